// SGLang's /generate: texts and ids, one and several, whole and streamed.
#include "tests/server/openai_fixture.h"

namespace kvasir::server {
namespace {

using Sglang = OpenAi;

TEST_F(Sglang, OneAnswerWholeOrStreamed) {
  Json one = whole("/generate", R"({"text":"hello","sampling_params":{"max_new_tokens":3},"rid":"r"})");
  EXPECT_EQ(one["text"], "hel");
  EXPECT_EQ(one["output_ids"], Json({'h', 'e', 'l'}));
  EXPECT_EQ(one["meta_info"]["id"], "r");
  EXPECT_EQ(one["meta_info"]["prompt_tokens"], 5);
  EXPECT_EQ(one["meta_info"]["completion_tokens"], 3);
  EXPECT_EQ(one["meta_info"]["cached_tokens"], 2);
  EXPECT_EQ(one["meta_info"]["finish_reason"], Json::parse(R"({"type":"length","length":3})"));
  EXPECT_FALSE(one["meta_info"].contains("output_token_logprobs"));
  std::string before;
  const auto all = streamed("/generate", R"({"input_ids":[104,105],"stream":true})");
  for (const Json& event : all) {  // each has all of the text so far
    EXPECT_TRUE(event["text"].get<std::string>().starts_with(before));
    before = event["text"];
    EXPECT_FALSE(event.contains("index"));
  }
  EXPECT_EQ(before, "hi");
  EXPECT_EQ(all.back()["meta_info"]["finish_reason"], Json::parse(R"({"type":"stop","matched":256})"));
  EXPECT_TRUE(all_gone());
}

TEST_F(Sglang, SeveralPromptsAreAList) {
  Json list = whole("/generate", R"({"text":["ab","cd"],"rid":["x","y"],
      "sampling_params":[{"max_new_tokens":1},{"max_new_tokens":2,"n":2}]})");
  ASSERT_EQ(list.size(), 3u);
  EXPECT_EQ(list[0]["text"], "a");
  EXPECT_EQ(list[1]["text"], "cd");
  EXPECT_EQ(list[0]["meta_info"]["id"], "x");
  EXPECT_EQ(list[2]["meta_info"]["id"], "y-1");
  EXPECT_EQ(whole("/generate", R"({"input_ids":[[97],[98]]})").size(), 2u);
  EXPECT_EQ(whole("/generate", R"({"text":["ab"]})").size(), 1u);
  std::map<int, std::string> texts;
  for (const Json& e : streamed("/generate", R"({"text":["ab","cd"],"stream":true})")) texts[e["index"]] = e["text"];
  EXPECT_EQ(texts, (std::map<int, std::string>{{0, "ab"}, {1, "cd"}}));
}

TEST_F(Sglang, LogprobsOfPromptAndAnswer) {
  Json about = whole("/generate", R"({"text":"hi","return_logprob":true,"logprob_start_len":0,"top_logprobs_num":2,
      "return_text_in_logprobs":true,"sampling_params":{"max_new_tokens":1}})")["meta_info"];
  EXPECT_EQ(about["input_token_logprobs"], Json::parse(R"([[null,104,"h"],[-0.5,105,"i"]])"));
  EXPECT_EQ(about["output_token_logprobs"], Json::parse(R"([[-0.25,104,"h"]])"));
  EXPECT_EQ(about["output_top_logprobs"][0].size(), 2u);
  EXPECT_EQ(about["input_top_logprobs"].size(), 2u);
  about = whole("/generate", R"({"text":"hi","return_logprob":true})")["meta_info"];
  EXPECT_EQ(about["input_token_logprobs"], Json::array());
  EXPECT_EQ(about["output_token_logprobs"][0], Json::parse("[-0.25,104,null]"));
  EXPECT_FALSE(about.contains("output_top_logprobs"));
  EXPECT_EQ(engine_.last().prompt_logprobs, -1);
}

