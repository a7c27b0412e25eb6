// A server on a free HTTP port over the scripted engine.
#pragma once

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <thread>

#include "server/server.h"
#include "tests/server/fake_engine.h"
#include "tests/server/http_client.h"

namespace kvasir::server {

class HttpFixture : public testing::Test {
 protected:
  using Json = nlohmann::json;

  virtual void configure(ServerOptions&) {}
  void SetUp() override {
    ServerOptions options;
    options.grpc_port = -1;
    options.http_port = 0;
    options.access_log = false;
    configure(options);
    auto server = Server::start(options, engine_);
    ASSERT_TRUE(server.ok()) << server.status().to_string();
    server_ = std::move(*server);
  }

  RawClient::Answer ask(const std::string& bytes) {
    RawClient client(server_->http_port());
    EXPECT_TRUE(client.connected());
    client.send(bytes);
    return client.read();
  }
  RawClient::Answer post(std::string_view path, std::string_view body, std::string_view headers = "") {
    return ask(RawClient::post(path, body, headers));
  }
  // The answer to what must be fine.
  Json whole(std::string_view path, std::string_view body) {
    RawClient::Answer a = post(path, body);
    EXPECT_EQ(a.status, 200) << a.body;
    return Json::parse(a.body);
  }
  // What the error body says, and about which field.
  void expect_error(const RawClient::Answer& a, int status, std::string_view param, std::string_view says) {
    ASSERT_EQ(a.status, status) << a.body;
    Json error = Json::parse(a.body)["error"];
    EXPECT_EQ(error["param"].is_null() ? "" : error["param"].get<std::string>(), param) << a.body;
    EXPECT_NE(error["message"].get<std::string>().find(says), std::string::npos) << a.body;
  }
  bool all_gone() { return engine_.wait_open(0); }

  FakeEngine engine_;
  std::unique_ptr<Server> server_;
};

}  // namespace kvasir::server
