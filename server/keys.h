// API keys at rest: a file of hashes, mode 0600, read again when it changes. A key is 256 random bits, so a
// plain SHA-256 of it cannot be searched; comparing visits every entry in constant time.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"
#include "server/caller.h"

namespace kvasir::server {

struct KeyEntry {
  std::string id;       // "k-3f9a": names the key in lists and logs
  std::string hash;     // SHA-256 of the key, hexadecimal
  int64_t created = 0;  // seconds since 1970
  Caller caller;
};

// What `kvasir keys` does. Each reads, changes and atomically replaces the file, under a lock.
Result<std::vector<KeyEntry>> read_keys(const std::string& path);
// Its text; `path` is for messages.
Result<std::vector<KeyEntry>> parse_keys(std::string_view text, const std::string& path);
// Fills in id, hash and created; returns the key itself, which is shown once and kept nowhere.
Result<std::string> add_key(const std::string& path, KeyEntry entry);
Status revoke_key(const std::string& path, std::string_view id);

// What the server asks.
class KeyStore {
 public:
  static Result<std::unique_ptr<KeyStore>> open(std::string path);
  // The caller behind a key; nothing when no key matches. Thread-safe.
  std::optional<Caller> find(std::string_view key);
  size_t size();

 private:
  using Entries = std::shared_ptr<const std::vector<KeyEntry>>;
  struct Version {
    int64_t seconds = 0, nanoseconds = 0, size = 0, inode = 0;
    bool operator==(const Version&) const = default;
  };
  explicit KeyStore(std::string path) : path_(std::move(path)) {}
  Entries current();

  std::string path_;
  std::mutex mutex_;
  Entries entries_;
  Version version_;
  std::chrono::steady_clock::time_point looked_{};
};

std::string sha256_hex(std::string_view bytes);

}  // namespace kvasir::server
