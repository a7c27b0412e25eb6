// vLLM's routes of token ids: /inference/v1/generate, and the render routes that write its requests.
#include "tests/server/openai_fixture.h"

namespace kvasir::server {
namespace {

using Tokens = OpenAi;

TEST_F(Tokens, OneAnswerWholeOrStreamed) {
  Json a = whole("/inference/v1/generate", R"({"request_id":"r","token_ids":[104,105],"sampling_params":{}})");
  EXPECT_EQ(a["request_id"], "r");
  EXPECT_EQ(a["choices"][0]["token_ids"], Json({104, 105, 256}));  // with what ended it
  EXPECT_EQ(a["choices"][0]["finish_reason"], "stop");
  EXPECT_EQ(a["choices"][0]["logprobs"], Json());
  EXPECT_EQ(a["usage"]["prompt_tokens"], 2);
  EXPECT_EQ(a["usage"]["total_tokens"], 2 + a["usage"]["completion_tokens"].get<int>());
  EXPECT_EQ(a["prompt_logprobs"], Json());
  EXPECT_TRUE(engine_.last().include_stop);
  EXPECT_FALSE(engine_.last().detokenize);
  EXPECT_FALSE(engine_.last().max_tokens);  // up to the context

  const auto events = streamed("/inference/v1/generate", R"({"token_ids":[104,105,106],"stream":true,
      "stream_options":{"include_usage":true},"sampling_params":{"max_tokens":2}})");
  std::vector<int> ids;
  for (const Json& e : events)
    for (const Json& c : e["choices"])
      for (const Json& id : c["token_ids"]) ids.push_back(id);
  EXPECT_EQ(ids, (std::vector<int>{104, 105}));
  EXPECT_EQ(events[events.size() - 2]["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(events.back()["usage"]["completion_tokens"], 2);
  EXPECT_TRUE(events.back()["choices"].empty());
  EXPECT_TRUE(all_gone());
}

// The model's own file, without what is none of a client's business; what it leaves out is the engine's to say.
class ConfiguredTokens final : public ByteTokenizer {
 public:
  bool is_special(int32_t id) const override { return id == 7 || id == 256; }
  const std::string& config_json() const override { return json_; }

 private:
  const std::string json_ = R"({"tokenizer_class":"LlamaTokenizer","bos_token":{"content":"<s>","lstrip":false},
      "unk_token":null,"vocab_file":"/home/a/vocab","model_max_length":1e30,"add_bos_token":true,
      "chat_template":"another"})";
};

TEST_F(Tokens, WhatTheTokenizerIs) {
  Json info = Json::parse(ask(RawClient::get("/tokenizer_info")).body);
  EXPECT_EQ(info["tokenizer_class"], "PreTrainedTokenizerFast");
  EXPECT_EQ(info["eos_token"], "<end>");
  EXPECT_EQ(info["model_max_length"], 128);
  EXPECT_EQ(info["added_tokens_decoder"], Json::parse(R"({"256":{"content":"<end>","special":true}})"));
  engine_.use_tokenizer(std::make_shared<ConfiguredTokens>());
  engine_.use_template("{{ messages }}");
  info = Json::parse(ask(RawClient::get("/tokenizer_info")).body);
  EXPECT_EQ(info["tokenizer_class"], "LlamaTokenizer");
  EXPECT_EQ(info["bos_token"], "<s>");
  EXPECT_EQ(info["add_bos_token"], true);
  EXPECT_EQ(info["model_max_length"], 128);
  EXPECT_EQ(info["chat_template"], "{{ messages }}") << "the one that is used";
  EXPECT_FALSE(info.contains("vocab_file"));
  EXPECT_EQ(info["added_tokens_decoder"].size(), 2u);
  EXPECT_EQ(post("/tokenizer_info", "{}").status, 405);
}

TEST_F(Tokens, ChoicesAndLogprobs) {
  Json a =
      whole("/inference/v1/generate",
            R"({"token_ids":[104,105],"sampling_params":{"n":2,"max_tokens":1,"logprobs":2,"prompt_logprobs":0}})");
  ASSERT_EQ(a["choices"].size(), 2u);
  EXPECT_EQ(a["choices"][1]["index"], 1);
  const Json entry = a["choices"][0]["logprobs"]["content"][0];
  EXPECT_EQ(entry["token"], "token_id:104");
  EXPECT_EQ(entry["logprob"], -0.25);
  EXPECT_EQ(entry["top_logprobs"].size(), 2u);
  ASSERT_EQ(a["prompt_logprobs"].size(), 2u);
  EXPECT_EQ(a["prompt_logprobs"][0], Json());
  EXPECT_EQ(a["prompt_logprobs"][1]["105"]["logprob"], -0.5);
}

TEST_F(Tokens, WhatIsAskedReachesTheEngine) {
  whole("/inference/v1/generate", R"({"token_ids":[104],"priority":2,"cache_salt":"k","features":null,
      "kv_transfer_params":null,"sampling_params":{"temperature":0.5,"top_k":4,"stop":["x"],"stop_token_ids":[3],
      "seed":4,"structured_outputs":{"regex":"a+"},"detokenize":false,"bad_words":null}})");
  const engine::Request r = engine_.last();
  EXPECT_EQ(r.sampling.temperature, 0.5f);
  EXPECT_EQ(r.sampling.top_k, 4);
  EXPECT_EQ(r.sampling.seed, 4u);
  EXPECT_EQ(r.priority, 2);
  EXPECT_EQ(r.cache_salt, "k");
  EXPECT_EQ(r.stop_tokens, (std::vector<int32_t>{3}));
  EXPECT_TRUE(r.detokenize);  // a stop text is found in text
  EXPECT_EQ(r.grammar.kind, text::GrammarSpec::Kind::regex);
}

