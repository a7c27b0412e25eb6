// OpenAI's responses: items in, items out, whole and as events in their order; what is kept and for whom.
#include "server/http/response_store.h"
#include "tests/server/sse_fixture.h"

namespace kvasir::server {
namespace {

using Strings = std::vector<std::string>;

class Responses : public SseFixture {
 protected:
  void SetUp() override {
    SseFixture::SetUp();
    engine_.set_context(4096);
  }
  std::string prompt() {
    std::string out;
    for (int32_t id : engine_.last().prompt) out += char(id);
    return out;
  }
  static constexpr const char* kTools =
      R"("tools":[{"type":"function","name":"f","parameters":{"type":"object","properties":{"a":{}}},"strict":null}])";
  static constexpr const char* kTemplate =
      "{% for m in messages %}[{{ m.role }}:{{ m.reasoning_content }}:{{ m.content }}{% for c in m.tool_calls %}"
      "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}]{% endfor %}{# tools #}";
};

class KeptResponses : public Responses {
 protected:
  void configure(ServerOptions& o) override { o.response_store.bytes = 64 << 10; }
};

TEST_F(Responses, AnAnswerWholeAndAsEvents) {
  Json one = whole("/v1/responses", R"({"model":"fake","input":"hey","max_output_tokens":99,"metadata":{"k":"v"}})");
  EXPECT_EQ(one["object"], "response");
  EXPECT_EQ(one["status"], "completed");
  EXPECT_EQ(one["store"], false);
  EXPECT_EQ(one["metadata"]["k"], "v");
  EXPECT_EQ(one["max_output_tokens"], 99);
  ASSERT_EQ(one["output"].size(), 1u);
  EXPECT_EQ(one["output"][0]["type"], "message");
  EXPECT_EQ(one["output"][0]["content"][0]["text"], "hey");
  EXPECT_EQ(one["usage"]["input_tokens"], 3);
  EXPECT_EQ(one["usage"]["input_tokens_details"]["cached_tokens"], 2);
  EXPECT_EQ(one["usage"]["total_tokens"], 7);

  const auto all = events("/v1/responses", R"({"input":"hey","stream":true})");
  EXPECT_EQ(types(all),
            (Strings{"response.created", "response.in_progress", "response.output_item.added",
                     "response.content_part.added", "response.output_text.delta", "response.output_text.done",
                     "response.content_part.done", "response.output_item.done", "response.completed"}));
  for (size_t i = 0; i < all.size(); ++i) EXPECT_EQ(all[i]["sequence_number"], i);
  EXPECT_EQ(all.back()["response"]["output"][0]["content"][0]["text"], "hey");
  EXPECT_EQ(all[2]["item"]["id"], all.back()["response"]["output"][0]["id"]);
  EXPECT_TRUE(all_gone());
  EXPECT_TRUE(counted("kvasir_calls_total{protocol=\"openai.responses\",code=\"OK\"} 2\n"));
}

TEST_F(Responses, LogprobsOfWhatIsSaid) {
  engine_.use_template("{% for m in messages %}{{ m.content }}{% endfor %}{# </think> #}");
  const std::string body =
      R"({"input":"<think>why</think>hey","include":["message.output_text.logprobs"],"top_logprobs":2)";
  const Json one = whole("/v1/responses", body + "}");
  EXPECT_EQ(engine_.last().sampling.logprobs, 2);
  EXPECT_EQ(one["top_logprobs"], 2);
  EXPECT_FALSE(one["output"][0]["content"][0].contains("logprobs"));
  const Json& all = one["output"][1]["content"][0]["logprobs"];
  std::string text;
  for (const Json& token : all) {
    text += token["token"];
    EXPECT_EQ(token["top_logprobs"].size(), 2u);
  }
  EXPECT_EQ(text, "hey");
  Json streamed = Json::array(), done;
  for (const Json& e : events("/v1/responses", body + R"(,"stream":true})")) {
    if (e["type"] == "response.output_text.delta")
      streamed.insert(streamed.end(), e["logprobs"].begin(), e["logprobs"].end());
    if (e["type"] == "response.output_text.done") done = e["logprobs"];
  }
  EXPECT_EQ(streamed, done);
  EXPECT_EQ(done, all);
  whole("/v1/responses", R"({"input":"x","include":["message.output_text.logprobs"]})");
  EXPECT_EQ(engine_.last().sampling.logprobs, 0);
  EXPECT_TRUE(whole("/v1/responses", R"({"input":"x"})")["output"][0]["content"][0]["logprobs"].empty());
  EXPECT_EQ(engine_.last().sampling.logprobs, -1);
  expect_error(post("/v1/responses", R"({"input":"x","top_logprobs":2})"), 400, "top_logprobs", "include");
  expect_error(post("/v1/responses", R"({"input":"x","include":["message.output_text.logprobs"],"top_logprobs":21})"),
               400, "top_logprobs", "20");
}

// What a call is written in is part of no message, before it or behind it.
TEST_F(Responses, LogprobsOfMessagesBesideCalls) {
  engine_.use_template("{% for m in messages %}{{ m.content }}{% endfor %}{# tools #}");
  const std::string said = R"(so <tool_call>{"name":"f","arguments":{"a":1}}</tool_call>yes)";
  const std::string body =
      cat(R"({"include":["message.output_text.logprobs"],"input":)", Json(said).dump(), ",", kTools);
  auto expect_own = [](const Json& output) {
    int messages = 0;
    for (const Json& item : output) {
      if (item["type"] != "message") continue;
      ++messages;
      std::string text;
      for (const Json& token : item["content"][0]["logprobs"]) text += token["token"];
      EXPECT_EQ(text, item["content"][0]["text"]);
    }
    EXPECT_GE(messages, 1) << output;
  };
  const Json one = whole("/v1/responses", body + "}");
  ASSERT_GE(one["output"].size(), 2u) << one;
  EXPECT_EQ(one["output"][0]["content"][0]["text"], "so");
  EXPECT_EQ(one["output"][1]["type"], "function_call");
  expect_own(one["output"]);
  Json streamed = Json::array();
  for (const Json& e : events("/v1/responses", body + R"(,"stream":true})"))
    if (e["type"] == "response.output_item.done") streamed.push_back(e["item"]);
  expect_own(streamed);
}

// llama-server's fields: how far the prompt is, and how long all of it took.
TEST_F(Responses, TimesAndProgressWhereTheyAreAskedFor) {
  const auto all =
      events("/v1/responses", R"({"input":"hey","stream":true,"timings_per_token":true,"return_progress":true})");
  Json progress = Json::array();
  for (const Json& e : all) {
    if (e.contains("prompt_progress")) {
      EXPECT_EQ(e["type"], "response.in_progress");
      progress.push_back(e["prompt_progress"]["processed"]);
    }
    const bool told = e["type"] == "response.output_text.delta" || e["type"] == "response.completed";
    EXPECT_EQ(e.contains("timings"), told) << e;
  }
  EXPECT_EQ(progress, Json({2, 3}));  // two were in the cache
  EXPECT_EQ(all.back()["timings"]["prompt_n"], 1);
  EXPECT_EQ(whole("/v1/responses", R"({"input":"hey","timings_per_token":true})")["timings"]["cache_n"], 2);
  EXPECT_FALSE(whole("/v1/responses", R"({"input":"hey"})").contains("timings"));
}

TEST_F(Responses, VariablesOfTheTemplate) {
  engine_.use_template("{{ enable_thinking }},{{ reasoning_effort }},{{ mood }}");
  whole("/v1/responses", R"({"input":"x","reasoning":{"effort":"none"},"chat_template_kwargs":{"mood":"good"}})");
  EXPECT_EQ(prompt(), "False,none,good");
  whole("/v1/responses",
        R"({"input":"x","reasoning":{"effort":"none"},"chat_template_kwargs":{"enable_thinking":true}})");
  EXPECT_EQ(prompt(), "True,none,");
  expect_error(post("/v1/responses", R"({"input":"x","chat_template_kwargs":[]})"), 400, "chat_template_kwargs",
               "object");
}

// llama-server's path, and its word for the length.
TEST_F(Responses, AsLlamaServersClientsSendIt) {
  for (const char* path : {"/responses", "/v1/responses"}) {
    EXPECT_EQ(whole(path, R"({"input":"hey","n_predict":2})")["status"], "incomplete");
    EXPECT_EQ(engine_.last().max_tokens, 2);
    EXPECT_EQ(whole(path, R"({"input":"hey","n_predict":-1})")["status"], "completed");
  }
  expect_error(post("/responses", R"({"input":"hey","n_predict":-2})"), 400, "n_predict", "0 or more");
  whole("/v1/completions", R"({"prompt":"hey","n_predict":3})");
  EXPECT_EQ(engine_.last().max_tokens, 3);
  whole("/v1/completions", R"({"prompt":"hey","n_predict":-1})");
  EXPECT_EQ(engine_.last().max_tokens, 16) << "OpenAI's, as if nothing were said";
  whole("/v1/chat/completions", R"({"messages":[{"role":"user","content":"x"}],"n_predict":-1})");
  EXPECT_EQ(engine_.last().max_tokens, std::nullopt);
}

TEST_F(Responses, ACutAnswerIsIncomplete) {
  Json one = whole("/v1/responses", R"({"input":"hey","max_output_tokens":2})");
  EXPECT_EQ(one["status"], "incomplete");
  EXPECT_EQ(one["incomplete_details"]["reason"], "max_output_tokens");
  EXPECT_EQ(events("/v1/responses", R"({"input":"hey","max_output_tokens":2,"stream":true})").back()["type"],
            "response.incomplete");
  const Json last = events("/responses", R"({"input":"hey","max_output_tokens":2,"stream":true})").back();
  EXPECT_EQ(last["type"], "response.completed") << "llama-server's one last event";
  EXPECT_EQ(last["response"]["status"], "incomplete");
}

TEST_F(Responses, CallsAndThoughtsAreItems) {
  engine_.use_template("{% for m in messages %}{{ m.content }}{% endfor %}{# </think> tools #}");
  const std::string said = R"(<think>why</think>so <tool_call>{"name":"f","arguments":{"a":1}}</tool_call>)";
  const std::string body = cat(R"({"input":)", Json(said).dump(), ",", kTools);
  Json one = whole("/v1/responses", body + "}");
  ASSERT_EQ(one["output"].size(), 3u) << one;
  EXPECT_EQ(one["output"][0]["type"], "reasoning");
  EXPECT_EQ(one["output"][0]["content"][0]["text"], "why");
  EXPECT_EQ(one["output"][1]["content"][0]["text"], "so");
  EXPECT_EQ(one["output"][2]["type"], "function_call");
  EXPECT_EQ(one["output"][2]["name"], "f");
  EXPECT_EQ(Json::parse(one["output"][2]["arguments"].get<std::string>()), Json::parse(R"({"a":1})"));
  EXPECT_GT(one["usage"]["output_tokens_details"]["reasoning_tokens"].get<int>(), 0);
  const auto all = events("/v1/responses", body + R"(,"stream":true})");
  EXPECT_EQ(
      types(all),
      (Strings{"response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
               "response.reasoning_text.delta", "response.reasoning_text.done", "response.content_part.done",
               "response.output_item.done", "response.output_item.added", "response.content_part.added",
               "response.output_text.delta", "response.output_text.done", "response.content_part.done",
               "response.output_item.done", "response.output_item.added", "response.function_call_arguments.delta",
               "response.function_call_arguments.done", "response.output_item.done", "response.completed"}));
}

TEST_F(Responses, ItemsAreAConversation) {
  engine_.use_template(kTemplate);
  whole("/v1/responses", R"({"instructions":"be kind","max_output_tokens":1,"input":[
      {"role":"user","content":[{"type":"input_text","text":"q"}]},
      {"type":"reasoning","id":"rs","summary":[],"content":[{"type":"reasoning_text","text":"t"}]},
      {"type":"message","role":"assistant","content":[{"type":"output_text","text":"a","annotations":[]}]},
      {"type":"function_call","call_id":"c","name":"f","arguments":"{\"n\":1}"},
      {"type":"function_call_output","call_id":"c","output":"r"},
      {"type":"function_call","call_id":"d","name":"g","arguments":"{"}]})");
  EXPECT_EQ(prompt(), "[system::be kind][user::q][assistant:t:af{\"n\": 1}][tool::r][assistant::g{}]");
}

