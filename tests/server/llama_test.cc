// llama-server's own routes: what goes in under its names, what comes out in its form.
#include <gmock/gmock.h>

#include <cmath>

#include "tests/server/openai_fixture.h"

namespace kvasir::server {
namespace {

class Llama : public HttpFixture {
 protected:
  std::vector<Json> events(const std::string& body) {
    RawClient::Answer a = post("/completion", body);
    EXPECT_EQ(a.status, 200) << a.body;
    EXPECT_NE(a.head.find("text/event-stream"), std::string::npos);
    std::vector<Json> out;
    for (std::string_view rest = a.body; !rest.empty(); rest.remove_prefix(rest.find("\n\n") + 2)) {
      EXPECT_TRUE(rest.starts_with("data: "));
      out.push_back(Json::parse(rest.substr(6, rest.find("\n\n") - 6)));
    }
    return out;
  }
};

TEST_F(Llama, ACompletionIsWholeOrStreamedAlike) {
  for (const char* path : {"/completion", "/completions"}) {
    Json one = whole(path, R"({"prompt":"hello","n_predict":3,"return_tokens":true,"seed":7})");
    EXPECT_EQ(one["content"], "hel");
    EXPECT_EQ(one["tokens"], Json({'h', 'e', 'l'}));
    EXPECT_EQ(one["stop"], true);
    EXPECT_EQ(one["stop_type"], "limit");
    EXPECT_EQ(one["stopping_word"], "");
    EXPECT_EQ(one["tokens_predicted"], 3);
    EXPECT_EQ(one["tokens_evaluated"], 5);
    EXPECT_EQ(one["tokens_cached"], 8);
    EXPECT_EQ(one["truncated"], false);
    EXPECT_EQ(one["has_new_line"], false);
    EXPECT_EQ(one["model"], "fake");
    EXPECT_EQ(one["prompt"], "hello");
    EXPECT_EQ(one["index"], 0);
    EXPECT_EQ(one["generation_settings"]["n_predict"], 3);
    EXPECT_EQ(one["generation_settings"]["seed"], 7);
    EXPECT_EQ(one["timings"]["prompt_n"], 3);  // two of the five were in the cache
    EXPECT_EQ(one["timings"]["cache_n"], 2);
    EXPECT_EQ(one["timings"]["predicted_n"], 3);
    EXPECT_EQ(one["timings"].contains("prompt_per_second"), true);
  }
  // A rate is of the steps after the prompt, of which one token needs none.
  const Json short_one =
      Json::parse(post("/completion", R"({"prompt":"hello","n_predict":1,"ignore_eos":true})").body)["timings"];
  EXPECT_EQ(short_one["predicted_n"], 1);
  EXPECT_EQ(short_one["predicted_per_second"], 0);
  EXPECT_EQ(short_one["predicted_per_token_ms"], 0);
  const auto all = events(R"({"prompt":"hello","n_predict":3,"stream":true,"timings_per_token":true})");
  std::string text;
  for (size_t i = 0; i + 1 < all.size(); ++i) {
    EXPECT_EQ(all[i]["stop"], false);
    EXPECT_FALSE(all[i]["tokens"].empty());
    EXPECT_EQ(all[i]["timings"]["predicted_n"], all[i]["tokens_predicted"]);
    text += all[i]["content"].get<std::string>();
  }
  EXPECT_EQ(text, "hel");
  EXPECT_EQ(all.back()["stop"], true);
  EXPECT_EQ(all.back()["content"], "");
  EXPECT_EQ(all.back()["generation_settings"]["stream"], true);
  EXPECT_TRUE(all_gone());
}

TEST_F(Llama, AnAnswerEndsInOneOfThreeWays) {
  EXPECT_EQ(whole("/completion", R"({"prompt":"hi"})")["stop_type"], "eos");
  Json word = whole("/completion", R"({"prompt":"hi","stop_token_ids":[105]})");
  EXPECT_EQ(word["stop_type"], "word");
  EXPECT_EQ(word["content"], "h");
  whole("/completion", R"({"prompt":"hi","n_predict":-1,"seed":-1,"n_probs":0,"top_n_sigma":-1})");
  EXPECT_FALSE(engine_.last().max_tokens.has_value());
  EXPECT_EQ(engine_.last().sampling.logprobs, -1);
}

// There a length is how far to go at most, often the same for any prompt; OpenAI's max_tokens must fit.
TEST_F(Llama, ALengthBeyondTheContextEndsWithIt) {
  const Json cut = whole("/completion", R"({"prompt":"hi","n_predict":1000})");
  EXPECT_EQ(engine_.last().max_tokens, 126);
  EXPECT_EQ(cut["generation_settings"]["n_predict"], 1000);
  whole("/v1/completions", R"({"prompt":"hi","n_predict":1000})");
  EXPECT_EQ(engine_.last().max_tokens, 126);
  whole("/v1/chat/completions", R"({"messages":[{"role":"user","content":"hi"}],"n_predict":1000})");
  EXPECT_EQ(engine_.last().max_tokens, 128 - int64_t(engine_.last().prompt.size()));
  expect_error(post("/v1/completions", R"({"prompt":"hi","max_tokens":1000})"), 400, "max_tokens", "at most 126");
}

TEST_F(Llama, PromptsAreTextsIdsOrBoth) {
  EXPECT_EQ(whole("/completion", R"({"prompt":[104,105]})")["content"], "hi");
  EXPECT_EQ(whole("/completion", R"({"prompt":[104,"i ",121,"ou"]})")["content"], "hi you");
  EXPECT_EQ(whole("/completion", R"({"prompt":["hi"]})")["content"], "hi");
  EXPECT_EQ(whole("/completion", R"({"prompt":{"prompt_string":"hi","multimodal_data":[]}})")["content"], "hi");
  Json list = whole("/completion", R"({"prompt":["ab",[99,100],["e",102]],"n":2})");
  ASSERT_EQ(list.size(), 6u);
  for (size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(list[i]["index"], i);
    EXPECT_EQ(list[i]["content"], (std::array{"ab", "cd", "ef"}[i / 2]));
  }
  std::map<int, std::string> texts;
  for (const Json& e : events(R"({"prompt":["ab","cd"],"stream":true})"))
    texts[e["index"]] += e["content"].get<std::string>();
  EXPECT_EQ(texts, (std::map<int, std::string>{{0, "ab"}, {1, "cd"}}));
}

TEST_F(Llama, OnlyTheFieldsThatAreAskedFor) {
  Json one = whole("/completion", R"({"prompt":"hi","n_predict":1,
      "response_fields":["content","generation_settings/n_predict","no/such"]})");
  EXPECT_EQ(one, Json::parse(R"({"content":"h","generation_settings/n_predict":1})"));
}

TEST_F(Llama, ProbabilitiesAreOfTheModel) {
  Json one = whole("/completion", R"({"prompt":"hi","n_predict":2,"n_probs":3})");
  ASSERT_EQ(one["completion_probabilities"].size(), 2u);
  const Json& first = one["completion_probabilities"][0];
  EXPECT_EQ(first["id"], 'h');
  EXPECT_EQ(first["token"], "h");
  EXPECT_EQ(first["bytes"], Json({'h'}));
  EXPECT_EQ(first["logprob"], -0.25);
  EXPECT_EQ(first["top_logprobs"].size(), 3u);
  for (const Json& e : events(R"({"prompt":"hi","n_predict":2,"n_probs":1,"stream":true})")) {
    EXPECT_EQ(e.contains("completion_probabilities"), !e["stop"].get<bool>());
  }
}

TEST_F(Llama, ProbabilitiesAfterSamplingAreFromNoughtToOne) {
  Json one = whole("/completion", R"({"prompt":"hi","n_predict":1,"n_probs":2,"post_sampling_probs":true})");
  EXPECT_TRUE(engine_.last().sampling.post_sampling_probs);
  EXPECT_EQ(one["generation_settings"]["post_sampling_probs"], true);
  const Json& first = one["completion_probabilities"][0];
  EXPECT_FLOAT_EQ(first["prob"].get<float>(), std::exp(-0.25f));
  EXPECT_FALSE(first.contains("logprob") || first.contains("top_logprobs"));
  ASSERT_EQ(first["top_probs"].size(), 2u);
  EXPECT_FLOAT_EQ(first["top_probs"][0]["prob"].get<float>(), std::exp(-1.0f));
}

TEST_F(Llama, AnEndThatIsIgnoredIsNeverDrawn) {
  Json one = whole("/completion", R"({"prompt":"hi","n_predict":1,"ignore_eos":true,"logit_bias":[[5,false]]})");
  EXPECT_EQ(one["generation_settings"]["logit_bias"],
            Json::parse(R"([{"token":5,"bias":null},{"token":256,"bias":null}])"));
  EXPECT_EQ(whole("/completion", R"({"prompt":"hi","n_predict":1})")["generation_settings"]["logit_bias"],
            Json::array());
}

TEST_F(Llama, ProgressIsToldAtBothEndsOfThePrompt) {
  std::vector<int> processed;
  for (const Json& e : events(R"({"prompt":"hello","stream":true,"return_progress":true,"timings_per_token":true})"))
    if (e.contains("prompt_progress")) {
      EXPECT_EQ(e["prompt_progress"]["total"], 5);
      EXPECT_EQ(e["prompt_progress"]["cache"], 2);
      EXPECT_EQ(e["timings"]["prompt_n"].get<int>(), e["prompt_progress"]["processed"].get<int>() - 2);
      EXPECT_EQ(e["timings"]["predicted_n"], 0);
      processed.push_back(e["prompt_progress"]["processed"]);
    }
  EXPECT_EQ(processed, (std::vector<int>{2, 5}));
}

TEST_F(Llama, WhatIsAskedReachesTheEngine) {
  whole("/completion", R"({"prompt":"hi","temperature":0.5,"top_k":7,"top_p":0.9,"min_p":0.1,"typical_p":0.8,
      "repeat_penalty":1.5,"repeat_last_n":-1,"stop":["x"],"ignore_eos":true,"n_predict":4,"json_schema":{"type":"object"},
      "logit_bias":[[5,-1.5],["ab",false]],"id_slot":3,"n_keep":2,"cache_prompt":true,"speculative.n_max":4})");
  const engine::Request r = engine_.last();
  EXPECT_EQ(r.sampling.temperature, 0.5f);
  EXPECT_EQ(r.sampling.top_k, 7);
  EXPECT_EQ(r.sampling.repetition_penalty, 1.5f);
  EXPECT_EQ(r.stop_strings, std::vector<std::string>{"x"});
  EXPECT_EQ(r.max_tokens, 4);
  EXPECT_EQ(r.grammar.kind, text::GrammarSpec::Kind::json_schema);
  EXPECT_EQ(r.sampling.logit_bias,
            (std::vector<std::pair<int32_t, float>>{{5, -1.5f}, {'a', -100}, {'b', -100}, {256, -100}}));
  EXPECT_EQ(r.cache_salt, "");
  whole("/completion", R"({"prompt":"hi","logit_bias":{"5":1,"c":-2}})");
  EXPECT_EQ(engine_.last().sampling.logit_bias, (std::vector<std::pair<int32_t, float>>{{5, 1.f}, {'c', -2.f}}));
}

