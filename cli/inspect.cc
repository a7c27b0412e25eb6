// kvasir inspect: what a model file is, and the memory it takes to serve.
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "cli/command.h"
#include "cli/hub/hub.h"
#include "cli/model_flags.h"
#include "core/config.h"
#include "core/host.h"
#include "core/log.h"
#include "engine/kv_memory.h"
#include "kvcache/view.h"
#include "model/arch/registry.h"
#include "model/cache_form.h"
#include "model/formats/gguf.h"
#include "model/load.h"

namespace kvasir::cli {
namespace {

using json = nlohmann::ordered_json;

std::string human(int64_t bytes) {
  char out[32];
  if (bytes >= 1 << 30)
    std::snprintf(out, sizeof out, "%.2f GiB", double(bytes) / (1 << 30));
  else
    std::snprintf(out, sizeof out, "%.1f MiB", double(bytes) / (1 << 20));
  return out;
}

// The pages that serve makes of its memory, and how that comes about.
struct Pools {
  int64_t memory = 0;
  std::string formula;
  std::vector<scheduler::PageGroup> groups;
};

Result<Pools> pools_of(const model::ModelInfo& info, int64_t memory, const engine::KvSteps& steps) {
  Pools out;
  const int64_t free = host_limits().memory_available;
  out.memory = memory > 0 ? memory : engine::default_kv_memory(free);
  out.formula = memory > 0 ? human(memory) : cat("min(", human(free), " free / 4, 4 GiB) = ", human(out.memory));
  out.formula += cat(" / (", steps.page_size, " tokens x ", info.kv_bytes_per_token, " bytes)");
  KVASIR_ASSIGN(out.groups, engine::kv_pools(out.memory, info, steps, true));
  if (out.groups.size() == 1) {
    out.formula += cat(" = ", out.groups[0].pages, " pages of all layers");
  } else {
    out.formula = cat(out.formula, "; layers with a window: ", steps.max_running, " x (pages of ", info.sliding_window,
                      " + 2) + pages of ", steps.max_tokens_per_step, ", at most that = ", out.groups[1].pages,
                      " pages; the others have what is left = ", out.groups[0].pages, " pages");
  }
  return out;
}

// A draft model's part of that memory.
struct Draft {
  std::string name;
  int64_t weight_bytes = 0, kv_bytes_per_token = 0, pages = 0, bytes = 0;
};

// It comes out of `memory`.
Result<Draft> draft_of(const std::string& file, const model::ModelInfo& model, const engine::KvSteps& steps,
                       int64_t& memory) {
  KVASIR_ASSIGN(model::ModelFiles files, model::open_model(file));
  if (files.config.vocab != model.vocab_size)
    log_warn("the draft model's vocabulary has another size; serve compares the tokens",
             {{"draft", files.config.vocab}, {"model", model.vocab_size}});
  KVASIR_ASSIGN(const auto form, model::cache_form_of(files.config, {}, DType::f16, *files.weights));
  model::ModelInfo info = files.config.info();
  info.kv_bytes_per_token = files.config.kv_bytes_per_token(form, false);
  const engine::DraftPages part = engine::draft_pages(memory, model, info, steps);
  memory -= part.bytes;
  return Draft{files.config.name, files.weights->bytes(), info.kv_bytes_per_token, part.pages, part.bytes};
}

void list_architectures() {
  std::puts("| architecture | models | model_type of config.json | GGUF architecture |\n| --- | --- | --- | --- |");
  for (const model::Architecture* a : model::architectures()) {
    auto or_name = [a](std::string_view s) { return std::string(s.empty() ? a->name : s); };
    std::printf("| %s | %s | %s | %s |\n", std::string(a->name).c_str(), std::string(a->models).c_str(),
                or_name(a->hugging_face).c_str(), or_name(a->gguf).c_str());
  }
}

// How many tensors there are of each type, and their bytes.
using TypeCounts = std::map<std::string, std::pair<int64_t, int64_t>>;

template <class Tensors>
TypeCounts count_types(const Tensors& tensors) {
  TypeCounts types;
  for (const auto& t : tensors) {
    auto& [count, bytes] = types[std::string(type_info(t.type)->name)];
    ++count, bytes += t.bytes;
  }
  return types;
}
void print_types(const TypeCounts& types) {
  for (const auto& [name, t] : types)
    std::printf("%-13s %lld tensors, %s\n", name.c_str(), static_cast<long long>(t.first), human(t.second).c_str());
}

// Of a file that cannot be served, what it says of itself.
void describe_unserved(const std::string& path) {
  auto gguf = model::Gguf::open(path);
  if (!gguf.ok()) return;
  std::printf("name          %s\narchitecture  %s\n",
              std::string((*gguf)->string("general.name").value_or("-")).c_str(),
              std::string((*gguf)->string("general.architecture").value_or("-")).c_str());
  print_types(count_types((*gguf)->tensors()));
}

struct InspectOptions {
  std::string model, draft_model;
  int batch = 16, context = 0, ranks = 1;
  bool tensors = false, as_json = false, architectures = false;
  ByteSize kv_memory;
  engine::KvSteps steps;
  kvcache::FormWish wish;
  hub::HubOptions hub;

