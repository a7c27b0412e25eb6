// What vLLM's clients ask of chats, completions and responses beyond OpenAI's fields, and its switches of a server.
#include "tests/server/openai_fixture.h"

namespace kvasir::server {
namespace {

constexpr const char* kChat = R"("messages":[{"role":"user","content":"hello"}])";

class VllmFields : public OpenAi {};

TEST_F(VllmFields, AStreamOfACompletionEndsWithItsLastText) {
  const auto events = streamed("/v1/completions", R"({"prompt":"hello","max_tokens":3,"stream":true})");
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events[2]["choices"][0]["text"], "l");
  EXPECT_EQ(events[2]["choices"][0]["finish_reason"], "length");
  // What the model itself ends has no text left.
  const auto ended = streamed("/v1/completions", R"({"prompt":"hi","stream":true})");
  EXPECT_EQ(ended.back()["choices"][0]["text"], "");
  EXPECT_EQ(ended.back()["choices"][0]["finish_reason"], "stop");
}

// A client that counts tokens by chunks gets no chunk without one; others get OpenAI's, whose last says only why.
TEST_F(VllmFields, AStreamOfAChatEndsWithItsLastTextWhereEachChunkHasUsage) {
  const std::string body = cat('{', kChat, R"(,"max_tokens":3,"stream":true,"stream_options":{"include_usage":true)");
  const auto counted = streamed("/v1/chat/completions", body + R"(,"continuous_usage_stats":true}})");
  int64_t before = 0;
  for (const Json& event : counted) {
    const int64_t made = event["usage"]["completion_tokens"];
    EXPECT_TRUE(before == 0 || made > before || (event["choices"].empty() && made == before)) << event;
    before = made;
  }
  EXPECT_EQ(before, 3);
  const Json& last = counted[counted.size() - 2]["choices"][0];
  EXPECT_EQ(last["delta"]["content"], "l");
  EXPECT_EQ(last["finish_reason"], "length");
  const auto plain = streamed("/v1/chat/completions", body + "}}");
  EXPECT_EQ(plain[plain.size() - 2]["choices"][0]["delta"], Json::object());
  EXPECT_EQ(plain[plain.size() - 2]["choices"][0]["finish_reason"], "length");
}

TEST_F(VllmFields, UsageSoFarOfNoUsageIsNone) {
  for (const Json& event : streamed("/v1/completions", R"({"prompt":"x","stream":true,
           "stream_options":{"include_usage":false,"continuous_usage_stats":true}})"))
    EXPECT_FALSE(event.contains("usage")) << event;
}

TEST_F(VllmFields, TokenIdsHaveTheTokenThatEndedTheAnswer) {
  for (const bool chat : {false, true}) {
    const std::string path = chat ? "/v1/chat/completions" : "/v1/completions";
    const std::string prompt =
        chat ? R"("messages":[{"role":"user","content":"hi"}],"logprobs":true)" : R"("prompt":"hi","logprobs":0)";
    const std::string body = cat('{', prompt, R"(,"return_token_ids":true)");
    const Json choice = whole(path, body + "}")["choices"][0];
    EXPECT_EQ(choice["token_ids"], Json({'h', 'i', 256}));
    EXPECT_EQ(chat ? choice["message"]["content"] : choice["text"], "hi");
    EXPECT_EQ(chat ? choice["logprobs"]["content"].size() : choice["logprobs"]["tokens"].size(), 3u);
    Json ids = Json::array();
    std::string text;
    for (const Json& event : streamed(path, body + R"(,"stream":true})")) {
      const Json& piece = event["choices"][0];
      for (const Json& id : piece.at("token_ids")) ids.push_back(id);
      text += chat ? piece["delta"].value("content", "") : piece["text"].get<std::string>();
    }
    EXPECT_EQ(ids, choice["token_ids"]);
    EXPECT_EQ(text, "hi");
    const Json shown = whole(path, body + R"(,"include_stop_str_in_output":true})")["choices"][0];
    EXPECT_EQ(shown["token_ids"], choice["token_ids"]);  // and not twice
    const Json cut = whole(path, body + R"(,"max_tokens":1})")["choices"][0];
    EXPECT_EQ(cut["token_ids"], Json({'h'}));
    const Json usual = whole(path, cat('{', prompt, '}'))["choices"][0];
    EXPECT_EQ(chat ? usual["logprobs"]["content"].size() : usual["logprobs"]["tokens"].size(), 2u);  // OpenAI's
  }
}

TEST_F(VllmFields, TheTokenThatWasDrawnIsTheFirstOfTheTop) {
  const std::string body =
      post("/v1/completions", R"({"prompt":"hi","max_tokens":2,"logprobs":2,"return_tokens_as_token_ids":true})").body;
  const auto one = nlohmann::ordered_json::parse(body)["choices"][0]["logprobs"];
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(one["top_logprobs"][i].begin().key(), one["tokens"][i]);
    EXPECT_EQ(one["top_logprobs"][i].size(), 3u);
  }
}