TEST_F(Llama, WithoutTheCacheNoPromptIsSharedWithAny) {
  whole("/completion", R"({"prompt":"hi","cache_prompt":false})");
  const std::string salt = engine_.last().cache_salt;
  EXPECT_FALSE(salt.empty());
  whole("/completion", R"({"prompt":"hi","cache_prompt":false})");
  EXPECT_NE(engine_.last().cache_salt, salt);
}

TEST_F(Llama, SamplersThatAreOffAreTaken) {
  whole("/completion", R"({"prompt":"hi","mirostat":0,"mirostat_tau":5.0,"mirostat_eta":0.1,"dynatemp_range":0.0,
      "dynatemp_exponent":1.0,"dry_multiplier":0.0,"dry_base":1.75,"dry_allowed_length":2,"dry_penalty_last_n":-1,
      "dry_sequence_breakers":["\n"],"xtc_probability":0.0,"xtc_threshold":0.1,"samplers":[],"min_keep":0,"lora":[],
      "repeat_last_n":64,"n_indent":0,"t_max_predict_ms":-1,"post_sampling_probs":false,"grammar":""})");
  whole("/completion", R"({"prompt":"hi","repeat_penalty":1.5,"repeat_last_n":0})");
  EXPECT_EQ(engine_.last().sampling.repetition_penalty, 1.0f);
}

