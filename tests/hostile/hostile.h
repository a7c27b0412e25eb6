// What tests of hostile clients share: how much the process holds, how soon health answers, and servers with keys.
#pragma once

#include <gtest/gtest.h>
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <thread>
#include <vector>

#include "server/keys.h"
#include "tests/scratch.h"
#include "tests/server/http_client.h"

namespace kvasir::server {

inline int64_t resident_bytes() {
  int64_t size = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

// Until the process holds no more than this; false when it does not come to that.
inline bool shrinks_to(int64_t bytes) {
  for (int i = 0; i < 200; ++i) {
    malloc_trim(0);
    if (resident_bytes() <= bytes) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  return false;
}

// Where nothing else runs the promise is 50 ms; elsewhere what is seen is that health does not wait for the work.
inline double health_bound_ms() { return std::getenv("KVASIR_QUIET") ? 50 : 5000; }

// Asks /health on new connections, over and over, until it is stopped.
class HealthWatch {
 public:
  explicit HealthWatch(int port) : thread_([this, port] { ask(port); }) {}
  ~HealthWatch() { stop(); }

  // The answers' times: p99 is within the bound, and there was no other answer than 200.
  void expect_prompt() {
    stop();
    ASSERT_FALSE(times_.empty());
    std::sort(times_.begin(), times_.end());
    EXPECT_LE(times_[(times_.size() * 99) / 100], health_bound_ms()) << times_.size() << " were asked";
    EXPECT_EQ(wrong_, 0);
  }

 private:
  void ask(int port) {
    do {
      auto began = std::chrono::steady_clock::now();
      RawClient client(port);
      client.send(RawClient::get("/health"));
      wrong_ += client.read().status != 200;
      times_.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - began).count());
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    } while (!stopped_);
  }
  void stop() {
    stopped_ = true;
    if (thread_.joinable()) thread_.join();
  }

  std::atomic<bool> stopped_{false};
  std::vector<double> times_;
  int wrong_ = 0;
  std::thread thread_;  // last: it uses the others
};

// A keys file with one key.
class OneKey {
 public:
  explicit OneKey(TenantLimits limits = {}, const std::string& tenant = "ann") { key = add(limits, tenant); }
  std::string add(TenantLimits limits, const std::string& tenant) {
    KeyEntry entry;
    entry.caller.tenant = tenant;
    entry.caller.user = true;
    entry.caller.limits = limits;
    auto made = add_key(path(), entry);
    EXPECT_TRUE(made.ok());
    return made.ok() ? *made : "";
  }
  std::string path() const { return folder_.path("keys.json"); }
  std::string header() const { return header(key); }
  static std::string header(const std::string& key) { return "Authorization: Bearer " + key + "\r\n"; }

  std::string key;

 private:
  ScratchFolder folder_;
};

}  // namespace kvasir::server