// Nothing is drawn, so that any seed gives the answer again: it is the same one each time.
TEST_F(VllmFields, AGreedyAnswerIsTheSameToTheLastByte) {
  const std::string body = cat('{', kChat, R"(,"temperature":0})");
  EXPECT_EQ(whole("/v1/chat/completions", body)["choices"], whole("/invocations", body)["choices"]);
  EXPECT_EQ(whole("/v1/chat/completions", body)["choices"][0]["seed"], 0);
}

TEST_F(VllmFields, AllWrongKeysOfABiasAreNamed) {
  expect_error(post("/v1/completions", R"({"prompt":"a","logit_bias":{"bad1":1,"5":1,"bad2":1}})"), 400, "logit_bias",
               "'bad1', 'bad2', which are no token ids");
  std::string many;
  for (int i = 0; i < 20; ++i) many += cat(i ? "," : "", "\"k", i, "\":1");
  expect_error(post("/v1/completions", cat(R"({"prompt":"a","logit_bias":{)", many, "}}")), 400, "logit_bias",
               "'k7' and 12 more");
}

TEST_F(VllmFields, APromptThatWasTokenizedElsewhereIsTakenAsItIs) {
  const std::string ids = R"(,"kv_transfer_params":{"prompt_token_ids":[104,105],"do_remote_prefill":false})";
  for (const std::string& body : {cat('{', kChat, ids, R"(,"return_token_ids":true})"),
                                  cat(R"({"prompt":"other")", ids, R"(,"return_token_ids":true})")}) {
    const bool chat = body.find("messages") != std::string::npos;
    const Json answer = whole(chat ? "/v1/chat/completions" : "/v1/completions", body);
    EXPECT_EQ(engine_.last().prompt, (std::vector<int32_t>{104, 105}));
    EXPECT_EQ((chat ? answer : answer["choices"][0])["prompt_token_ids"], Json({104, 105}));
  }
  for (const auto& [params, says] :
       std::vector<std::pair<const char*, const char*>>{{R"({"do_remote_prefill":true})", "does not move caches"},
                                                        {R"({"prompt_token_ids":[]})", "without an entry"},
                                                        {R"({"prompt_token_ids":"x"})", "prompt_token_ids"},
                                                        {R"([1])", "object"}})
    expect_error(post("/v1/chat/completions", cat('{', kChat, R"(,"kv_transfer_params":)", params, '}')), 400,
                 "kv_transfer_params", says);
  expect_error(post("/v1/completions", cat(R"({"prompt":["a","b"])", ids, '}')), 400, "kv_transfer_params",
               "there are 2");
  expect_error(post("/v1/chat/completions", cat('{', kChat, R"(,"kv_transfer_params":{"prompt_token_ids":[999]}})")),
               400, "prompt", "999");
}

TEST_F(VllmFields, WhoNamesAModelHasTheTextOnceAlone) {
  EXPECT_EQ(Json::parse(post("/detokenize", R"({"model":"fake","tokens":[104,105]})").body), Json({{"prompt", "hi"}}));
  EXPECT_EQ(Json::parse(post("/detokenize", R"({"tokens":[104,105]})").body)["content"], "hi");
}

