#include "server/keys.h"

#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/rand.h>
#include <openssl/sha.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/cat.h"
#include "core/log.h"
#include "server/json_text.h"

namespace kvasir::server {
namespace {

using nlohmann::json;

std::string hex(const unsigned char* bytes, size_t n) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  for (size_t i = 0; i < n; ++i) out += kDigits[bytes[i] >> 4], out += kDigits[bytes[i] & 15];
  return out;
}

std::string random_hex(size_t bytes) {
  std::vector<unsigned char> raw(bytes);
  if (RAND_bytes(raw.data(), int(bytes)) != 1) return {};
  return hex(raw.data(), bytes);
}

Status bad(const std::string& path, const std::string& why) {
  return invalid_argument(cat("keys file ", path, ": ", why, "; `kvasir keys` writes this file, repair or remove it"));
}

json to_json(const KeyEntry& e) {
  json roles = json::array();
  if (e.caller.user) roles.push_back("user");
  if (e.caller.metrics) roles.push_back("metrics");
  if (e.caller.admin) roles.push_back("admin");
  json out = {{"id", e.id},
              {"sha256", e.hash},
              {"created", e.created},
              {"tenant", e.caller.tenant},
              {"roles", roles},
              {"priority", e.caller.priority_ceiling},
              {"weight", e.caller.weight},
              {"requests_per_minute", e.caller.limits.requests_per_minute},
              {"tokens_per_minute", e.caller.limits.tokens_per_minute},
              {"concurrent", e.caller.limits.concurrent}};
  if (!e.caller.adapters.empty()) out["adapters"] = e.caller.adapters;
  return out;
}

// A number that is not there is 0.
Result<int64_t> whole_number(const json& j, const char* name, const std::string& id, const std::string& path,
                             int64_t low = 0, int64_t high = INT64_MAX) {
  auto it = j.find(name);
  if (it == j.end()) return 0;
  bool whole = it->is_number_integer() && !(it->is_number_unsigned() && it->get<uint64_t>() > uint64_t(INT64_MAX));
  int64_t value = whole ? it->get<int64_t>() : 0;
  if (!whole || value < low || value > high)
    return bad(path, cat("key ", id, ": ", name, " is ", it->dump().substr(0, 40), "; it must be a whole number from ",
                         low, " to ", high));
  return value;
}

Result<KeyEntry> from_json(const json& j, const std::string& path) {
  KeyEntry e;
  try {
    e.id = j.at("id").get<std::string>();
    e.hash = j.at("sha256").get<std::string>();
    KVASIR_ASSIGN(e.created, whole_number(j, "created", e.id, path));
    Caller& c = e.caller;
    c.key_id = e.id;
    c.tenant = j.at("tenant").get<std::string>();
    for (const json& role : j.at("roles")) {
      std::string name = role.get<std::string>();
      if (name == "user")
        c.user = true;
      else if (name == "metrics")
        c.metrics = true;
      else if (name == "admin")
        c.admin = true;
      else
        return bad(path, cat("key ", e.id, " has the role '", name, "'; it must be user, metrics or admin"));
    }
    KVASIR_ASSIGN(int64_t priority, whole_number(j, "priority", e.id, path, INT32_MIN, INT32_MAX));
    c.priority_ceiling = int32_t(priority);
    c.weight = j.value("weight", 1.0);
    KVASIR_ASSIGN(c.limits.requests_per_minute, whole_number(j, "requests_per_minute", e.id, path));
    KVASIR_ASSIGN(c.limits.tokens_per_minute, whole_number(j, "tokens_per_minute", e.id, path));
    KVASIR_ASSIGN(c.limits.concurrent, whole_number(j, "concurrent", e.id, path));
    c.adapters = j.value("adapters", std::vector<std::string>());
  } catch (const json::exception& error) {
    return bad(path, error.what());
  }
  if (e.hash.size() != 64) return bad(path, cat("key ", e.id, " has a sha256 of ", e.hash.size(), " digits, not 64"));
  if (e.caller.tenant.empty()) return bad(path, cat("key ", e.id, " has no tenant"));
  if (!(e.caller.weight >= 0.001 && e.caller.weight <= 1000))
    return bad(path, cat("key ", e.id, " has the weight ", e.caller.weight, "; it must be from 0.001 to 1000"));
  return e;
}

// The lock outlives the file it guards being replaced: it is a file of its own.
class FileLock {
 public:
  explicit FileLock(const std::string& path)
      : fd_(::open((path + ".lock").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600)) {
    if (fd_ >= 0) ::flock(fd_, LOCK_EX);
  }
  ~FileLock() {
    if (fd_ >= 0) ::close(fd_);
  }
  bool ok() const { return fd_ >= 0; }