TEST_F(Responses, StructuredOutputAndForcedCalls) {
  whole("/v1/responses", R"({"input":"x","text":{"format":{"type":"json_schema","name":"n","strict":true,
      "schema":{"type":"object","properties":{"a":{}}}}}})");
  EXPECT_EQ(engine_.last().grammar.text, R"({"type":"object","properties":{"a":{}},"additionalProperties":false})");
  Json one = whole("/v1/responses",
                   cat(R"({"input":"{\"a\":2}",)", kTools, R"(,"tool_choice":{"type":"function","name":"f"}})"));
  EXPECT_EQ(one["output"][0]["arguments"], "{\"a\":2}");
  whole("/v1/responses", cat(R"({"input":"x",)", kTools, R"(,"tool_choice":"required"})"));
  EXPECT_EQ(Json::parse(engine_.last().grammar.text)["only"], "some");
}

TEST_F(Responses, WhatIsNotServedIsNamed) {
  for (const auto& [sent, param, says] : std::vector<std::tuple<const char*, const char*, const char*>>{
           {R"({"input":"x","store":true})", "store", "--response-store"},
           {R"({"input":"x","previous_response_id":"resp_1"})", "previous_response_id", "--response-store"},
           {R"({"input":"x","background":true})", "background", "stream it"},
           {R"({"input":"x","tools":[{"type":"web_search"}]})", "tools", "no tools of its own"},
           {R"({"input":[{"type":"item_reference","id":"x"}]})", "input[0].type", "item_reference"},
           {R"({"input":[{"role":"user","content":[{"type":"input_image"}]}]})", "input[0].content", "text only"},
           {R"({"input":"x","truncation":"auto"})", "truncation", "send fewer items"},
           {R"({"input":"x","max_tokens":3})", "max_tokens", "not a field of this request; use max_output_tokens"},
           {R"({})", "input", "string or a list"},
       })
    expect_error(post("/v1/responses", sent), 400, param, says);
  EXPECT_EQ(ask(RawClient::get("/v1/responses/resp_1")).status, 404);
  whole("/v1/responses", R"({"input":"x","store":false,"background":false,"include":[],"top_logprobs":0})");
}