TEST_F(VllmFields, AResponseTellsWhatItIsMadeOf) {
  const Json one = whole("/v1/responses", R"({"input":"hi","enable_response_messages":true})");
  EXPECT_EQ(one["input_messages"], Json::parse(R"([{"type":"raw_message_tokens","message":"hi","tokens":[104,105]}])"));
  EXPECT_EQ(one["output_messages"][0]["message"], "hi");
  EXPECT_EQ(one["output_messages"][0]["tokens"], Json({104, 105, 256}));
  EXPECT_FALSE(whole("/v1/responses", R"({"input":"hi"})").contains("input_messages"));
}

// By expressions and by how much is thought: rows of the table, which each protocol has by its names.
TEST_F(VllmFields, ExpressionsEndAnAnswer) {
  const auto given = [&] { return engine_.last().stop_expressions ? engine_.last().stop_regex.size() : 0; };
  whole("/v1/completions", R"({"prompt":"a","stop_regex":"a|b"})");
  EXPECT_EQ(given(), 1u);
  whole("/v1/chat/completions", cat('{', kChat, R"(,"stop_regex":["a","[.!?]\\s*$"]})"));
  EXPECT_EQ(given(), 2u);
  whole("/v1/messages", cat('{', kChat, R"(,"max_tokens":3,"stop_regex":"a"})"));
  EXPECT_EQ(given(), 1u);
  whole("/v1/responses", R"({"input":"a","stop_regex":"a"})");
  EXPECT_EQ(given(), 1u);
  whole("/completion", R"({"prompt":"a","stop_regex":"a"})");
  EXPECT_EQ(given(), 1u);
  whole("/generate", R"({"text":"a","sampling_params":{"stop_regex":"a"}})");
  EXPECT_EQ(given(), 1u);
  auto refused = [&](const char* value, const char* says) {
    expect_error(post("/v1/completions", cat(R"({"prompt":"a","stop_regex":)", value, '}')), 400, "stop_regex", says);
  };
  refused(R"("(a")", "no regular expression");
  refused(R"(["a","x*"])", "[1] matches an empty text");
  refused(R"("")", "empty");
  refused("7", "a string or a list of strings");
}

class Thoughts : public VllmFields {
 protected:
  void SetUp() override {
    VllmFields::SetUp();
    engine_.use_template(
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if think %}<think>{% endif %}{# </think> #}");
  }
  std::optional<int64_t> asked(const char* path, const std::string& body) {
    whole(path, body);
    const auto& thoughts = engine_.last().thoughts;
    return thoughts ? std::optional(thoughts->tokens) : std::nullopt;
  }
};

TEST_F(Thoughts, HaveABudget) {
  const auto chat = [](const char* more) { return cat('{', kChat, ',', more, '}'); };
  EXPECT_EQ(asked("/v1/chat/completions", chat(R"("thinking_token_budget":5)")), 5);
  EXPECT_FALSE(engine_.last().thoughts->begun);
  EXPECT_EQ(engine_.last().thoughts->open, "<think>");
  EXPECT_EQ(engine_.last().thoughts->closing.size(), 8u);
  EXPECT_EQ(asked("/v1/chat/completions", chat(R"("thinking_budget_tokens":0,"chat_template_kwargs":{"think":true})")),
            0);  // llama-server's name
  EXPECT_TRUE(engine_.last().thoughts->begun);
  EXPECT_EQ(asked("/v1/chat/completions", chat(R"("thinking_token_budget":-1)")), std::nullopt);
  EXPECT_EQ(asked("/v1/chat/completions", chat(R"("thinking_token_budget":null)")), std::nullopt);
  EXPECT_EQ(asked("/v1/responses", R"({"input":"x","thinking_token_budget":7})"), 7);
  EXPECT_EQ(asked("/v1/messages", chat(R"("max_tokens":9,"thinking":{"type":"enabled","budget_tokens":6})")), 6);
  EXPECT_EQ(asked("/v1/messages", chat(R"("max_tokens":9,"thinking":{"type":"disabled","budget_tokens":6})")),
            std::nullopt);
  // A constraint's text has no thoughts.
  EXPECT_EQ(asked("/v1/chat/completions", chat(R"("thinking_token_budget":5,"guided_regex":"a")")), std::nullopt);
  expect_error(post("/v1/chat/completions", chat(R"("thinking_token_budget":-2)")), 400, "thinking_token_budget", "-2");
  expect_error(post("/v1/chat/completions", chat(R"("thinking_token_budget":"x")")), 400, "thinking_token_budget",
               "whole");
}

TEST_F(Thoughts, OfAModelWithoutAnyHaveNoBudget) {
  engine_.use_template("{% for m in messages %}{{ m.content }}{% endfor %}");
  expect_error(post("/v1/chat/completions", cat('{', kChat, R"(,"thinking_token_budget":5})")), 400,
               "thinking_token_budget", "no thoughts to count");
  EXPECT_EQ(
      asked("/v1/messages", cat('{', kChat, R"(,"max_tokens":9,"thinking":{"type":"enabled","budget_tokens":6}})")),
      std::nullopt);
}

class SwitchedOn : public Thoughts {
 protected:
  void configure(ServerOptions& o) override {
    o.return_tokens_as_token_ids = o.enable_force_include_usage = o.enable_per_request_metrics = true;
    o.max_logprobs = 1000;
    o.thinking_token_budget = 4;
  }
};

TEST_F(SwitchedOn, AllRequestsAreAnsweredSo) {
  const Json one = whole("/v1/completions", R"({"prompt":"hi","logprobs":0,"max_tokens":2})");
  EXPECT_EQ(one["choices"][0]["logprobs"]["tokens"], Json({"token_id:104", "token_id:105"}));
  const Json named =
      whole("/v1/completions", R"({"prompt":"hi","logprobs":0,"max_tokens":2,"return_tokens_as_token_ids":false})");
  EXPECT_EQ(named["choices"][0]["logprobs"]["tokens"], Json({"h", "i"}));
  for (const char* name : {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms"})
    EXPECT_GE(one["metrics"].at(name).get<double>(), 0) << name;
  EXPECT_FALSE(whole("/v1/completions", R"({"prompt":"hi","n":2})").contains("metrics"));  // of one answer
  const auto events = streamed("/v1/chat/completions", cat('{', kChat, R"(,"stream":true,"max_tokens":1})"));
  for (const Json& event : events) EXPECT_TRUE(event["usage"].is_object()) << event;
  EXPECT_TRUE(events.back()["choices"].empty());
  EXPECT_GE(events.back()["metrics"]["time_to_first_token_ms"].get<double>(), 0);
  EXPECT_FALSE(events.back()["metrics"].contains("mean_itl_ms"));  // there is no second token
  EXPECT_EQ(asked("/v1/chat/completions", cat('{', kChat, '}')), 4);
  EXPECT_EQ(asked("/v1/chat/completions", cat('{', kChat, R"(,"thinking_token_budget":9})")), 9);
}

// -1 is the whole vocabulary, where the operator lets a token have as many.
TEST_F(SwitchedOn, AllLogprobsAreTheVocabularys) {
  whole("/v1/chat/completions", cat('{', kChat, R"(,"logprobs":true,"top_logprobs":-1,"max_tokens":1})"));
  EXPECT_EQ(engine_.last().sampling.logprobs, 257);
  whole("/v1/completions", R"({"prompt":"a","prompt_logprobs":-1,"max_tokens":1})");
  EXPECT_EQ(engine_.last().prompt_logprobs, 257);
  whole("/v1/completions", R"({"prompt":"a","logprobs":-1,"echo":true,"max_tokens":1})");
  EXPECT_EQ(engine_.last().prompt_logprobs, 257);
  engine_.set_context(200000);
  expect_error(post("/v1/completions", R"({"prompt":"a","logprobs":-1,"max_tokens":190000})"), 400, "logprobs",
               "33554432");
}

TEST_F(VllmFields, AllLogprobsAreMoreThanIsUsual) {
  expect_error(post("/v1/completions", R"({"prompt":"a","logprobs":-1})"), 400, "logprobs",
               "all 257 of the vocabulary");
  expect_error(post("/v1/completions", R"({"prompt":"a","prompt_logprobs":-1})"), 400, "prompt_logprobs", "-1");
  expect_error(post("/v1/completions", R"({"prompt":"a","logprobs":-2})"), 400, "logprobs", "-2");
}

}  // namespace
}  // namespace kvasir::server