TEST_F(Llama, EachWrongFieldIsNamed) {
  const std::vector<std::tuple<const char*, const char*, const char*>> wrong = {
      {R"({})", "prompt", "is missing"},
      {R"({"prompt":[]})", "prompt", "empty"},
      {R"({"prompt":{"prompt_string":"x","multimodal_data":["aGk="]}})", "prompt.multimodal_data", "text only"},
      {R"({"prompt":{"text":"x"}})", "prompt.prompt_string", "is missing"},
      {R"({"prompt":[1,true]})", "prompt", "true"},
      {R"({"prompt":["a",300,"b"]})", "prompt", "300"},
      {R"({"prompt":"x","n_predict":1.5})", "n_predict", "1.5"},
      {R"({"prompt":"x","max_tokens":1000})", "max_tokens", "at most"},
      {R"({"prompt":"x","repeat_penalty":-1})", "repeat_penalty", "-1"},
      {R"({"prompt":"x","repeat_penalty":1.2,"repeat_last_n":64})", "repeat_last_n", "send -1"},
      {R"({"prompt":"x","n_probs":50})", "n_probs", "50"},
      {R"({"prompt":"x","n_probs":1,"post_sampling_probs":1})", "post_sampling_probs", "true or false"},
      {R"({"prompt":"x","mirostat":2})", "mirostat", "top_p"},
      {R"({"prompt":"x","dry_multiplier":0.8})", "dry_multiplier", "presence_penalty"},
      {R"({"prompt":"x","xtc_probability":0.5})", "xtc_probability", "min_p"},
      {R"({"prompt":"x","dynatemp_range":0.5})", "dynatemp_range", "temperature"},
      {R"({"prompt":"x","samplers":["top_k"]})", "samplers", "order is fixed"},
      {R"({"prompt":"x","lora":[{"id":0,"scale":1}]})", "lora", "as model"},
      {R"({"prompt":"x","logit_bias":[[1]]})", "logit_bias", "pairs"},
      {R"({"prompt":"x","logit_bias":{"1":"a"}})", "logit_bias", "number"},
      {R"({"prompt":"x","prompt_logprobs":1})", "prompt_logprobs", "not a field"},
      {R"({"prompt":"x","model":"other"})", "model", "other"},
      {R"({"prompt":"x","grammar":"start: \"a\"","json_schema":{}})", "json_schema", "second constraint"},
  };
  for (const auto& [body, param, says] : wrong) {
    SCOPED_TRACE(body);
    expect_error(post("/completion", body), std::string_view(param) == "model" ? 404 : 400, param, says);
  }
}