TEST_F(KeptResponses, AConversationGoesOnFromWhatIsKept) {
  engine_.use_template(kTemplate);
  Json one = whole("/v1/responses", R"({"input":"q","instructions":"old"})");
  EXPECT_EQ(one["store"], true);
  const std::string id = one["id"], said = one["output"][0]["content"][0]["text"];
  whole("/v1/responses", cat(R"({"input":"more","instructions":"new","previous_response_id":")", id, "\"}"));
  EXPECT_EQ(prompt(), cat("[system::new][user::q][assistant::", said, "][user::more]"));
  EXPECT_EQ(Json::parse(ask(RawClient::get("/v1/responses/" + id)).body), one);
  Json items = Json::parse(ask(RawClient::get(cat("/v1/responses/", id, "/input_items"))).body);
  EXPECT_EQ(items["data"][0]["content"][0]["text"], "q");
  expect_error(post(cat("/v1/responses/", id, "/cancel"), "{}"), 400, "", "background");
  std::string erase = RawClient::get("/v1/responses/" + id);
  erase.replace(0, 3, "DELETE");
  EXPECT_EQ(Json::parse(ask(erase).body)["deleted"], true);
  std::string put = RawClient::get("/v1/responses/" + id);
  put.replace(0, 3, "PUT");
  EXPECT_NE(ask(put).head.find("Allow: GET, DELETE, POST\r\n"), std::string::npos);
  EXPECT_EQ(ask(RawClient::get("/v1/responses/" + id)).status, 404);
  one = whole("/v1/responses", R"({"input":"q","store":false})");
  EXPECT_EQ(ask(RawClient::get("/v1/responses/" + one["id"].get<std::string>())).status, 404);
}

