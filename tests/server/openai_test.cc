// OpenAI's bodies: what comes out for what goes in, streamed and whole, and every way of asking wrongly.
#include "tests/server/openai_fixture.h"

namespace kvasir::server {
namespace {

TEST_F(OpenAi, ACompletionIsWholeOrStreamedAlike) {
  Json one = whole("/v1/completions", R"({"prompt":"hello","max_tokens":9})");
  EXPECT_EQ(one["object"], "text_completion");
  EXPECT_EQ(one["model"], "fake");
  EXPECT_EQ(one["choices"][0]["text"], "hello");
  EXPECT_EQ(one["choices"][0]["finish_reason"], "stop");
  EXPECT_EQ(one["usage"]["prompt_tokens"], 5);
  EXPECT_EQ(one["usage"]["completion_tokens"], 6);
  EXPECT_EQ(one["usage"]["prompt_tokens_details"]["cached_tokens"], 2);

  std::string text;
  auto events = streamed("/v1/completions",
                         R"({"prompt":"hello","max_tokens":9,"stream":true,"stream_options":{"include_usage":true}})");
  for (const Json& e : events)
    for (const Json& c : e["choices"]) text += c["text"].get<std::string>();
  EXPECT_EQ(text, "hello");
  EXPECT_TRUE(events.back()["choices"].empty());
  EXPECT_EQ(events.back()["usage"]["total_tokens"], 11);
  EXPECT_EQ(events[events.size() - 2]["choices"][0]["finish_reason"], "stop");
}

// A search, by vLLM's names and by transformers'; what shapes draws has no place in it.
TEST_F(OpenAi, BeamsReachTheEngine) {
  const std::string begin = R"({"prompt":"hi","max_tokens":2,)";
  post("/v1/completions", begin + R"("use_beam_search":true,"n":3,"temperature":0})");
  ASSERT_TRUE(engine_.last().beams);
  EXPECT_EQ(engine_.last().beams->width, 3);
  EXPECT_EQ(engine_.last().n, 3);
  EXPECT_EQ(engine_.last().beams->length_penalty, 1);
  post("/v1/completions", begin + R"("beam_width":4,"length_penalty":0.5,"early_stopping":"never"})");
  ASSERT_TRUE(engine_.last().beams);
  EXPECT_EQ(engine_.last().beams->width, 4);
  EXPECT_EQ(engine_.last().n, 1);
  EXPECT_EQ(engine_.last().beams->length_penalty, 0.5f);
  EXPECT_EQ(engine_.last().beams->early, engine::BeamOptions::Early::never);
  expect_error(post("/v1/completions", begin + R"("beam_width":2,"temperature":0.7})"), 400, "temperature", "beam");
  expect_error(post("/v1/completions", begin + R"("beam_width":2,"top_k":5})"), 400, "top_k", "beam");
  expect_error(post("/v1/completions", begin + R"("beam_width":2,"early_stopping":1})"), 400, "early_stopping",
               "never");
  expect_error(post("/v1/completions", begin + R"("early_stopping":true})"), 400, "early_stopping", "beam");
}

// A prediction reaches the engine as tokens, and usage says how many draft tokens were right.
TEST_F(OpenAi, APredictionIsADraft) {
  const std::string chat = R"({"messages":[{"role":"user","content":"hi"}],"prediction":)";
  Json one = whole("/v1/chat/completions", chat + R"({"type":"content","content":"ab"}})");
  EXPECT_EQ(engine_.last().prediction, (std::vector<int32_t>{'a', 'b'}));
  EXPECT_EQ(one["usage"]["completion_tokens_details"]["accepted_prediction_tokens"], 0);
  EXPECT_EQ(one["usage"]["completion_tokens_details"]["rejected_prediction_tokens"], 0);
  whole("/v1/chat/completions",
        chat + R"({"type":"content","content":[{"type":"text","text":"c"},{"type":"text","text":"d"}]}})");
  EXPECT_EQ(engine_.last().prediction, (std::vector<int32_t>{'c', 'd'}));
  whole("/v1/completions", R"({"prompt":"hi","prediction":{"type":"content","content":[7,8,9]}})");
  EXPECT_EQ(engine_.last().prediction, (std::vector<int32_t>{7, 8, 9}));
  whole("/v1/chat/completions", chat + "null}");
  EXPECT_TRUE(engine_.last().prediction.empty());
  for (const char* bad : {"1", R"({"type":"x","content":"a"})", R"({"type":"content"})",
                          R"({"type":"content","content":[{"type":"text"}]})",
                          R"({"type":"content","content":[1,"a"]})", R"({"type":"content","content":[-1]})"}) {
    RawClient::Answer a = post("/v1/chat/completions", cat(chat, bad, "}"));
    EXPECT_EQ(a.status, 400) << bad;
    EXPECT_NE(a.body.find("prediction"), std::string::npos) << a.body;
  }
}

TEST_F(OpenAi, UsageGrowsWithEachChunkWhenAsked) {
  auto events = streamed("/v1/completions", R"({"prompt":["hello","hi"],"max_tokens":2,"ignore_eos":true,"stream":true,
      "stream_options":{"include_usage":true,"continuous_usage_stats":true,"include_obfuscation":false}})");
  std::map<int, int64_t> last;
  for (const Json& e : events) {
    if (e["choices"].empty()) continue;
    const int index = e["choices"][0]["index"];
    EXPECT_EQ(e["usage"]["prompt_tokens"], index == 0 ? 5 : 2);
    EXPECT_GE(e["usage"]["completion_tokens"].get<int64_t>(), last[index]);
    last[index] = e["usage"]["completion_tokens"];
  }
  EXPECT_EQ(last, (std::map<int, int64_t>{{0, 2}, {1, 2}}));
  EXPECT_EQ(events.back()["usage"]["completion_tokens"], 4);
  expect_error(post("/v1/completions", R"({"prompt":"x","model":"gpt-4"})"), 404, "model", "gpt-4");
}

TEST_F(OpenAi, ChatStartsWithTheRole) {
  auto events = streamed("/v1/chat/completions", R"({"messages":[{"role":"user","content":"hey"}],"stream":true})");
  EXPECT_EQ(events[0]["object"], "chat.completion.chunk");
  EXPECT_EQ(events[0]["choices"][0]["delta"]["role"], "assistant");
  std::string text;
  for (const Json& e : events) text += e["choices"][0]["delta"].value("content", "");
  EXPECT_NE(text.find("hey"), std::string::npos);
  Json one =
      whole("/v1/chat/completions",
            R"({"messages":[{"role":"user","content":[{"type":"text","text":"h"},{"type":"text","text":"ey"}]}]})");
  EXPECT_EQ(one["choices"][0]["message"]["content"], "h\ney");
}

TEST_F(OpenAi, SixteenTokensAreTheDefaultAsFarAsTheContextGoes) {
  whole("/v1/completions", R"({"prompt":"x"})");
  EXPECT_EQ(engine_.last().max_tokens, 16);
  whole("/v1/completions", cat(R"({"prompt":")", std::string(120, 'x'), "\"}"));
  EXPECT_EQ(engine_.last().max_tokens, 8);
  expect_error(post("/v1/completions", cat(R"({"max_tokens":16,"prompt":")", std::string(120, 'x'), "\"}")), 400,
               "max_tokens", "at most 8");
}

