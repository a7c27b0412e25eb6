// Any bytes as what a client sends over one HTTP connection, in pieces of any size: answers that are HTTP, never a
// crash, never a connection that hangs.
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <cstdlib>
#include <future>

#include "server/http/api.h"
#include "server/http/connection.h"
#include "tests/fuzz/seeds.h"
#include "tests/server/fake_engine.h"
#include "tests/server/http_client.h"

namespace kvasir::server {
namespace {

using http::Task;

class FuzzTransport final : public http::Transport {
 public:
  FuzzTransport(std::string_view input, std::string& output, const FakeEngine& engine)
      : input_(input), output_(output), engine_(engine) {}

  Task<size_t> read(char* to, size_t capacity, std::chrono::milliseconds) override {
    size_t n = std::min({capacity, input_.size(), piece_});
    std::copy_n(input_.data(), n, to);
    input_.remove_prefix(n);
    piece_ = piece_ * 5 % 4093 + 1;
    co_return n;
  }
  Task<bool> write(std::string_view bytes, std::chrono::milliseconds) override {
    output_ += bytes;
    co_return output_.size() < (1 << 20);  // a reader that has had enough of a flood
  }
  Task<void> close() override { co_return; }
  void interrupt() override {}
  std::string peer() const override { return "127.0.0.1"; }
  void watch(std::function<void()> gone) override {
    if (engine_.open() > 0) gone();  // nothing will come: a stream that hangs is given up
  }
  void unwatch() override {}

 private:
  std::string_view input_;
  std::string& output_;
  const FakeEngine& engine_;
  size_t piece_ = 7;
};

struct World {
  World() {
    ServerOptions options;
    options.access_log = false;
    options.max_choices = 8;
    engine.floods = false;
    services = *Services::create(options, engine);
    api = std::make_unique<http::Api>(*services);
    context.limits.max_body_bytes = 64 << 10;
    context.handler = [this](const http::HttpRequest& head) { return api->admit(head); };
    context.budget = &services->budget();
    context.workers = &workers;
    context.draining = [] { return false; };
  }
  FakeEngine engine;
  std::unique_ptr<Services> services;
  std::unique_ptr<http::Api> api;
  Workers workers{1, 16};
  http::ConnectionContext context;
};

World& world() {
  static World* w = new World;  // its thread may run to the very end
  return *w;
}

}  // namespace
}  // namespace kvasir::server

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  using kvasir::server::RawClient;
  const std::string ask = R"({"prompt":"ab","n":2,"stream":true})";
  kvasir::write_seeds(
      *argc, *argv,
      {RawClient::get("/health"), RawClient::get("/metrics", "Connection: close\r\n"),
       RawClient::post("/v1/completions", ask), RawClient::get("/") + RawClient::post("/tokenize", R"({"prompt":"a"})"),
       "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: "
       "chunked\r\n\r\n8\r\n{\"prompt\r\n7\r\n\":\"ab\"}\r\n0\r\nTrailer: x\r\n\r\n",
       "POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 15\r\n"
       "Expect: 100-continue\r\n\r\n{\"prompt\":\"ab\"}",
       "OPTIONS /v1/models HTTP/1.1\r\nHost: [::1]:80\r\nOrigin: http://localhost\r\n\r\n",
       "HEAD /v1/models HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc"});
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace kvasir::server;
  World& w = world();
  std::string output;
  {
    boost::asio::io_context io(1);
    http::IdleSet idle;
    auto transport =
        std::make_unique<FuzzTransport>(std::string_view(reinterpret_cast<const char*>(data), size), output, w.engine);
    boost::asio::co_spawn(io.get_executor(),
                          http::serve_connection(std::move(transport), w.context, idle, io.get_executor()),
                          boost::asio::detached);
    io.run();
    // The worker may still be on its way out of its last task, and wants `io` for it.
    std::promise<void> idle_worker;
    if (!w.workers.post([&] { idle_worker.set_value(); })) abort();
    idle_worker.get_future().wait();
  }
  if (!output.empty() && !output.starts_with("HTTP/1.1 ")) abort();
  if (w.engine.open() != 0) abort();  // a connection that is over leaves no request behind
  w.engine.forget();
  return 0;
}