class BackgroundResponses : public KeptResponses {
 protected:
  void SetUp() override {
    KeptResponses::SetUp();
    engine_.hang_on('~');
  }
  Json state(const std::string& id) { return Json::parse(ask(RawClient::get("/v1/responses/" + id)).body); }
  Json state_after(const std::string& id, const std::string& status) {
    Json now = state(id);
    for (int tries = 0; tries < 2000 && now["status"] != status; ++tries) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      now = state(id);
    }
    EXPECT_EQ(now["status"], status) << now;
    return now;
  }
  std::vector<Json> followed(const std::string& id, std::string_view more = "") {
    return parsed(ask(RawClient::get(cat("/v1/responses/", id, "?stream=true", more))));
  }
  static constexpr const char* kHang = R"({"input":"~","background":true)";
};

TEST_F(BackgroundResponses, AreMadeWithoutTheirClient) {
  const Json asked = whole("/v1/responses", R"({"input":"hey","background":true})");
  EXPECT_EQ(asked["background"], true);
  EXPECT_TRUE(asked["status"] == "queued" || asked["status"] == "in_progress" || asked["status"] == "completed");
  const std::string id = asked["id"];
  const Json made = state_after(id, "completed");
  EXPECT_EQ(made["output"][0]["content"][0]["text"], "hey");
  EXPECT_EQ(made["usage"]["input_tokens"], 3);
  Json items = Json::parse(ask(RawClient::get(cat("/v1/responses/", id, "/input_items"))).body);
  EXPECT_EQ(items["data"][0]["content"][0]["text"], "hey");
  // It is gone on from, and cancelling what is over changes nothing.
  EXPECT_EQ(whole(cat("/v1/responses/", id, "/cancel"), "{}"), made);
  whole("/v1/responses", cat(R"({"input":"so","previous_response_id":")", id, "\"}"));
  EXPECT_EQ(prompt(), "heyheyso");
  expect_error(ask(RawClient::get(cat("/v1/responses/", id, "?stream=true"))), 400, "stream", "background: true");
  expect_error(post("/v1/responses", R"({"input":"x","background":true,"store":false})"), 400, "background", "store");
  EXPECT_TRUE(all_gone());
}

