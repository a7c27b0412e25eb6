// ppl.llm.proto: a client made from the published messages, and the faults of the server it was made for,
// which this one must not have.
#include <gmock/gmock.h>

#include <map>

#include "ppl_llm.grpc.pb.h"
#include "tests/server/grpc_fixture.h"

namespace kvasir::server {
namespace {

namespace pb = ppl::llm::proto;
using testing::HasSubstr;

class PplTest : public GrpcFixture {
 protected:
  void SetUp() override {
    GrpcFixture::SetUp();
    stub_ = pb::LLMService::NewStub(channel_);
  }
  struct Answer {
    std::string text;
    std::vector<uint32_t> ids;
    pb::Status status = pb::PROCESSING;
    pb::FinishReason reason = pb::FINISH_REASON_LENGTH;
    int ends = 0;
  };
  std::map<uint64_t, Answer> call(const pb::BatchedRequest& batch, grpc::Status* status = nullptr) {
    grpc::ClientContext context;
    auto reader = stub_->Generation(&context, batch);
    std::map<uint64_t, Answer> answers;
    pb::BatchedResponse message;
    while (reader->Read(&message))
      for (const pb::Response& r : message.rsp()) {
        Answer& a = answers[r.id()];
        EXPECT_EQ(a.ends, 0) << "something followed the end of " << r.id();
        a.text += r.generated();
        a.ids.insert(a.ids.end(), r.tokens().ids().begin(), r.tokens().ids().end());
        a.status = r.status();
        a.reason = r.detail().finish_reason();
        if (r.status() != pb::PROCESSING) ++a.ends;
      }
    grpc::Status end = reader->Finish();
    if (status)
      *status = end;
    else
      EXPECT_TRUE(end.ok()) << end.error_message();
    for (auto& [id, a] : answers) EXPECT_EQ(a.ends, 1) << id;
    return answers;
  }
  Answer one(const pb::Request& request) {
    pb::BatchedRequest batch;
    *batch.add_req() = request;
    return call(batch)[request.id()];
  }
  static pb::Request text(uint64_t id, const std::string& prompt) {
    pb::Request r;
    r.set_id(id);
    r.set_prompt(prompt);
    return r;
  }
  std::unique_ptr<pb::LLMService::Stub> stub_;
};

TEST_F(PplTest, ManyRequestsInOneCall) {
  pb::BatchedRequest batch;
  for (uint64_t i = 0; i < 50; ++i) *batch.add_req() = text(1000 + i, cat("prompt ", i));
  auto answers = call(batch);
  ASSERT_EQ(answers.size(), 50u);
  for (uint64_t i = 0; i < 50; ++i) {
    EXPECT_EQ(answers[1000 + i].text, cat("prompt ", i));
    EXPECT_EQ(answers[1000 + i].status, pb::FINISHED);
    EXPECT_EQ(answers[1000 + i].reason, pb::FINISH_REASON_EOS_TOKEN);
  }
  EXPECT_TRUE(all_gone());
}

// Each costs an answer and a line in the log: eight MiB of empty ones would keep the workers for minutes.
TEST_F(PplTest, ACallHasSoManyRequests) {
  pb::BatchedRequest batch;
  for (int i = 0; i <= options_.max_streams_per_connection; ++i) batch.add_req()->set_id(uint64_t(i));
  grpc::Status status;
  EXPECT_TRUE(call(batch, &status).empty());
  EXPECT_EQ(status.error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("req has 1025 requests; at most 1024"));
}

TEST_F(PplTest, TokensInTokensOut) {
  pb::Request r;
  r.set_id(1);
  for (uint32_t id : {72, 105}) r.mutable_tokens()->add_ids(id);
  r.mutable_stopping_parameters()->set_ignore_eos_token(true);
  r.mutable_stopping_parameters()->set_max_new_tokens(2);
  Answer a = one(r);
  EXPECT_EQ(a.ids, (std::vector<uint32_t>{72, 105}));
  EXPECT_EQ(a.text, "");
  EXPECT_EQ(a.reason, pb::FINISH_REASON_LENGTH);
}

TEST_F(PplTest, EachFailsAloneAndSaysWhy) {
  pb::BatchedRequest batch;
  *batch.add_req() = text(1, "good");
  *batch.add_req() = text(2, std::string(500, 'x'));  // over the context: refused, not left waiting
  *batch.add_req() = text(3, "bad");
  batch.mutable_req(2)->mutable_choosing_parameters()->set_do_sample(true);
  batch.mutable_req(2)->mutable_choosing_parameters()->set_temperature(-1);
  *batch.add_req() = text(1, "again");
  *batch.add_req() = text(5, "water");
  batch.mutable_req(4)->mutable_choosing_parameters()->set_watermark(true);
  grpc::ClientContext context;
  auto reader = stub_->Generation(&context, batch);
  std::map<uint64_t, std::string> failed;
  std::string good;
  pb::BatchedResponse message;
  while (reader->Read(&message))
    for (const pb::Response& r : message.rsp())
      if (r.status() == pb::FAILED)
        failed[r.id()] = r.generated();
      else if (r.id() == 1)
        good += r.generated();
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(good, "good");
  EXPECT_THAT(failed[2], HasSubstr("500 tokens; the context holds 128"));
  EXPECT_THAT(failed[3], HasSubstr("temperature is -1"));
  EXPECT_THAT(failed[1], HasSubstr("id 1 is used twice"));
  EXPECT_THAT(failed[5], HasSubstr("watermark"));
  EXPECT_TRUE(all_gone());
}

TEST_F(PplTest, StopTokensStop) {
  pb::Request r = text(1, "abc");
  r.mutable_stopping_parameters()->mutable_stop_tokens()->add_ids('b');
  Answer a = one(r);
  EXPECT_EQ(a.reason, pb::FINISH_REASON_STOP_SEQUENCE);
  EXPECT_EQ(a.text, "a");
}

TEST_F(PplTest, TopKAndPenaltiesArePassedOn) {
  pb::Request r = text(1, "x");
  auto* c = r.mutable_choosing_parameters();
  c->set_do_sample(true);
  c->set_temperature(0.5f);
  c->set_top_k(7);
  c->set_top_p(0.9f);
  c->set_typical_p(0.8f);
  c->set_seed(42);
  c->set_repetition_penalty(1.5f);
  c->set_presence_penalty(0.25f);
  c->set_frequency_penalty(0.75f);
  one(r);
  model::SamplingParams s = engine_.last().sampling;
  EXPECT_FLOAT_EQ(s.temperature, 0.5f);
  EXPECT_EQ(s.top_k, 7);
  EXPECT_FLOAT_EQ(s.top_p, 0.9f);
  EXPECT_FLOAT_EQ(s.typical_p, 0.8f);
  EXPECT_EQ(s.seed, 42u);
  EXPECT_FLOAT_EQ(s.repetition_penalty, 1.5f);
  EXPECT_FLOAT_EQ(s.presence_penalty, 0.25f);
  EXPECT_FLOAT_EQ(s.frequency_penalty, 0.75f);
}

TEST_F(PplTest, ZeroIsTheDefault) {
  one(text(1, "x"));
  engine::Request r = engine_.last();
  EXPECT_FALSE(r.max_tokens);                  // not zero: that leaked the cache there
  EXPECT_FLOAT_EQ(r.sampling.temperature, 0);  // do_sample false is greedy
  EXPECT_EQ(r.sampling.top_k, 0);
  EXPECT_FLOAT_EQ(r.sampling.top_p, 1);
  EXPECT_FLOAT_EQ(r.sampling.repetition_penalty, 1);
  pb::Request cold = text(1, "x");
  cold.mutable_choosing_parameters()->set_do_sample(true);
  one(cold);
  EXPECT_FLOAT_EQ(engine_.last().sampling.temperature, 0);
}

TEST_F(PplTest, ACancelledCallTakesItsRequestsWithIt) {
  engine_.hang_on('x');
  pb::BatchedRequest batch;
  for (uint64_t i = 0; i < 200; ++i) *batch.add_req() = text(i, "x");
  grpc::ClientContext context;
  auto reader = stub_->Generation(&context, batch);
  ASSERT_TRUE(engine_.wait_open(200));
  context.TryCancel();
  EXPECT_EQ(reader->Finish().error_code(), grpc::CANCELLED);
  EXPECT_TRUE(all_gone());
}

TEST_F(PplTest, NothingAndNotReady) {
  grpc::Status status;
  call({}, &status);
  EXPECT_EQ(status.error_code(), grpc::INVALID_ARGUMENT);
  engine_.set_state(engine::State::starting);
  pb::BatchedRequest batch;
  *batch.add_req() = text(1, "x");
  call(batch, &status);
  EXPECT_EQ(status.error_code(), grpc::UNAVAILABLE);
}

}  // namespace
}  // namespace kvasir::server
