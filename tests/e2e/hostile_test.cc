// Input made to hurt, sent to the real binary while somebody else's stream runs: it is refused or bounded, the stream
// keeps its pace and its tokens, and the log keeps its lines.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "tests/e2e/server_process.h"
#include "tests/e2e/streams.h"
#include "tests/server/http_client.h"
#include "vllm_engine.grpc.pb.h"

namespace kvasir::e2e {
namespace {

using std::chrono::milliseconds;
using Json = nlohmann::json;
using ::testing::HasSubstr;

constexpr const char* kModel =
    "dummy:llama,layers=1,hidden=64,heads=1,kv_heads=1,head_dim=64,ffn=64,vocab=260,step_ms=5";

std::vector<std::string> arguments(std::vector<std::string> more = {}) {
  std::vector<std::string> all{"--model", kModel, "--kv-memory", "16MiB", "--threads", "1", "--log-level", "info"};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

class Hostile : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(server.ready()) << server.log();
    stub = connect(server.address());
    gateway = vllm::grpc::engine::VllmEngine::NewStub(
        grpc::CreateChannel(server.address(), grpc::InsecureChannelCredentials()));
    StreamReader alone(*stub, witness());
    alone.wait();
    ASSERT_TRUE(alone.status.ok()) << alone.status.error_message();
    right = alone.text;
  }
  static v1::GenerateRequest witness() { return greedy("the witness", 400, true); }

  // Does `attack` while the witness's stream runs.
  template <class F>
  void beside_the_witness(F attack) {
    StreamReader stream(*stub, witness());
    attack();
    stream.wait();
    EXPECT_TRUE(stream.status.ok()) << stream.status.error_message();
    EXPECT_EQ(stream.text, right);
    double longest = 0;
    for (double gap : stream.gaps) longest = std::max(longest, gap);
    EXPECT_LT(longest, 1.5) << "a step of 5 ms was held up";
  }
  grpc::Status ask(const std::function<void(v1::GenerateRequest&)>& change) {
    auto request = greedy("x", 4, true);
    change(request);
    StreamReader reader(*stub, request);
    reader.wait();
    return reader.status;
  }
  grpc::Status ask_engine(const std::function<void(vllm::grpc::engine::SamplingParams&)>& change) {
    vllm::grpc::engine::GenerateRequest request;
    request.set_text("x");
    request.mutable_sampling_params()->set_max_tokens(4);
    change(*request.mutable_sampling_params());
    grpc::ClientContext context;
    auto reader = gateway->Generate(&context, request);
    for (vllm::grpc::engine::GenerateResponse r; reader->Read(&r);) {
    }
    return reader->Finish();
  }
  server::RawClient::Answer post(const char* path, const Json& body, std::string_view headers = "") {
    server::RawClient client(server.http_port());
    client.send(server::RawClient::post(path, body.dump(), headers));
    return client.read();
  }
  // Refused as bad, or run within the limits: nothing else.
  static void expect_bounded(const grpc::Status& s, const std::string& what) {
    EXPECT_TRUE(s.ok() || s.error_code() == grpc::INVALID_ARGUMENT || s.error_code() == grpc::RESOURCE_EXHAUSTED)
        << what.substr(0, 60) << ": " << s.error_code() << ' ' << s.error_message();
  }
  static void expect_bounded(const server::RawClient::Answer& a, const std::string& what) {
    EXPECT_TRUE(a.status == 200 || a.status == 400 || a.status == 429)
        << what.substr(0, 60) << ": " << a.status << a.body;
  }

