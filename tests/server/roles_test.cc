// Every method of every contract against every role, and against no key at all. The methods are read from
// the descriptors, so that one without a line here fails the test.
#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <grpcpp/generic/generic_stub.h>

#include <filesystem>
#include <map>

#include "kserve.grpc.pb.h"
#include "kvasir.grpc.pb.h"
#include "ppl_llm.grpc.pb.h"
#include "server/keys.h"
#include "tests/server/grpc_fixture.h"
#include "vllm_control.grpc.pb.h"
#include "vllm_engine.grpc.pb.h"
#include "vllm_inference.grpc.pb.h"

namespace kvasir::server {
namespace {

enum class Needs { nothing, user, metrics, admin };

const std::map<std::string, Needs>& table() {
  static const std::map<std::string, Needs> methods = {
      {"/kvasir.v1.Inference/Generate", Needs::user},
      {"/kvasir.v1.Inference/Embed", Needs::user},
      {"/kvasir.v1.Inference/Tokenize", Needs::user},
      {"/kvasir.v1.Inference/Detokenize", Needs::user},
      {"/kvasir.v1.Inference/ListModels", Needs::user},
      {"/kvasir.v1.Inference/Cancel", Needs::user},
      {"/kvasir.v1.Inference/GetStats", Needs::metrics},
      {"/ppl.llm.proto.LLMService/Generation", Needs::user},
      {"/vllm.grpc.engine.VllmEngine/Generate", Needs::user},
      {"/vllm.grpc.engine.VllmEngine/Abort", Needs::user},
      {"/vllm.grpc.engine.VllmEngine/GetModelInfo", Needs::user},
      {"/vllm.grpc.engine.VllmEngine/GetServerInfo", Needs::user},
      {"/vllm.grpc.engine.VllmEngine/GetLoads", Needs::metrics},
      {"/vllm.grpc.engine.VllmEngine/FlushCache", Needs::admin},
      {"/vllm.grpc.engine.VllmEngine/HealthCheck", Needs::nothing},
      {"/vllm.grpc.engine.VllmEngine/Embed", Needs::user},
      {"/vllm.grpc.engine.VllmEngine/StartProfile", Needs::nothing},
      {"/vllm.grpc.engine.VllmEngine/StopProfile", Needs::nothing},
      {"/vllm.grpc.engine.VllmEngine/GetTokenizer", Needs::user},
      {"/vllm.grpc.engine.VllmEngine/SubscribeKvEvents", Needs::admin},
      {"/vllm.Inference/Generate", Needs::user},
      {"/vllm.Inference/GenerateStream", Needs::user},
      {"/vllm.Control/GetServerInfo", Needs::user},
      {"/vllm.Control/GetModelInfo", Needs::user},
      {"/vllm.Control/Shutdown", Needs::admin},
      {"/vllm.Control/Abort", Needs::user},
      {"/vllm.Control/LoadLora", Needs::admin},
      {"/vllm.Control/UnloadLora", Needs::admin},
      {"/vllm.Control/ListLoras", Needs::user},
      {"/vllm.Control/GetKvEventSources", Needs::admin},
      {"/vllm.Control/IsPaused", Needs::user},
      {"/vllm.Control/IsSleeping", Needs::user},
      {"/vllm.Control/PauseGeneration", Needs::nothing},
      {"/vllm.Control/ResumeGeneration", Needs::nothing},
      {"/vllm.Control/Sleep", Needs::nothing},
      {"/vllm.Control/WakeUp", Needs::nothing},
      {"/vllm.Control/InitWeightTransferEngine", Needs::nothing},
      {"/vllm.Control/StartWeightUpdate", Needs::nothing},
      {"/vllm.Control/StartDraftWeightUpdate", Needs::nothing},
      {"/vllm.Control/UpdateWeights", Needs::nothing},
      {"/vllm.Control/FinishWeightUpdate", Needs::nothing},
      {"/vllm.Control/UpdateWeightVersion", Needs::nothing},
      {"/vllm.Control/GetWeightVersion", Needs::nothing},
      {"/inference.GRPCInferenceService/ServerLive", Needs::nothing},
      {"/inference.GRPCInferenceService/ServerReady", Needs::nothing},
      {"/inference.GRPCInferenceService/ModelReady", Needs::nothing},
      {"/inference.GRPCInferenceService/ServerMetadata", Needs::nothing},
      {"/inference.GRPCInferenceService/ModelMetadata", Needs::user},
      {"/inference.GRPCInferenceService/ModelConfig", Needs::user},
      {"/inference.GRPCInferenceService/ModelStatistics", Needs::metrics},
      {"/inference.GRPCInferenceService/ModelInfer", Needs::user},
      {"/inference.GRPCInferenceService/ModelStreamInfer", Needs::user},
  };
  return methods;
}

class RolesTest : public GrpcFixture {
 protected:
  RolesTest() {
    char name[] = "/tmp/kvasir-roles-XXXXXX";
    folder_ = mkdtemp(name);
    options_.keys_file = folder_ + "/keys.json";
    for (const char* role : {"user", "metrics", "admin"}) {
      KeyEntry e;
      e.caller.tenant = role;
      e.caller.user = role == std::string("user");
      e.caller.metrics = role == std::string("metrics");
      e.caller.admin = role == std::string("admin");
      keys_[role] = *add_key(options_.keys_file, e);
    }
  }
  ~RolesTest() override { std::filesystem::remove_all(folder_); }

