#include "client/chat_client.h"

#include <grpcpp/grpcpp.h>

#include <mutex>

#include "client/grpc_credentials.h"
#include "kvasir.grpc.pb.h"

namespace kvasir::client {
namespace {

using Clock = std::chrono::steady_clock;

Status from_grpc(const grpc::Status& s) {
  if (s.ok()) return {};
  return {static_cast<Code>(s.error_code()), s.error_message()};
}

class GrpcChatClient final : public ChatClient {
 public:
  GrpcChatClient(const ChatTarget& target, const std::shared_ptr<grpc::ChannelCredentials>& with)
      : key_(target.key), stub_(v1::Inference::NewStub(grpc::CreateChannel(target.address, with))) {}

  Result<std::string> model(std::chrono::milliseconds limit) override {
    grpc::ClientContext context;
    prepare(context);
    context.set_deadline(std::chrono::system_clock::now() + limit);
    v1::ListModelsResponse models;
    KVASIR_TRY(from_grpc(stub_->ListModels(&context, {}, &models)));
    return models.models_size() ? models.models(0).id() : std::string("(loading)");
  }

  Result<ChatReply> chat(std::span<const Message> messages, const ChatSettings& settings,
                         const OnText& on_text) override {
    v1::GenerateRequest request;
    for (const Message& m : messages) {
      auto* out = request.mutable_chat()->add_messages();
      out->set_role(m.role);
      out->set_content(m.content);
    }
    if (settings.temperature) request.mutable_sampling()->set_temperature(float(*settings.temperature));
    if (settings.top_p) request.mutable_sampling()->set_top_p(float(*settings.top_p));
    if (settings.seed) request.mutable_sampling()->set_seed(*settings.seed);
    if (settings.max_tokens) request.set_max_tokens(uint32_t(*settings.max_tokens));

    auto context = std::make_shared<grpc::ClientContext>();
    prepare(*context);
    set_current(context);
    auto began = Clock::now();
    ChatReply reply;
    auto stream = stub_->Generate(context.get(), request);
    for (v1::GenerateResponse event; stream->Read(&event);) take(event, began, reply, on_text);
    grpc::Status end = stream->Finish();
    set_current(nullptr);
    reply.seconds = std::chrono::duration<double>(Clock::now() - began).count();
    if (end.error_code() == grpc::StatusCode::CANCELLED) {
      reply.reason = "CANCELLED";
      return reply;
    }
    KVASIR_TRY(from_grpc(end));
    return reply;
  }

  void cancel() override {
    std::lock_guard lock(mutex_);
    if (current_) current_->TryCancel();
  }

 private:
  void prepare(grpc::ClientContext& context) const {
    if (!key_.empty()) context.AddMetadata("authorization", "Bearer " + key_);
  }
  void set_current(std::shared_ptr<grpc::ClientContext> context) {
    std::lock_guard lock(mutex_);
    current_ = std::move(context);
  }
  static void take(const v1::GenerateResponse& event, Clock::time_point began, ChatReply& reply,
                   const OnText& on_text) {
    if (event.has_started()) reply.seed = event.started().seed();
    if (event.has_delta()) {
      if (reply.text.empty()) reply.first_token_seconds = std::chrono::duration<double>(Clock::now() - began).count();
      reply.text += event.delta().text();
      reply.completion_tokens += event.delta().tokens_size();  // until Finished says it
      on_text(event.delta().text());
    }
    if (!event.has_finished()) return;
    const auto& finished = event.finished();
    reply.reason = v1::GenerateResponse_Finished_Reason_Name(finished.reason());
    reply.prompt_tokens = int64_t(finished.usage().prompt_tokens());
    reply.completion_tokens = int64_t(finished.usage().completion_tokens());
    reply.cached_tokens = int64_t(finished.usage().cached_tokens());
  }

  const std::string key_;
  const std::unique_ptr<v1::Inference::Stub> stub_;
  std::mutex mutex_;
  std::shared_ptr<grpc::ClientContext> current_;
};

}  // namespace

Result<std::unique_ptr<ChatClient>> ChatClient::create(const ChatTarget& target) {
  KVASIR_ASSIGN(auto with, grpc_credentials(target.tls));
  return std::unique_ptr<ChatClient>(std::make_unique<GrpcChatClient>(target, with));
}

}  // namespace kvasir::client
