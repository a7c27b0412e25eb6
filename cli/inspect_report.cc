#include "cli/inspect_report.h"

#include <cstdio>

#include "core/cat.h"

namespace kvasir::cli {
namespace {

void print_network(const Inspection& found) {
  const model::ModelConfig& c = found.files.config;
  std::printf("name          %s\narchitecture  %s\ntype          %s\n", c.name.c_str(), c.architecture.c_str(),
              c.quantization.c_str());
  std::printf("parameters    %.1f M in %zu tensors\n", double(found.parameters) / 1e6, found.tensors.size());
  std::printf("layers        %d, hidden %d, ffn %d, heads %d of %d, kv heads %d\n", c.layers, c.hidden, c.ffn, c.heads,
              c.head_dim, c.kv_heads);
  if (c.latent.on())
    std::printf("latent        %d and %d that turn in the cache; heads' queries %d, values %d\n", c.latent.rank,
                c.latent.rope, c.latent.nope + c.latent.rope, c.latent.value);
  if (c.encoder_layers > 0)
    std::printf("kind          encoder-decoder, of %d and %d layers that take turns in the cache\n", c.encoder_layers,
                c.decoder_layers);
  if (c.experts.routing.experts > 0)
    std::printf("experts       %d of %d, %d of them and %.1f M parameters a token\n", c.experts.routing.experts,
                c.experts.ffn, c.experts.routing.used, double(found.active_parameters()) / 1e6);
  std::printf("vocabulary    %d\ncontext       %d\n", c.vocab, found.info.context_length);
  if (c.window > 0) std::printf("window        %d\n", c.window);
  print_types(found.types);
  std::printf("cache         %lld bytes a token in %s\n", static_cast<long long>(found.info.kv_bytes_per_token),
              found.form.to_string().c_str());
  if (found.info.state_bytes > 0)
    std::printf("states        %lld bytes a sequence, of layers of linear attention\n",
                static_cast<long long>(found.info.state_bytes));
  if (found.attention_dtype == "fp8") std::printf("attention     queries, keys and values in E4M3\n");
  for (const model::ModelConfig& r : found.ranks)
    if (r.part.ranks > 1)
      std::printf(
          "rank %-8d heads %d from %lld, kv heads %d, ffn %d, %sof the vocabulary %d, cache %lld bytes a token\n",
          r.part.rank, r.heads, static_cast<long long>(r.part.heads.first), r.kv_heads, r.ffn,
          r.part.experts.split() ? cat("experts ", r.part.experts.count, ", ").c_str() : "", r.vocab,
          static_cast<long long>(r.kv_bytes_per_token(found.form, false)));
}

void print_memory(const Inspection& found) {
  const Needs& n = found.needs;
  std::printf("memory        weights %s (of %s in the file) + cache %s (%d sequences of %d tokens)\n",
              human(n.weights).c_str(), human(found.bytes).c_str(), human(n.cache).c_str(), found.batch, found.context);
  std::printf("              + activations %s + %s %s = %s on %s\n", human(n.steps).c_str(),
              n.on_gpu ? "libraries" : "server", human(n.program).c_str(), human(n.all()).c_str(),
              !n.on_gpu                ? "a CPU"
              : found.ranks.size() > 1 ? cat("each of ", found.ranks.size(), " GPUs, at most").c_str()
                                       : "a GPU");
  const std::string fits = n.lacking() == 0 ? "it fits"
                                            : cat("lacks ", human(n.lacking()),
                                                  "; fewer or shorter sequences (--batch, --context) or a narrower "
                                                  "cache (--kv-dtype) take less");
  if (!n.on_gpu)
    std::printf("machine       %s for this process, %s free: %s\n", human(n.limit).c_str(), human(n.free).c_str(),
                fits.c_str());
  else if (n.is_there())
    std::printf("GPU           %s, %s, %s free: %s\n", n.gpu.c_str(), human(n.limit).c_str(), human(n.free).c_str(),
                fits.c_str());
  else
    std::printf("GPU           none here that this build can use\n");
  std::printf("pages         %s\n", found.pages.formula.c_str());
  if (found.draft)
    std::printf("draft model   %s, weights %s + cache %s beside these (%lld pages, %lld bytes a token)\n",
                found.draft->name.c_str(), human(found.draft->weight_bytes).c_str(), human(found.draft->bytes).c_str(),
                static_cast<long long>(found.draft->pages), static_cast<long long>(found.draft->kv_bytes_per_token));
}

}  // namespace

std::string human(int64_t bytes) {
  char out[32];
  if (bytes >= 1 << 30)
    std::snprintf(out, sizeof out, "%.2f GiB", double(bytes) / (1 << 30));
  else
    std::snprintf(out, sizeof out, "%.1f MiB", double(bytes) / (1 << 20));
  return out;
}

void print_types(const TensorTypes& types) {
  for (auto& [name, t] : types)
    std::printf("%-13s %lld tensors, %s\n", name.c_str(), static_cast<long long>(t.first), human(t.second).c_str());
}

nlohmann::ordered_json inspection_json(const Inspection& found) {
  const model::ModelConfig& c = found.files.config;
  nlohmann::ordered_json j = {{"name", c.name},
                              {"architecture", c.architecture},
                              {"type", c.quantization},
                              {"parameters", found.parameters},
                              {"layers", c.layers},
                              {"hidden", c.hidden},
                              {"ffn", c.ffn},
                              {"heads", c.heads},
                              {"kv_heads", c.kv_heads},
                              {"head_dim", c.head_dim},
                              {"vocab", c.vocab},
                              {"context", c.context},
                              {"window", c.window},
                              {"experts", c.experts.routing.experts},
                              {"experts_used", c.experts.routing.used},
                              {"active_parameters", found.active_parameters()},
                              {"weight_bytes", found.bytes},
                              {"kv_type", found.form.to_string()},
                              {"attention_dtype", found.attention_dtype},
                              {"kv_bytes_per_token", found.info.kv_bytes_per_token},
                              {"cache_bytes", found.cache},
                              {"kv_memory", found.pages.memory},
                              {"memory",
                               {{"device", found.needs.on_gpu ? "cuda" : "cpu"},
                                {"weights", found.needs.weights},
                                {"cache", found.needs.cache},
                                {"steps", found.needs.steps},
                                {"program", found.needs.program},
                                {"all", found.needs.all()}}}};
  if (found.needs.on_gpu && found.needs.is_there()) j["memory"]["gpu"] = found.needs.gpu;
  if (found.needs.is_there()) {
    j["memory"]["limit"] = found.needs.limit, j["memory"]["free"] = found.needs.free;
    j["memory"]["lacking"] = found.needs.lacking();
  }
  if (c.latent.on())
    j["latent"] = {{"rank", c.latent.rank},
                   {"rope", c.latent.rope},
                   {"nope", c.latent.nope},
                   {"value", c.latent.value},
                   {"query_rank", c.latent.query_rank}};
  if (found.info.state_bytes > 0)
    j["state_bytes_per_sequence"] = found.info.state_bytes, j["states"] = found.pages.states.sequences,
    j["kept_states"] = found.pages.states.kept;
  if (c.encoder_layers > 0) j["encoder_layers"] = c.encoder_layers, j["decoder_layers"] = c.decoder_layers;
  for (const scheduler::PageGroup& g : found.pages.groups)
    j["pools"].push_back({{"pages", g.pages}, {"page_size", found.page_size}, {"window", g.window}});
  for (const model::ModelConfig& r : found.ranks)
    if (r.part.ranks > 1)
      j["ranks"].push_back({{"heads", r.heads},
                            {"kv_heads", r.kv_heads},
                            {"ffn", r.ffn},
                            {"experts", r.part.experts.count},
                            {"vocab", r.vocab},
                            {"kv_bytes_per_token", r.kv_bytes_per_token(found.form, false)}});
  if (found.draft)
    j["draft_model"] = {{"name", found.draft->name},
                        {"weight_bytes", found.draft->weight_bytes},
                        {"kv_bytes_per_token", found.draft->kv_bytes_per_token},
                        {"pages", found.draft->pages},
                        {"cache_bytes", found.draft->bytes}};
  for (auto& [name, t] : found.types) j["types"][name] = {{"tensors", t.first}, {"bytes", t.second}};
  if (found.list_tensors)
    for (const auto& t : found.tensors)
      j["tensors"].push_back({{"name", t.name}, {"type", type_info(t.type)->name}, {"rows", t.rows}, {"cols", t.cols}});
  return j;
}

void print_inspection(const Inspection& found) {
  print_network(found);
  print_memory(found);
  if (found.list_tensors)
    for (const auto& t : found.tensors)
      std::printf("%-40s %-5s %lld x %lld\n", t.name.c_str(), std::string(type_info(t.type)->name).c_str(),
                  static_cast<long long>(t.rows), static_cast<long long>(t.cols));
}

}  // namespace kvasir::cli