TEST_F(OpenAi, ASeedHas64Bits) {
  whole("/v1/completions", R"({"prompt":"x","seed":18446744073709551615})");
  EXPECT_EQ(engine_.last().sampling.seed, UINT64_MAX);
  whole("/v1/completions", R"({"prompt":"x","seed":-2})");
  EXPECT_EQ(engine_.last().sampling.seed, UINT64_MAX - 1);
  // As of vLLM and llama-server, -1 is none: it is drawn, and told.
  const Json drawn = whole("/v1/completions", R"({"prompt":"x","seed":-1})")["choices"][0];
  EXPECT_NE(engine_.last().sampling.seed, UINT64_MAX);
  EXPECT_EQ(drawn["seed"], engine_.last().sampling.seed);
}

// So that an answer can be asked for again.
TEST_F(OpenAi, ASeedThatWasDrawnIsToldWithEachChoice) {
  for (const char* path : {"/v1/completions", "/v1/chat/completions"}) {
    const bool chat = std::string_view(path) == "/v1/chat/completions";
    const std::string body = chat ? R"("messages":[{"role":"user","content":"x"}])" : R"("prompt":"x")";
    Json one = whole(path, cat("{", body, R"(,"n":2})"));
    for (const Json& choice : one["choices"]) EXPECT_EQ(choice["seed"], engine_.last().sampling.seed) << one;
    for (const Json& event : streamed(path, cat("{", body, R"(,"stream":true})"))) {
      const Json& choice = event["choices"][0];
      EXPECT_EQ(choice.contains("seed"), choice["finish_reason"].is_string()) << event;
      if (choice.contains("seed")) {
        EXPECT_EQ(choice["seed"], engine_.last().sampling.seed);
      }
    }
    EXPECT_FALSE(whole(path, cat("{", body, R"(,"seed":0})"))["choices"][0].contains("seed"));
  }
}