  // An empty request: enough to be let in, or not. Whoever is let into a stream without an end leaves it again.
  grpc::StatusCode knock(const std::string& method, const std::string& authorization, bool endless = false) {
    grpc::GenericStub stub(channel_);
    grpc::CompletionQueue queue;
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() +
                         (endless ? std::chrono::milliseconds(500) : std::chrono::milliseconds(60'000)));
    if (!authorization.empty()) context.AddMetadata("authorization", authorization);
    auto call = stub.PrepareCall(&context, method, &queue);
    auto wait = [&] {
      void* tag;
      bool ok = false;
      return queue.Next(&tag, &ok) && ok;
    };
    call->StartCall(nullptr);
    wait();
    grpc::Slice nothing;
    call->WriteLast(grpc::ByteBuffer(&nothing, 1), grpc::WriteOptions(), nullptr);
    wait();
    for (grpc::ByteBuffer message;;) {
      call->Read(&message, nullptr);
      if (!wait()) break;
    }
    grpc::Status status;
    call->Finish(&status, nullptr);
    wait();
    return status.error_code();
  }

  std::string folder_;
  std::map<std::string, std::string> keys_;
};

TEST_F(RolesTest, EveryMethodHasItsRole) {
  auto* pool = google::protobuf::DescriptorPool::generated_pool();
  for (const char* service : {"kvasir.v1.Inference", "ppl.llm.proto.LLMService", "vllm.grpc.engine.VllmEngine",
                              "vllm.Inference", "vllm.Control", "inference.GRPCInferenceService"}) {
    auto* descriptor = pool->FindServiceByName(service);
    ASSERT_TRUE(descriptor) << service;
    for (int i = 0; i < descriptor->method_count(); ++i) {
      std::string method = cat("/", service, "/", descriptor->method(i)->name());
      ASSERT_TRUE(table().count(method)) << method << " has no role in this test";
      Needs needs = table().at(method);
      auto open = needs == Needs::nothing;
      for (const char* key : {"", "Bearer wrong", "Bearer "})
        EXPECT_EQ(knock(method, key) == grpc::UNAUTHENTICATED, !open) << method << " with key '" << key << "'";
      for (const char* role : {"user", "metrics", "admin"}) {
        bool let_in = open || role == std::string("admin") || (needs == Needs::user && role == std::string("user")) ||
                      (needs == Needs::metrics && role == std::string("metrics"));
        grpc::StatusCode code = knock(method, "Bearer " + keys_[role], let_in && method.ends_with("SubscribeKvEvents"));
        EXPECT_NE(code, grpc::UNAUTHENTICATED) << method << " as " << role;
        EXPECT_EQ(code != grpc::PERMISSION_DENIED, let_in) << method << " as " << role;
      }
    }
  }
}

TEST_F(RolesTest, ATenantCancelsOnlyItsOwn) {
  auto stub = kvasir::v1::Inference::NewStub(channel_);
  kvasir::v1::GenerateRequest request;
  request.set_prompt("x");
  request.set_request_id("shared-name");
  request.set_cache_salt("hang");
  grpc::ClientContext call;
  call.AddMetadata("authorization", "Bearer " + keys_["user"]);
  auto reader = stub->Generate(&call, request);
  kvasir::v1::GenerateResponse event;
  ASSERT_TRUE(reader->Read(&event));
  EXPECT_EQ(engine_.last().tenant, "user");
  auto cancel = [&](const std::string& role) {
    grpc::ClientContext c;
    c.AddMetadata("x-api-key", keys_[role]);
    kvasir::v1::CancelRequest in;
    kvasir::v1::CancelResponse out;
    in.set_request_id("shared-name");
    EXPECT_TRUE(stub->Cancel(&c, in, &out).ok());
    return out.found();
  };
  EXPECT_FALSE(cancel("admin"));
  EXPECT_EQ(engine_.open(), 1);
  EXPECT_TRUE(cancel("user"));
  ASSERT_TRUE(reader->Read(&event));
  EXPECT_TRUE(reader->Finish().ok());
}

}  // namespace
}  // namespace kvasir::server
