// Ollama's routes: what goes in under its names, what comes out whole and line by line.
#include "tests/server/http_fixture.h"

namespace kvasir::server {
namespace {

class Ollama : public HttpFixture {
 protected:
  void SetUp() override {
    HttpFixture::SetUp();
    engine_.set_context(4096);
  }
  std::vector<Json> lines(std::string_view path, const std::string& body) {
    RawClient::Answer a = post(path, body);
    EXPECT_EQ(a.status, 200) << a.body;
    EXPECT_NE(a.head.find("application/x-ndjson"), std::string::npos) << a.head;
    std::vector<Json> out;
    for (std::string_view rest = a.body; !rest.empty(); rest.remove_prefix(rest.find('\n') + 1))
      out.push_back(Json::parse(rest.substr(0, rest.find('\n'))));
    return out;
  }
  static std::string chat(const std::string& content, std::string_view more = "") {
    return cat(R"({"model":"fake","messages":[{"role":"user","content":)", content, "}]", more, "}");
  }
  std::string prompt() {
    std::string out;
    for (int32_t id : engine_.last().prompt) out += char(id);
    return out;
  }
  void expect_refused(std::string_view path, const std::string& body, int status, const char* says) {
    RawClient::Answer a = post(path, body);
    EXPECT_EQ(a.status, status) << body;
    EXPECT_NE(Json::parse(a.body)["error"].get<std::string>().find(says), std::string::npos) << a.body;
  }
  static constexpr const char* kTools =
      R"(,"tools":[{"type":"function","function":{"name":"f","description":"d","parameters":{"type":"object"}}}])";
};

TEST_F(Ollama, AChatIsStreamedUnlessToldOtherwise) {
  const auto all = lines("/api/chat", chat("\"hey\""));
  std::string text;
  for (size_t i = 0; i + 1 < all.size(); ++i) {
    EXPECT_EQ(all[i]["done"], false);
    EXPECT_EQ(all[i]["message"]["role"], "assistant");
    text += all[i]["message"]["content"].get<std::string>();
  }
  EXPECT_EQ(text, "hey");
  EXPECT_EQ(all.back()["done"], true);
  EXPECT_EQ(all.back()["message"]["content"], "");

  Json one = whole("/api/chat", chat("\"hey\"", ",\"stream\":false"));
  EXPECT_EQ(one["model"], "fake");
  EXPECT_EQ(one["message"], Json::parse(R"({"role":"assistant","content":"hey"})"));
  EXPECT_EQ(one["done_reason"], "stop");
  EXPECT_EQ(one["prompt_eval_count"], 3);
  EXPECT_EQ(one["eval_count"], 4);
  EXPECT_EQ(one["load_duration"], 0);
  EXPECT_GE(one["total_duration"].get<int64_t>(), one["prompt_eval_duration"].get<int64_t>());
  EXPECT_TRUE(one["created_at"].get<std::string>().ends_with("Z"));
  EXPECT_TRUE(all_gone());
}

TEST_F(Ollama, APromptIsATextOrAChat) {
  engine_.use_template("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ enable_thinking }}");
  const auto all = lines("/api/generate", R"({"model":"fake:latest","prompt":"hey","system":"be"})");
  EXPECT_EQ(prompt(), "<system>be<user>hey");
  std::string text;
  for (const Json& line : all) text += line["response"].get<std::string>();
  EXPECT_EQ(text, prompt());
  Json one = whole("/api/generate", R"({"model":"fake","prompt":"hey","raw":true,"stream":false})");
  EXPECT_EQ(one["response"], "hey");
  EXPECT_EQ(prompt(), "hey");
  whole("/api/generate", R"({"model":"fake","prompt":"hey","think":false,"stream":false})");
  EXPECT_EQ(prompt(), "<user>heyFalse");
  Json loaded = whole("/api/generate", R"({"model":"fake","keep_alive":-1,"stream":false})");
  EXPECT_EQ(loaded["done_reason"], "load");
  EXPECT_EQ(lines("/api/chat", R"({"model":"fake","messages":[]})")[0]["done_reason"], "load");
}

TEST_F(Ollama, OptionsReachTheEngine) {
  Json one = whole("/api/chat", chat("\"hey\"", R"(,"stream":false,"keep_alive":"5m","options":{"num_predict":2,
      "temperature":0.5,"top_k":7,"top_p":0.9,"min_p":0.1,"repeat_penalty":1.5,"seed":9,"stop":["x"],"num_ctx":2048,
      "mirostat":0,"num_gpu":1})"));
  EXPECT_EQ(one["message"]["content"], "he");
  EXPECT_EQ(one["done_reason"], "length");
  const engine::Request r = engine_.last();
  EXPECT_EQ(r.sampling.temperature, 0.5f);
  EXPECT_EQ(r.sampling.top_k, 7);
  EXPECT_EQ(r.sampling.repetition_penalty, 1.5f);
  EXPECT_EQ(r.sampling.seed, 9u);
  EXPECT_EQ(r.stop_strings, std::vector<std::string>{"x"});
  whole("/api/chat", chat("\"hey\"", R"(,"stream":false,"options":{"num_predict":99999})"));
  EXPECT_EQ(engine_.last().max_tokens, 4096 - int64_t(engine_.last().prompt.size()));
  whole("/api/chat", chat("\"hey\"", R"(,"stream":false,"options":{"num_predict":-1,"seed":-1,"repeat_last_n":64})"));
  EXPECT_FALSE(engine_.last().max_tokens.has_value());
}

TEST_F(Ollama, AFormatIsAGrammar) {
  using Kind = text::GrammarSpec::Kind;
  whole("/api/chat", chat("\"x\"", R"(,"stream":false,"format":"json")"));
  EXPECT_EQ(engine_.last().grammar.kind, Kind::json_object);
  whole("/api/generate", R"({"model":"fake","prompt":"x","stream":false,
      "format":{"type":"object","properties":{"a":{"type":"string"}}}})");
  EXPECT_EQ(engine_.last().grammar.kind, Kind::json_schema);
  EXPECT_EQ(Json::parse(engine_.last().grammar.text)["additionalProperties"], false);
  whole("/api/chat", chat("\"x\"", R"(,"stream":false,"format":"")"));
  EXPECT_EQ(engine_.last().grammar.kind, Kind::none);
}

TEST_F(Ollama, CallsAreObjectsAndGoBackAsTheyCame) {
  const std::string said = Json(R"(so <tool_call>{"name":"f","arguments":{"a": [1]}}</tool_call>)").dump();
  const Json calls = Json::parse(R"([{"function":{"index":0,"name":"f","arguments":{"a":[1]}}}])");
  Json one = whole("/api/chat", chat(said, cat(kTools, ",\"stream\":false")));
  EXPECT_EQ(one["message"]["content"], "so");
  EXPECT_EQ(one["message"]["tool_calls"], calls);
  const auto all = lines("/api/chat", chat(said, kTools));
  EXPECT_EQ(all[all.size() - 2]["message"]["tool_calls"], calls);
  EXPECT_FALSE(all.back()["message"].contains("tool_calls"));
  engine_.use_template(
      "{% for m in messages %}[{{ m.role }}:{{ m.name }}:{{ m.content }}{% for c in m.tool_calls %}"
      "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}]{% endfor %}{# tools #}");
  whole("/api/chat", R"({"model":"fake","stream":false,"messages":[{"role":"user","content":"q","images":[]},
      {"role":"assistant","content":"","tool_calls":[{"function":{"name":"f","arguments":{"n":1}}}]},
      {"role":"tool","content":"r","tool_name":"f"}]})");
  EXPECT_EQ(prompt(), "[user::q][assistant::f{\"n\": 1}][tool:f:r]");
}

