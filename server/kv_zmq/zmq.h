// The few calls of ZeroMQ that publishing takes. Its library is opened when somebody asks for it, so that the program
// starts without it.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"

namespace kvasir::server {

class Zmq {
 public:
  enum class Kind { pub, router };
  struct Limits {
    int messages = 0;      // that wait for one peer; more are dropped
    int receive_ms = 250;  // after which receive() says that nothing came
  };

  // A socket is one thread's.
  class Socket {
   public:
    ~Socket();
    // "tcp://*:5557" listens, "tcp://HOST:5557" goes to where somebody listens.
    Status attach(const std::string& address);
    bool send(const std::vector<std::string_view>& frames);
    bool receive(std::vector<std::string>* frames);

   private:
    friend class Zmq;
    Socket(const Zmq& zmq, void* socket) : zmq_(zmq), socket_(socket) {}
    const Zmq& zmq_;
    void* const socket_;
  };

  static Result<std::unique_ptr<Zmq>> open();
  ~Zmq();  // after its sockets
  Result<std::unique_ptr<Socket>> socket(Kind kind, Limits limits);

 private:
  Zmq();
  Status refusal(const std::string& what) const;

  struct Calls;
  std::unique_ptr<Calls> calls_;
  void* context_ = nullptr;
};

// Whether an address is one that Zmq::Socket takes.
Status check_zmq_address(const std::string& address);

}  // namespace kvasir::server
