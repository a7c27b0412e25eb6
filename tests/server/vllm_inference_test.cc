// vllm.Inference as Dynamo drives it.
#include <gmock/gmock.h>

#include "tests/server/vllm_inference_fixture.h"

namespace kvasir::server {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

TEST_F(VllmInference, GenerateAnswersAllInOne) {
  pb::GenerateRequest r = text("AB");
  r.mutable_response()->set_output_token_ids(true);
  r.mutable_response()->set_prompt_token_ids(true);
  auto [out, status] = generate(r);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(out.prompt_info().num_prompt_tokens(), 2u);
  EXPECT_THAT(out.prompt_info().token_ids(), ElementsAre(65, 66));
  EXPECT_EQ(out.outputs().text(), "AB");
  EXPECT_EQ(out.outputs().num_tokens(), 3u);
  EXPECT_THAT(out.outputs().token_ids(), ElementsAre(65, 66, 256));
  EXPECT_EQ(out.outputs().finish_info().finish_reason(), pb::FinishInfo::STOP);
  EXPECT_EQ(out.outputs().finish_info().eos_token_id(), 256u);
  EXPECT_EQ(out.outputs().finish_info().num_output_tokens(), 3u);
}

// Without text the ids are all that were drawn, and what was not asked for is not sent.
TEST_F(VllmInference, OnlyWhatIsAskedForIsSent) {
  pb::GenerateRequest r = text("AB");
  r.mutable_response()->set_output_text(false);
  r.mutable_response()->set_output_token_ids(true);
  auto [ids, status] = generate(r);
  ASSERT_TRUE(status.ok());
  EXPECT_THAT(ids.outputs().token_ids(), ElementsAre(65, 66, 256));
  EXPECT_EQ(ids.outputs().text(), "");
  EXPECT_EQ(ids.outputs().finish_info().num_output_tokens(), 3u);
  EXPECT_FALSE(engine_.last().detokenize);
  auto [plain, ok] = generate(text("AB"));
  ASSERT_TRUE(ok.ok());
  EXPECT_THAT(plain.prompt_info().token_ids(), IsEmpty());
  EXPECT_THAT(plain.outputs().token_ids(), IsEmpty());
  EXPECT_THAT(plain.outputs().logprobs(), IsEmpty());
}

TEST_F(VllmInference, AStreamBeginsWithThePromptAndEndsEachSequence) {
  pb::GenerateRequest r = text("AB");
  r.mutable_sampling()->set_num_sequences(2);
  r.mutable_stopping()->set_max_new_tokens(2);
  pb::ResponseOptions& shape = *r.mutable_response();
  shape.set_output_token_ids(true);
  shape.set_output_logprobs(true);
  shape.mutable_output_candidates()->set_top_n(2);
  shape.set_prompt_logprobs(true);
  auto [all, status] = stream(r);
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_GE(all.size(), 4u);
  EXPECT_EQ(all[0].prompt_info().num_prompt_tokens(), 2u);
  EXPECT_THAT(all[0].prompt_info().logprobs(), ElementsAre(0, -0.5));
  EXPECT_THAT(all[0].prompt_info().ranks(), ElementsAre(0, 0));
  EXPECT_EQ(all[0].prompt_info().candidate_tokens_size(), 2);
  EXPECT_FALSE(all[0].has_outputs());
  std::map<uint32_t, std::vector<uint32_t>> ids;
  std::map<uint32_t, std::string> texts;
  std::map<uint32_t, int> ends;
  for (size_t i = 1; i < all.size(); ++i) {
    const pb::SequenceOutput& o = all[i].outputs();
    EXPECT_FALSE(all[i].has_prompt_info());
    EXPECT_EQ(ends[o.index()], 0);
    EXPECT_EQ(o.num_tokens(), uint32_t(o.token_ids_size()));
    EXPECT_EQ(o.logprobs_size(), o.token_ids_size());
    EXPECT_EQ(o.ranks_size(), o.token_ids_size());
    ASSERT_EQ(o.candidate_tokens_size(), o.token_ids_size());
    if (o.token_ids_size() > 0) {
      EXPECT_EQ(o.candidate_tokens(0).tokens_size(), 2);
      EXPECT_EQ(o.candidate_tokens(0).tokens(1).id(), 1u);
      EXPECT_EQ(o.candidate_tokens(0).tokens(1).rank(), 2u);
    }
    for (uint32_t id : o.token_ids()) ids[o.index()].push_back(id);
    texts[o.index()] += o.text();
    if (o.has_finish_info()) {
      ++ends[o.index()];
      EXPECT_EQ(o.finish_info().finish_reason(), pb::FinishInfo::LENGTH);
      EXPECT_EQ(o.finish_info().num_output_tokens(), 2u);
    }
  }
  for (uint32_t i : {0u, 1u}) {
    EXPECT_THAT(ids[i], ElementsAre(65, 66));
    EXPECT_EQ(texts[i], "AB");
    EXPECT_EQ(ends[i], 1);
  }
}

TEST_F(VllmInference, AStopTokenIsToldFromTheModelsEnd) {
  pb::GenerateRequest r = text("ABC");
  r.mutable_stopping()->add_stop_token_ids(66);
  auto [out, status] = generate(r);
  ASSERT_TRUE(status.ok());
  EXPECT_EQ(out.outputs().text(), "A");
  EXPECT_EQ(out.outputs().finish_info().stop_token_id(), 66u);
  EXPECT_EQ(out.outputs().finish_info().num_output_tokens(), 2u);
  r.mutable_stopping()->set_include_stop_strings(true);
  std::tie(out, status) = generate(r);
  EXPECT_TRUE(engine_.last().include_stop);
  EXPECT_EQ(out.outputs().finish_info().num_output_tokens(), 2u);
}

// Dynamo adds up num_tokens and fails an answer whose end counts otherwise, or whose token has no log-probability.
TEST_F(VllmInference, TheTokenThatEndsAStreamIsAmongItsIdsAndNotInItsText) {
  for (const bool by_model : {true, false}) {
    pb::GenerateRequest r = text("AB");
    if (!by_model) r.mutable_stopping()->add_stop_token_ids(66);
    r.mutable_response()->set_output_token_ids(true);
    r.mutable_response()->set_output_logprobs(true);
    auto [all, status] = stream(r);
    ASSERT_TRUE(status.ok()) << status.error_message();
    std::vector<uint32_t> ids;
    uint32_t tokens = 0;
    int logprobs = 0;
    std::string said;
    for (const pb::GenerateResponse& piece : all) {
      ids.insert(ids.end(), piece.outputs().token_ids().begin(), piece.outputs().token_ids().end());
      tokens += piece.outputs().num_tokens();
      logprobs += piece.outputs().logprobs_size();
      said += piece.outputs().text();
    }
    EXPECT_EQ(said, by_model ? "AB" : "A");
    EXPECT_EQ(ids, by_model ? std::vector<uint32_t>({65, 66, 256}) : std::vector<uint32_t>({65, 66}));
    EXPECT_EQ(all.back().outputs().finish_info().num_output_tokens(), tokens);
    EXPECT_EQ(tokens, ids.size());
    EXPECT_EQ(size_t(logprobs), ids.size());
  }
}

TEST_F(VllmInference, CandidatesMayBeNamedByTheirIds) {
  pb::GenerateRequest r = text("AB");
  r.mutable_stopping()->set_max_new_tokens(1);
  r.mutable_response()->set_output_logprobs(true);
  r.mutable_response()->mutable_output_candidates()->mutable_token_ids()->add_ids(9);
  auto [one, status] = generate(r);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_THAT(engine_.last().sampling.logprob_token_ids, ElementsAre(9));
  ASSERT_EQ(one.outputs().candidate_tokens_size(), 1);
  ASSERT_EQ(one.outputs().candidate_tokens(0).tokens_size(), 1);
  EXPECT_EQ(one.outputs().candidate_tokens(0).tokens(0).id(), 9u);
  EXPECT_EQ(one.outputs().candidate_tokens(0).tokens(0).rank(), 0u);  // how many are likelier is not counted
  EXPECT_THAT(one.outputs().ranks(), ElementsAre(0));
}

TEST_F(VllmInference, ZerosAreDefaultsAndEachFieldReachesTheEngine) {
  generate(text("A"));
  engine::Request r = engine_.last();
  EXPECT_FLOAT_EQ(r.sampling.temperature, 0);  // as vLLM's server
  EXPECT_FLOAT_EQ(r.sampling.top_p, 1);
  EXPECT_FLOAT_EQ(r.sampling.repetition_penalty, 1);
  EXPECT_FALSE(r.max_tokens);
  EXPECT_TRUE(r.detokenize);
  EXPECT_TRUE(r.skip_special);
  EXPECT_EQ(r.n, 1);
  EXPECT_EQ(r.sampling.logprobs, -1);
  EXPECT_EQ(r.prompt_logprobs, -1);

  pb::GenerateRequest all;
  for (uint32_t id : {70, 71, 72}) all.mutable_token_ids()->add_ids(id);
  all.set_request_id("r");
  all.set_model("fake");
  all.set_temperature(0.5);
  all.mutable_sampling()->set_top_k(3);
  all.mutable_sampling()->set_top_p(0.25);
  all.mutable_sampling()->set_min_p(0.125);
  all.mutable_sampling()->set_seed(0);
  all.mutable_decoding()->set_presence_penalty(1);
  all.mutable_decoding()->set_frequency_penalty(-1);
  all.mutable_decoding()->set_repetition_penalty(1.5);
  (*all.mutable_decoding()->mutable_logit_bias())[5] = 2;
  all.mutable_decoding()->add_allowed_token_ids(71);
  all.mutable_decoding()->set_regex("[a-z]");
  all.mutable_stopping()->set_max_new_tokens(7);
  all.mutable_stopping()->set_min_new_tokens(2);
  all.mutable_stopping()->add_stop_strings("x");
  all.mutable_stopping()->set_ignore_eos(true);
  all.mutable_response()->set_prompt_logprobs(true);
  all.mutable_response()->mutable_prompt_candidates()->set_top_n(4);
  all.mutable_response()->set_output_logprobs(true);
  all.mutable_response()->set_skip_special_tokens(false);
  all.mutable_kv()->set_cache_salt("mine");
  all.set_priority(-3);
  all.set_truncate_prompt_tokens(2);
  all.set_session_id("s");
  ASSERT_TRUE(generate(all).second.ok()) << generate(all).second.error_message();
  r = engine_.last();
  EXPECT_EQ(r.id, "r");
  EXPECT_THAT(r.prompt, ElementsAre(71, 72));
  EXPECT_FLOAT_EQ(r.sampling.temperature, 0.5);
  EXPECT_EQ(r.sampling.top_k, 3);
  EXPECT_FLOAT_EQ(r.sampling.top_p, 0.25);
  EXPECT_FLOAT_EQ(r.sampling.min_p, 0.125);
  EXPECT_EQ(r.sampling.seed, 0u);
  EXPECT_FLOAT_EQ(r.sampling.presence_penalty, 1);
  EXPECT_FLOAT_EQ(r.sampling.frequency_penalty, -1);
  EXPECT_FLOAT_EQ(r.sampling.repetition_penalty, 1.5);
  EXPECT_THAT(r.sampling.logit_bias, ElementsAre(std::pair(5, 2.0f)));
  EXPECT_THAT(r.allowed_tokens, ElementsAre(71));
  EXPECT_EQ(r.grammar.kind, text::GrammarSpec::Kind::regex);
  EXPECT_EQ(r.max_tokens, 7);
  EXPECT_EQ(r.min_tokens, 2);
  EXPECT_THAT(r.stop_strings, ElementsAre("x"));
  EXPECT_TRUE(r.ignore_eos);
  EXPECT_EQ(r.prompt_logprobs, 4);
  EXPECT_EQ(r.sampling.logprobs, 0);
  EXPECT_FALSE(r.skip_special);
  EXPECT_EQ(r.cache_salt, "mine");
  EXPECT_EQ(r.priority, -3);
}

TEST_F(VllmInference, EachStructureIsAGrammar) {
  using Kind = text::GrammarSpec::Kind;
  auto kind = [&](const std::function<void(pb::DecodingParameters&)>& set) {
    pb::GenerateRequest r = text("A");
    set(*r.mutable_decoding());
    EXPECT_TRUE(generate(r).second.ok());
    return engine_.last().grammar;
  };
  EXPECT_EQ(kind([](auto& d) { d.set_json("{}"); }).kind, Kind::json_schema);
  EXPECT_EQ(kind([](auto& d) { d.set_grammar("start: \"a\""); }).kind, Kind::lark);
  EXPECT_EQ(kind([](auto& d) { d.set_json_object(true); }).kind, Kind::json_object);
  EXPECT_EQ(kind([](auto& d) { d.set_json_object(false); }).kind, Kind::none);
  EXPECT_EQ(kind([](auto& d) { d.set_structural_tag(R"({"format":{"type":"any_text"}})"); }).kind,
            Kind::structural_tag);
  EXPECT_THAT(kind([](auto& d) { d.mutable_choice()->add_choices("yes"); }).choices, ElementsAre("yes"));
}

TEST_F(VllmInference, ABypassedCacheIsSharedWithNobody) {
  pb::GenerateRequest r = text("A");
  r.mutable_kv()->set_bypass_prefix_cache(true);
  ASSERT_TRUE(generate(r).second.ok());
  const std::string first = engine_.last().cache_salt;
  ASSERT_TRUE(generate(r).second.ok());
  EXPECT_NE(first, "");
  EXPECT_NE(engine_.last().cache_salt, first);
}

TEST_F(VllmInference, AnAdapterByItsNameOrAsTheModel) {
  (void)*engine_.load_adapter("sql", "/adapters/sql");
  pb::GenerateRequest r = text("A");
  r.set_lora_name("sql");
  ASSERT_TRUE(generate(r).second.ok());
  EXPECT_EQ(engine_.last().adapter, "sql");
  r.set_lora_name("law");
  EXPECT_EQ(generate(r).second.error_code(), grpc::NOT_FOUND);
  r.clear_lora_name();
  r.set_model("sql");
  ASSERT_TRUE(generate(r).second.ok());
  EXPECT_EQ(engine_.last().adapter, "sql");
}

TEST_F(VllmInference, WhatIsNotServedIsRefusedByName) {
  auto refused = [&](const char* field, const char* value, const std::function<void(pb::GenerateRequest&)>& set) {
    pb::GenerateRequest r = text("A");
    set(r);
    for (const grpc::Status& status : {generate(r).second, stream(r).second}) {
      EXPECT_EQ(status.error_code(), grpc::INVALID_ARGUMENT) << field;
      EXPECT_THAT(status.error_message(), AllOf(HasSubstr(field), HasSubstr(value)));
    }
  };
  refused("media", "text only", [](auto& r) { r.add_media(); });
  refused("kv_transfer_params", "unset", [](auto& r) { r.mutable_kv()->mutable_kv_transfer_params(); });
  refused("ec_transfer_params", "unset", [](auto& r) { r.mutable_kv()->mutable_ec_transfer_params(); });
  refused("prompt", "token_ids", [](auto& r) { r.clear_text(); });
  refused("prompt_candidates", "token ids", [](auto& r) {
    r.mutable_response()->set_prompt_logprobs(true);
    r.mutable_response()->mutable_prompt_candidates()->mutable_token_ids()->add_ids(1);
  });
  refused("logprob_token_ids", "257", [](auto& r) {
    r.mutable_response()->set_output_logprobs(true);
    r.mutable_response()->mutable_output_candidates()->mutable_token_ids()->add_ids(257);
  });
  refused("prompt_candidates", "-1", [](auto& r) {
    r.mutable_response()->set_prompt_logprobs(true);
    r.mutable_response()->mutable_prompt_candidates()->set_all(true);
  });
  refused("output_candidates", "asked for",
          [](auto& r) { r.mutable_response()->mutable_output_candidates()->set_top_n(2); });
  refused("output_candidates", "21", [](auto& r) {
    r.mutable_response()->set_output_logprobs(true);
    r.mutable_response()->mutable_output_candidates()->set_top_n(21);
  });
  refused("cache_salt", "300", [](auto& r) {
    r.mutable_kv()->set_cache_salt(std::string(300, 's'));
    r.mutable_kv()->set_bypass_prefix_cache(true);
  });
  pb::GenerateRequest two = text("A");
  two.mutable_sampling()->set_num_sequences(2);
  EXPECT_THAT(generate(two).second.error_message(), HasSubstr("num_sequences is 2"));
  EXPECT_TRUE(engine_.requests.empty());
}

TEST_F(VllmInference, FailsWithTheEnginesStatus) {
  pb::GenerateRequest r = text("A");
  r.mutable_kv()->set_cache_salt("fail");
  for (const grpc::Status& status : {generate(r).second, stream(r).second}) {
    EXPECT_EQ(status.error_code(), grpc::INTERNAL);
    EXPECT_EQ(status.error_message(), "the script says so");
  }
}

}  // namespace
}  // namespace kvasir::server