TEST_F(Tokens, EachWrongFieldIsNamed) {
  for (const auto& [body, param, says] : std::vector<std::tuple<const char*, const char*, const char*>>{
           {R"({"sampling_params":{}})", "token_ids", "is missing"},
           {R"({"token_ids":["a"]})", "token_ids", "whole"},
           {R"({"token_ids":[]})", "token_ids", "empty"},
           {R"({"token_ids":[1000]})", "token_ids", "1000"},
           {R"({"token_ids":[1],"features":{"mm_hashes":{}}})", "features", "reads text only"},
           {R"({"token_ids":[1],"kv_transfer_params":{"a":1}})", "kv_transfer_params", "does not move caches"},
           {R"({"token_ids":[1],"sampling_params":{"temperature":-1}})", "temperature", "must be"},
           {R"({"token_ids":[1],"sampling_params":{"nonsense":1}})", "sampling_params.nonsense", "is not a field"},
           {R"({"token_ids":[1],"sampling_params":3})", "", "sampling_params is number"},
           {R"({"token_ids":[1],"stream_options":{}})", "stream_options", "only allowed with stream"}})
    expect_error(post("/inference/v1/generate", body), 400, param, says);
  EXPECT_EQ(post("/inference/v1/generate", R"({"token_ids":[1],"model":"other"})").status, 404);
}

TEST_F(Tokens, ARenderedRequestHasTheIdsAndTheDraws) {
  Json chat =
      whole("/v1/chat/completions/render", R"({"messages":[{"role":"user","content":"hi"}],"max_completion_tokens":3,
      "temperature":0.5,"logprobs":true,"top_logprobs":1,"cache_salt":"k","request_id":"r","stream":true,
      "response_format":{"type":"json_object"}})");
  EXPECT_EQ(chat["token_ids"], Json({104, 105}));
  EXPECT_EQ(chat["request_id"], "r");
  EXPECT_EQ(chat["cache_salt"], "k");
  EXPECT_EQ(chat["stream"], true);
  EXPECT_EQ(
      chat["sampling_params"],
      Json::parse(R"({"max_tokens":3,"temperature":0.5,"logprobs":1,"structured_outputs":{"json_object":true}})"));

  Json texts = whole("/v1/completions/render", R"({"prompt":["ab","cd"],"seed":1})");
  ASSERT_TRUE(texts.is_array());
  EXPECT_EQ(texts[0]["token_ids"], Json({97, 98}));
  EXPECT_EQ(texts[1]["token_ids"], Json({99, 100}));
  EXPECT_EQ(texts[0]["sampling_params"], Json::parse(R"({"seed":1,"max_tokens":16})"));  // OpenAI's usual length
  EXPECT_EQ(whole("/v1/completions/render", R"({"prompt":"ab"})").size(), 1u);

  // What is refused of an answer is refused here.
  expect_error(post("/v1/completions/render", R"({"prompt":"ab","temperature":-1})"), 400, "temperature", "must be");
  expect_error(post("/v1/chat/completions/render", R"({"messages":[]})"), 400, "messages", "at least one");
}

TEST_F(Tokens, ARenderedRequestIsAnswered) {
  Json request = whole("/v1/chat/completions/render",
                       R"({"messages":[{"role":"user","content":"hello"}],"max_tokens":3,"temperature":0})");
  Json answer = whole("/inference/v1/generate", [&] {
    request["stream"] = false;
    return request.dump();
  }());
  EXPECT_EQ(answer["choices"][0]["token_ids"], Json({'h', 'e', 'l'}));
}

TEST_F(Tokens, TheLoadIsToldToThoseWhoAsk) {
  const char* body = R"({"prompt":"ab"})";
  EXPECT_EQ(post("/v1/completions", body).head.find("endpoint-load-metrics"), std::string::npos);
  std::string head = post("/v1/completions", body, "endpoint-load-metrics-format: text\r\n").head;
  EXPECT_NE(head.find("endpoint-load-metrics: TEXT named_metrics.kv_cache_usage_perc=0"), std::string::npos) << head;
  EXPECT_NE(head.find(", named_metrics.num_requests_waiting=0"), std::string::npos) << head;
  head = post("/inference/v1/generate", R"({"token_ids":[1]})", "endpoint-load-metrics-format: JSON\r\n").head;
  const auto at = head.find("endpoint-load-metrics: JSON ");
  ASSERT_NE(at, std::string::npos) << head;
  const std::string json = head.substr(at + 28, head.find('\r', at) - at - 28);
  EXPECT_TRUE(Json::parse(json)["named_metrics"].contains("num_requests_running")) << json;
  EXPECT_EQ(post("/v1/completions", body, "endpoint-load-metrics-format: BIN\r\n").head.find("endpoint-load"),
            std::string::npos);
}

}  // namespace
}  // namespace kvasir::server