// Half an answer must not look like a whole one.
TEST_F(OpenAi, WhatSomebodyCancelledIsAnError) {
  const char* bodies[] = {R"({"prompt":"x","cache_salt":"hang"})",
                          R"({"prompt":"x","cache_salt":"hang","stream":true})"};
  for (const char* body : bodies) {
    RawClient client(server_->http_port());
    client.send(RawClient::post("/v1/completions", body));
    ASSERT_TRUE(engine_.wait_open(1));
    ASSERT_TRUE(engine_.cancel("", engine_.last().id));
    RawClient::Answer a = client.read();
    EXPECT_EQ(a.body.find("finish_reason\":\"stop"), std::string::npos) << a.body;
    EXPECT_NE(a.body.find("the request was cancelled"), std::string::npos) << a.body;
    EXPECT_TRUE(all_gone());
  }
}

TEST_F(OpenAi, AModelsNameMayHaveCodes) {
  EXPECT_EQ(ask(RawClient::get("/v1/models/fake")).status, 200);
  EXPECT_EQ(ask(RawClient::get("/v1/models/f%61k%65")).status, 200);
  expect_error(ask(RawClient::get("/v1/models/a%2Fb%")), 404, "model", "'a/b%'");
}

// Programs decide by it, and strict ones refuse a body whose code is a number.
TEST_F(OpenAi, CodesOfErrorsAreOpenAisWords) {
  auto code = [](const RawClient::Answer& a) { return Json::parse(a.body)["error"]["code"]; };
  const std::string chat = R"({"messages":[{"role":"user","content":"x"}],)", long_text(200, 'x');
  EXPECT_EQ(code(post("/v1/completions", R"({"prompt":"a","model":"gpt-4"})")), "model_not_found");
  EXPECT_EQ(code(post("/v1/chat/completions", chat + R"("model":"gpt-4"})")), "model_not_found");
  EXPECT_EQ(code(ask(RawClient::get("/v1/models/gpt-4"))), "model_not_found");
  EXPECT_EQ(code(post("/v1/completions", cat(R"({"prompt":")", long_text, "\"}"))), "context_length_exceeded");
  EXPECT_EQ(code(post("/v1/chat/completions", chat + R"("max_tokens":128})")), "context_length_exceeded");
  EXPECT_EQ(code(post("/v1/completions", R"({"prompt":"a","temperature":-1})")), nullptr);
  EXPECT_EQ(code(ask(RawClient::get("/v2"))), nullptr);
  engine_.refuse(resource_exhausted("the queue is full"));
  EXPECT_EQ(code(post("/v1/completions", R"({"prompt":"a"})")), "rate_limit_exceeded");
}

TEST_F(OpenAi, PromptsComeInFourForms) {
  for (const char* prompt : {R"("hi")", R"(["hi"])", "[104,105]", "[[104,105]]"}) {
    Json one = whole("/v1/completions", cat(R"({"prompt":)", prompt, "}"));
    EXPECT_EQ(one["choices"][0]["text"], "hi") << prompt;
  }
  Json two = whole("/v1/completions", R"({"prompt":["a","b"],"n":2})");
  ASSERT_EQ(two["choices"].size(), 4u);
  EXPECT_EQ(two["choices"][1]["text"], "a");
  EXPECT_EQ(two["choices"][2]["text"], "b");
  EXPECT_EQ(two["choices"][3]["index"], 3);
}