TEST_F(Llama, APromptThatIsTooLongSaysByHowMuch) {
  for (const auto& [path, body] :
       {std::pair("/completion", cat(R"({"prompt":")", std::string(130, 'x'), "\"}")),
        std::pair("/chat/completions",
                  cat(R"({"stream":true,"messages":[{"role":"user","content":")", std::string(130, 'x'), "\"}]}"))}) {
    RawClient::Answer a = post(path, body);
    EXPECT_EQ(a.status, 400);
    const Json error = Json::parse(a.body)["error"];
    EXPECT_EQ(error["type"], "exceed_context_size_error");
    EXPECT_EQ(error["n_prompt_tokens"], 130);
    EXPECT_EQ(error["n_ctx"], 128);
    EXPECT_THAT(error["message"].get<std::string>(), testing::HasSubstr("exceeds the available context size"));
  }
  // OpenAI's own route has OpenAI's words.
  const Json error =
      Json::parse(post("/v1/completions", cat(R"({"prompt":")", std::string(130, 'x'), "\"}")).body)["error"];
  EXPECT_EQ(error["type"], "invalid_request_error");
  EXPECT_EQ(error["code"], "context_length_exceeded");
}

TEST_F(Llama, AChatsTokensAreCountedWithoutAnAnswer) {
  for (const char* path : {"/chat/completions/input_tokens", "/v1/chat/completions/input_tokens"})
    EXPECT_EQ(whole(path, R"({"messages":[{"role":"user","content":"hello"}]})")["input_tokens"], 5);
  EXPECT_EQ(engine_.asked(), 0u);
}