TEST_F(Sglang, WhatIsAskedReachesTheEngine) {
  whole("/generate", R"({"text":"hi","priority":2,"extra_key":"k","sampling_params":{"temperature":0.5,"top_k":-1,
      "top_p":0.9,"min_new_tokens":1,"max_new_tokens":7,"stop":["x"],"stop_token_ids":[3],"ignore_eos":true,
      "regex":"a+","frequency_penalty":0.5,"no_stop_trim":true,"skip_special_tokens":false,"sampling_seed":4}})");
  const engine::Request r = engine_.last();
  EXPECT_EQ(r.sampling.temperature, 0.5f);
  EXPECT_EQ(r.sampling.top_k, 0);
  EXPECT_EQ(r.sampling.seed, 4u);
  EXPECT_EQ(r.max_tokens, 7);
  EXPECT_EQ(r.min_tokens, 1);
  EXPECT_EQ(r.priority, 2);
  EXPECT_EQ(r.cache_salt, "k");
  EXPECT_TRUE(r.include_stop);
  EXPECT_FALSE(r.skip_special);
  EXPECT_EQ(r.grammar.kind, text::GrammarSpec::Kind::regex);
  whole("/generate", R"({"text":"hi"})");
  EXPECT_EQ(engine_.last().max_tokens, 126);  // 128, as far as the context goes
}

TEST_F(Sglang, EachWrongFieldIsNamed) {
  for (const auto& [body, param, says] : std::vector<std::tuple<const char*, const char*, const char*>>{
           {"{}", "text", "must be given"},
           {R"({"text":"x","input_ids":[1]})", "text", "not both"},
           {R"({"text":[]})", "text", "empty"},
           {R"({"text":[1]})", "text", "a string"},
           {R"({"input_ids":[1,"a"]})", "input_ids", "whole numbers"},
           {R"({"text":"x","sampling_params":{"max_new_tokens":1000}})", "max_new_tokens", "at most"},
           {R"({"text":"x","sampling_params":{"temperature":-1}})", "temperature", "-1"},
           {R"({"text":"x","sampling_params":{"stop_regex":"(a"}})", "stop_regex", "no regular expression"},
           {R"({"text":"x","sampling_params":{"warmth":1}})", "sampling_params.warmth", "not a field"},
           {R"({"text":["x","y"],"sampling_params":[{}]})", "sampling_params", "2 prompts"},
           {R"({"text":["x","y"],"rid":["a"]})", "rid", "2 prompts"},
           {R"({"text":"x","rid":1})", "rid", "a string"},
           {R"({"text":"x","return_logprob":1})", "return_logprob", "true or false"},
           {R"({"text":"x","return_logprob":true,"top_logprobs_num":99})", "top_logprobs_num", "99"},
           {R"({"text":"x","image_data":"x"})", "image_data", "text only"},
           {R"({"text":"x","background":true})", "background", "keep the call open"}}) {
    SCOPED_TRACE(body);
    expect_error(post("/generate", body), 400, param, says);
  }
}

TEST_F(Sglang, ARequestIsAbortedByItsId) {
  RawClient client(server_->http_port());
  client.send(RawClient::post("/generate", R"({"text":"x","rid":"mine","extra_key":"hang"})"));
  ASSERT_TRUE(engine_.wait_open(1));
  EXPECT_EQ(whole("/abort_request", R"({"rid":"mine"})")["success"], true);
  const RawClient::Answer ended = client.read();
  EXPECT_EQ(ended.status, 200);
  EXPECT_EQ(Json::parse(ended.body)["meta_info"]["finish_reason"]["type"], "abort");
  EXPECT_TRUE(all_gone());
}

TEST_F(Sglang, AllRequestsAreAbortedAtOnce) {
  std::vector<std::unique_ptr<RawClient>> clients;
  for (int i = 0; i < 3; ++i) {
    clients.push_back(std::make_unique<RawClient>(server_->http_port()));
    clients.back()->send(RawClient::post("/generate", R"({"text":"x","extra_key":"hang"})"));
  }
  ASSERT_TRUE(engine_.wait_open(3));
  EXPECT_EQ(whole("/abort_request", R"({"abort_all":true})")["success"], true);
  for (const auto& client : clients)
    EXPECT_EQ(Json::parse(client->read().body)["meta_info"]["finish_reason"]["type"], "abort");
  EXPECT_TRUE(all_gone());
  expect_error(post("/abort_request", R"({"abort_all":false})"), 400, "rid", "abort_all");
}

TEST_F(Sglang, WhatIsServedIsTold) {
  EXPECT_EQ(Json::parse(ask(RawClient::get("/get_model_info")).body)["is_generation"], true);
  Json info = Json::parse(ask(RawClient::get("/get_server_info")).body);
  EXPECT_EQ(info["context_length"], 128);
  EXPECT_EQ(info["max_running_requests"], 64);
  EXPECT_EQ(info["max_total_num_tokens"], 1600);
}

}  // namespace
}  // namespace kvasir::server