TEST_F(BackgroundResponses, CanBeFollowedFromAnyEventOn) {
  const auto all = events("/v1/responses", R"({"input":"hey","background":true,"stream":true})");
  EXPECT_EQ(types(all),
            (Strings{"response.created", "response.queued", "response.in_progress", "response.output_item.added",
                     "response.content_part.added", "response.output_text.delta", "response.output_text.done",
                     "response.content_part.done", "response.output_item.done", "response.completed"}));
  for (size_t i = 0; i < all.size(); ++i) EXPECT_EQ(all[i]["sequence_number"], i);
  const std::string id = all[0]["response"]["id"];
  EXPECT_EQ(all[0]["response"]["status"], "queued");
  EXPECT_EQ(state(id), all.back()["response"]);
  EXPECT_EQ(followed(id), all);
  EXPECT_EQ(followed(id, "&starting_after=3"), std::vector<Json>(all.begin() + 4, all.end()));
  EXPECT_EQ(followed(id, "&starting_after=99"), std::vector<Json>());
  expect_error(ask(RawClient::get(cat("/v1/responses/", id, "?stream=true&starting_after=x"))), 400, "starting_after",
               "sequence_number");
  // While it is made, too: who follows is woken by its end.
  const auto hung = whole("/v1/responses", cat(kHang, "}"));
  RawClient follower(server_->http_port());
  follower.send(RawClient::post("/v1/responses", cat(kHang, R"(,"stream":true})")));
  ASSERT_TRUE(engine_.wait_open(2));
  for (const auto& request : engine_.requests)
    if (request.prompt[0] == '~') whole(cat("/v1/responses/resp_", request.id, "/cancel"), "{}");
  const auto seen = parsed(follower.read());
  ASSERT_FALSE(seen.empty());
  EXPECT_EQ(seen[0]["type"], "response.created");
  EXPECT_EQ(state(hung["id"])["status"], "cancelled");
  EXPECT_TRUE(all_gone());
}

