// Where every call of the gRPC port comes in, by its header alone: the method is found, the caller known and the call
// counted before a byte of any message is read.
#pragma once

#include <grpcpp/generic/async_generic_service.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/grpc/incoming.h"
#include "server/grpc/one_message.h"

namespace kvasir::server::rpc {

class Door final : public grpc::CallbackGenericService {
 public:
  using Make = std::function<std::shared_ptr<Incoming>(Opening)>;
  explicit Door(const Context& context) : context_(context) {}

  // A method ("/kvasir.v1.Inference/Generate"). No role: anyone may call it. `costs` is its protocol's name for the
  // log: the key's limits are asked before the message is read.
  void add(std::string method, std::optional<Role> role, Make make, const char* costs = nullptr) {
    methods_[std::move(method)] = {role, costs, std::move(make)};
  }
  template <class Request, class Response>
  void unary(std::string method, Role role, typename Unary<Request, Response>::Work work, const char* costs = nullptr) {
    add(
        std::move(method), role,
        [work = std::move(work)](Opening o) -> std::shared_ptr<Incoming> {
          return std::make_shared<Unary<Request, Response>>(std::move(o), work);
        },
        costs);
  }
  template <class Request, class Response>
  void at_once(std::string method, typename AtOnce<Request, Response>::Work work) {
    add(std::move(method), std::nullopt, [work = std::move(work)](Opening o) -> std::shared_ptr<Incoming> {
      return std::make_shared<AtOnce<Request, Response>>(std::move(o), work);
    });
  }
  template <class Call>
  void stream(std::string method, Role role, const char* costs = nullptr) {
    add(
        std::move(method), role,
        [](Opening o) -> std::shared_ptr<Incoming> { return std::make_shared<Call>(std::move(o)); }, costs);
  }

  std::vector<std::string> services() const;  // "kvasir.v1.Inference", each once

  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext* call) override;

 private:
  struct Method {
    std::optional<Role> role;
    const char* costs = nullptr;
    Make make;
  };
  std::shared_ptr<Incoming> open(grpc::GenericCallbackServerContext* call);
  Result<Caller> admit(const Method& method, const grpc::GenericCallbackServerContext& call);

  const Context context_;
  std::map<std::string, Method, std::less<>> methods_;
};

}  // namespace kvasir::server::rpc