TEST_F(Ollama, ThoughtsStandByThemselves) {
  engine_.use_template("{% for m in messages %}{{ m.content }}{% endfor %}{# </think> #}");
  const std::string said = R"("<think>why</think>so")";
  Json one = whole("/api/chat", chat(said, R"(,"think":true,"stream":false)"));
  EXPECT_EQ(one["message"], Json::parse(R"({"role":"assistant","content":"so","thinking":"why"})"));
  std::string thoughts, text;
  for (const Json& line : lines("/api/generate", cat(R"({"model":"fake","prompt":)", said, "}"))) {
    thoughts += line.value("thinking", "");
    text += line["response"].get<std::string>();
  }
  EXPECT_EQ(thoughts, "why");
  EXPECT_EQ(text, "so");
}

TEST_F(Ollama, EachMistakeIsNamed) {
  for (const auto& [sent, says] : std::vector<std::pair<std::string, const char*>>{
           {"{", "not valid JSON"},
           {R"({"messages":[]})", "model is missing"},
           {chat("\"x\"", R"(,"context":[1])"), "context is not served here"},
           {chat("\"x\"", R"(,"format":"yaml")"), "JSON schema"},
           {chat("\"x\"", R"(,"think":"much")"), "low, medium, high"},
           {chat("\"x\"", R"(,"logprobs":true)"), "/v1/completions"},
           {chat("\"x\"", R"(,"options":{"mirostat":2})"), "mirostat"},
           {chat("\"x\"", R"(,"options":{"temperature":-1})"), "temperature"},
           {chat("\"x\"", R"(,"options":{"repeat_penalty":1.1,"repeat_last_n":33})"), "repeat_last_n"},
           {chat("\"x\"", R"(,"options":{"heat":1})"), "heat"},
           {chat("\"x\"", R"(,"tools":[{"type":"x"}])"), "function"},
           {R"({"model":"fake","messages":[{"role":"user","content":"x","images":["abc"]}]})", "text only"},
           {R"({"model":"fake","messages":[{"role":"robot","content":"x"}]})", "robot"}})
    expect_refused("/api/chat", sent, 400, says);
  expect_refused("/api/chat", R"({"model":"other","messages":[{"role":"user","content":"x"}]})", 404, "other");
  expect_refused("/api/generate", R"({"model":"fake","prompt":"x","suffix":"y"})", 400, "no tokens for a gap");
  expect_refused("/api/generate", R"({"model":"fake","prompt":"x","template":"t"})", 400, "--chat-template");
  expect_refused("/api/generate", R"({"model":"fake","prompt":"x","raw":true,"system":"y"})", 400, "raw leaves out");
  expect_refused("/api/embed", R"({"model":"fake"})", 400, "input");
  expect_refused("/api/embed", R"({"model":"fake","input":"x","truncate":true})", 400, "not cut");
  expect_refused("/api/embed", R"({"model":"other","input":"x"})", 404, "other");
  EXPECT_TRUE(all_gone());
}