TEST_F(Llama, VerboseShowsWhatAnAnswerWasMadeOf) {
  const char* body = R"({"messages":[{"role":"user","content":"hello"}],"max_tokens":3,"seed":7,"verbose":true})";
  const Json shown = whole("/v1/chat/completions", body)["__verbose"];
  EXPECT_EQ(shown["prompt"], "hello");
  EXPECT_EQ(shown["content"], "hel");
  EXPECT_EQ(shown["tokens_evaluated"], 5);
  EXPECT_EQ(shown["generation_settings"]["seed"], 7);
  EXPECT_FALSE(
      whole("/v1/chat/completions", R"({"messages":[{"role":"user","content":"hello"}]})").contains("__verbose"));
  const RawClient::Answer streamed =
      post("/v1/chat/completions", R"({"messages":[{"role":"user","content":"hello"}],"verbose":true,"stream":true})");
  EXPECT_THAT(streamed.body, testing::HasSubstr(R"("__verbose":{"index":0,"prompt":"hello","content":"hello")"));
}

TEST_F(Llama, AStreamsFirstChunkHasNoText) {
  const char* body = R"({"messages":[{"role":"user","content":"hi"}],"stream":true,"timings_per_token":true,
      "stream_options":{"include_usage":true}})";
  const std::string own = post("/chat/completions", body).body, openai = post("/v1/chat/completions", body).body;
  const std::string first = own.substr(0, own.find("\n\n"));
  EXPECT_THAT(first, testing::HasSubstr(R"("delta":{"role":"assistant","content":null})"));
  EXPECT_THAT(first, testing::Not(testing::HasSubstr("timings")));
  EXPECT_THAT(openai.substr(0, openai.find("\n\n")),
              testing::HasSubstr(R"("delta":{"role":"assistant","content":""})"));
  const std::string usage = own.substr(own.rfind(R"("choices":[])"));
  EXPECT_THAT(usage, testing::HasSubstr("predicted_per_second"));
}

class LlamaKept : public HttpFixture {
 protected:
  void configure(ServerOptions& o) override {
    o.response_store.bytes = 64 << 10;
    o.slots = o.metrics = false;
    o.model_alias = {"fim", "code"};
    o.model_tags = {"small"};
    o.seed = 42;
  }
  RawClient::Answer stream(const char* script, const char* conversation) {
    return post("/v1/chat/completions",
                cat(R"({"stream":true,"cache_salt":")", script, R"(","messages":[{"role":"user","content":"hello"}]})"),
                cat("X-Conversation-Id: ", conversation, "\r\n"));
  }
  RawClient::Answer remove(std::string_view path) {
    return ask(cat("DELETE ", path, " HTTP/1.1\r\nHost: localhost\r\n\r\n"));
  }
};

TEST_F(LlamaKept, AStreamIsReadAgainAndForgotten) {
  const RawClient::Answer first = stream("", "a/b::c");
  EXPECT_EQ(first.status, 200);
  EXPECT_NE(first.body.find("[DONE]"), std::string::npos);
  EXPECT_EQ(ask(RawClient::get("/v1/stream?conv_id=a%2Fb%3A%3Ac&from=0")).body, first.body);
  EXPECT_EQ(ask(RawClient::get("/v1/stream?conv_id=a/b::c&from=10")).body, first.body.substr(10));
  EXPECT_EQ(ask(RawClient::get("/v1/stream?conv_id=a/b::c&from=1000000")).body, "");
  expect_error(ask(RawClient::get("/v1/stream?conv_id=a/b::c&from=x")), 400, "from", "a number of bytes");
  expect_error(ask(RawClient::get("/v1/stream")), 400, "conv_id", "is missing");
  EXPECT_EQ(remove("/v1/stream?conv_id=a/b::c").status, 204);
  expect_error(ask(RawClient::get("/v1/stream?conv_id=a/b::c")), 404, "conv_id", "no stream");
  EXPECT_EQ(remove("/v1/stream?conv_id=a/b::c").status, 204);  // again, as well
}

