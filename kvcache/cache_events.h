// What routers want to know: which prefixes are cached here. One numbered ring a tenant, so that nobody
// learns of another's prompts, not even from gaps in the numbers. Written by the step thread, read by any.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace kvasir::kvcache {

struct CacheEvent {
  enum class Kind : uint8_t { stored, removed, cleared };
  uint64_t sequence = 0;  // 1, 2, 3 ...
  Kind kind = Kind::stored;
  uint64_t hash = 0, parent = 0;  // of the prefix that ends with this page; parent 0: the page is the first
  std::vector<int32_t> tokens;    // stored only
};

class CacheEvents {
 public:
  explicit CacheEvents(size_t ring) : ring_(ring) {}

  // The name of a tenant's number, before its first event.
  void name(int32_t tenant, const std::string& name) {
    std::lock_guard lock(mutex_);
    numbers_[name] = tenant;
  }
  void add(int32_t tenant, CacheEvent event) {
    {
      std::lock_guard lock(mutex_);
      if (static_cast<size_t>(tenant) >= logs_.size()) logs_.resize(static_cast<size_t>(tenant) + 1);
      Log& log = logs_[static_cast<size_t>(tenant)];
      event.sequence = ++log.last;
      log.note(event);
      log.ring.push_back(std::move(event));
      if (log.ring.size() > ring_) log.ring.pop_front();
      ++version_;
      if (waiting_ == 0) return;
    }
    added_.notify_all();
  }

  // Events after `since`, as many as the ring still has; `lost` says whether some are gone.
  std::vector<CacheEvent> since(const std::string& tenant, uint64_t since, bool* lost) const {
    std::lock_guard lock(mutex_);
    std::vector<CacheEvent> out;
    *lost = false;
    const Log* log = find(tenant);
    if (!log) return out;
    uint64_t first = log->last + 1 - log->ring.size();
    *lost = since + 1 < first;
    for (const CacheEvent& e : log->ring)
      if (e.sequence > since) out.push_back(e);
    return out;
  }
  // The prefixes cached at the moment, parents before what continues them, as `stored` events numbered with the last
  // event they include.
  std::vector<CacheEvent> snapshot(const std::string& tenant, uint64_t* last) const {
    std::vector<CacheEvent> out;
    {
      std::lock_guard lock(mutex_);
      const Log* log = find(tenant);
      *last = log ? log->last : 0;
      if (!log) return out;
      out.reserve(log->live.size());
      for (const auto& [hash, stored] : log->live) out.push_back(stored);
    }
    // A page is stored after the one it continues.
    std::sort(out.begin(), out.end(), [](const auto& a, const auto& b) { return a.sequence < b.sequence; });
    return out;
  }
  uint64_t last(const std::string& tenant) const {
    std::lock_guard lock(mutex_);
    const Log* log = find(tenant);
    return log ? log->last : 0;
  }
  // Until something was added after `version`, at most for `limit`; returns the version now.
  uint64_t wait(uint64_t version, std::chrono::milliseconds limit) const {
    std::unique_lock lock(mutex_);
    ++waiting_;
    added_.wait_for(lock, limit, [&] { return version_ != version; });
    --waiting_;
    return version_;
  }

 private:
  struct Log {
    uint64_t last = 0;
    std::deque<CacheEvent> ring;
    std::unordered_map<uint64_t, CacheEvent> live;  // stored and not removed, by hash

    void note(const CacheEvent& e) {
      switch (e.kind) {
        case CacheEvent::Kind::stored: live.insert_or_assign(e.hash, e); break;
        case CacheEvent::Kind::removed: live.erase(e.hash); break;
        case CacheEvent::Kind::cleared: live.clear(); break;
      }
    }
  };
  const Log* find(const std::string& tenant) const {
    auto it = numbers_.find(tenant);
    bool known = it != numbers_.end() && static_cast<size_t>(it->second) < logs_.size();
    return known ? &logs_[static_cast<size_t>(it->second)] : nullptr;
  }

  const size_t ring_;
  mutable std::mutex mutex_;
  mutable std::condition_variable added_;
  mutable int waiting_ = 0;
  uint64_t version_ = 0;
  std::unordered_map<std::string, int32_t> numbers_;
  std::vector<Log> logs_;
};

}  // namespace kvasir::kvcache
