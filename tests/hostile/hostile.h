// What tests of hostile clients share: how much the process holds, how soon health answers, and servers with keys.
#pragma once

#include <gtest/gtest.h>
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "server/keys.h"
#include "server/server.h"
#include "tests/scratch.h"
#include "tests/server/fake_engine.h"
#include "tests/server/http_client.h"

namespace kvasir::server {

inline int64_t resident_bytes() {
  int64_t size = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

// Until the process holds no more than this; false when it does not come to that. `helped`: what was freed goes back to
// the system at once, whatever the server does.
inline bool shrinks_to(int64_t bytes, bool helped = true) {
  for (int i = 0; i < 200; ++i) {
    if (helped) malloc_trim(0);
    if (resident_bytes() <= bytes) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  return false;
}

using Milliseconds = std::chrono::duration<double, std::milli>;

// A server that nobody else asks: how long it takes says how crowded the machine is.
class IdleServer {
 public:
  IdleServer() {
    ServerOptions o;
    o.grpc_port = -1;
    o.http_port = 0;
    o.access_log = false;
    auto server = Server::start(o, engine_);
    EXPECT_TRUE(server.ok()) << server.status().to_string();
    if (server.ok()) server_ = std::move(*server);
  }
  int port() const { return server_ ? server_->http_port() : 0; }

 private:
  FakeEngine engine_;
  std::unique_ptr<Server> server_;
};

// Asks for health, over and over, until it is stopped; after each time an idle server is asked for its own. What is
// bounded is p99: by 50 ms where nothing else runs (KVASIR_QUIET), elsewhere by 5 s, since what is tried is over so
// soon that p99 is the slowest of a few dozen; and where an idle server takes long too, by three times the longest it
// took.
class Promptness {
 public:
  // `ask`: whether it was answered as it should be.
  explicit Promptness(std::function<bool()> ask)
      : thread_([this, ask = std::move(ask)] {
          do {
            wrong_ += !timed(asked_, ask);
            timed(idle_, [this] { return asked_over_http(idle_server_.port()); });
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
          } while (!stopped_);
        }) {}
  ~Promptness() { stop(); }

  void expect_prompt() {
    stop();
    ASSERT_FALSE(asked_.empty());
    std::sort(asked_.begin(), asked_.end());
    const double p99 = asked_[(asked_.size() * 99) / 100], idle = *std::max_element(idle_.begin(), idle_.end());
    std::cout << "health answered " << asked_.size() << " times, p99 " << p99 << " ms, at most " << asked_.back()
              << " ms; an idle server at most " << idle << " ms\n";
    EXPECT_LE(p99, std::max(std::getenv("KVASIR_QUIET") ? 50. : 5000., 3 * idle)) << asked_.size() << " were asked";
    EXPECT_EQ(wrong_, 0);
  }
  // /health on a new connection.
  static bool asked_over_http(int port) {
    RawClient client(port);
    client.send(RawClient::get("/health"));
    return client.read().status == 200;
  }

 private:
  template <class F>
  static bool timed(std::vector<double>& times, F&& f) {
    const auto began = std::chrono::steady_clock::now();
    const bool right = f();
    times.push_back(Milliseconds(std::chrono::steady_clock::now() - began).count());
    return right;
  }
  void stop() {
    stopped_ = true;
    if (thread_.joinable()) thread_.join();
  }

  IdleServer idle_server_;
  std::atomic<bool> stopped_{false};
  std::vector<double> asked_, idle_;
  int wrong_ = 0;
  std::thread thread_;  // last: it uses the others
};

class HealthWatch : public Promptness {
 public:
  explicit HealthWatch(int port) : Promptness([port] { return asked_over_http(port); }) {}
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
