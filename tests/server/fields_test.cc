// Every bad value is refused by the field's name, with the value and the limit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "server/parameters.h"
#include "server/services.h"
#include "tests/server/fake_engine.h"

namespace kvasir::server {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class FieldsTest : public testing::Test {
 protected:
  FieldsTest() {
    options_.access_log = false;
    auto made = Services::create(options_, engine_);
    EXPECT_TRUE(made.ok());
    services_ = std::move(*made);
  }
  static GenerateInput good() {
    GenerateInput in;
    in.prompt = TextInput{"hello"};
    return in;
  }
  Status send(GenerateInput in) { return services_->generate(everyone(), std::move(in)).status(); }

  ServerOptions options_;
  FakeEngine engine_;
  std::unique_ptr<Services> services_;
};

TEST_F(FieldsTest, BadValuesAreNamed) {
  struct Case {
    const char* field;
    const char* value;
    std::function<void(GenerateInput&)> spoil;
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const Case cases[] = {
      {"temperature", "-1", [](auto& in) { in.request.sampling.temperature = -1; }},
      {"temperature", "nan", [&](auto& in) { in.request.sampling.temperature = nan; }},
      {"temperature", "inf", [](auto& in) { in.request.sampling.temperature = INFINITY; }},
      {"top_p", "0", [](auto& in) { in.request.sampling.top_p = 0; }},
      {"top_p", "1.5", [](auto& in) { in.request.sampling.top_p = 1.5f; }},
      {"top_k", "-3", [](auto& in) { in.request.sampling.top_k = -3; }},
      {"min_p", "2", [](auto& in) { in.request.sampling.min_p = 2; }},
      {"typical_p", "-0.5", [](auto& in) { in.request.sampling.typical_p = -0.5f; }},
      {"repetition_penalty", "0", [](auto& in) { in.request.sampling.repetition_penalty = 0; }},
      {"presence_penalty", "3", [](auto& in) { in.request.sampling.presence_penalty = 3; }},
      {"frequency_penalty", "-3", [](auto& in) { in.request.sampling.frequency_penalty = -3; }},
      {"n", "0", [](auto& in) { in.request.n = 0; }},
      {"n", "129", [](auto& in) { in.request.n = 129; }},
      {"n", "1000", [](auto& in) { in.choices_of_call = 1000; }},
      {"logprobs", "21", [](auto& in) { in.request.sampling.logprobs = 21; }},
      {"prompt_logprobs", "99", [](auto& in) { in.request.prompt_logprobs = 99; }},
      {"logit_bias", "257",
       [](auto& in) {
         in.request.sampling.logit_bias = {{257, 1.0f}};
       }},
      {"logit_bias", "101",
       [](auto& in) {
         in.request.sampling.logit_bias = {{1, 101.0f}};
       }},
      {"logit_bias", "2000", [](auto& in) { in.request.sampling.logit_bias.resize(2000); }},
      {"stop", "17", [](auto& in) { in.request.stop_strings.assign(17, "x"); }},
      {"stop", "300", [](auto& in) { in.request.stop_strings = {std::string(300, 'x')}; }},
      {"stop", "empty", [](auto& in) { in.request.stop_strings = {""}; }},
      {"stop", "byte 1", [](auto& in) { in.request.stop_strings = {"a\xff"}; }},
      {"stop_token_ids", "4294967295", [](auto& in) { set_ids(parameter("stop_token_ids"), {4294967295}, in); }},
      {"max_tokens", "-1", [](auto& in) { in.request.max_tokens = -1; }},
      {"max_tokens", "124", [](auto& in) { in.request.max_tokens = 124; }},
      {"min_tokens", "9", [](auto& in) { in.request.min_tokens = 9, in.request.max_tokens = 8; }},
      {"request_id", "300", [](auto& in) { in.request.id.assign(300, 'x'); }},
      {"cache_salt", "300", [](auto& in) { in.request.cache_salt.assign(300, 'x'); }},
      {"prompt", "byte 2", [](auto& in) { in.prompt = TextInput{"ok\xc0\x80"}; }},
      {"prompt", "128", [](auto& in) { in.prompt = TextInput{std::string(128, 'x')}; }},
      {"prompt", "bytes", [](auto& in) { in.prompt = TextInput{std::string(1 << 20, 'x')}; }},
      {"prompt", "-1",
       [](auto& in) {
         in.prompt = TokensInput{1, -1};
       }},
      {"prompt", "257", [](auto& in) { in.prompt = TokensInput{257}; }},
      {"prompt", "empty", [](auto& in) { in.prompt = TokensInput{}; }},
  };
  for (const Case& c : cases) {
    GenerateInput in = good();
    c.spoil(in);
    Status s = send(std::move(in));
    EXPECT_EQ(s.code(), Code::invalid_argument) << c.field << " " << c.value;
    EXPECT_EQ(s.field(), c.field) << s.message();
    EXPECT_THAT(s.message(), AllOf(HasSubstr(c.field), HasSubstr(c.value)));
  }
  GenerateInput other = good();
  other.model = "gpt-9";
  EXPECT_EQ(send(other).code(), Code::not_found);
  EXPECT_TRUE(engine_.requests.empty());
  EXPECT_TRUE(send(good()).ok());
  EXPECT_EQ(engine_.open(), 0);
}

TEST_F(FieldsTest, LegalEdges) {
  GenerateInput in = good();
  in.request.max_tokens = 0;
  in.request.sampling.seed = 0;
  in.draw_seed = false;
  in.request.sampling.temperature = 0;
  EXPECT_TRUE(send(in).ok());
  EXPECT_EQ(engine_.last().sampling.seed, 0u);
  in = good();
  in.prompt = TextInput{std::string(127, 'x')};
  EXPECT_TRUE(send(in).ok());
  in.prompt = TextInput{std::string(128, 'x')};
  in.request.max_tokens = 0;  // scoring may fill the context
  EXPECT_TRUE(send(in).ok());
}

TEST_F(FieldsTest, APassedDeadlineNeverReachesTheEngine) {
  GenerateInput in = good();
  in.request.deadline = std::chrono::steady_clock::now() - std::chrono::seconds(1);
  EXPECT_EQ(send(in).code(), Code::deadline_exceeded);
  EXPECT_TRUE(engine_.requests.empty());
}

TEST_F(FieldsTest, StatesOfTheEngine) {
  engine_.set_state(engine::State::starting);
  EXPECT_EQ(send(good()).code(), Code::unavailable);
  EXPECT_FALSE(services_->health().ready);
  EXPECT_TRUE(services_->health().live);
  engine_.set_state(engine::State::degraded);
  EXPECT_TRUE(services_->health().ready);
  engine_.set_state(engine::State::stuck);
  EXPECT_FALSE(services_->health().live);
  engine_.set_state(engine::State::serving);
  services_->set_draining();
  EXPECT_EQ(send(good()).code(), Code::unavailable);
  EXPECT_FALSE(services_->health().ready);
  EXPECT_TRUE(services_->health().live);
}

TEST_F(FieldsTest, PriorityAndRolesComeFromTheKey) {
  Caller caller;
  caller.user = true;
  caller.key_id = "k-1";
  GenerateInput in = good();
  in.request.priority = 1;
  Status s = services_->generate(caller, in).status();
  EXPECT_EQ(s.field(), "priority");
  in.request.priority = 0;
  in.request.tenant = "someone-else";
  caller.tenant = "ann";
  caller.weight = 2.5;
  EXPECT_TRUE(services_->generate(caller, in).ok());
  EXPECT_EQ(engine_.last().weight, 2.5);
  EXPECT_EQ(engine_.last().tenant, "ann");
  caller.user = false;
  caller.metrics = true;
  EXPECT_EQ(services_->generate(caller, in).status().code(), Code::permission_denied);
}

TEST(OpenToOthers, NeedsKeysOrASayso) {
  FakeEngine engine;
  for (const char* host : {"", "0.0.0.0", "10.0.0.1", "::"}) {
    ServerOptions o;
    o.host = host;
    EXPECT_EQ(Services::create(o, engine).status().code(), Code::failed_precondition) << host;
    o.allow_no_keys = true;
    EXPECT_TRUE(Services::create(o, engine).ok());
  }
}

}  // namespace
}  // namespace kvasir::server
