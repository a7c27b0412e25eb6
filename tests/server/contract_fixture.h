// The same mistake, made on every protocol: what each answers, in one form.
#pragma once

#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>

#include <nlohmann/json.hpp>

#include "kserve.grpc.pb.h"
#include "kvasir.grpc.pb.h"
#include "ppl_llm.grpc.pb.h"
#include "tests/server/grpc_fixture.h"
#include "tests/server/http_client.h"
#include "vllm_engine.grpc.pb.h"
#include "vllm_inference.grpc.pb.h"

namespace kvasir::server {

struct Outcome {
  std::string protocol;
  Code code = Code::ok;
  std::string message;
  std::string retry_after;  // seconds; empty: not said
};

class ContractFixture : public GrpcFixture {
 protected:
  using Json = nlohmann::json;
  using V1 = kvasir::v1::GenerateRequest;
  using Ppl = ppl::llm::proto::Request;
  using Vllm = vllm::grpc::engine::GenerateRequest;
  using Native = vllm::GenerateRequest;  // vllm.Inference's
  using Infer = inference::ModelInferRequest;

  explicit ContractFixture(ServerOptions options = {}) : GrpcFixture(std::move(options)) { options_.http_port = 0; }

  static V1 v1_request() {
    V1 r;
    r.set_prompt("ab");
    return r;
  }
  static Ppl ppl_request() {
    Ppl r;
    r.set_id(7);
    r.set_prompt("ab");
    return r;
  }
  static Vllm vllm_request() {
    Vllm r;
    r.set_text("ab");
    return r;
  }
  static Native native_request() {
    Native r;
    r.set_text("ab");
    return r;
  }
  static Infer infer_request(std::string_view text = "ab") {
    Infer r;
    add_text(r, "text_input", text);
    return r;
  }
  static void add_text(Infer& r, const char* name, std::string_view text) {
    auto& t = *r.add_inputs();
    t.set_name(name);
    t.set_datatype("BYTES");
    t.add_shape(1);
    t.mutable_contents()->add_bytes_contents(std::string(text));
  }

  Outcome send(const V1& r) { return streamed("kvasir.v1", *kvasir::v1::Inference::NewStub(channel_), r); }
  Outcome send(const Vllm& r) { return streamed("vllm", *vllm::grpc::engine::VllmEngine::NewStub(channel_), r); }
  Outcome send(const Ppl& r) {
    ppl::llm::proto::BatchedRequest batch;
    *batch.add_req() = r;
    auto stub = ppl::llm::proto::LLMService::NewStub(channel_);
    grpc::ClientContext call;
    authorize(call);
    auto reader = stub->Generation(&call, batch);
    auto all = read_all<ppl::llm::proto::BatchedResponse>(*reader);
    Outcome out = of("ppl", reader->Finish(), call);
    for (const auto& message : all)
      for (const auto& rsp : message.rsp())
        if (rsp.status() == ppl::llm::proto::FAILED) split(rsp.generated(), out);
    return out;
  }
  Outcome send(const Native& r) {
    auto stub = vllm::Inference::NewStub(channel_);
    grpc::ClientContext call;
    authorize(call);
    vllm::GenerateResponse answer;
    grpc::Status status = stub->Generate(&call, r, &answer);
    return of("vllm.inference", status, call);
  }
  Outcome send_streamed(const Native& r) {
    auto stub = vllm::Inference::NewStub(channel_);
    grpc::ClientContext call;
    authorize(call);
    auto reader = stub->GenerateStream(&call, r);
    (void)read_all<vllm::GenerateResponse>(*reader);
    grpc::Status status = reader->Finish();
    return of("vllm.inference stream", status, call);
  }
  Outcome send(const Infer& r) {
    auto stub = inference::GRPCInferenceService::NewStub(channel_);
    grpc::ClientContext call;
    authorize(call);
    inference::ModelInferResponse answer;
    grpc::Status status = stub->ModelInfer(&call, r, &answer);
    return of("kserve", status, call);
  }
  // The same on the stream, where each request fails alone.
  Outcome send_streamed(const Infer& r) {
    auto stub = inference::GRPCInferenceService::NewStub(channel_);
    grpc::ClientContext call;
    authorize(call);
    auto stream = stub->ModelStreamInfer(&call);
    stream->Write(r);
    stream->WritesDone();
    inference::ModelStreamInferResponse answer;
    std::string error;
    while (stream->Read(&answer))
      if (!answer.error_message().empty()) error = answer.error_message();
    Outcome out = of("kserve stream", stream->Finish(), call);
    if (!error.empty()) split(error, out);
    return out;
  }
  Outcome post(std::string_view path, std::string_view body, std::string_view headers = "") {
    RawClient client(server_->http_port());
    client.send(RawClient::post(path, body, cat(headers, http_key())));
    RawClient::Answer a = client.read();
    Outcome out{std::string(path), code_of(a.status), "", ""};
    if (a.status != 200) out.message = Json::parse(a.body)["error"]["message"].get<std::string>();
    if (size_t at = a.head.find("Retry-After: "); at != std::string::npos)
      out.retry_after = a.head.substr(at + 13, a.head.find('\r', at) - at - 13);
    return out;
  }
  // "prompt":"ab" or a message, and these fields.
  Outcome complete(std::string_view fields) { return post("/v1/completions", cat(R"({"prompt":"ab",)", fields, "}")); }
  Outcome chat(std::string_view fields) {
    return post("/v1/chat/completions", cat(R"({"messages":[{"role":"user","content":"ab"}],)", fields, "}"));
  }
  // Bytes that no stub would send.
  Outcome raw(const std::string& method, std::string_view bytes) {
    grpc::GenericStub stub(channel_);
    grpc::CompletionQueue queue;
    grpc::ClientContext call;
    call.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    grpc::Slice slice(bytes.data(), bytes.size());
    auto rpc = stub.PrepareUnaryCall(&call, method, grpc::ByteBuffer(&slice, 1), &queue);
    rpc->StartCall();
    grpc::ByteBuffer answer;
    grpc::Status status;
    rpc->Finish(&answer, &status, nullptr);
    void* tag;
    bool ok;
    queue.Next(&tag, &ok);
    return of(method, status, call);
  }
  // Any bytes as the messages of one KServe stream, and what comes back.
  std::vector<inference::ModelStreamInferResponse> exchange(const std::vector<std::string>& messages) {
    grpc::GenericStub stub(channel_);
    grpc::CompletionQueue queue;
    grpc::ClientContext call;
    call.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    auto done = [&] {
      void* tag;
      bool ok = false;
      return queue.Next(&tag, &ok) && ok;
    };
    auto stream = stub.PrepareCall(&call, "/inference.GRPCInferenceService/ModelStreamInfer", &queue);
    stream->StartCall(nullptr);
    EXPECT_TRUE(done());
    for (const std::string& bytes : messages) {
      grpc::Slice slice(bytes.data(), bytes.size());
      stream->Write(grpc::ByteBuffer(&slice, 1), nullptr);
      EXPECT_TRUE(done());
    }
    stream->WritesDone(nullptr);
    EXPECT_TRUE(done());
    std::vector<inference::ModelStreamInferResponse> answers;
    for (grpc::ByteBuffer bytes;;) {
      stream->Read(&bytes, nullptr);
      if (!done()) break;
      using Traits = grpc::SerializationTraits<inference::ModelStreamInferResponse>;
      EXPECT_TRUE(Traits::Deserialize(&bytes, &answers.emplace_back()).ok());
    }
    grpc::Status status;
    stream->Finish(&status, nullptr);
    done();
    EXPECT_TRUE(status.ok()) << status.error_message();
    return answers;
  }