// The vectors of /v1/embeddings, in both of Ollama's forms.
TEST_F(Ollama, TextsBecomeVectors) {
  const Json same = whole("/v1/embeddings", R"({"input":["ab","c"]})");
  const Json all = whole("/api/embed", R"({"model":"fake:latest","input":["ab","c"],"keep_alive":"5m","options":{}})");
  ASSERT_EQ(all["embeddings"].size(), 2u);
  for (size_t i = 0; i < 2; ++i) EXPECT_EQ(all["embeddings"][i], same["data"][i]["embedding"]);
  EXPECT_EQ(all["prompt_eval_count"], same["usage"]["prompt_tokens"]);
  EXPECT_EQ(all["model"], "fake");
  EXPECT_EQ(whole("/api/embed", R"({"model":"fake","input":"c"})")["embeddings"][0], all["embeddings"][1]);
  EXPECT_EQ(whole("/api/embeddings", R"({"model":"fake","prompt":"c"})")["embedding"], all["embeddings"][1]);
  EXPECT_TRUE(all_gone());
}

TEST_F(Ollama, WhatIsServedIsTold) {
  Json shown = whole("/api/show", R"({"model":"fake:latest"})");
  EXPECT_EQ(shown["model_info"]["general.architecture"], "llama");
  EXPECT_EQ(shown["model_info"]["llama.context_length"], 4096);
  EXPECT_EQ(shown["capabilities"], Json({"completion", "tools"}));
  EXPECT_EQ(shown["details"]["family"], "llama");
  expect_refused("/api/show", R"({"model":"other"})", 404, "other");
  expect_refused("/api/show", "{}", 400, "model is missing");
  for (const char* path : {"/api/tags", "/api/ps"}) {
    Json list = Json::parse(ask(RawClient::get(path)).body);
    EXPECT_EQ(list["models"][0]["name"], "fake") << path;
    EXPECT_EQ(list["models"][0]["details"]["family"], "llama") << path;
  }
}

TEST_F(Ollama, AClientThatLeavesEndsItsRequest) {
  engine_.hang_on('!');
  {
    RawClient client(server_->http_port());
    client.send(RawClient::post("/api/chat", chat("\"!\"")));
    ASSERT_TRUE(engine_.wait_open(1));
  }
  EXPECT_TRUE(all_gone());
}

}  // namespace
}  // namespace kvasir::server
