// A server on a free port over the scripted engine, and a channel to it.
#pragma once

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <gtest/gtest.h>

#include "server/server.h"
#include "tests/server/fake_engine.h"

namespace kvasir::server {

class GrpcFixture : public testing::Test {
 protected:
  explicit GrpcFixture(ServerOptions options = {}) : options_(std::move(options)) {
    options_.grpc_port = 0;
    options_.http_port = -1;
    options_.access_log = false;
  }
  void SetUp() override {
    auto server = Server::start(options_, engine_);
    ASSERT_TRUE(server.ok()) << server.status().to_string();
    server_ = std::move(*server);
    channel_ = grpc::CreateChannel(cat("127.0.0.1:", server_->grpc_port()), grpc::InsecureChannelCredentials());
  }
  // Until no request is left in the engine.
  bool all_gone() { return engine_.wait_open(0); }

  ServerOptions options_;
  FakeEngine engine_;
  std::unique_ptr<Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
};

template <class Response, class Reader>
std::vector<Response> read_all(Reader& reader) {
  std::vector<Response> all;
  for (Response r; reader.Read(&r);) all.push_back(std::move(r));
  return all;
}

}  // namespace kvasir::server