TEST_F(OpenAi, BestOfReturnsTheBestN) {
  Json one = whole("/v1/completions", R"({"prompt":"ab","best_of":3,"n":2})");
  EXPECT_EQ(one["choices"].size(), 2u);
  EXPECT_EQ(engine_.last().n, 3);
}

TEST_F(OpenAi, EchoPutsThePromptInFront) {
  EXPECT_EQ(whole("/v1/completions",
                  R"({"prompt":"hey","echo":true,"logprobs":1,"prompt_logprobs":0})")["choices"][0]["prompt_logprobs"]
                .size(),
            3u);
  Json one = whole("/v1/completions", R"({"prompt":"hey","echo":true,"max_tokens":0,"logprobs":1})");
  EXPECT_EQ(one["choices"][0]["text"], "hey");
  Json l = one["choices"][0]["logprobs"];
  EXPECT_EQ(l["tokens"], Json({"h", "e", "y"}));
  EXPECT_TRUE(l["token_logprobs"][0].is_null());
  EXPECT_EQ(l["token_logprobs"][1], -0.5);
  EXPECT_EQ(l["text_offset"], Json({0, 1, 2}));
}

TEST_F(OpenAi, TextOffsetsCountCharactersAndNotBytes) {
  Json one = whole("/v1/completions", R"({"prompt":"h\u00e9\u00e9!","echo":true,"max_tokens":3,"logprobs":0})");
  EXPECT_EQ(one["choices"][0]["text"], "h\u00e9\u00e9!h\u00e9");
  EXPECT_EQ(one["choices"][0]["logprobs"]["text_offset"], Json({0, 1, 1, 2, 2, 3, 4, 5, 5}));
  // A special token is text only where it is shown: in an echoed prompt, or when it is asked for.
  one = whole("/v1/completions", R"({"prompt":[256,97],"echo":true,"max_tokens":1,"ignore_eos":true,"logprobs":0})");
  EXPECT_EQ(one["choices"][0]["logprobs"]["text_offset"], Json({0, 5, 6}));
  int64_t offset = -1;
  for (const Json& e : streamed("/v1/completions", R"({"prompt":"\u00e9a","max_tokens":3,"logprobs":0,"stream":true})"))
    if (const Json& l = e["choices"][0]["logprobs"]; !l.is_null() && !l["text_offset"].empty())
      offset = l["text_offset"].back();
  EXPECT_EQ(offset, 1);
}

// As OpenAI's do: there may be one more than was asked for.
TEST_F(OpenAi, TheTokenItselfIsAmongTheTopOfCompletions) {
  for (int top : {0, 2}) {
    Json one = whole("/v1/completions", cat(R"({"prompt":"a","echo":true,"max_tokens":3,"logprobs":)", top, "}"));
    const Json& l = one["choices"][0]["logprobs"];
    EXPECT_TRUE(l["top_logprobs"][0].is_null());  // what nothing came before
    for (size_t i = 1; i < l["tokens"].size(); ++i) {
      const Json& among = l["top_logprobs"][i];
      EXPECT_LE(among.size(), size_t(top) + 1);
      EXPECT_EQ(among.value(l["tokens"][i].get<std::string>(), Json()), l["token_logprobs"][i]) << i << ' ' << l;
    }
  }
}

TEST_F(OpenAi, LogprobsOfChatNameTheBytes) {
  Json one =
      whole("/v1/chat/completions", R"({"messages":[{"role":"user","content":"x"}],"logprobs":true,"top_logprobs":2})");
  Json first = one["choices"][0]["logprobs"]["content"][0];
  EXPECT_EQ(first["logprob"], -0.25);
  EXPECT_EQ(first["top_logprobs"].size(), 2u);
  EXPECT_EQ(first["bytes"].size(), 1u);
}