  ServerProcess server{arguments()};
  std::unique_ptr<v1::Inference::Stub> stub;
  std::unique_ptr<vllm::grpc::engine::VllmEngine::Stub> gateway;
  std::string right;
};

TEST_F(Hostile, CatastrophicRegexes) {
  std::string nested = "a";
  for (int i = 0; i < 200; ++i) nested = "(" + nested + ")*";
  std::string wide;
  for (int i = 0; i < 3000; ++i) wide += "(a|b)?";
  beside_the_witness([&] {
    for (const std::string& regex : {std::string("(a+)+$"), std::string("(x{1000}){1000}"), std::string(".{0,100000}"),
                                     std::string("(((a{1,100}){1,100}){1,100}){1,100}"), nested, wide,
                                     std::string("[\\s\\S]*a[\\s\\S]{20}b"), std::string("(")}) {
      expect_bounded(ask([&](auto& r) { r.mutable_grammar()->set_regex(regex); }), regex);
      expect_bounded(ask_engine([&](auto& s) { s.set_regex(regex); }), regex);
      expect_bounded(post("/v1/completions", {{"prompt", "x"}, {"max_tokens", 4}, {"guided_regex", regex}}), regex);
    }
  });
  EXPECT_EQ(ask([](auto& r) { r.mutable_grammar()->set_regex("("); }).error_code(), grpc::INVALID_ARGUMENT);
}

TEST_F(Hostile, CatastrophicSchemasAndGrammars) {
  Json wide = {{"type", "object"}, {"properties", Json::object()}};
  for (int i = 0; i < 5000; ++i) wide["properties"]["p" + std::to_string(i)] = {{"type", "string"}};
  Json loop = {{"$ref", "#/$defs/a"}, {"$defs", {{"a", {{"$ref", "#/$defs/b"}}}, {"b", {{"$ref", "#/$defs/a"}}}}}};
  Json tree = {{"$ref", "#/$defs/n0"}, {"$defs", Json::object()}};
  for (int i = 0; i < 30; ++i)
    tree["$defs"]["n" + std::to_string(i)] = {
        {"anyOf", {{{"$ref", "#/$defs/n" + std::to_string(i + 1)}}, {{"$ref", "#/$defs/n" + std::to_string(i + 1)}}}}};
  tree["$defs"]["n30"] = {{"type", "null"}};
  Json counted = {{"type", "array"}, {"items", {{"type", "integer"}}}, {"minItems", 1000000}, {"maxItems", 2000000}};
  Json pattern = {{"type", "string"}, {"pattern", "^(a+)+$"}, {"maxLength", 1000000}};
  beside_the_witness([&] {
    for (const Json& schema : {wide, loop, tree, counted, pattern, Json("not a schema"), Json(7)}) {
      std::string text = schema.dump();
      expect_bounded(ask([&](auto& r) { r.mutable_grammar()->set_json_schema(text); }), text);
      expect_bounded(ask_engine([&](auto& s) { s.set_json_schema(text); }), text);
      expect_bounded(post("/v1/completions", {{"prompt", "x"}, {"max_tokens", 4}, {"guided_json", schema}}), text);
      if (schema.is_object())
        expect_bounded(post("/v1/chat/completions",
                            {{"messages", {{{"role", "user"}, {"content", "x"}}}},
                             {"max_tokens", 4},
                             {"response_format", {{"type", "json_schema"}, {"json_schema", {{"schema", schema}}}}}}),
                       text);
    }
    for (const std::string& lark : {std::string("start: start start"), std::string("start: /(a+)+/ start | start"),
                                    std::string("start: nowhere")}) {
      expect_bounded(ask([&](auto& r) { r.mutable_grammar()->set_lark(lark); }), lark);
      expect_bounded(ask_engine([&](auto& s) { s.set_grammar(lark); }), lark);
      expect_bounded(post("/v1/completions", {{"prompt", "x"}, {"max_tokens", 4}, {"guided_grammar", lark}}), lark);
    }
  });
  EXPECT_EQ(ask([](auto& r) { r.mutable_grammar()->set_json_schema("{"); }).error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_EQ(ask([](auto& r) { r.mutable_grammar()->set_lark("start: nowhere"); }).error_code(), grpc::INVALID_ARGUMENT);
}

TEST_F(Hostile, NothingAClientWritesForgesALineOfTheLog) {
  const std::string forged = "\n{\"time\":\"now\",\"level\":\"error\",\"message\":\"forged\"}\r\n\x1b[31m";
  ask([&](auto& r) { r.set_request_id("id" + forged); });
  ask([&](auto& r) { r.set_model("model" + forged); });
  Json body = {{"prompt", "x"},
               {"max_tokens", 1},
               {"user", "user" + forged},
               {"metadata", {{"k", forged}}},
               {"prompt_cache_key", forged}};
  EXPECT_EQ(post("/v1/completions", body, "Traceparent: \"},{forged\r\n").status, 200);
  body["user"] = std::string(400, 'u');
  EXPECT_EQ(post("/v1/completions", body).status, 200);
  body["user"] = std::string(4000, 'u');
  EXPECT_EQ(post("/v1/completions", body).status, 400);
  server.signal(SIGTERM);
  EXPECT_EQ(server.wait(), 0);
  std::istringstream lines(server.log());
  int requests = 0;
  bool user_shown = false;
  for (std::string line; std::getline(lines, line);) {
    Json json = Json::parse(line, nullptr, false);
    ASSERT_TRUE(json.is_object()) << line;
    EXPECT_NE(json["message"], "forged") << line;
    EXPECT_EQ(line.find('\x1b'), std::string::npos);
    EXPECT_LT(line.size(), 4096u);
    requests += json["message"] == "request" || json["message"] == "request refused";
    user_shown |= json.value("user", "").find("user") == 0;
  }
  EXPECT_GE(requests, 5);
  EXPECT_TRUE(user_shown);
}

// What one tenant has cached is not found by another: not in the figures, and so not in the time.
TEST(HostileTenants, APrefixIsFoundOnlyByItsOwnTenant) {
  char name[] = "/tmp/kvasir-hostile-XXXXXX";
  std::string folder = mkdtemp(name), file = folder + "/keys.json";
  auto add = [&](const std::string& tenant) {
    std::string command =
        std::string(KVASIR_EXE) + " keys add --keys " + file + " --tenant " + tenant + " --role user 2>/dev/null";
    FILE* out = popen(command.c_str(), "r");
    char text[4096] = {};
    size_t n = fread(text, 1, sizeof text - 1, out);
    EXPECT_EQ(pclose(out), 0) << command;
    return std::string(text, n).substr(0, std::string(text, n).find('\n'));
  };
  std::string ann = add("ann"), bob = add("bob");
  ASSERT_FALSE(ann.empty() || bob.empty());
  ServerProcess server(arguments({"--keys", file}));
  ASSERT_TRUE(server.ready()) << server.log();
  std::string prompt(160, 'p');
  auto cached_http = [&](const std::string& key, const std::string& cache_key = "") {
    server::RawClient client(server.http_port());
    Json body = {{"prompt", prompt}, {"max_tokens", 1}};
    if (!cache_key.empty()) body["prompt_cache_key"] = cache_key;
    client.send(server::RawClient::post("/v1/completions", body.dump(), "Authorization: Bearer " + key + "\r\n"));
    auto a = client.read();
    EXPECT_EQ(a.status, 200) << a.body;
    return Json::parse(a.body)["usage"]["prompt_tokens_details"]["cached_tokens"].get<int>();
  };
  auto channel = grpc::CreateChannel(server.address(), grpc::InsecureChannelCredentials());
  auto cached_v1 = [&](const std::string& key) {
    grpc::ClientContext context;
    context.AddMetadata("authorization", "Bearer " + key);
    auto reader = v1::Inference::NewStub(channel)->Generate(&context, greedy(prompt, 1, true));
    uint64_t cached = 0;
    for (v1::GenerateResponse r; reader->Read(&r);)
      if (r.has_started()) cached = r.started().cached_tokens();
    EXPECT_TRUE(reader->Finish().ok());
    return int(cached);
  };
  auto cached_vllm = [&](const std::string& key) {
    grpc::ClientContext context;
    context.AddMetadata("authorization", "Bearer " + key);
    vllm::grpc::engine::GenerateRequest request;
    request.set_text(prompt);
    request.mutable_sampling_params()->set_max_tokens(1);
    auto reader = vllm::grpc::engine::VllmEngine::NewStub(channel)->Generate(&context, request);
    int cached = 0;
    for (vllm::grpc::engine::GenerateResponse r; reader->Read(&r);) cached = int(r.complete().cached_tokens());
    EXPECT_TRUE(reader->Finish().ok());
    return cached;
  };
  EXPECT_EQ(cached_http(ann, "shared"), 0);
  EXPECT_GE(cached_http(ann, "shared"), 128);
  EXPECT_EQ(cached_http(bob, "shared"), 0);  // the same words, the same prompt_cache_key, another tenant
  EXPECT_GE(cached_http(bob, "other"), 128);
  // The others from the start, each with a prompt of its own.
  for (auto& cached : std::vector<std::function<int(const std::string&)>>{cached_v1, cached_vllm}) {
    ++prompt[0];
    EXPECT_EQ(cached(ann), 0);
    EXPECT_GE(cached(ann), 128);
    EXPECT_EQ(cached(bob), 0);
  }
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace kvasir::e2e
