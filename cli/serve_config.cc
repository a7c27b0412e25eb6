#include "cli/serve_config.h"

#include <algorithm>
#include <limits>

#include "model/generation_config.h"

namespace kvasir::cli {

void ServeConfig::define(Options& o) {
  o.with_config_file();
  model.define(o);
  model.define_adapters(o);
  model.define_queue(o);
  server.define(o);
  kv_events.define(o);
  o.section("Answers");
  o.add("generation_config", &generation_config,
        "Sampling where a request says nothing: auto is what generation_config.json beside the weights says, none is "
        "temperature 1 without cuts")
      .one_of({"auto", "none"});
  o.add("seed", &server.seed, "Seed of requests that bring none; -1: each draws its own")
      .range(-1, std::numeric_limits<int64_t>::max());
  o.section("Ending");
  o.add("drain_seconds", &drain, "How long running requests may go on after SIGTERM; a second SIGTERM ends them")
      .at_least(0);
  log.define(o);
  ppl.define(o, *this);
  o.check([this]() -> Status {
    if (model.model.model.empty())
      return invalid_argument("model is not set: --model FILE.gguf, a folder, hf:ORG/REPO, or dummy: for a load test");
    for (const auto& a : model.engine.adapters)
      if (const auto& other = server.model_alias;
          a.name == server.served_model_name || std::find(other.begin(), other.end(), a.name) != other.end())
        return invalid_argument(
            cat("lora has the name '", a.name, "', which is served_model_name or a model_alias; give it another"));
    return {};
  });
  o.example("kvasir serve --model SmolLM2-135M-Instruct.Q4_1.gguf", "gRPC on 50051, HTTP and a page on 8000");
  o.example("kvasir serve --model m.gguf --http-port 9000 --grpc-port -1", "HTTP only, elsewhere");
  o.example("kvasir serve --model m.gguf --host '' --keys keys.json --tls-cert c.pem --tls-key k.pem",
            "to the network, with keys and TLS");
  o.example("kvasir serve --model m.gguf --lora sql=./sql-adapter", "with a LoRA adapter: requests name it as model");
  o.example("kvasir serve --config server.json --check-config", "say whether a configuration is good");
}

Status ServeConfig::find_sampling() {
  model::GenerationConfig said;
  if (generation_config != "none") {
    KVASIR_ASSIGN(said, model::read_generation_config(model.model.model));
  }
  ppl.apply(said.sampling);
  server.said_top_p = float(ppl.top_p), server.said_top_k = ppl.top_k;
  server.sampling = said.sampling, server.sampling_json = said.sampling_json();
  if (server.sampling_json != "{}")
    log_info("what a request leaves unset is sampled as generation_config.json says",
             {{"sampling", server.sampling_json}});
  return {};
}

}  // namespace kvasir::cli
