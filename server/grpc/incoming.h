// One call of the port, whatever its method. Its messages are kept as bytes until they are read for a caller who is
// allowed to call that method; it owns itself until gRPC is done with it.
#pragma once

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/support/byte_buffer.h>

#include <memory>
#include <mutex>
#include <new>

#include "server/grpc/call.h"
#include "server/grpc/calls.h"

namespace kvasir::server::rpc {

// What a call begins with: it has been let in, and nothing of it was read.
struct Opening {
  const Context& context;
  grpc::CallbackServerContext* call;
  Caller caller;
};

class Incoming : public grpc::ServerGenericBidiReactor, public std::enable_shared_from_this<Incoming> {
 public:
  explicit Incoming(Opening opening)
      : context_(opening.context), call_(opening.call), caller_(std::move(opening.caller)) {}

  void begin() {
    self_ = shared_from_this();
    start();
  }
  // Whatever it does: it is over.
  void end(const grpc::Status& status) {
    std::lock_guard lock(mutex_);
    finish(status);
  }

  // Memory that cannot be had ends a call, not the server. Not under the lock.
  template <class F>
  void ends_without_memory(F&& f) {
    try {
      f();
    } catch (const std::bad_alloc&) {
      end({grpc::StatusCode::RESOURCE_EXHAUSTED, "no memory is left for this call"});
    }
  }

  void OnReadDone(bool ok) final {
    context_.calls.heard(*this);
    ends_without_memory([&] {
      if (ok)
        message();
      else
        no_message();
    });
  }
  void OnDone() final {
    context_.calls.left(*this);
    auto last = std::move(self_);
  }

 protected:
  virtual void start() { listen(); }
  virtual void message() = 0;  // received_ has one
  // The client has said all it had to.
  virtual void no_message() { end({grpc::StatusCode::INVALID_ARGUMENT, "the call came without a message"}); }

  // Reads a message, which has to come within the time. Not after finish().
  void listen() {
    context_.calls.waits(*this);
    StartRead(&received_);
  }
  // Under the lock, as everything that writes: nothing goes out after the end.
  void finish(const grpc::Status& status) {
    if (!leave()) return;
    Finish(status);
  }
  void finish_with(const grpc::ByteBuffer* message) {
    if (!leave()) return;
    StartWriteAndFinish(message, grpc::WriteOptions(), grpc::Status::OK);
  }
  bool finished() const { return finished_; }
  template <class F>
  void locked(F&& f) {
    std::lock_guard lock(mutex_);
    f();
  }

  const Context context_;
  grpc::CallbackServerContext* const call_;
  const Caller caller_;
  grpc::ByteBuffer received_;
  std::mutex mutex_;

 private:
  friend class Calls;
  bool leave() {
    if (finished_) return false;
    finished_ = true;
    context_.calls.leaves(*this);
    return true;
  }

  bool finished_ = false;
  Calls::Seat seat_;
  std::shared_ptr<Incoming> self_;
};

// A call that is not let in.
class Refused final : public Incoming {
 public:
  Refused(Opening opening, grpc::Status why) : Incoming(std::move(opening)), why_(std::move(why)) {}

 private:
  void start() override { end(why_); }
  void message() override {}
  const grpc::Status why_;
};

}  // namespace kvasir::server::rpc