  // An ordinary request on every protocol.
  std::vector<Outcome> everywhere() {
    return {send(v1_request()),
            send(ppl_request()),
            send(vllm_request()),
            send(native_request()),
            send_streamed(native_request()),
            send(infer_request()),
            send_streamed(infer_request()),
            complete("\"n\":1"),
            chat("\"n\":1")};
  }
  static void expect_refused(const Outcome& o, Code code, std::string_view field, std::string_view value) {
    EXPECT_EQ(code_name(o.code), std::string(code_name(code))) << o.protocol << ": " << o.message;
    EXPECT_THAT(o.message, testing::HasSubstr(std::string(field))) << o.protocol;
    EXPECT_THAT(o.message, testing::HasSubstr(std::string(value))) << o.protocol;
  }
  static void expect_bad(const Outcome& o, std::string_view field, std::string_view value) {
    expect_refused(o, Code::invalid_argument, field, value);
  }

  std::string key_;  // sent with every call when set

 private:
  void authorize(grpc::ClientContext& call) const {
    if (!key_.empty()) call.AddMetadata("authorization", "Bearer " + key_);
  }
  std::string http_key() const { return key_.empty() ? "" : cat("Authorization: Bearer ", key_, "\r\n"); }

  template <class Stub, class Request>
  Outcome streamed(const char* protocol, Stub&& stub, const Request& r) {
    grpc::ClientContext call;
    authorize(call);
    auto reader = stub.Generate(&call, r);
    using Response = std::conditional_t<std::is_same_v<Request, V1>, kvasir::v1::GenerateResponse,
                                        vllm::grpc::engine::GenerateResponse>;
    (void)read_all<Response>(*reader);
    grpc::Status status = reader->Finish();
    return of(protocol, status, call);
  }
  static Outcome of(std::string protocol, const grpc::Status& status, const grpc::ClientContext& call) {
    Outcome out{std::move(protocol), Code(int(status.error_code())), status.error_message(), ""};
    const auto& trailers = call.GetServerTrailingMetadata();
    if (auto it = trailers.find("retry-after"); it != trailers.end())
      out.retry_after.assign(it->second.data(), it->second.size());
    return out;
  }
  // "INVALID_ARGUMENT: n is 0", where the wire has no field for a code.
  static void split(const std::string& text, Outcome& out) {
    out.message = text;
    for (int c = 0; c <= 16; ++c)
      if (text.starts_with(cat(code_name(Code(c)), ":"))) out.code = Code(c);
  }
  static Code code_of(int http) {
    for (int c = 0; c <= 16; ++c)
      if (Code(c) != Code::unknown && http_status(Code(c)) == http) return Code(c);
    return Code::unknown;
  }
};

}  // namespace kvasir::server