TEST_F(LlamaKept, AStreamOutlivesItsClientUntilItIsEnded) {
  {
    RawClient client(server_->http_port());
    client.send(RawClient::post("/v1/chat/completions",
                                R"({"stream":true,"cache_salt":"hang","messages":[{"role":"user","content":"hello"}]})",
                                "X-Conversation-Id: one\r\n"));
    ASSERT_TRUE(engine_.wait_open(1));
  }
  RawClient follower(server_->http_port());  // served behind the other's leaving
  follower.send(RawClient::get("/v1/stream?conv_id=one"));
  EXPECT_EQ(ask(RawClient::get("/health")).status, 200);
  EXPECT_EQ(engine_.open(), 1);
  EXPECT_EQ(remove("/v1/stream?conv_id=one").status, 204);
  EXPECT_TRUE(all_gone());
  EXPECT_EQ(follower.read().status, 200);  // it ends for who follows it, too
}

TEST_F(LlamaKept, WhatFailsFailsInTheStream) {
  const RawClient::Answer a = stream("fail", "two");
  EXPECT_EQ(a.status, 200);
  EXPECT_NE(a.body.find("data: {\"error\":"), std::string::npos) << a.body;
}

TEST_F(LlamaKept, WhatAnOperatorTurnedOffSaysSo) {
  expect_error(ask(RawClient::get("/slots")), 501, "", "--no-slots");
  expect_error(ask(RawClient::get("/metrics")), 501, "", "--no-metrics");
}

TEST_F(LlamaKept, AModelMayHaveSeveralNames) {
  const Json models = Json::parse(ask(RawClient::get("/models")).body)["data"];
  ASSERT_EQ(models.size(), 1u);
  EXPECT_EQ(models[0]["id"], "fake");
  EXPECT_EQ(models[0]["aliases"], Json({"fake", "fim", "code"}));
  EXPECT_EQ(models[0]["tags"], Json({"small"}));
  EXPECT_EQ(Json::parse(ask(RawClient::get("/v1/models/code")).body)["id"], "fake");
  EXPECT_EQ(whole("/v1/completions", R"({"model":"code","prompt":"hi"})")["model"], "fake");
  expect_error(post("/v1/completions", R"({"model":"other","prompt":"hi"})"), 404, "model",
               "'other' is not served here; this server has 'fake', 'fim', 'code'");
  expect_error(ask(RawClient::get("/v1/models/other")), 404, "model", "'fake', 'fim', 'code'");
}

TEST_F(LlamaKept, TheServersSeedIsOfRequestsWithoutOne) {
  whole("/completion", R"({"prompt":"hi"})");
  EXPECT_EQ(engine_.last().sampling.seed, 42u);
  whole("/completion", R"({"prompt":"hi","seed":7})");
  EXPECT_EQ(engine_.last().sampling.seed, 7u);
}

TEST_F(Llama, AFailureBeforeTheFirstByteIsAStatusAndAfterItAnEvent) {
  EXPECT_EQ(post("/completion", R"({"prompt":"x","cache_salt":"fail"})").status, 500);
  RawClient::Answer a = post("/completion", R"({"prompt":"x","cache_salt":"fail","stream":true})");
  EXPECT_EQ(a.status, 200);
  EXPECT_NE(a.body.find("data: {\"error\":"), std::string::npos) << a.body;
  EXPECT_TRUE(all_gone());
}

TEST_F(Llama, AClientThatLeavesEndsItsRequests) {
  {
    RawClient client(server_->http_port());
    client.send(RawClient::post("/completion", R"({"prompt":["ab","cd"],"cache_salt":"hang","stream":true})"));
    ASSERT_TRUE(engine_.wait_open(2));
  }
  EXPECT_TRUE(all_gone());
}

TEST_F(Llama, AGapIsFilledInTheModelsTokens) {
  const char* body = R"({"input_prefix":"ab","input_suffix":"cd","prompt":"!","n_predict":9})";
  expect_error(post("/infill", body), 400, "input_suffix", "no tokens for a gap");
  engine_.use_tokenizer(std::make_shared<NamedTokens>(
      std::map<std::string, int32_t>{{"<|fim_prefix|>", 1}, {"<|fim_suffix|>", 2}, {"<|fim_middle|>", 3}}));
  Json one = whole("/infill", body);
  EXPECT_EQ(engine_.last().prompt, (std::vector<int32_t>{1, 'a', 'b', '!', 2, 'c', 'd', 3}));
  EXPECT_EQ(one["tokens_evaluated"], 8);
  expect_error(post("/infill", R"({"input_prefix":"a","input_suffix":"b","input_extra":[{"text":"x"}]})"), 400,
               "input_extra", "no tokens for files");
  engine_.use_tokenizer(std::make_shared<NamedTokens>(std::map<std::string, int32_t>{
      {"<fim_prefix>", 1}, {"<fim_suffix>", 2}, {"<fim_middle>", 3}, {"<repo_name>", 4}, {"<file_sep>", 5}}));
  whole("/infill", R"({"input_prefix":"a","input_suffix":"b","input_extra":[{"filename":"f","text":"x"}]})");
  std::vector<int32_t> prompt{4};
  for (char c : std::string("project\n\5f\nx\5filename\n\1a\2b\3")) prompt.push_back(c);
  EXPECT_EQ(engine_.last().prompt, prompt);
  expect_error(post("/infill", R"({"input_prefix":"a"})"), 400, "input_suffix", "is missing");
  expect_error(post("/infill", R"({"input_prefix":"a","input_suffix":"b","input_extra":[{}]})"), 400,
               "input_extra[0].text", "is missing");
}