  void define(Options& o);
};

void InspectOptions::define(Options& o) {
  o.positional("model", &model,
               "A GGUF file, a directory with config.json and safetensors, hf:ORG/REPO[:FILE], or dummy:...");
  o.add("batch", &batch, "Sequences at once, for the memory needed").range(1, 100000);
  o.add("context", &context, "Tokens of each; 0 is all the model can").range(0, 1 << 24);
  o.add("ranks", &ranks, "Show what each of so many ranks has").range(1, model::kMostRanks).only_flag();
  o.add("kv_memory", &kv_memory, "Memory of the KV cache; 0 is serve's default on a CPU").only_flag();
  o.add("draft_model", &draft_model, "The model that drafts beside it, and its part of that memory")
      .value_name("MODEL")
      .only_flag();
  define_cache_form(o, wish);
  o.add("page_size", &steps.page_size, "Tokens a page of the cache").range(1, kvcache::kMostPageTokens).only_flag();
  o.add("architectures", &architectures, "List the architectures that are served, as a table of Markdown").only_flag();
  o.add("tensors", &tensors, "List every tensor").only_flag();
  o.add("json", &as_json, "One JSON object").only_flag();
  hub.define(o);
  o.example("kvasir inspect model.gguf --batch 32 --context 4096", "the memory 32 sequences of 4,096 tokens take");
}

// What a model is, and what serving it takes.
struct Inspected {
  const model::ModelFiles& files;
  kvcache::CacheForm form;
  std::vector<model::ModelConfig> ranks;
  model::ModelInfo info;
  TypeCounts types;
  int64_t active = 0, cache_bytes = 0;  // parameters that a token takes; of `batch` sequences of `context`
  std::optional<Draft> draft;
  Pools pools;
};

json json_of(const Inspected& m, const InspectOptions& asked) {
  const model::ModelConfig& c = m.files.config;
  json j = {{"name", c.name},
            {"architecture", c.architecture},
            {"type", c.quantization},
            {"parameters", m.files.weights->parameters()},
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
            {"active_parameters", m.active},
            {"weight_bytes", m.files.weights->bytes()},
            {"kv_type", m.form.to_string()},
            {"kv_bytes_per_token", m.info.kv_bytes_per_token},
            {"cache_bytes", m.cache_bytes},
            {"kv_memory", m.pools.memory}};
  if (c.encoder_layers > 0) j["encoder_layers"] = c.encoder_layers, j["decoder_layers"] = c.decoder_layers;
  for (const scheduler::PageGroup& g : m.pools.groups)
    j["pools"].push_back({{"pages", g.pages}, {"page_size", asked.steps.page_size}, {"window", g.window}});
  for (const model::ModelConfig& r : m.ranks)
    if (r.part.ranks > 1)
      j["ranks"].push_back({{"heads", r.heads},
                            {"kv_heads", r.kv_heads},
                            {"ffn", r.ffn},
                            {"experts", r.part.experts.count},
                            {"vocab", r.vocab},
                            {"kv_bytes_per_token", r.kv_bytes_per_token(m.form, false)}});
  if (m.draft)
    j["draft_model"] = {{"name", m.draft->name},
                        {"weight_bytes", m.draft->weight_bytes},
                        {"kv_bytes_per_token", m.draft->kv_bytes_per_token},
                        {"pages", m.draft->pages},
                        {"cache_bytes", m.draft->bytes}};
  for (const auto& [name, t] : m.types) j["types"][name] = {{"tensors", t.first}, {"bytes", t.second}};
  if (asked.tensors)
    for (const auto& t : m.files.weights->tensors())
      j["tensors"].push_back({{"name", t.name}, {"type", type_info(t.type)->name}, {"rows", t.rows}, {"cols", t.cols}});
  return j;
}

void print_network(const Inspected& m) {
  const model::ModelConfig& c = m.files.config;
  std::printf("name          %s\narchitecture  %s\ntype          %s\n", c.name.c_str(), c.architecture.c_str(),
              c.quantization.c_str());
  std::printf("parameters    %.1f M in %zu tensors\n", double(m.files.weights->parameters()) / 1e6,
              m.files.weights->tensors().size());
  std::printf("layers        %d, hidden %d, ffn %d, heads %d of %d, kv heads %d\n", c.layers, c.hidden, c.ffn, c.heads,
              c.head_dim, c.kv_heads);
  if (c.encoder_layers > 0)
    std::printf("kind          encoder-decoder, of %d and %d layers that take turns in the cache; on a CPU\n",
                c.encoder_layers, c.decoder_layers);
  if (c.experts.routing.experts > 0)
    std::printf("experts       %d of %d, %d of them and %.1f M parameters a token\n", c.experts.routing.experts,
                c.experts.ffn, c.experts.routing.used, double(m.active) / 1e6);
  std::printf("vocabulary    %d\ncontext       %d\n", c.vocab, m.info.context_length);
  if (c.window > 0) std::printf("window        %d\n", c.window);
  print_types(m.types);
}

void print_memory(const Inspected& m, const InspectOptions& asked) {
  std::printf("cache         %lld bytes a token in %s\n", static_cast<long long>(m.info.kv_bytes_per_token),
              m.form.to_string().c_str());
  for (const model::ModelConfig& r : m.ranks)
    if (r.part.ranks > 1)
      std::printf(
          "rank %-8d heads %d from %lld, kv heads %d, ffn %d, %sof the vocabulary %d, cache %lld bytes a token\n",
          r.part.rank, r.heads, static_cast<long long>(r.part.heads.first), r.kv_heads, r.ffn,
          r.part.experts.split() ? cat("experts ", r.part.experts.count, ", ").c_str() : "", r.vocab,
          static_cast<long long>(r.kv_bytes_per_token(m.form, false)));
  std::printf("memory        weights %s + cache %s (%d sequences of %d tokens)\n",
              human(m.files.weights->bytes()).c_str(), human(m.cache_bytes).c_str(), asked.batch, asked.context);
  std::printf("pages         %s\n", m.pools.formula.c_str());
  if (m.draft)
    std::printf("draft model   %s, weights %s + cache %s beside these (%lld pages, %lld bytes a token)\n",
                m.draft->name.c_str(), human(m.draft->weight_bytes).c_str(), human(m.draft->bytes).c_str(),
                static_cast<long long>(m.draft->pages), static_cast<long long>(m.draft->kv_bytes_per_token));
}

int failed(const Status& s) {
  std::fprintf(stderr, "kvasir inspect: %s\n", s.to_string().c_str());
  return kFailed;
}
int misused(const std::string& what) {
  std::fprintf(stderr, "kvasir inspect: %s\n", what.c_str());
  return kUsage;
}

int show(const model::ModelFiles& files, InspectOptions& asked) {
  const model::ModelConfig& c = files.config;
  if (asked.context == 0) asked.context = c.context;
  auto form = model::cache_form_of(c, asked.wish, DType::f16, *files.weights);
  if (!form.ok()) return misused(form.status().message());
  auto ranks = model::split_over_ranks(c, *files.weights, asked.ranks);
  if (!ranks.ok()) return failed(ranks.status());
  Inspected m{files, std::move(*form), std::move(*ranks), c.info(), count_types(files.weights->tensors())};
  m.info.kv_bytes_per_token = m.info.windowed_kv_bytes = 0;  // of all ranks
  for (const model::ModelConfig& r : m.ranks) {
    m.info.kv_bytes_per_token += r.kv_bytes_per_token(m.form, false);
    m.info.windowed_kv_bytes += r.kv_bytes_per_token(m.form, true);
  }
  m.cache_bytes = m.info.kv_bytes_per_token * asked.context * asked.batch;
  m.active = files.weights->parameters() - c.idle_parameters();
  int64_t memory = asked.kv_memory.bytes;
  if (!asked.draft_model.empty()) {
    if (memory == 0) memory = engine::default_kv_memory(host_limits().memory_available);
    auto file = hub::local_model(asked.draft_model, asked.hub);
    if (!file.ok()) return failed(file.status());
    auto draft = draft_of(*file, m.info, asked.steps, memory);
    if (!draft.ok()) return failed(draft.status());
    m.draft = std::move(*draft);
  }
  auto pools = pools_of(m.info, memory, asked.steps);
  if (!pools.ok()) return misused(pools.status().message());
  m.pools = std::move(*pools);
  if (asked.as_json) {
    std::puts(json_of(m, asked).dump(2, ' ', false, json::error_handler_t::replace).c_str());
    return kOk;
  }
  print_network(m);
  print_memory(m, asked);
  if (asked.tensors)
    for (const auto& t : files.weights->tensors())
      std::printf("%-40s %-5s %lld x %lld\n", t.name.c_str(), std::string(type_info(t.type)->name).c_str(),
                  static_cast<long long>(t.rows), static_cast<long long>(t.cols));
  return kOk;
}

int inspect(int argc, char** argv) {
  InspectOptions asked;
  Options o(
      "kvasir inspect",
      cat("Shows what a model file is: architecture, tensors, types, context, memory needed; of one that cannot be ",
          "served, what is missing. Architectures: ", model::known_architectures(), "."));
  asked.define(o);
  if (auto code = o.parse(argc, argv)) return *code;
  if (asked.architectures) return list_architectures(), kOk;
  if (asked.model.empty()) return misused("name a model");
  auto path = hub::local_model(asked.model, asked.hub);
  if (!path.ok()) return failed(path.status());
  auto files = model::open_model(*path);
  if (files.ok()) return show(*files, asked);
  if (!asked.as_json) describe_unserved(*path);
  return failed(files.status());
}

}  // namespace

extern const Command inspect_command;
const Command inspect_command{"inspect", "show what a model file is and the memory it needs", inspect};

}  // namespace kvasir::cli