TEST_F(OpenAi, AFailureBeforeTheFirstByteIsAStatusAndAfterItAnEvent) {
  // What a log line and a page of another origin know it by is there as in any other answer.
  RawClient::Answer a =
      post("/v1/completions", R"({"prompt":"a","cache_salt":"fail"})", "Origin: http://localhost\r\n");
  EXPECT_EQ(a.status, 500);
  EXPECT_NE(a.head.find("X-Request-Id: "), std::string::npos) << a.head;
  EXPECT_NE(a.head.find("Access-Control-Allow-Origin: http://localhost"), std::string::npos) << a.head;
  a = post("/v1/completions", R"({"prompt":"a","cache_salt":"fail","stream":true})");
  EXPECT_EQ(a.status, 200);
  EXPECT_NE(a.body.find("\"error\":{\"message\":\"the script says so\""), std::string::npos) << a.body;
  EXPECT_TRUE(a.body.ends_with("data: [DONE]\n\n"));
}

TEST_F(OpenAi, WhatIsAskedReachesTheEngine) {
  whole("/v1/completions", R"({"prompt":"a","temperature":0.5,"top_p":0.9,"top_k":7,"min_p":0.1,"seed":42,"stop":["xx"],
    "presence_penalty":1,"frequency_penalty":-1,"repetition_penalty":1.1,"logit_bias":{"5":3},"ignore_eos":true,"max_tokens":4})");
  engine::Request r = engine_.last();
  EXPECT_FLOAT_EQ(r.sampling.temperature, 0.5f);
  EXPECT_FLOAT_EQ(r.sampling.top_p, 0.9f);
  EXPECT_EQ(r.sampling.top_k, 7);
  EXPECT_FLOAT_EQ(r.sampling.min_p, 0.1f);
  EXPECT_EQ(r.sampling.seed, 42u);
  EXPECT_EQ(r.stop_strings, std::vector<std::string>{"xx"});
  EXPECT_FLOAT_EQ(r.sampling.presence_penalty, 1);
  EXPECT_FLOAT_EQ(r.sampling.frequency_penalty, -1);
  EXPECT_FLOAT_EQ(r.sampling.repetition_penalty, 1.1f);
  ASSERT_EQ(r.sampling.logit_bias.size(), 1u);
  EXPECT_TRUE(r.ignore_eos);
  EXPECT_EQ(r.max_tokens, 4);
}

TEST_F(OpenAi, EachWrongFieldIsNamed) {
  struct Case {
    const char *body, *param, *says;
  };
  for (const Case& c : std::vector<Case>{
           {R"({"prompt":"a","temperature":-1})", "temperature", "-1"},
           {R"({"prompt":"a","temperature":"hot"})", "temperature", "number"},
           {R"({"prompt":"a","top_p":1.5})", "top_p", "1"},
           {R"({"prompt":"a","n":1000})", "n", "1000"},
           {R"({"prompt":"a","n":0})", "n", "0"},
           {R"({"prompt":"a","max_tokens":-5})", "max_tokens", "-5"},
           {R"({"prompt":"a","max_tokens":4000})", "max_tokens", "128"},
           {R"({"prompt":[300]})", "prompt", "300"},
           {R"({"prompt":[]})", "prompt", ""},
           {R"({})", "prompt", "missing"},
           {R"({"prompt":"a","logprobs":99})", "logprobs", "99"},
           {R"({"prompt":"a","logit_bias":{"9999":1}})", "logit_bias", "9999"},
           {R"({"prompt":"a","logit_bias":{"x":1}})", "logit_bias", "x"},
           {R"({"prompt":"a","stop":["","b"]})", "stop", ""},
           {R"({"prompt":"a","best_of":1,"n":2})", "best_of", "at least n"},
           {R"({"prompt":"a","stream_options":{}})", "stream_options", "stream: true"},
           {R"({"prompt":"a","suffix":"z"})", "suffix", "not served"},
           {R"({"prompt":"a","user":7})", "user", "string"},
           {R"({"prompt":"a","metadata":"x"})", "metadata", "object"},
           {R"({"prompt":"a","metadata":{"k":1}})", "metadata", "'k'"},
           {R"({"prompt":"a","tempratur":1})", "tempratur", "not a field of this request; did you mean temperature?"},
           {R"({"prompt":"a","max_new_tokens":1})", "max_new_tokens", "not a field of this request; use max_tokens"},
           {R"({"prompt":"a","response_format":{"type":"xml"}})", "response_format", "json_schema"},
           {R"({"prompt":"a","guided_regex":"a","guided_choice":["b"]})", "guided_choice", "second constraint"},
           {R"({"prompt":"a","structured_outputs":{"json":{},"regex":"b"}})", "regex", "second constraint"},
           {R"({"prompt":"a","structured_outputs":{"regex":7}})", "structured_outputs", "string"},
           {R"({"prompt":"a","structured_outputs":{"jsn":{}}})", "structured_outputs", "jsn"},
           {R"({"prompt":"a","structured_outputs":{}})", "structured_outputs", "give one of"},
       }) {
    SCOPED_TRACE(c.body);
    expect_error(post("/v1/completions", c.body), 400, c.param, c.says);
  }
  EXPECT_EQ(engine_.requests.size(), 0u);
}

