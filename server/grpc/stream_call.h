// A server-streaming call over engine events. One message is on its way at a time, and the next event is
// taken only when the transport took the last: the engine's own bounded queue is all that waits behind a
// slow reader. Nothing here blocks, and no thread belongs to a call.
#pragma once

#include <memory>
#include <mutex>

#include "server/grpc/feed.h"
#include "server/grpc/one_message.h"

namespace kvasir::server::rpc {

// Base: how the client's side is read, OneMessage<Request> or a loop of one's own.
template <class Response, class Base>
class StreamCall : public Base {
 public:
  using Base::Base;

  void OnWriteDone(bool ok) override {
    {
      std::lock_guard lock(this->mutex_);
      writing_ = false;
      if (!ok) cancelled_ = true;
    }
    pump();
  }
  void OnCancel() override {
    {
      std::lock_guard lock(this->mutex_);
      cancelled_ = true;
    }
    pump();
  }

 protected:
  enum class Next { message, waiting, end };
  // Fills the message from one or more events, `last` when nothing follows it; or ends with the status.
  virtual Next next(Response& message, bool& last, Status& status) = 0;

  // Sends what there is, if the last message has gone.
  void pump() {
    this->ends_without_memory([&] { send(); });
  }

  // What the call asks for is in feed_, or it ends with this error.
  void prepared(const Status& status) {
    {
      std::lock_guard lock(this->mutex_);
      prepared_ = true;
      if (!status.ok()) return this->finish(to_grpc(status, this->call_));
    }
    std::weak_ptr<StreamCall> weak = std::static_pointer_cast<StreamCall>(this->shared_from_this());
    feed_.start([weak, &delivery = this->context_.delivery] {
      if (auto self = weak.lock()) (void)delivery.post([self = std::move(self)] { self->pump(); });
    });
    pump();
  }

  Feed feed_;

 private:
  void send() {
    std::lock_guard lock(this->mutex_);
    if (!prepared_ || this->finished() || writing_) return;
    if (cancelled_) {
      feed_.cancel();
      this->finish(grpc::Status(grpc::StatusCode::CANCELLED, "the client went away"));
      return;
    }
    message_.Clear();
    bool last = false;
    Status status;
    switch (next(message_, last, status)) {
      case Next::waiting: return;
      case Next::end: this->finish(to_grpc(status, this->call_)); return;
      case Next::message: break;
    }
    serialize(message_, bytes_);
    if (last) {
      this->finish_with(&bytes_);
    } else {
      writing_ = true;
      this->StartWrite(&bytes_);
    }
  }

  Response message_;
  grpc::ByteBuffer bytes_;
  bool prepared_ = false, writing_ = false, cancelled_ = false;
};

// Asked by one message, answered by many.
template <class Request, class Response>
class AnswerCall : public StreamCall<Response, OneMessage<Request>> {
 public:
  using StreamCall<Response, OneMessage<Request>>::StreamCall;

 protected:
  // Submits what request_ asks for into feed_; an error ends the call.
  virtual Status prepare() = 0;

 private:
  void look() final { this->prepared(prepare()); }
};

}  // namespace kvasir::server::rpc
