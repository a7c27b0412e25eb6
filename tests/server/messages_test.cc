// Anthropic's messages: what goes into the prompt, and what comes out, whole and as events.
#include "tests/server/sse_fixture.h"

namespace kvasir::server {
namespace {

using Strings = std::vector<std::string>;

class Messages : public SseFixture {
 protected:
  void SetUp() override {
    SseFixture::SetUp();
    engine_.set_context(4096);
  }
  // The scripted engine says the prompt again, so the answer is what a user says.
  static std::string body(const std::string& content, std::string_view more = "") {
    return cat(R"({"model":"fake","max_tokens":2000,"messages":[{"role":"user","content":)", content, "}]", more, "}");
  }
  std::string prompt() {
    std::string out;
    for (int32_t id : engine_.last().prompt) out += char(id);
    return out;
  }
  static constexpr const char* kTools =
      R"(,"tools":[{"name":"f","description":"d","input_schema":{"type":"object","properties":{"a":{}}}}])";
};

TEST_F(Messages, AnAnswerWholeAndAsEvents) {
  Json one = whole("/v1/messages", body("\"hey\""));
  EXPECT_EQ(one["type"], "message");
  EXPECT_EQ(one["role"], "assistant");
  EXPECT_EQ(one["model"], "fake");
  EXPECT_EQ(one["content"], Json::parse(R"([{"type":"text","text":"hey"}])"));
  EXPECT_EQ(one["stop_reason"], "end_turn");
  EXPECT_TRUE(one["stop_sequence"].is_null());
  EXPECT_EQ(one["usage"]["input_tokens"], 1);  // two of the three were in the cache
  EXPECT_EQ(one["usage"]["cache_read_input_tokens"], 2);
  EXPECT_EQ(one["usage"]["output_tokens"], 4);

  const auto all = events("/v1/messages", body("\"hey\"", ",\"stream\":true"));
  EXPECT_EQ(types(all), (Strings{"message_start", "ping", "content_block_start", "content_block_delta",
                                 "content_block_stop", "message_delta", "message_stop"}));
  EXPECT_EQ(all[0]["message"]["content"], Json::array());
  EXPECT_EQ(all[2]["content_block"], Json::parse(R"({"type":"text","text":""})"));
  std::string text;
  for (const Json& e : all)
    if (e["type"] == "content_block_delta") text += e["delta"]["text"].get<std::string>();
  EXPECT_EQ(text, "hey");
  EXPECT_EQ(all[all.size() - 2]["delta"]["stop_reason"], "end_turn");
  EXPECT_EQ(all[all.size() - 2]["usage"]["output_tokens"], 4);
  EXPECT_TRUE(all_gone());
  EXPECT_TRUE(counted("kvasir_calls_total{protocol=\"anthropic.messages\",code=\"OK\"} 2\n"));
}

TEST_F(Messages, CutAndStopped) {
  Json one = whole("/v1/messages", R"({"max_tokens":2,"messages":[{"role":"user","content":"hey"}]})");
  EXPECT_EQ(one["stop_reason"], "max_tokens");
  whole("/v1/messages", body("\"hey\"", R"(,"stop_sequences":["xx"],"temperature":0.5,"top_p":0.9,"top_k":7)"));
  EXPECT_EQ(engine_.last().stop_strings, Strings{"xx"});
  EXPECT_EQ(engine_.last().sampling.top_k, 7);
  EXPECT_EQ(engine_.last().sampling.temperature, 0.5f);
}

TEST_F(Messages, ACallIsABlock) {
  const std::string said = R"(so <tool_call>{"name":"f","arguments":{"a": [1, 2]}}</tool_call>)";
  Json one = whole("/v1/messages", body(Json(said).dump(), kTools));
  EXPECT_EQ(one["stop_reason"], "tool_use");
  ASSERT_EQ(one["content"].size(), 2u);
  EXPECT_EQ(one["content"][0]["text"], "so");
  EXPECT_EQ(one["content"][1]["type"], "tool_use");
  EXPECT_EQ(one["content"][1]["name"], "f");
  EXPECT_EQ(one["content"][1]["input"], Json::parse(R"({"a":[1,2]})"));
  std::string input;
  Json block;
  for (const Json& e : events("/v1/messages", body(Json(said).dump(), cat(kTools, ",\"stream\":true")))) {
    if (e["type"] == "content_block_start" && e["index"] == 1) block = e["content_block"];
    if (e["type"] == "content_block_delta" && e["index"] == 1) input += e["delta"]["partial_json"].get<std::string>();
  }
  EXPECT_EQ(block["name"], "f");
  EXPECT_EQ(block["input"], Json::object());
  EXPECT_EQ(Json::parse(input), Json::parse(R"({"a":[1,2]})"));
}

TEST_F(Messages, CallsMayBeForced) {
  whole("/v1/messages",
        body("\"x\"", cat(kTools, R"(,"tool_choice":{"type":"any","disable_parallel_tool_use":true})")));
  Json grammar = Json::parse(engine_.last().grammar.text);
  EXPECT_EQ(grammar["only"], "one");
  EXPECT_EQ(grammar["tools"][0]["parameters"]["additionalProperties"], false);
  Json one = whole("/v1/messages", body(R"("{\"a\":1}")", cat(kTools, R"(,"tool_choice":{"type":"tool","name":"f"})")));
  EXPECT_EQ(one["content"][0]["input"], Json::parse(R"({"a":1})"));
  EXPECT_EQ(one["stop_reason"], "tool_use");
  whole("/v1/messages", body("\"x\"", cat(kTools, R"(,"tool_choice":{"type":"none"})")));
  EXPECT_EQ(engine_.last().grammar.kind, text::GrammarSpec::Kind::none);
}

TEST_F(Messages, ThoughtsAreBlocks) {
  engine_.use_template("{% for m in messages %}{{ m.content }}{% endfor %}{{ enable_thinking }}{# </think> #}");
  const std::string said = R"("<think>why</think>so")";
  Json one = whole("/v1/messages", body(said, R"(,"thinking":{"type":"enabled","budget_tokens":1024})"));
  EXPECT_EQ(one["content"], Json::parse(R"([{"type":"thinking","thinking":"why","signature":""},
                                            {"type":"text","text":"soTrue"}])"));
  const auto all = events("/v1/messages", body(said, ",\"stream\":true"));
  EXPECT_EQ(types(all), (Strings{"message_start", "ping", "content_block_start", "content_block_delta",
                                 "content_block_stop", "content_block_start", "content_block_delta",
                                 "content_block_stop", "message_delta", "message_stop"}));
  EXPECT_TRUE(prompt().ends_with("False"));
}

TEST_F(Messages, TheWholeConversationIsInThePrompt) {
  engine_.use_template(
      "{% for m in messages %}[{{ m.role }}:{{ m.reasoning_content }}:{{ m.content }}{% for c in m.tool_calls %}"
      "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}]{% endfor %}{# tools #}");
  whole("/v1/messages", R"({"max_tokens":1,"system":[{"type":"text","text":"x-anthropic-billing-header: cch=17"},
      {"type":"text","text":"be","cache_control":{"type":"ephemeral"}},{"type":"text","text":"kind"}],
      "messages":[{"role":"user","content":[{"type":"text","text":"q"}]},
      {"role":"assistant","content":[{"type":"thinking","thinking":"t","signature":"s"},{"type":"text","text":"a"},
        {"type":"tool_use","id":"i","name":"f","input":{"n":1}}]},
      {"role":"user","content":[{"type":"tool_result","tool_use_id":"i","content":[{"type":"text","text":"r"}]},
        {"type":"text","text":"go on"}]}],
      "metadata":{"user_id":"u"},"service_tier":"auto"})");
  EXPECT_EQ(prompt(), "[system::be\nkind][user::q][assistant:t:af{\"n\": 1}][tool::r][user::go on]");
}

TEST_F(Messages, AnAnswerThatIsBegunGoesOn) {
  engine_.use_template("{% for m in messages %}<{{ m.content }}>{% endfor %}");
  whole("/v1/messages",
        R"({"max_tokens":1,"messages":[{"role":"user","content":"q"},{"role":"assistant","content":"The"}]})");
  EXPECT_EQ(prompt(), "<q><The");
}

TEST_F(Messages, TokensAreCounted) {
  Json count = whole("/v1/messages/count_tokens", R"({"model":"fake","messages":[{"role":"user","content":"hey"}]})");
  EXPECT_EQ(count, Json::parse(R"({"input_tokens":3})"));
}

TEST_F(Messages, MistakesAreInAnthropicsForm) {
  for (const auto& [sent, says] : std::vector<std::pair<std::string, const char*>>{
           {"{", "not valid JSON"},
           {R"({"messages":[{"role":"user","content":"x"}]})", "max_tokens is missing"},
           {R"({"max_tokens":1,"messages":[]})", "at least one"},
           {R"({"max_tokens":1,"messages":[{"role":"robot","content":"x"}]})", "robot"},
           {R"({"max_tokens":1,"messages":[{"role":"user","content":[{"type":"image"}]}]})", "image"},
           {R"({"max_tokens":1,"messages":[{"role":"user","content":[{"type":"tool_result"}]}]})", "tool_use_id"},
           {body("\"x\"", R"(,"tools":[{"type":"web_search_20250305","name":"w"}])"), "web_search"},
           {body("\"x\"", R"(,"tools":[{"name":"f"}])"), "input_schema"},
           {body("\"x\"", R"(,"tool_choice":{"type":"any"})"), "needs tools"},
           {body("\"x\"", R"(,"n":2)"), "not a field"},
           {body("\"x\"", R"(,"temperature":-1)"), "temperature"},
           {body("\"x\"", R"(,"mcp_servers":[{}])"), "give tools"},
       }) {
    RawClient::Answer a = post("/v1/messages", sent);
    EXPECT_EQ(a.status, 400) << sent;
    Json error = Json::parse(a.body);
    EXPECT_EQ(error["type"], "error");
    EXPECT_EQ(error["error"]["type"], "invalid_request_error");
    EXPECT_NE(error["error"]["message"].get<std::string>().find(says), std::string::npos) << a.body;
  }
  EXPECT_EQ(
      Json::parse(post("/v1/messages", R"({"model":"m","max_tokens":1,"messages":[{"role":"user","content":"x"}]})")
                      .body)["error"]["type"],
      "not_found_error");
}

TEST_F(Messages, AFailureOnTheWayIsAnEvent) {
  const std::string fails = R"({"max_tokens":9,"cache_salt":"fail","messages":[{"role":"user","content":"x"}])";
  EXPECT_EQ(post("/v1/messages", fails + "}").status, 400);  // a salt is not of this protocol
  engine_.refuse(resource_exhausted("the queue is full"));
  Json error = Json::parse(post("/v1/messages", body("\"x\"", ",\"stream\":true")).body);
  EXPECT_EQ(error["error"]["type"], "rate_limit_error");
}

}  // namespace
}  // namespace kvasir::server
