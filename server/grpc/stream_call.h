// A server-streaming call over engine events. One message is on its way at a time, and the next event is
// taken only when the transport took the last: the engine's own bounded queue is all that waits behind a
// slow reader. Nothing here blocks, and no thread belongs to a call.
#pragma once

#include <grpcpp/support/server_callback.h>

#include <memory>
#include <mutex>

#include "server/grpc/call.h"
#include "server/grpc/feed.h"

namespace kvasir::server::rpc {

template <class Response, class Base = grpc::ServerWriteReactor<Response>>
class StreamCall : public Base, public std::enable_shared_from_this<StreamCall<Response, Base>> {
 public:
  StreamCall(const Context& context, grpc::CallbackServerContext* call) : context_(context), call_(call) {}

  // Owns itself from here until gRPC is done with it; prepare() runs on a worker.
  void begin() {
    self_ = this->shared_from_this();
    if (!context_.workers.post([self = self_] { self->prepared(self->prepare()); }))
      prepared(resource_exhausted("the server has too many calls to look at; try again")
                   .with_retry_after(std::chrono::seconds(1)));
  }

  void OnWriteDone(bool ok) override {
    {
      std::lock_guard lock(mutex_);
      writing_ = false;
      if (!ok) cancelled_ = true;
    }
    pump();
  }
  void OnCancel() override {
    {
      std::lock_guard lock(mutex_);
      cancelled_ = true;
    }
    pump();
  }
  void OnDone() override {
    auto last = std::move(self_);  // destroys the streams, which cancels what still runs
  }

 protected:
  enum class Next { message, waiting, end };
  // Submits what the call asks for into feed_; an error ends the call.
  virtual Status prepare() = 0;
  // Fills the message from one or more events, `last` when nothing follows it; or ends with the status.
  virtual Next next(Response& message, bool& last, Status& status) = 0;

  // What next() reads is written under its lock.
  template <class F>
  void locked(F&& f) {
    std::lock_guard lock(mutex_);
    f();
  }
  bool finished() const { return finished_; }  // under the lock

  // Sends what there is, if the last message has gone.
  void pump() {
    std::lock_guard lock(mutex_);
    if (!prepared_ || finished_ || writing_) return;
    if (cancelled_) {
      finished_ = true;
      feed_.cancel();
      this->Finish(grpc::Status(grpc::StatusCode::CANCELLED, "the client went away"));
      return;
    }
    message_.Clear();
    bool last = false;
    Status status;
    switch (next(message_, last, status)) {
      case Next::waiting: return;
      case Next::end:
        finished_ = true;
        this->Finish(to_grpc(status, call_));
        return;
      case Next::message: break;
    }
    if (last) {
      finished_ = true;
      this->StartWriteAndFinish(&message_, grpc::WriteOptions(), grpc::Status::OK);
    } else {
      writing_ = true;
      this->StartWrite(&message_);
    }
  }

  const Context context_;
  grpc::CallbackServerContext* const call_;
  Feed feed_;

 private:
  void prepared(Status status) {
    {
      std::lock_guard lock(mutex_);
      prepared_ = true;
      if (!status.ok()) {
        finished_ = true;
        this->Finish(to_grpc(status, call_));
        return;
      }
    }
    std::weak_ptr<StreamCall> weak = this->shared_from_this();
    feed_.start([weak, &delivery = context_.delivery] {
      if (auto self = weak.lock()) (void)delivery.post([self = std::move(self)] { self->pump(); });
    });
    pump();
  }

  std::mutex mutex_;
  std::shared_ptr<StreamCall> self_;
  Response message_;
  bool prepared_ = false, writing_ = false, cancelled_ = false, finished_ = false;
};

}  // namespace kvasir::server::rpc
