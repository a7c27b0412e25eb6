// The gRPC port's sockets. gRPC itself takes every connection that comes; here they are accepted by a thread of our
// own, which sleeps until one does. Over the limit a few are taken for a moment, so that health is heard whoever fills
// the rest; the others are closed.
#pragma once

#include <grpcpp/server_builder.h>

#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "core/status.h"
#include "server/grpc/pacer.h"

namespace kvasir::server::rpc {

class Listener {
 public:
  static Result<std::unique_ptr<Listener>> open(const std::string& host, int port, int max_connections);
  ~Listener();

  int port() const { return port_; }
  void start(std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor);
  void stop();                         // no connection comes after it
  void drop(const std::string& peer);  // ends a connection, by gRPC's name of its other end; from any thread

 private:
  explicit Listener(int max_connections) : max_connections_(size_t(max_connections)) {}
  struct Spare {
    int fd;
    uint64_t inode;
    std::chrono::steady_clock::time_point until;
  };
  void run();
  void take(int listening);
  bool has_room();
  void end_spares(size_t most);  // those whose time is over, and the oldest of more than that

  const size_t max_connections_;
  int port_ = -1, wake_ = -1;
  const std::shared_ptr<Pacer> pacer_ = std::make_shared<Pacer>();  // connections outlive this
  std::vector<int> sockets_;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor_;
  // What was handed over: descriptor and inode. gRPC does not say when it closes one, but then the number stands for
  // another file or none.
  std::mutex mutex_;  // of open_ and spares_
  std::unordered_map<int, uint64_t> open_;
  std::deque<Spare> spares_;
  std::thread thread_;
};

}  // namespace kvasir::server::rpc
