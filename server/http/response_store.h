// Answers of /v1/responses, and streams that outlive their clients, kept for a while, each for its tenant alone.
// Bounded in bytes: the oldest of the tenant that holds most goes first, and one that is being made in the background
// ends with that.
#pragma once

#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "server/http/background.h"

namespace kvasir::server::http {

class ResponseStore {
 public:
  struct Kept {
    std::string response;  // as it was answered
    std::string input;     // its own input items
    std::string messages;  // the conversation, with this answer: what a next one goes on from
    std::shared_ptr<BackgroundResponse> background{};  // null: none; else it knows the response
  };

  explicit ResponseStore(size_t most_bytes) : most_(most_bytes) {}
  void keep(const std::string& tenant, const std::string& id, Kept kept);
  std::optional<Kept> find(const std::string& tenant, const std::string& id);
  // One that is there has become this; false: it is not, or there is no room.
  bool replace(const std::string& tenant, const std::string& id, Kept kept);
  // What is made in the background has grown; false: it is not kept any more.
  bool recount(const std::string& tenant, const std::string& id);
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
  static size_t bytes_of(const std::string& id, const Kept& kept);
  void make_room(size_t bytes);
  bool add(const std::string& tenant, const std::string& id, Kept kept);
  static std::list<Entry>::iterator entry_of(Tenant& owner, const std::string& id);
  // What is made in the background is cancelled with it, unless only its entry changes.
  void drop(std::map<std::string, Tenant>::iterator tenant, std::list<Entry>::iterator entry, bool cancels = true);

  const size_t most_;
  std::mutex mutex_;
  size_t bytes_ = 0;
  std::map<std::string, Tenant> tenants_;
};

}  // namespace kvasir::server::http
