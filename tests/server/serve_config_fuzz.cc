// Any bytes as what an operator hands to `kvasir serve`: its whole configuration with ppl.llm's names, a keys file, a
// model's params.json. An answer, never a crash; what is accepted is printed as what is accepted again.
#include <cmath>
#include <cstdlib>

#include "cli/model_flags.h"
#include "cli/serve_config.h"
#include "core/log.h"
#include "model/config.h"
#include "server/keys.h"
#include "server/options.h"
#include "tests/fuzz/seeds.h"

namespace kvasir {
namespace {

struct Config {
  cli::ServeConfig serve;
  Options options{"kvasir serve", ""};
  cli::ModelFlags& model = serve.model;
  Config() { serve.define(options); }
};

void configuration(std::string_view text) {
  Config config;
  if (!config.options.load_json(text, "fuzz").ok()) return;
  (void)config.options.validate();
  (void)config.model.engine_options();
  // What is printed says where each value comes from, so it is the same from the second time on.
  std::string printed = config.options.print_config();
  for (int i = 0; i < 2; ++i) {
    Config again;
    if (!again.options.load_json(printed, "printed").ok()) abort();
    std::string once_more = again.options.print_config();
    if (i == 1 && once_more != printed) abort();
    printed = std::move(once_more);
  }
}

void flags(std::string_view text) {
  std::vector<std::string> args;
  for (size_t end; args.size() < 16 && !text.empty(); text.remove_prefix(std::min(end + 1, text.size()))) {
    end = std::min(text.find('\n'), text.size());
    args.emplace_back(text.substr(0, end));
  }
  // These name files to read, or print and leave; the rest is values.
  for (const std::string& arg : args)
    if (arg.starts_with("--config")) return;
  Config config;
  if (config.options.load_flags(args).ok()) (void)config.options.validate();
}

void keys(std::string_view text) {
  auto entries = server::parse_keys(text, "fuzz");
  if (!entries.ok()) return;
  for (const server::KeyEntry& e : *entries)
    if (e.hash.size() != 64 || e.caller.tenant.empty() || !(e.caller.weight > 0) || e.caller.limits.concurrent < 0)
      abort();
}

void params(std::string_view text) {
  auto config = model::config_from_params(text, "fuzz");
  if (config.ok() && !config->validate().ok()) abort();
}

}  // namespace
}  // namespace kvasir

// The first character says which of them the rest is.
extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  kvasir::write_seeds(
      *argc, *argv,
      {R"(0{"model":"m.gguf","host":"127.0.0.1","http_port":8000,"kv_memory":"1GiB","drain_seconds":"30s",
           "cors":["http://a"],"log_level":"info","policy":"fair","tenant_weight":["a=2"]} // a remark)",
       R"(0{"model_dir":"m","port":23333,"max_running_batch":8,"enable_prefix_cache":true,"top_p":0.5,
           "quant_method":"none","tensor_parallel_size":1,"enable_penalty":true})",
       "0" + kvasir::Config().options.print_config(),
       "1--model-dir\nm\n--port=1\n--enable-penalty\n--top-k\n3\n--kv-memory\n5MB\n--no-prefix-cache\n--cors\na\n--"
       "cors=b",
       R"(2{"keys":[{"id":"k-1","sha256":"0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
           "created":1,"tenant":"t","roles":["user","metrics","admin"],"priority":-1,"weight":0.5,
           "requests_per_minute":1,"tokens_per_minute":2,"concurrent":3}]})",
       R"(3{"hidden_dim":64,"intermediate_dim":128,"num_layers":2,"num_heads":4,"num_kv_heads":2,"vocab_size":260,
           "norm_eps":1e-5,"rope_theta":10000,"max_position":128,"cache_quant_bit":8,"cache_quant_group":8,
           "cache_layout":3,"cache_mode":0,"dynamic_batching":true,"auto_causal":true})"});
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  constexpr void (*kWays[])(std::string_view) = {kvasir::configuration, kvasir::flags, kvasir::keys, kvasir::params};
  kWays[data[0] % 16 % std::size(kWays)]({reinterpret_cast<const char*>(data) + 1, size - 1});
  return 0;
}