TEST_F(OpenAi, MetadataIsMeasuredInCharacters) {
  auto with = [&](size_t key, size_t value) {
    std::string k, v;
    while (k.size() < 2 * key) k += "\u00e9";
    while (v.size() < 2 * value) v += "\u00e9";
    return post("/v1/completions", R"({"prompt":"a","max_tokens":1,"metadata":{")" + k + "\":\"" + v + "\"}}");
  };
  EXPECT_EQ(with(64, 512).status, 200);
  expect_error(with(65, 1), 400, "metadata", "64 characters");
  expect_error(with(1, 513), 400, "metadata", "512");
}

TEST_F(OpenAi, WhatAsksForNothingIsNoneOfWhatIsNotServed) {
  const auto answer = post("/v1/completions", R"({"prompt":"ab","suffix":"","store":false,"max_tokens":1})");
  EXPECT_EQ(answer.status, 200) << answer.body;
}

TEST_F(OpenAi, AConstraintUnderEachOfItsNames) {
  using Kind = text::GrammarSpec::Kind;
  struct Case {
    const char* field;
    Kind kind;
    const char* text;
  };
  for (
      const Case& c : std::initializer_list<Case>{
          {R"("response_format":{"type":"json_object"})", Kind::json_object, ""},
          {R"("response_format":{"type":"json_schema","json_schema":{"name":"x","strict":true,"schema":{"type":"null"}}})",
           Kind::json_schema, R"({"type":"null"})"},
          {R"("response_format":{"type":"json_object","schema":{"const":"42"}})", Kind::json_schema,
           R"({"const":"42"})"},
          {R"("guided_json":{"type":"null"})", Kind::json_schema, R"({"type":"null"})"},
          {R"("guided_json":"{\"type\":\"null\"}")", Kind::json_schema, R"({"type":"null"})"},
          {R"("guided_regex":"a+")", Kind::regex, "a+"},
          {R"("guided_grammar":"start: \"a\"")", Kind::lark, "start: \"a\""},
          {R"("guided_choice":["a","b"])", Kind::choice, ""},
          {R"("structured_outputs":{"json":{"type":"null"}})", Kind::json_schema, R"({"type":"null"})"},
          {R"("structured_outputs":{"regex":"a+"})", Kind::regex, "a+"},
          {R"("structured_outputs":{"structural_tag":"{}"})", Kind::structural_tag, "{}"},
          {R"("response_format":{"type":"structural_tag","format":{"type":"any_text"}})", Kind::structural_tag,
           R"({"type":"structural_tag","format":{"type":"any_text"}})"},
          {R"("structured_outputs":{"grammar":"start: \"a\""})", Kind::lark, "start: \"a\""},
          {R"("structured_outputs":{"choice":["a","b"]})", Kind::choice, ""},
          {R"("structured_outputs":{"json_object":true})", Kind::json_object, ""},
      }) {
    SCOPED_TRACE(c.field);
    whole("/v1/completions", cat(R"({"prompt":"a",)", c.field, "}"));
    const text::GrammarSpec grammar = engine_.last().grammar;
    EXPECT_EQ(grammar.kind, c.kind);
    EXPECT_EQ(grammar.text, c.text);
    EXPECT_EQ(grammar.choices.size(), c.kind == Kind::choice ? 2u : 0u);
  }
}

