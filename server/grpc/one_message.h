// Calls that begin with one message of the client: it is read, counted against the memory of all requests, and looked
// at on a worker, where callers take turns.
#pragma once

#include <grpcpp/impl/codegen/proto_utils.h>

#include <functional>
#include <memory>
#include <string>

#include "core/cat.h"
#include "server/grpc/incoming.h"
#include "server/grpc/parts.h"
#include "server/memory.h"

namespace kvasir::server::rpc {

// A message of that type, or INTERNAL: the transport's own status for bytes that it refuses.
template <class Message>
Status parse(grpc::ByteBuffer& bytes, Message& to) {
  if (!few_parts(bytes, *Message::descriptor()))
    return invalid_argument(cat("the message has more than ", kMostParts, " strings and messages in it"));
  if (grpc::SerializationTraits<Message>::Deserialize(&bytes, &to).ok()) return {};
  return internal_error(cat("what was sent is no ", Message::descriptor()->full_name(),
                            ": its bytes do not parse, or a string in it is not UTF-8"));
}
template <class Message>
void serialize(const Message& from, grpc::ByteBuffer& to) {
  bool own = false;
  to.Clear();
  (void)grpc::SerializationTraits<Message>::Serialize(from, &to, &own);
}

template <class Request>
class OneMessage : public Incoming {
 public:
  explicit OneMessage(Opening opening)
      : Incoming(std::move(opening)), share_(&context_.services.budget(), caller_.tenant) {}

 protected:
  virtual void look() = 0;  // on a worker; request_ is there
  // The message is of no more use.
  void forget_request() {
    request_.reset();
    share_.drop();
  }

  std::unique_ptr<Request> request_;

 private:
  void message() final {
    Status status = share_.hold(received_.Length());
    if (!status.ok()) return end(to_grpc(status, call_));
    auto self = std::static_pointer_cast<OneMessage>(shared_from_this());
    auto work = [self] { self->ends_without_memory([&] { self->unpack(); }); };
    if (!context_.workers.post(std::move(work), caller_.tenant, received_.Length()))
      end(to_grpc(resource_exhausted("the server has too many calls to look at; try again")
                      .with_retry_after(std::chrono::seconds(1)),
                  call_));
  }

  void unpack() {
    request_ = std::make_unique<Request>();
    if (Status parsed = parse(received_, *request_); !parsed.ok()) {
      forget_request();
      return end(to_grpc(parsed, call_));
    }
    look();
  }

  ByteBudget::Share share_;
};

template <class Request, class Response>
class Unary final : public OneMessage<Request> {
 public:
  using Work = std::function<Status(const Caller&, const Request&, Response&)>;
  Unary(Opening opening, Work work) : OneMessage<Request>(std::move(opening)), work_(std::move(work)) {}

 private:
  void look() override {
    Response response;
    Status status = work_(this->caller_, *this->request_, response);
    this->forget_request();
    if (!status.ok()) return this->end(to_grpc(status, this->call_));
    serialize(response, answer_);
    this->locked([&] { this->finish_with(&answer_); });
  }

  const Work work_;
  grpc::ByteBuffer answer_;
};

// What neither works nor waits: answered where its message, a small one, is read.
template <class Request, class Response>
class AtOnce final : public Incoming {
 public:
  using Work = std::function<grpc::Status(const Request&, Response&)>;
  AtOnce(Opening opening, Work work) : Incoming(std::move(opening)), work_(std::move(work)) {}

 private:
  static constexpr size_t kMost = 4096;
  void message() override {
    if (received_.Length() > kMost)
      return end({grpc::StatusCode::INVALID_ARGUMENT,
                  cat("the message has ", received_.Length(), " bytes; at most ", kMost, " are taken here")});
    Request request;
    Response response;
    if (Status parsed = parse(received_, request); !parsed.ok()) return end(to_grpc(parsed, call_));
    grpc::Status status = work_(request, response);
    if (!status.ok()) return end(status);
    serialize(response, answer_);
    locked([&] { finish_with(&answer_); });
  }

  const Work work_;
  grpc::ByteBuffer answer_;
};

}  // namespace kvasir::server::rpc
