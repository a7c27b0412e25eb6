// Answers of /v1/responses that are kept for a while, each for its tenant alone. Bounded in bytes: the oldest of the
// tenant that holds most goes first.
#pragma once

#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <string>

namespace kvasir::server::http {

class ResponseStore {
 public:
  struct Kept {
    std::string response;  // as it was answered
    std::string input;     // its own input items
    std::string messages;  // the conversation, with this answer: what a next one goes on from
  };

  explicit ResponseStore(size_t most_bytes) : most_(most_bytes) {}
  void keep(const std::string& tenant, const std::string& id, Kept kept);
  std::optional<Kept> find(const std::string& tenant, const std::string& id);
  bool erase(const std::string& tenant, const std::string& id);

 private:
  struct Entry {
    std::string id;
    Kept kept;
    size_t bytes;
  };
  struct Tenant {
    std::list<Entry> entries;  // oldest first
    size_t bytes = 0;
  };
  static std::list<Entry>::iterator entry_of(Tenant& owner, const std::string& id);
  void drop(std::map<std::string, Tenant>::iterator tenant, std::list<Entry>::iterator entry);

  const size_t most_;
  std::mutex mutex_;
  size_t bytes_ = 0;
  std::map<std::string, Tenant> tenants_;
};

}  // namespace kvasir::server::http
