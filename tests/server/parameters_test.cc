// Every number the sampler takes, on every protocol: what a client sends reaches the engine, what is out of range is
// refused by name with the value. A new row of the table is tested by being there.
#include "server/parameters.h"

#include <google/protobuf/message.h>

#include "tests/server/contract_fixture.h"

namespace kvasir::server {
namespace {

class Parameters : public ContractFixture {
 protected:
  // False: the message has no such field.
  static bool set(google::protobuf::Message& m, const char* name, float value) {
    const auto* field = m.GetDescriptor()->FindFieldByName(name);
    if (field) m.GetReflection()->SetFloat(&m, field, value);
    return field != nullptr;
  }
  // The same number over each protocol that has a field for it.
  std::vector<Outcome> everywhere(const char* name, float value) {
    V1 v1 = v1_request();
    EXPECT_TRUE(set(*v1.mutable_sampling(), name, value)) << "proto/kvasir.proto lacks " << name;
    Infer number = infer_request(), text = infer_request(), json = infer_request();
    (*number.mutable_parameters())[name].set_double_param(double(value));
    (*text.mutable_parameters())[name].set_string_param(cat(value));
    const std::string field = cat('"', name, "\":", value);
    add_text(json, "sampling_parameters", cat('{', field, '}'));
    std::vector<Outcome> out = {
        send(v1),
        send(number),
        send(text),
        send(json),
        complete(field),
        chat(field),
        post("/v1/responses", cat(R"({"input":"ab",)", field, '}')),
        post("/v1/messages", cat(R"({"max_tokens":9,"messages":[{"role":"user","content":"ab"}],)", field, '}'))};
    Vllm vllm = vllm_request();
    if (set(*vllm.mutable_sampling_params(), name, value)) out.push_back(send(vllm));
    Native native = native_request();
    if (set(native, name, value) || set(*native.mutable_sampling(), name, value) ||
        set(*native.mutable_decoding(), name, value))
      out.push_back(send(native));
    Ppl ppl = ppl_request();
    ppl.mutable_choosing_parameters()->set_do_sample(true);
    if (set(*ppl.mutable_choosing_parameters(), name, value)) out.push_back(send(ppl));
    return out;
  }
};

TEST_F(Parameters, EachNumberReachesTheEngineOnEveryProtocol) {
  for (const model::SamplingNumber& n : model::kSamplingNumbers) {
    SCOPED_TRACE(n.name);
    const float value = 0.25f * n.low + 0.75f * std::min(n.high, 2.0f);
    const size_t before = engine_.asked();
    size_t sent = 0;
    for (const Outcome& o : everywhere(n.name, value)) {
      EXPECT_EQ(o.code, Code::ok) << o.protocol << ": " << o.message;
      ++sent;
    }
    ASSERT_EQ(engine_.asked(), before + sent);
    for (size_t i = before; i < before + sent; ++i) EXPECT_EQ(engine_.requests[i].sampling.*n.to, value) << i - before;
  }
}

// By the names that those servers have for them.
TEST_F(Parameters, EachNumberReachesTheEngineOnRoutesOfOtherServers) {
  for (const model::SamplingNumber& n : model::kSamplingNumbers) {
    const float value = 0.25f * n.low + 0.75f * std::min(n.high, 2.0f);
    auto field = [&](Wire wire) { return cat('"', name_on(wire, parameter(n.name)), "\":", value); };
    for (const auto& [path, body] : std::vector<std::pair<const char*, std::string>>{
             {"/completion", cat(R"({"prompt":"ab",)", field(Wire::llama), '}')},
             {"/generate", cat(R"({"text":"ab","sampling_params":{)", field(Wire::sglang), "}}")},
             {"/api/generate",
              cat(R"({"model":"fake","prompt":"ab","stream":false,"options":{)", field(Wire::ollama), "}}")}}) {
      SCOPED_TRACE(cat(path, ' ', body));
      EXPECT_EQ(post(path, body).code, Code::ok);
      EXPECT_EQ(engine_.last().sampling.*n.to, value);
    }
  }
}

TEST_F(Parameters, EachNumberOutOfRangeIsRefusedOnEveryProtocol) {
  for (const model::SamplingNumber& n : model::kSamplingNumbers)
    for (float value : {n.low - 1, n.high + 1})
      for (const Outcome& o : everywhere(n.name, value)) {
        expect_bad(o, n.name, cat(value));
        EXPECT_THAT(o.message, testing::HasSubstr(n.limits())) << o.protocol;
      }
  EXPECT_EQ(engine_.asked(), 0u);
}

TEST_F(Parameters, ProbabilitiesAfterSamplingReachTheEngineWhereLogprobsDo) {
  V1 v1 = v1_request();
  v1.set_logprobs(1);
  EXPECT_EQ(send(v1).code, Code::ok);
  EXPECT_FALSE(engine_.last().sampling.post_sampling_probs);
  v1.set_post_sampling_probs(true);
  EXPECT_EQ(send(v1).code, Code::ok);
  EXPECT_TRUE(engine_.last().sampling.post_sampling_probs);
  for (const Outcome& o : {complete(R"("logprobs":1,"post_sampling_probs":true)"),
                           chat(R"("logprobs":true,"post_sampling_probs":true)")}) {
    EXPECT_EQ(o.code, Code::ok) << o.message;
    EXPECT_TRUE(engine_.requests.back().sampling.post_sampling_probs);
  }
  expect_bad(complete(R"("use_beam_search":true,"n":2,"post_sampling_probs":true)"), "post_sampling_probs", "draws");
}

TEST_F(Parameters, ANumberNoMemberHoldsIsRefusedAsItWasSent) {
  expect_bad(complete(R"("n":5000000000)"), "n", "5000000000");
  expect_bad(chat(R"("logprobs":true,"top_logprobs":-1)"), "top_logprobs", "-1");
  expect_bad(complete(R"("stop_token_ids":[5000000000])"), "stop_token_ids", "5000000000");
  expect_bad(complete(R"("logit_bias":{"5000000000":1})"), "logit_bias", "5000000000");
  EXPECT_EQ(complete(R"("priority":99999999999,"top_k":99999999999)").code, Code::ok);  // as high as it goes
  EXPECT_EQ(engine_.last().priority, INT32_MAX);
  EXPECT_EQ(complete(R"("temperature":null,"nothing":null)").code, Code::ok);
}

}  // namespace
}  // namespace kvasir::server