TEST_F(OpenAi, EachWrongMessageIsNamed) {
  for (const auto& [body, says] : std::vector<std::pair<const char*, const char*>>{
           {R"({"messages":[]})", "at least one"},
           {R"({"messages":[{"content":"x"}]})", "role"},
           {R"({"messages":[{"role":"robot","content":"x"}]})", "robot"},
           {R"({"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]})", "image_url"},
           {R"({"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function"}]})", "function.name"},
           {R"({"messages":[{"role":"user","content":"x"}],"tool_choice":"required"})", "needs tools"},
           {R"({"messages":[{"role":"user","content":"x"}],"modalities":["audio"]})", "modalities"},
       }) {
    SCOPED_TRACE(body);
    RawClient::Answer a = post("/v1/chat/completions", body);
    EXPECT_EQ(a.status, 400);
    EXPECT_NE(a.body.find(says), std::string::npos) << a.body;
  }
}

// A function that takes nothing is called with {} or, by some models and clients, with no text at all.
TEST_F(OpenAi, ACallWithoutArgumentsMayBeSentBack) {
  for (const char* arguments : {R"("")", R"(" ")", R"("{}")", "{}"})
    whole(
        "/v1/chat/completions",
        cat(R"({"messages":[{"role":"user","content":"x"},{"role":"assistant","content":null,"tool_calls":[{"id":"c",)",
            R"("type":"function","function":{"name":"f","arguments":)", arguments,
            R"(}}]},{"role":"tool","content":"y","tool_call_id":"c"}]})"));
}

TEST_F(OpenAi, MalformedBodiesAreRefused) {
  expect_error(post("/v1/completions", "{"), 400, "", "not valid JSON");
  expect_error(post("/v1/completions", "[]"), 400, "", "object");
  expect_error(post("/v1/completions", "{\"prompt\":\"\xff\"}"), 400, "", "not valid JSON");
  // A zero byte ends nothing: what a filter before the server read must be what the server reads.
  expect_error(post("/v1/completions", std::string("{\"prompt\":\"a\"}\0,\"junk", 21)), 400, "", "byte 15 of 21");
  expect_error(post("/v1/completions", std::string(10000, '[')), 400, "", "nests 10000 deep");
  expect_error(post("/v1/completions", "{\"prompt\":" + std::string(10000, '[') + std::string(10000, ']') + "}"), 400,
               "", "deep");
}

TEST_F(OpenAi, TokensThereAndBack) {
  Json there = Json::parse(post("/tokenize", R"({"prompt":"hi"})").body);
  EXPECT_TRUE(there.at("token_strs").is_null()) << there;
  EXPECT_EQ(there["tokens"], Json({104, 105}));
  EXPECT_EQ(there["count"], 2);
  EXPECT_EQ(Json::parse(post("/detokenize", R"({"tokens":[104,105]})").body)["prompt"], "hi");
  EXPECT_EQ(post("/detokenize", R"({"tokens":[9999]})").status, 400);
}

TEST_F(OpenAi, ModelsAreListed) {
  Json list = Json::parse(ask(RawClient::get("/v1/models")).body);
  EXPECT_EQ(list["data"][0]["id"], "fake");
  EXPECT_EQ(ask(RawClient::get("/v1/models/fake")).status, 200);
  EXPECT_EQ(ask(RawClient::get("/v1/models/other")).status, 404);
  EXPECT_EQ(Json::parse(ask(RawClient::get("/models")).body), list);
  EXPECT_EQ(Json::parse(ask(RawClient::get("/api/tags")).body)["models"][0]["name"], "fake");
  EXPECT_EQ(Json::parse(ask(RawClient::get("/get_model_info")).body)["model_path"], "fake");
}

TEST_F(OpenAi, RoutesOfOtherServersAnswerAsTheirs) {
  EXPECT_FALSE(Json::parse(ask(RawClient::get("/version")).body)["version"].get<std::string>().empty());
  EXPECT_EQ(Json::parse(ask(RawClient::get("/load")).body)["server_load"], 0);
  EXPECT_EQ(whole("/flush_cache", "{}")["success"], true);
  EXPECT_EQ(engine_.flushes, 1);
  EXPECT_EQ(whole("/abort_request", R"({"rid":"no such"})")["success"], true);
  expect_error(post("/abort_request", "{}"), 400, "rid", "which request");
}

}  // namespace
}  // namespace kvasir::server
