// Every HTTP endpoint against every role, and against no key at all. The endpoints are read from the server's own
// list, so that one without a line here fails the test.
#include <filesystem>
#include <map>

#include "server/keys.h"
#include "tests/server/http_fixture.h"

namespace kvasir::server {
namespace {

struct Needs {
  const char* method;
  const char* role;  // "": nobody is asked
};

const std::map<std::string, Needs>& table() {
  static const std::map<std::string, Needs> endpoints = {
      {"/", {"GET", ""}},
      {"/health", {"GET", ""}},
      {"/ready", {"GET", ""}},
      {"/metrics", {"GET", "metrics"}},
      {"/stats", {"GET", "metrics"}},
      {"/v1/models", {"GET", "user"}},
      {"/v1/models/", {"GET", "user"}},
      {"/v1/load_lora_adapter", {"POST", "admin"}},
      {"/v1/unload_lora_adapter", {"POST", "admin"}},
      {"/v1/messages", {"POST", "user"}},
      {"/v1/messages/count_tokens", {"POST", "user"}},
      {"/v1/responses", {"POST", "user"}},
      {"/v1/responses/", {"GET", "user"}},
      {"/v1/chat/completions", {"POST", "user"}},
      {"/v1/completions", {"POST", "user"}},
      {"/v1/embeddings", {"POST", "user"}},
      {"/v1/rerank", {"POST", "user"}},
      {"/v1/score", {"POST", "user"}},
      {"/embeddings", {"POST", "user"}},
      {"/rerank", {"POST", "user"}},
      {"/v2/rerank", {"POST", "user"}},
      {"/score", {"POST", "user"}},
      {"/tokenize", {"POST", "user"}},
      {"/detokenize", {"POST", "user"}},
      {"/tokenizer_info", {"GET", "user"}},
      {"/drain", {"POST", "admin"}},
      {"/version", {"GET", ""}},
      {"/v1/chat/completions/render", {"POST", "user"}},
      {"/v1/completions/render", {"POST", "user"}},
      {"/v1/chat/completions/batch", {"POST", "user"}},
      {"/invocations", {"POST", "user"}},
      {"/inference/v1/generate", {"POST", "user"}},
      {"/load", {"GET", "metrics"}},
      {"/ping", {"GET", ""}},
      {"/v1/health", {"GET", ""}},
      {"/models", {"GET", "user"}},
      {"/chat/completions", {"POST", "user"}},
      {"/chat/completions/input_tokens", {"POST", "user"}},
      {"/v1/chat/completions/input_tokens", {"POST", "user"}},
      {"/v1/stream", {"GET", "user"}},
      {"/responses", {"POST", "user"}},
      {"/completion", {"POST", "user"}},
      {"/completions", {"POST", "user"}},
      {"/infill", {"POST", "user"}},
      {"/apply-template", {"POST", "user"}},
      {"/props", {"GET", "user"}},
      {"/slots", {"GET", "metrics"}},
      {"/get_model_info", {"GET", "user"}},
      {"/flush_cache", {"POST", "admin"}},
      {"/health_generate", {"GET", ""}},
      {"/abort_request", {"POST", "user"}},
      {"/api/version", {"GET", ""}},
      {"/api/tags", {"GET", "user"}},
      {"/api/ps", {"GET", "user"}},
      {"/api/show", {"POST", "user"}},
      {"/api/chat", {"POST", "user"}},
      {"/api/generate", {"POST", "user"}},
      {"/api/embed", {"POST", "user"}},
      {"/api/embeddings", {"POST", "user"}},
      {"/generate", {"POST", "user"}},
      {"/get_server_info", {"GET", "user"}},
  };
  return endpoints;
}

class HttpRoles : public HttpFixture {
 protected:
  HttpRoles() {
    char name[] = "/tmp/kvasir-http-roles-XXXXXX";
    folder_ = mkdtemp(name);
  }
  ~HttpRoles() override { std::filesystem::remove_all(folder_); }
  void configure(ServerOptions& o) override {
    o.keys_file = folder_ + "/keys.json";
    o.on_drain = [this] { ++drains_; };
    for (const char* role : {"user", "metrics", "admin"}) {
      KeyEntry e;
      e.caller.tenant = role;
      e.caller.user = role == std::string("user");
      e.caller.metrics = role == std::string("metrics");
      e.caller.admin = role == std::string("admin");
      keys_[role] = *add_key(o.keys_file, e);
    }
  }
  int knock(const Needs& needs, const std::string& path, const std::string& key) {
    std::string header = key.empty() ? "" : cat("Authorization: Bearer ", key, "\r\n");
    return ask(needs.method == std::string("GET") ? RawClient::get(path, header) : RawClient::post(path, "{}", header))
        .status;
  }
  std::string folder_;
  std::map<std::string, std::string> keys_;
  std::atomic<int> drains_{0};
};

TEST_F(HttpRoles, EveryEndpointHasItsRole) {
  std::string list = Json::parse(ask(RawClient::get("/nothing/here")).body)["error"]["message"];
  list = list.substr(list.find("this server has ") + 16) + ", ";
  size_t seen = 0;
  for (size_t end; (end = list.find(", ")) != list.npos; list.erase(0, end + 2)) {
    std::string path = list.substr(0, end);
    ASSERT_TRUE(table().count(path)) << path << " has no role in this test";
    ++seen;
    const Needs& needs = table().at(path);
    std::string role = needs.role;
    for (const char* key : {"", "wrong", "kv-"})
      EXPECT_EQ(knock(needs, path, key) == 401, !role.empty()) << path << " with key '" << key << "'";
    for (const char* who : {"user", "metrics", "admin"}) {
      bool let_in = role.empty() || role == who || who == std::string("admin");
      int status = knock(needs, path, keys_[who]);
      EXPECT_NE(status, 401) << path << " as " << who;
      EXPECT_EQ(status != 403, let_in) << path << " as " << who;
    }
  }
  EXPECT_EQ(seen, table().size());
  EXPECT_EQ(drains_, 1);  // the admin's
}

// Anthropic's clients send the key elsewhere, and read a refusal in their own form.
TEST_F(HttpRoles, AKeyMayComeAsAnthropicsClientsSendIt) {
  EXPECT_EQ(ask(RawClient::get("/v1/models", cat("X-Api-Key: ", keys_["user"], "\r\n"))).status, 200);
  RawClient::Answer a = post("/v1/messages", "{}", "X-Api-Key: wrong\r\n");
  EXPECT_EQ(a.status, 401);
  EXPECT_EQ(Json::parse(a.body)["error"]["type"], "authentication_error");
}

TEST_F(HttpRoles, AModelByNameNeedsTheSameRole) {
  EXPECT_EQ(ask(RawClient::get("/v1/models/fake")).status, 401);
  EXPECT_EQ(ask(RawClient::get("/v1/models/fake", cat("Authorization: Bearer ", keys_["user"], "\r\n"))).status, 200);
}

}  // namespace
}  // namespace kvasir::server
