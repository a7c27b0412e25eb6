// A call for embeddings: one answer when all of them are known, and no thread waits for it.
#pragma once

#include <utility>
#include <vector>

#include "server/grpc/stream_call.h"

namespace kvasir::server::rpc {

struct PooledAsk {
  GenerateInput input;
  std::vector<PooledPrompt> prompts;
};

template <class Request, class Response>
class PooledCall : public AnswerCall<Request, Response> {
 public:
  using AnswerCall<Request, Response>::AnswerCall;

 protected:
  using typename AnswerCall<Request, Response>::Next;
  virtual const char* protocol() const = 0;
  virtual Result<PooledAsk> read(const Request& request) = 0;
  virtual void write(const engine::Finished& all, Response& out) = 0;

 private:
  Status prepare() final {
    Services& services = this->context_.services;
    KVASIR_ASSIGN(PooledAsk ask, services.read(this->caller_, protocol(), read(*this->request_)));
    this->forget_request();
    carry(*this->call_, ask.input.request);
    KVASIR_ASSIGN(Submitted submitted, services.pool(this->caller_, std::move(ask.input), std::move(ask.prompts)));
    this->feed_.add(std::move(submitted.stream));
    return {};
  }
  Next next(Response& out, bool& last, Status& status) final {
    while (auto event = this->feed_.poll()) {
      if (auto* failed = std::get_if<engine::Failed>(&event->second)) {
        status = failed->status;
        return Next::end;
      }
      if (auto* all = std::get_if<engine::Finished>(&event->second)) {
        write(*all, out);
        last = true;
        return Next::message;
      }
    }
    return Next::waiting;
  }
};

}  // namespace kvasir::server::rpc