 private:
  int fd_;
};

Status write_keys(const std::string& path, const std::vector<KeyEntry>& entries) {
  json all = json::array();
  for (const KeyEntry& e : entries) all.push_back(to_json(e));
  std::string text = json{{"keys", all}}.dump(2) + "\n", fresh = path + ".new";
  ::unlink(fresh.c_str());
  int fd = ::open(fresh.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
  if (fd < 0) return failed_precondition(cat("cannot write ", fresh, ": ", std::strerror(errno)));
  bool written = ::write(fd, text.data(), text.size()) == ssize_t(text.size()) && ::fsync(fd) == 0;
  ::close(fd);
  if (!written || ::rename(fresh.c_str(), path.c_str()) != 0)
    return failed_precondition(cat("cannot write ", path, ": ", std::strerror(errno)));
  return {};
}

bool exists(const std::string& path) { return ::access(path.c_str(), F_OK) == 0; }

}  // namespace

std::string sha256_hex(std::string_view bytes) {
  unsigned char digest[SHA256_DIGEST_LENGTH];
  SHA256(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(), digest);
  return hex(digest, sizeof digest);
}

Result<std::vector<KeyEntry>> read_keys(const std::string& path) {
  struct stat info;
  if (::stat(path.c_str(), &info) != 0)
    return failed_precondition(
        cat("cannot read keys file ", path, ": ", std::strerror(errno), "; make one with `kvasir keys add`"));
  // An administrator hands a file to the server's group and keeps it: root:kvasir 0640, or a secret in Kubernetes
  // (0440).
  const bool handed = info.st_uid == 0 && ::geteuid() != 0;
  if (info.st_mode & (handed ? 037 : 077))
    return failed_precondition(cat("keys file ", path, " may be read by others",
                                   handed ? ", or written by its group" : "", "; run chmod ", handed ? "640 " : "600 ",
                                   path));
  std::ifstream in(path);
  std::stringstream text;
  text << in.rdbuf();
  return parse_keys(text.str(), path);
}

Result<std::vector<KeyEntry>> parse_keys(std::string_view text, const std::string& path) {
  if (int depth = json_depth(text); depth > kMostJsonDepth)
    return bad(path, cat("it nests ", depth, " deep; the limit is ", kMostJsonDepth));
  json parsed = json::parse(text, nullptr, false);
  if (has_zero_byte(text) || !parsed.is_object() || !parsed.contains("keys") || !parsed["keys"].is_array())
    return bad(path, "it is not a JSON object with a list \"keys\"");
  std::vector<KeyEntry> entries;
  for (const json& j : parsed["keys"]) {
    KVASIR_ASSIGN(KeyEntry e, from_json(j, path));
    entries.push_back(std::move(e));
  }
  return entries;
}

Result<std::string> add_key(const std::string& path, KeyEntry entry) {
  FileLock lock(path);
  if (!lock.ok()) return failed_precondition(cat("cannot lock ", path, ".lock: ", std::strerror(errno)));
  std::vector<KeyEntry> entries;
  if (exists(path)) {
    KVASIR_ASSIGN(entries, read_keys(path));
  }
  std::string id = random_hex(4), secret = random_hex(32);
  if (secret.empty()) return internal_error("the system gave no random bytes");
  std::string key = "kvasir-" + secret;
  entry.id = "k-" + id;
  entry.caller.key_id = entry.id;
  entry.hash = sha256_hex(key);
  entry.created = std::time(nullptr);
  if (entry.caller.tenant.empty()) entry.caller.tenant = entry.id;
  entries.push_back(std::move(entry));
  KVASIR_TRY(write_keys(path, entries));
  return key;
}

Status revoke_key(const std::string& path, std::string_view id) {
  FileLock lock(path);
  if (!lock.ok()) return failed_precondition(cat("cannot lock ", path, ".lock: ", std::strerror(errno)));
  KVASIR_ASSIGN(auto entries, read_keys(path));
  if (std::erase_if(entries, [&](const KeyEntry& e) { return e.id == id; }) == 0)
    return not_found(cat("no key has the id '", id, "'; `kvasir keys list` shows them"));
  return write_keys(path, entries);
}

Result<std::unique_ptr<KeyStore>> KeyStore::open(std::string path) {
  std::unique_ptr<KeyStore> store(new KeyStore(std::move(path)));
  KVASIR_ASSIGN(auto entries, read_keys(store->path_));
  if (entries.empty())
    return failed_precondition(cat("keys file ", store->path_, " has no key; make one with `kvasir keys add`"));
  store->entries_ = std::make_shared<const std::vector<KeyEntry>>(std::move(entries));
  struct stat info;
  if (::stat(store->path_.c_str(), &info) == 0)
    store->version_ = {info.st_mtim.tv_sec, info.st_mtim.tv_nsec, info.st_size, int64_t(info.st_ino)};
  store->looked_ = std::chrono::steady_clock::now();
  return store;
}

// One stat a second at most. A file that went bad keeps the keys that were: a slip of an editor must not
// open the server, nor lock everybody out.
KeyStore::Entries KeyStore::current() {
  std::lock_guard lock(mutex_);
  auto now = std::chrono::steady_clock::now();
  if (now - looked_ < std::chrono::seconds(1)) return entries_;
  looked_ = now;
  struct stat info;
  Version version;
  if (::stat(path_.c_str(), &info) == 0)
    version = {info.st_mtim.tv_sec, info.st_mtim.tv_nsec, info.st_size, int64_t(info.st_ino)};
  if (version == version_) return entries_;
  version_ = version;
  auto fresh = read_keys(path_);
  if (fresh.ok()) {
    entries_ = std::make_shared<const std::vector<KeyEntry>>(std::move(*fresh));
    log_info("keys read again", {{"path", path_}, {"keys", entries_->size()}});
  } else {
    log_error("keys file not taken, the keys of before stay", {{"why", fresh.status().message()}});
  }
  return entries_;
}

std::optional<Caller> KeyStore::find(std::string_view key) {
  Entries entries = current();
  std::string hash = sha256_hex(key);
  const KeyEntry* found = nullptr;
  for (const KeyEntry& e : *entries)
    if (CRYPTO_memcmp(e.hash.data(), hash.data(), hash.size()) == 0) found = &e;
  if (!found) return std::nullopt;
  return found->caller;
}

size_t KeyStore::size() { return current()->size(); }

}  // namespace kvasir::server
