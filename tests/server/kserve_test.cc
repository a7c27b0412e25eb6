// inference.GRPCInferenceService: tensors as contents and raw, one answer and streams.
#include <gmock/gmock.h>

#include <atomic>
#include <cstring>
#include <map>
#include <thread>

#include "kserve.grpc.pb.h"
#include "tests/server/grpc_fixture.h"

namespace kvasir::server {
namespace {

namespace pb = inference;
using testing::HasSubstr;

class KServeTest : public GrpcFixture {
 protected:
  void SetUp() override {
    GrpcFixture::SetUp();
    stub_ = pb::GRPCInferenceService::NewStub(channel_);
  }
  static pb::ModelInferRequest request(const std::string& text) {
    pb::ModelInferRequest r;
    r.set_model_name("fake");
    auto& t = *r.add_inputs();
    t.set_name("text_input");
    t.set_datatype("BYTES");
    t.add_shape(1);
    t.mutable_contents()->add_bytes_contents(text);
    return r;
  }
  grpc::Status infer(const pb::ModelInferRequest& in, pb::ModelInferResponse& out) {
    grpc::ClientContext c;
    return stub_->ModelInfer(&c, in, &out);
  }
  std::unique_ptr<pb::GRPCInferenceService::Stub> stub_;
};

TEST_F(KServeTest, TextInTextOut) {
  auto in = request("hello");
  in.set_id("r7");
  (*in.mutable_parameters())["temperature"].set_double_param(0.5);
  (*in.mutable_parameters())["max_tokens"].set_int64_param(3);
  (*in.mutable_parameters())["seed"].set_string_param("9");
  pb::ModelInferResponse out;
  ASSERT_TRUE(infer(in, out).ok());
  EXPECT_EQ(out.id(), "r7");
  EXPECT_EQ(out.outputs(0).name(), "text_output");
  EXPECT_EQ(out.outputs(0).contents().bytes_contents(0), "hellohel");
  EXPECT_EQ(out.parameters().at("finish_reason").string_param(), "length");
  EXPECT_FLOAT_EQ(engine_.last().sampling.temperature, 0.5f);
  EXPECT_EQ(engine_.last().sampling.seed, 9u);
  EXPECT_TRUE(all_gone());
}

TEST_F(KServeTest, RawTensorsGoBackRaw) {
  auto in = request("");
  in.mutable_inputs(0)->clear_contents();
  uint32_t n = 2;
  std::string raw(reinterpret_cast<char*>(&n), 4);
  in.add_raw_input_contents(raw + "ab");
  auto& s = *in.add_inputs();
  s.set_name("sampling_parameters");
  s.set_datatype("BYTES");
  s.add_shape(1);
  std::string json = R"({"temperature": 0, "ignore_eos": true, "max_tokens": "2"})";
  n = uint32_t(json.size());
  in.add_raw_input_contents(std::string(reinterpret_cast<char*>(&n), 4) + json);
  pb::ModelInferResponse out;
  auto status = infer(in, out);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(out.raw_output_contents(0).substr(4), "abab");
}

// What has no kind of its own among a call's parameters comes as text, here and among the sampling parameters.
TEST_F(KServeTest, ListsAndFlagsMayComeAsText) {
  auto sent = [&](const std::string& name, const std::string& text) {
    auto in = request("x");
    (*in.mutable_parameters())["max_tokens"].set_string_param("1");
    (*in.mutable_parameters())[name].set_string_param(text);
    pb::ModelInferResponse out;
    auto status = infer(in, out);
    EXPECT_TRUE(status.ok()) << name << ": " << status.error_message();
    return engine_.last();
  };
  using Texts = std::vector<std::string>;
  EXPECT_EQ(sent("stop", R"(["a", "\n"])").stop_strings, (Texts{"a", "\n"}));
  EXPECT_EQ(sent("stop", "END").stop_strings, Texts{"END"});
  for (const char* itself : {"[1]", "[", "\"", "7", "true", "[\"a\"", "{}"})
    EXPECT_EQ(sent("stop", itself).stop_strings, Texts{itself});
  EXPECT_EQ(sent("stop", "[]").stop_strings, Texts{});
  EXPECT_EQ(sent("stop_token_ids", "[3, 4]").stop_tokens, (std::vector<int32_t>{3, 4}));
  EXPECT_TRUE(sent("ignore_eos", "true").ignore_eos);
  EXPECT_FALSE(sent("skip_special_tokens", "false").skip_special);
  EXPECT_TRUE(sent("include_stop_str_in_output", "true").include_stop);
  EXPECT_FLOAT_EQ(sent("typical_p", "0.5").sampling.typical_p, 0.5f);
}

TEST_F(KServeTest, BadTensorsAndParametersAreNamed) {
  pb::ModelInferResponse out;
  auto refused = [&](const char* says, const std::function<void(pb::ModelInferRequest&)>& spoil,
                     grpc::StatusCode code = grpc::INVALID_ARGUMENT) {
    auto in = request("x");
    spoil(in);
    auto status = infer(in, out);
    EXPECT_EQ(status.error_code(), code) << says;
    EXPECT_THAT(status.error_message(), HasSubstr(says));
  };
  refused("text_input", [](auto& r) { r.clear_inputs(); });
  refused("INT32", [](auto& r) { r.mutable_inputs(0)->set_datatype("INT32"); });
  refused("dimension of 2", [](auto& r) { r.mutable_inputs(0)->set_shape(0, 2); });
  refused("image", [](auto& r) { r.add_inputs()->set_name("image"); });
  refused("raw_input_contents", [](auto& r) { r.add_raw_input_contents("x"), r.add_raw_input_contents("y"); });
  refused("length of 4 bytes", [](auto& r) { r.add_raw_input_contents(std::string("\xff\xff\xff\xff", 4)); });
  refused("logits", [](auto& r) { r.add_outputs()->set_name("logits"); });
  refused("beam_width", [](auto& r) { (*r.mutable_parameters())["beam_width"].set_int64_param(4); });
  refused("temperature", [](auto& r) { (*r.mutable_parameters())["temperature"].set_string_param("hot"); });
  refused("max_tokens", [](auto& r) { (*r.mutable_parameters())["max_tokens"].set_double_param(1.5); });
  refused("stop is 1; it must be", [](auto& r) { (*r.mutable_parameters())["stop"].set_int64_param(1); });
  refused("ignore_eos", [](auto& r) { (*r.mutable_parameters())["ignore_eos"].set_string_param("yes"); });
  refused("stop_token_ids", [](auto& r) { (*r.mutable_parameters())["stop_token_ids"].set_string_param("3"); });
  refused(
      "other", [](auto& r) { r.set_model_name("other"); }, grpc::NOT_FOUND);
  refused("model_version", [](auto& r) { r.set_model_version("2"); });
  refused("shared_memory_region",
          [](auto& r) { (*r.mutable_inputs(0)->mutable_parameters())["shared_memory_region"].set_string_param("r"); });
  refused("classification", [](auto& r) {
    r.add_outputs()->set_name("text_output");
    (*r.mutable_outputs(0)->mutable_parameters())["classification"].set_int64_param(2);
  });
  refused("max_tokens is 9223372036854775807",
          [](auto& r) { (*r.mutable_parameters())["max_tokens"].set_uint64_param(UINT64_MAX); });
  refused("ModelStreamInfer", [](auto& r) {
    auto& s = *r.add_inputs();
    s.set_name("stream");
    s.set_datatype("BOOL");
    s.mutable_contents()->add_bool_contents(true);
  });
  EXPECT_TRUE(engine_.requests.empty());
}

TEST_F(KServeTest, ADisconnectCancelsAnInfer) {
  engine_.hang_on('h');
  grpc::ClientContext c;
  c.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(200));
  pb::ModelInferResponse out;
  EXPECT_EQ(stub_->ModelInfer(&c, request("h"), &out).error_code(), grpc::DEADLINE_EXCEEDED);
  EXPECT_TRUE(all_gone());
}

TEST_F(KServeTest, ManyOnOneStream) {
  grpc::ClientContext c;
  auto stream = stub_->ModelStreamInfer(&c);
  for (int i = 0; i < 20; ++i) {
    auto in = request(cat("number ", i));
    in.set_id(cat(i));
    auto& s = *in.add_inputs();
    s.set_name("stream");
    s.set_datatype("BOOL");
    s.add_shape(1);
    s.mutable_contents()->add_bool_contents(i % 2 == 0);
    if (i == 5) in.set_model_name("wrong");
    ASSERT_TRUE(stream->Write(in));
  }
  stream->WritesDone();
  std::map<std::string, std::string> text;
  std::map<std::string, int> finals, messages;
  std::string error;
  for (pb::ModelStreamInferResponse m; stream->Read(&m);) {
    const std::string& id = m.infer_response().id();
    if (!m.error_message().empty()) {
      error = id + " " + m.error_message();
      continue;
    }
    text[id] += m.infer_response().outputs(0).contents().bytes_contents(0);
    ++messages[id];
    const auto& parameters = m.infer_response().parameters();
    const bool last = parameters.at("triton_final_response").bool_param();
    finals[id] += last;
    EXPECT_EQ(parameters.contains("completion_tokens"), last);
    if (!last) continue;
    EXPECT_EQ(parameters.at("prompt_tokens").int64_param(), int64_t(("number " + id).size()));
    EXPECT_EQ(parameters.at("completion_tokens").int64_param(), int64_t(("number " + id).size()) + 1);
  }
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_THAT(error, HasSubstr("5 NOT_FOUND: model 'wrong'"));
  EXPECT_EQ(text.size(), 19u);
  for (auto& [id, t] : text) {
    const std::string said = "number " + id;
    EXPECT_EQ(t, std::stoi(id) % 2 == 0 ? said : said + said);  // unless streamed, the prompt is in front
    EXPECT_EQ(finals[id], 1);
  }
  EXPECT_EQ(messages["7"], 1);
  EXPECT_GT(messages["8"], 1);
  EXPECT_TRUE(all_gone());
}

// Half an answer must not look like a whole one, on the stream as in the single call.
TEST_F(KServeTest, WhatSomebodyCancelledIsAnError) {
  engine_.hang_on('h');
  grpc::ClientContext c;
  auto stream = stub_->ModelStreamInfer(&c);
  auto in = request("h");
  in.set_id("seven");
  ASSERT_TRUE(stream->Write(in));
  stream->WritesDone();
  ASSERT_TRUE(engine_.wait_open(1));
  ASSERT_TRUE(engine_.cancel("", "seven"));
  pb::ModelStreamInferResponse m;
  ASSERT_TRUE(stream->Read(&m));
  EXPECT_EQ(m.error_message(), "CANCELLED: the request was cancelled");
  EXPECT_EQ(m.infer_response().id(), "seven");
  EXPECT_FALSE(stream->Read(&m));
  EXPECT_TRUE(stream->Finish().ok());
}

// Errors wait for their reader in the transport's windows, not in the server's memory.
TEST_F(KServeTest, WhoReadsNoErrorsIsNotReadFurther) {
  constexpr int kMany = 20000;
  grpc::ClientContext c;
  auto stream = stub_->ModelStreamInfer(&c);
  std::atomic<int> written{0};
  std::thread writer([&] {
    auto in = request("x");
    in.set_model_name("wrong");
    in.set_id(std::string(4000, 'i'));  // comes back with each error
    for (int i = 0; i < kMany && stream->Write(in); ++i) ++written;
    stream->WritesDone();
  });
  for (int before = -1; before != written;) {
    before = written;
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
  }
  EXPECT_LT(written, kMany);
  int errors = 0;
  for (pb::ModelStreamInferResponse m; stream->Read(&m);) errors += !m.error_message().empty();
  writer.join();
  EXPECT_EQ(errors, kMany);
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(KServeTest, OneStreamMayAskForEver) {
  grpc::ClientContext c;
  auto stream = stub_->ModelStreamInfer(&c);
  for (int i = 0; i < 300; ++i) {  // one after another, then a few at once: each with its own id and text
    for (int k = 0; k < 1 + i % 3; ++k) {
      auto in = request(cat("text ", i, k));
      in.set_id(cat(i, k));
      ASSERT_TRUE(stream->Write(in));
    }
    for (int k = 0; k < 1 + i % 3; ++k) {
      pb::ModelStreamInferResponse m;
      ASSERT_TRUE(stream->Read(&m));
      EXPECT_EQ(m.error_message(), "");
      EXPECT_EQ(m.infer_response().outputs(0).contents().bytes_contents(0),
                cat("text ", m.infer_response().id(), "text ", m.infer_response().id()));
    }
  }
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_TRUE(all_gone());
}

TEST_F(KServeTest, LiveReadyMetadata) {
  {
    grpc::ClientContext c;
    pb::ServerLiveResponse out;
    ASSERT_TRUE(stub_->ServerLive(&c, {}, &out).ok());
    EXPECT_TRUE(out.live());
  }
  {
    grpc::ClientContext c;
    pb::ModelReadyRequest in;
    in.set_name("fake");
    pb::ModelReadyResponse out;
    ASSERT_TRUE(stub_->ModelReady(&c, in, &out).ok());
    EXPECT_TRUE(out.ready());
    in.set_version("2");
    grpc::ClientContext other;
    ASSERT_TRUE(stub_->ModelReady(&other, in, &out).ok());
    EXPECT_FALSE(out.ready());
  }
  {
    grpc::ClientContext c;
    pb::ModelMetadataRequest in;
    in.set_version("2");
    pb::ModelMetadataResponse out;
    EXPECT_EQ(stub_->ModelMetadata(&c, in, &out).error_code(), grpc::INVALID_ARGUMENT);
  }
  {
    grpc::ClientContext c;
    pb::ModelMetadataResponse out;
    ASSERT_TRUE(stub_->ModelMetadata(&c, {}, &out).ok());
    EXPECT_EQ(out.inputs(0).name(), "text_input");
  }
  {
    grpc::ClientContext c;
    pb::ServerMetadataResponse out;
    ASSERT_TRUE(stub_->ServerMetadata(&c, {}, &out).ok());
    EXPECT_EQ(out.name(), "kvasir");
  }
  engine_.set_state(engine::State::draining);
  grpc::ClientContext c;
  pb::ServerReadyResponse out;
  ASSERT_TRUE(stub_->ServerReady(&c, {}, &out).ok());
  EXPECT_FALSE(out.ready());
}

// As Triton's vLLM back end: the text goes on from the prompt, which a stream leaves out.
TEST_F(KServeTest, ThePromptIsInFrontUnlessStreamed) {
  pb::ModelInferRequest in;
  auto add = [&](const char* name, const char* type) -> pb::ModelInferRequest::InferInputTensor& {
    auto& t = *in.add_inputs();
    t.set_name(name);
    t.set_datatype(type);
    t.add_shape(1);
    return t;
  };
  add("text_input", "BYTES").mutable_contents()->add_bytes_contents("hey");
  add("return_logprobs", "BOOL").mutable_contents()->add_bool_contents(false);
  pb::ModelInferResponse out;
  ASSERT_TRUE(infer(in, out).ok());
  EXPECT_EQ(out.outputs(0).contents().bytes_contents(0), "heyhey");
  in.mutable_inputs(1)->mutable_contents()->set_bool_contents(0, true);
  const grpc::Status refused = infer(in, out);
  EXPECT_EQ(refused.error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_NE(refused.error_message().find("finish_reason"), std::string::npos);
}

TEST_F(KServeTest, ConfigAndStatistics) {
  {
    grpc::ClientContext c;
    pb::ModelConfigResponse out;
    ASSERT_TRUE(stub_->ModelConfig(&c, {}, &out).ok());
    EXPECT_EQ(out.config().name(), "fake");
    EXPECT_EQ(out.config().input(0).name(), "text_input");
    EXPECT_EQ(out.config().input(0).data_type(), pb::TYPE_STRING);
    EXPECT_TRUE(out.config().input(1).optional());
    EXPECT_TRUE(out.config().model_transaction_policy().decoupled());
  }
  grpc::ClientContext c;
  pb::ModelStatisticsRequest in;
  in.set_name("fake");
  pb::ModelStatisticsResponse out;
  ASSERT_TRUE(stub_->ModelStatistics(&c, in, &out).ok());
  EXPECT_EQ(out.model_stats(0).name(), "fake");
  grpc::ClientContext other;
  in.set_name("none");
  EXPECT_EQ(stub_->ModelStatistics(&other, in, &out).error_code(), grpc::NOT_FOUND);
}

}  // namespace
}  // namespace kvasir::server
