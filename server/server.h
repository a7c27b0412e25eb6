// The process's front door: every protocol over one engine, on two ports.
//
//   auto engine = engine::Engine::start(model, engine_options);
//   auto server = Server::start(options, *engine);      // ports are open before the model has loaded
//   ... SIGTERM: server->drain(drain_seconds); a second one, from any thread: server->stop();
#pragma once

#include <chrono>
#include <memory>

#include "core/status.h"
#include "engine/engine.h"
#include "server/options.h"

namespace kvasir::server {

class Server {
 public:
  virtual ~Server() = default;  // stops, if nobody did
  // The engine outlives the server.
  static Result<std::unique_ptr<Server>> start(const ServerOptions& options, engine::Engine& engine);

  virtual int grpc_port() const = 0;  // as bound; -1: off
  virtual int http_port() const = 0;

  // Refuses what is new, lets what runs finish within the limit and be read, then closes. Drains the engine
  // too. Blocks until done; what is left at the limit is cancelled.
  virtual void drain(std::chrono::milliseconds limit) = 0;
  // Cancels what runs and closes now; makes a drain() in progress return. From any thread.
  virtual void stop() = 0;
};

}  // namespace kvasir::server