TEST_F(BackgroundResponses, EndWhenTheyAreCancelledOrForgotten) {
  std::string id = whole("/v1/responses", cat(kHang, "}"))["id"];
  state_after(id, "in_progress");
  expect_error(post("/v1/responses", cat(R"({"input":"x","previous_response_id":")", id, "\"}")), 400,
               "previous_response_id", "in_progress");
  const Json cancelled = whole(cat("/v1/responses/", id, "/cancel"), "{}");
  EXPECT_EQ(cancelled["status"], "cancelled");
  EXPECT_EQ(state(id), cancelled);
  EXPECT_TRUE(all_gone());
  id = whole("/v1/responses", cat(kHang, "}"))["id"];
  std::string erase = RawClient::get("/v1/responses/" + id);
  erase.replace(0, 3, "DELETE");
  EXPECT_EQ(Json::parse(ask(erase).body)["deleted"], true);
  EXPECT_TRUE(all_gone());
  // Ended from elsewhere, by its id.
  id = whole("/v1/responses", cat(kHang, "}"))["id"];
  ASSERT_TRUE(engine_.cancel(engine_.last().tenant, engine_.last().id));
  EXPECT_EQ(state_after(id, "failed")["error"]["code"], "server_error");
  EXPECT_TRUE(all_gone());
  // What is larger than all room there is, is refused.
  engine_.set_context(100'000);
  expect_error(post("/v1/responses", cat(R"({"background":true,"input":")", std::string(70'000, 'x'), "\"}")), 400,
               "input", "--response-store");
}

TEST(ResponseStore, IsBoundedAndEachTenantsOwn) {
  http::ResponseStore store(4096);
  store.keep("a", "1", {"one", "", ""});
  EXPECT_FALSE(store.find("b", "1"));
  EXPECT_FALSE(store.erase("b", "1"));
  for (int i = 0; i < 20; ++i) store.keep("b", cat("b", i), {std::string(500, 'x'), "", ""});
  EXPECT_TRUE(store.find("a", "1")) << "who holds little loses nothing";
  EXPECT_FALSE(store.find("b", "b0"));
  EXPECT_TRUE(store.find("b", "b19"));
  store.keep("b", "huge", {std::string(5000, 'x'), "", ""});
  EXPECT_FALSE(store.find("b", "huge"));
  store.keep("a", "1", {"two", "", ""});
  EXPECT_EQ(store.find("a", "1")->response, "two");
  EXPECT_TRUE(store.erase("a", "1"));
  EXPECT_FALSE(store.find("a", "1"));
  // What is made in the background counts as it grows, and ends where it makes room.
  auto grows = std::make_shared<http::BackgroundResponse>(true);
  grows->now(R"({"status":"queued"})");
  store.keep("c", "1", {"", "", "", grows});
  EXPECT_TRUE(store.recount("c", "1"));
  EXPECT_FALSE(store.replace("c", "2", {"", "", "", grows}));
  grows->append("event: x\ndata: " + std::string(2000, 'x') + "\n\n");
  EXPECT_TRUE(store.recount("c", "1"));
  EXPECT_FALSE(grows->over());
  grows->append("event: x\ndata: " + std::string(4000, 'x') + "\n\n");
  EXPECT_FALSE(store.recount("c", "1"));
  EXPECT_TRUE(grows->over());
  EXPECT_EQ(grows->response(), R"({"status":"cancelled"})");
  EXPECT_FALSE(store.find("c", "1"));
}

}  // namespace
}  // namespace kvasir::server
