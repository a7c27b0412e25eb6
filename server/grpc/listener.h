// The gRPC port's sockets. gRPC itself takes every connection that comes; here they are accepted by a thread of our
// own, which sleeps until one does and closes those over the limit.
#pragma once

#include <grpcpp/server_builder.h>

#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "core/status.h"

namespace kvasir::server::rpc {

class Listener {
 public:
  static Result<std::unique_ptr<Listener>> open(const std::string& host, int port, int max_connections);
  ~Listener();

  int port() const { return port_; }
  void start(std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor);
  void stop();  // no connection comes after it

 private:
  explicit Listener(int max_connections) : max_connections_(size_t(max_connections)) {}
  void run();
  void take(int listening);
  bool has_room();

  const size_t max_connections_;
  int port_ = -1, wake_ = -1;
  std::vector<int> sockets_;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor_;
  // What was handed over: descriptor and inode. gRPC does not say when it closes one, but then the number stands for
  // another file or none.
  std::unordered_map<int, uint64_t> open_;
  std::thread thread_;
};

}  // namespace kvasir::server::rpc
