// All that `kvasir serve` can be told. `kvasir health` reads it too, to ask a server by that server's own
// configuration.
#pragma once

#include "cli/model_flags.h"
#include "cli/ppl_names.h"
#include "core/log.h"
#include "server/kv_zmq/kv_publisher.h"
#include "server/options.h"

namespace kvasir::cli {

struct ServeConfig {
  LogConfig log;
  ModelFlags model;
  server::ServerOptions server;
  server::KvPublisherOptions kv_events;
  PplNames ppl;
  std::string generation_config = "auto";
  std::chrono::milliseconds drain{30000};

  void define(Options& options);
  // What the model's makers say of sampling is for what requests leave unset, but for what the options say.
  Status find_sampling();
};

}  // namespace kvasir::cli