TEST_F(Llama, WhatIsServedAndHowBusyItIs) {
  Json props = Json::parse(ask(RawClient::get("/props")).body);
  EXPECT_EQ(props["default_generation_settings"]["n_ctx"], 128);
  EXPECT_EQ(props["default_generation_settings"]["params"]["temperature"], 1.0);
  EXPECT_EQ(props["total_slots"], 64);
  EXPECT_EQ(props["eos_token"], "<end>");
  EXPECT_NE(props["chat_template"].get<std::string>().find("messages"), std::string::npos);
  Json slots = Json::parse(ask(RawClient::get("/slots")).body);
  ASSERT_EQ(slots.size(), 64u);
  EXPECT_EQ(slots[0]["is_processing"], false);
  RawClient client(server_->http_port());
  client.send(RawClient::post("/completion", R"({"prompt":"x","cache_salt":"hang"})"));
  ASSERT_TRUE(engine_.wait_open(1));
  EXPECT_EQ(Json::parse(ask(RawClient::get("/slots?fail_on_no_slot=1")).body)[0]["is_processing"], true);
}

TEST_F(Llama, TheTemplateIsApplied) {
  EXPECT_EQ(whole("/apply-template", R"({"messages":[{"role":"user","content":"a"},{"role":"user","content":"b"}]})"),
            Json::parse(R"({"prompt":"ab"})"));
  expect_error(post("/apply-template", "{}"), 400, "messages", "at least one");
}

TEST_F(Llama, TokensHavePieces) {
  EXPECT_EQ(whole("/tokenize", R"({"content":"hi","add_special":true})")["tokens"], Json({104, 105}));
  EXPECT_EQ(whole("/tokenize", R"({"content":"hé","with_pieces":true})")["tokens"],
            Json::parse(R"([{"id":104,"piece":"h"},{"id":195,"piece":[195]},{"id":169,"piece":[169]}])"));
  EXPECT_EQ(whole("/tokenize", R"({"prompt":"hi","return_token_strs":true})")["token_strs"], Json({"h", "i"}));
  EXPECT_EQ(whole("/detokenize", R"({"tokens":[104,105]})")["content"], "hi");
}

// Its fields beside OpenAI's, as its clients send them to the chat.
TEST_F(Llama, ChatTakesItsFields) {
  const std::string chat = R"({"messages":[{"role":"user","content":"hey"}],"id_slot":0,"cache_prompt":true,
      "n_predict":2,"repeat_penalty":1.0,"mirostat":0,"timings_per_token":true,"reasoning_format":"auto")";
  Json one = whole("/chat/completions", chat + "}");
  EXPECT_EQ(one["choices"][0]["message"]["content"], "he");
  EXPECT_EQ(one["timings"]["predicted_n"], 2);
  RawClient::Answer a = post("/chat/completions", chat + R"(,"stream":true,"return_progress":true})");
  EXPECT_NE(a.body.find(R"("prompt_progress":{"total":3,"cache":2,"processed":2)"), std::string::npos) << a.body;
  EXPECT_NE(a.body.find(R"("timings":{"cache_n":2)"), std::string::npos) << a.body;
  expect_error(post("/v1/chat/completions", R"({"messages":[{"role":"user","content":"x"}],"mirostat":1})"), 400,
               "mirostat", "top_p");
}

}  // namespace
}  // namespace kvasir::server
