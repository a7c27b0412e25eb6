// Adapters over every protocol that can name one, from a scripted engine: which reaches it, what the answer says, who
// may load and use which, and every way of asking wrongly.
#include <filesystem>

#include "server/keys.h"
#include "tests/server/contract_fixture.h"

namespace kvasir::server {
namespace {

using testing::HasSubstr;
using testing::UnorderedElementsAre;

class NamedAdapters : public ContractFixture {
 protected:
  NamedAdapters() {
    (void)*engine_.load_adapter("sql", "/adapters/sql");
    (void)*engine_.load_adapter("law", "/adapters/law");
  }

  RawClient::Answer ask(const std::string& bytes) {
    RawClient client(server_->http_port());
    client.send(bytes);
    return client.read();
  }
  Json whole(std::string_view path, std::string_view body) {
    const RawClient::Answer a = ask(RawClient::post(path, body));
    EXPECT_EQ(a.status, 200) << a.body;
    return Json::parse(a.body);
  }
  std::string error(std::string_view path, std::string_view body, int status) {
    const RawClient::Answer a = ask(RawClient::post(path, body));
    EXPECT_EQ(a.status, status) << a.body;
    return a.body;
  }
};

TEST_F(NamedAdapters, TheModelOfARequestNamesOne) {
  const std::pair<const char*, const char*> calls[] = {
      {"/v1/completions", R"({"model":"sql","prompt":"ab","max_tokens":2})"},
      {"/v1/chat/completions", R"({"model":"sql","messages":[{"role":"user","content":"ab"}],"max_tokens":2})"},
      {"/v1/messages", R"({"model":"sql","messages":[{"role":"user","content":"ab"}],"max_tokens":2})"},
      {"/v1/responses", R"({"model":"sql","input":"ab","max_output_tokens":2})"},
      {"/completion", R"({"model":"sql","prompt":"ab","n_predict":2})"},
      {"/v1/embeddings", R"({"model":"sql","input":"ab"})"},
      {"/api/generate", R"({"model":"sql","prompt":"ab","stream":false})"}};
  for (const auto& [path, body] : calls) {
    SCOPED_TRACE(path);
    const Json answer = whole(path, body);
    EXPECT_EQ(answer["model"], "sql");
    EXPECT_EQ(engine_.last().adapter, "sql");
  }
  whole("/v1/completions", R"({"model":"fake","prompt":"ab","max_tokens":2})");
  EXPECT_EQ(engine_.last().adapter, "");
  whole("/v1/completions", R"({"prompt":"ab","max_tokens":2})");
  EXPECT_EQ(engine_.last().adapter, "");
}

TEST_F(NamedAdapters, ARenderedRequestKeepsItsAdapter) {
  for (const char* named : {R"("model":"sql")", R"("lora_path":"sql")"}) {
    Json request = whole("/v1/completions/render", cat(R"({"prompt":"ab",)", named, "}"))[0];
    EXPECT_EQ(request["model"], "sql");
    EXPECT_EQ(whole("/inference/v1/generate", request.dump())["model"], "sql");
    EXPECT_EQ(engine_.last().adapter, "sql");
  }
}

TEST_F(NamedAdapters, AFieldNamesOne) {
  V1 v1 = v1_request();
  v1.set_adapter("law");
  EXPECT_EQ(send(v1).code, Code::ok);
  EXPECT_EQ(engine_.last().adapter, "law");
  V1 by_model = v1_request();
  by_model.set_model("sql");
  EXPECT_EQ(send(by_model).code, Code::ok);
  EXPECT_EQ(engine_.last().adapter, "sql");
  Infer infer = infer_request();
  infer.set_model_name("law");
  EXPECT_EQ(send(infer).code, Code::ok);
  EXPECT_EQ(engine_.last().adapter, "law");
  whole("/generate", R"({"text":"ab","lora_path":"sql","sampling_params":{"max_new_tokens":2}})");
  EXPECT_EQ(engine_.last().adapter, "sql");
}

TEST_F(NamedAdapters, WhatIsNotLoadedIsRefusedByName) {
  EXPECT_THAT(error("/v1/completions", R"({"model":"tax","prompt":"ab"})", 404), HasSubstr("'tax' is not served here"));
  EXPECT_THAT(error("/v1/completions", R"({"lora_path":"tax","prompt":"ab"})", 404), HasSubstr("'tax' is not loaded"));
  EXPECT_THAT(error("/v1/completions", R"({"model":"sql","lora_path":"law","prompt":"ab"})", 400),
              HasSubstr("another adapter"));
  EXPECT_THAT(error("/completion", R"({"lora":[{"id":0,"scale":1}],"prompt":"ab"})", 400), HasSubstr("as model"));
  V1 v1 = v1_request();
  v1.set_adapter("tax");
  EXPECT_EQ(send(v1).code, Code::not_found);
}

TEST_F(NamedAdapters, AreListedWithTheirParent) {
  const Json list = Json::parse(ask(RawClient::get("/v1/models")).body)["data"];
  ASSERT_EQ(list.size(), 3u);
  EXPECT_EQ(list[0]["id"], "fake");
  EXPECT_TRUE(list[0]["parent"].is_null());
  EXPECT_EQ(list[1]["id"], "law");
  EXPECT_EQ(list[1]["parent"], "fake");
  EXPECT_EQ(list[1]["root"], "/adapters/law");
  EXPECT_EQ(Json::parse(ask(RawClient::get("/v1/models/sql")).body)["id"], "sql");
  EXPECT_EQ(ask(RawClient::get("/v1/models/tax")).status, 404);

  grpc::ClientContext call;
  kvasir::v1::ListModelsResponse models;
  ASSERT_TRUE(kvasir::v1::Inference::NewStub(channel_)->ListModels(&call, {}, &models).ok());
  ASSERT_EQ(models.models_size(), 3);
  EXPECT_EQ(models.models(0).parent(), "");
  EXPECT_EQ(models.models(1).id(), "law");
  EXPECT_EQ(models.models(1).parent(), "fake");
}

TEST_F(NamedAdapters, AreLoadedAndUnloadedWhileServing) {
  const Json loaded = whole("/v1/load_lora_adapter", R"({"lora_name":"tax","lora_path":"/adapters/tax"})");
  EXPECT_EQ(loaded["lora_name"], "tax");
  EXPECT_EQ(loaded["rank"], 8);
  EXPECT_EQ(whole("/v1/completions", R"({"model":"tax","prompt":"ab","max_tokens":2})")["model"], "tax");
  whole("/v1/unload_lora_adapter", R"({"lora_name":"tax"})");
  error("/v1/completions", R"({"model":"tax","prompt":"ab"})", 404);
  EXPECT_THAT(error("/v1/unload_lora_adapter", R"({"lora_name":"tax"})", 404), HasSubstr("'tax' is not loaded"));
  EXPECT_THAT(error("/v1/load_lora_adapter", R"({"lora_name":"x","lora_path":"broken"})", 400), HasSubstr("broken"));
  EXPECT_THAT(error("/v1/load_lora_adapter", R"({"lora_name":"fake","lora_path":"x"})", 409),
              HasSubstr("the served model's own name"));
  EXPECT_THAT(error("/v1/load_lora_adapter", R"({"lora_name":"x"})", 400), HasSubstr("lora_path is missing"));
  EXPECT_THAT(error("/v1/load_lora_adapter", R"({"lora_path":"x"})", 400), HasSubstr("lora_name is missing"));
  EXPECT_THAT(error("/v1/load_lora_adapter", R"({"lora_name":"x","lora_path":"x","load_inplace":true})", 400),
              HasSubstr("load_inplace"));
  EXPECT_THAT(error("/v1/load_lora_adapter", "[", 400), HasSubstr("JSON"));
}

TEST_F(NamedAdapters, MetricsSayWhoIsInUse) {
  whole("/v1/completions", R"({"model":"sql","prompt":"ab","max_tokens":2})");
  const std::string text = ask(RawClient::get("/metrics")).body;
  EXPECT_THAT(text, HasSubstr("vllm:lora_requests_info{max_lora=\""));
  EXPECT_THAT(text, HasSubstr("running_lora_adapters=\"sql\",waiting_lora_adapters=\"\"} 1"));
  EXPECT_THAT(text, HasSubstr("kvasir_adapters 2\n"));
}

// A key may be bound to adapters.
class BoundKeys : public NamedAdapters {
 protected:
  void SetUp() override {
    folder_ = testing::TempDir() + "kvasir-bound-" + std::to_string(::getpid());
    std::filesystem::create_directories(folder_);
    options_.keys_file = folder_ + "/keys.json";
    for (const auto& [who, names] :
         std::map<std::string, std::vector<std::string>>{{"one", {"sql"}}, {"two", {"sql", "fake"}}, {"all", {}}}) {
      KeyEntry e;
      e.caller.tenant = who, e.caller.user = true, e.caller.adapters = names;
      keys_[who] = *add_key(options_.keys_file, e);
    }
    NamedAdapters::SetUp();
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  RawClient::Answer complete(const std::string& who, std::string_view model) {
    const std::string named = model.empty() ? "" : cat("\"model\":\"", model, "\",");
    return ask(RawClient::post("/v1/completions", cat("{", named, R"("prompt":"ab","max_tokens":2})"),
                               cat("Authorization: Bearer ", keys_[who], "\r\n")));
  }
  std::string folder_;
  std::map<std::string, std::string> keys_;
};

TEST_F(BoundKeys, UseTheirOwnAlone) {
  EXPECT_EQ(complete("one", "sql").status, 200);
  EXPECT_EQ(complete("one", "").status, 200);  // the one it has
  EXPECT_EQ(engine_.last().adapter, "sql");
  for (const char* other : {"law", "fake"}) {
    const RawClient::Answer refused = complete("one", other);
    EXPECT_EQ(refused.status, 403) << refused.body;
    EXPECT_THAT(refused.body, HasSubstr(cat("may not use '", other, "'")));
  }
  EXPECT_EQ(complete("two", "").status, 200);
  EXPECT_EQ(engine_.last().adapter, "");
  EXPECT_EQ(complete("two", "sql").status, 200);
  EXPECT_EQ(complete("two", "law").status, 403);
  EXPECT_EQ(complete("all", "law").status, 200);
  std::vector<std::string> seen;
  const Json list =
      Json::parse(ask(RawClient::get("/v1/models", cat("Authorization: Bearer ", keys_["two"], "\r\n"))).body)["data"];
  for (const Json& m : list) seen.push_back(m["id"]);
  EXPECT_THAT(seen, UnorderedElementsAre("fake", "sql"));
}

}  // namespace
}  // namespace kvasir::server
