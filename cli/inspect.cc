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
#include "model/attention_dtype.h"
#include "model/cache_form.h"
#include "model/cpu/footprint.h"
#include "model/formats/gguf.h"
#include "model/head.h"
#include "model/load.h"

namespace kvasir::cli {
namespace {

std::string human(int64_t bytes) {
  char out[32];
  if (bytes >= 1 << 30)
    std::snprintf(out, sizeof out, "%.2f GiB", double(bytes) / (1 << 30));
  else
    std::snprintf(out, sizeof out, "%.1f MiB", double(bytes) / (1 << 20));
  return out;
}

// The pages that serve makes of its memory, and how that comes about.
struct PageMemory {
  int64_t memory = 0;
  std::string formula;
  std::vector<scheduler::PageGroup> groups;
  engine::StateSlots states;
};

Result<PageMemory> pools_of(const model::ModelInfo& info, int64_t memory, const engine::KvSteps& steps) {
  PageMemory out;
  const int64_t free = host_limits().memory_available;
  out.memory = memory > 0 ? memory : engine::default_kv_memory(free);
  KVASIR_ASSIGN(const engine::StateSlots states, engine::state_slots(out.memory, info, steps.max_running, true));
  out.formula = memory > 0 ? human(memory) : cat("min(", human(free), " free / 4, 4 GiB) = ", human(out.memory));
  if (states.bytes > 0)
    out.formula = cat("(", out.formula, " - ", human(states.bytes), " of states: ", states.sequences, " sequences and ",
                      states.kept, " prefixes)");
  out.formula += cat(" / (", steps.page_size, " tokens x ", info.kv_bytes_per_token, " bytes)");
  out.states = states;
  KVASIR_ASSIGN(out.groups, engine::kv_pools(out.memory - states.bytes, info, steps, true));
  if (out.groups.size() == 1) {
    out.formula += cat(" = ", out.groups[0].pages, " pages of all layers");
  } else {
    out.formula = cat(out.formula, "; layers with a window: ", steps.max_running, " x (pages of ", info.sliding_window,
                      " + 2) + pages of ", steps.max_tokens_per_step, ", at most that = ", out.groups[1].pages,
                      " pages; the others have what is left = ", out.groups[0].pages, " pages");
  }
  return out;
}

// What serving takes of this machine's memory on its processors, and what there is.
struct Needs {
  model::cpu::Footprint of;
  int64_t cache = 0, program = 0;
  int64_t limit = 0, free = 0;
  int64_t all() const { return of.weights + of.steps + cache + program; }
  int64_t lacking() const { return std::max<int64_t>(0, all() - free); }
};

// The server itself, with what its tokenizer and grammars make of each token of the vocabulary.
int64_t program_bytes(const model::ModelConfig& c) {
  constexpr int64_t kServer = int64_t(34) << 20, kToken = 250;
  return kServer + kToken * c.vocab;
}

// Serve's step unless `batch` needs a larger one.
Result<Needs> needs_of(const std::vector<model::ModelConfig>& ranks, model::Weights& weights, int64_t cache,
                       const engine::KvSteps& steps, int batch) {
  model::RunnerOptions o;
  o.page_size = steps.page_size;
  o.max_batch = std::max<int64_t>(steps.max_running, batch);
  o.max_tokens = std::max<int64_t>(steps.max_tokens_per_step, batch + steps.page_size);
  Needs out{.cache = cache, .program = program_bytes(ranks[0])};
  KVASIR_ASSIGN(out.of, model::cpu::footprint(ranks, weights, o));
  const HostLimits host = host_limits();
  out.limit = host.memory_limit, out.free = host.memory_available;
  return out;
}

// A draft model's part of that memory.
struct DraftMemory {
  std::string name;
  int64_t weight_bytes = 0, kv_bytes_per_token = 0, pages = 0, bytes = 0;
};

// It comes out of `memory`.
Result<DraftMemory> draft_of(const std::string& file, const model::ModelConfig& of, const model::ModelInfo& model,
                             const engine::KvSteps& steps, int64_t& memory) {
  model::ModelFiles files;
  const bool head = model::is_eagle3(file);
  if (head) {
    KVASIR_ASSIGN(model::HeadFiles made_for, model::open_eagle3(file, of));
    files = {std::move(made_for.config.decoder), std::move(made_for.weights)};
  } else {
    KVASIR_ASSIGN(files, model::open_model(file));
  }
  if (!head && files.config.vocab != model.vocab_size)
    log_warn("the draft model's vocabulary has another size; serve compares the tokens",
             {{"draft", files.config.vocab}, {"model", model.vocab_size}});
  KVASIR_ASSIGN(const auto form, model::cache_form_of(files.config, {}, DType::f16, *files.weights));
  model::ModelInfo info = files.config.info();
  info.kv_bytes_per_token = files.config.kv_bytes_per_token(form, false);
  const engine::DraftPages part = engine::draft_pages(memory, model, info, steps);
  memory -= part.bytes;
  return DraftMemory{files.config.name, files.weights->bytes(), info.kv_bytes_per_token, part.pages, part.bytes};
}

void list_architectures() {
  std::puts("| architecture | models | model_type of config.json | GGUF architecture |\n| --- | --- | --- | --- |");
  for (const model::Architecture* a : model::architectures()) {
    auto or_name = [a](std::string_view s) { return std::string(s.empty() ? a->name : s); };
    std::printf("| %s | %s | %s | %s |\n", std::string(a->name).c_str(), std::string(a->models).c_str(),
                or_name(a->hugging_face).c_str(), or_name(a->gguf).c_str());
  }
}

// Of a file that cannot be served, what it says of itself.
void describe_unserved(const std::string& path) {
  auto gguf = model::Gguf::open(path);
  if (!gguf.ok()) return;
  std::map<std::string, std::pair<int64_t, int64_t>> types;
  for (const model::GgufTensor& t : (*gguf)->tensors()) {
    auto& [count, bytes] = types[std::string(type_info(t.type)->name)];
    ++count, bytes += t.bytes;
  }
  std::printf("name          %s\narchitecture  %s\n",
              std::string((*gguf)->string("general.name").value_or("-")).c_str(),
              std::string((*gguf)->string("general.architecture").value_or("-")).c_str());
  for (auto& [name, t] : types)
    std::printf("%-13s %lld tensors, %s\n", name.c_str(), static_cast<long long>(t.first), human(t.second).c_str());
}

int inspect(int argc, char** argv) {
  std::string model, draft_model;
  int batch = 16, context = 0, rank_count = 1;
  bool tensors = false, as_json = false, architectures = false;
  ByteSize kv_memory;
  engine::KvSteps steps;
  hub::HubOptions hub;
  Options o(
      "kvasir inspect",
      cat("Shows what a model file is: architecture, tensors, types, context, memory needed here on a CPU and whether "
          "there is as much; of one that cannot be served, what is missing. Architectures: ",
          model::known_architectures(), "."));
  o.positional(
      "model", &model,
      "A GGUF file, a directory with config.json and safetensors (or Mistral's params.json), hf:ORG/REPO[:FILE], or "
      "dummy:...");
  o.add("batch", &batch, "Sequences at once, for the memory needed").range(1, 100000);
  o.add("context", &context, "Tokens of each; 0 is all the model can").range(0, 1 << 24);
  o.add("ranks", &rank_count, "Show what each of so many ranks has").range(1, model::kMostRanks).only_flag();
  o.add("kv_memory", &kv_memory, "Memory of the KV cache; 0 is serve's default on a CPU").only_flag();
  o.add("draft_model", &draft_model, "The model or head that drafts beside it, and its part of that memory")
      .value_name("MODEL")
      .only_flag();
  kvcache::FormWish wish;
  std::string attention_dtype = "auto";
  define_attention_dtype(o, attention_dtype);
  define_cache_form(o, wish);
  o.add("page_size", &steps.page_size, "Tokens a page of the cache").range(1, kvcache::kMostPageTokens).only_flag();
  o.add("architectures", &architectures, "List the architectures that are served, as a table of Markdown").only_flag();
  o.add("tensors", &tensors, "List every tensor").only_flag();
  o.add("json", &as_json, "One JSON object").only_flag();
  hub.define(o);
  o.example("kvasir inspect model.gguf --batch 32 --context 4096", "the memory 32 sequences of 4,096 tokens take");
  if (auto code = o.parse(argc, argv)) return *code;
  if (architectures) return list_architectures(), kOk;
  if (model.empty()) {
    std::fprintf(stderr, "kvasir inspect: name a model\n");
    return kUsage;
  }
  auto fail = [](const Status& s) {
    std::fprintf(stderr, "kvasir inspect: %s\n", s.to_string().c_str());
    return kFailed;
  };
  auto path = hub::local_model(model, hub);
  if (!path.ok()) return fail(path.status());
  auto files = model::open_model(*path);
  if (!files.ok()) {
    if (!as_json) describe_unserved(*path);
    return fail(files.status());
  }
  const model::ModelConfig& c = files->config;
  if (context == 0) context = c.context;
  auto demanded = model::cache_wish(c, wish, attention_dtype);
  auto form = demanded.ok() ? model::cache_form_of(c, *demanded, DType::f16, *files->weights)
                            : Result<kvcache::CacheForm>(demanded.status());
  if (!form.ok()) {
    std::fprintf(stderr, "kvasir inspect: %s\n", form.status().message().c_str());
    return kUsage;
  }
  const auto ranks = model::split_over_ranks(c, *files->weights, rank_count);
  if (!ranks.ok()) return fail(ranks.status());
  int64_t kv = 0, windowed_kv = 0;  // of all ranks
  for (const model::ModelConfig& r : *ranks)
    kv += r.kv_bytes_per_token(*form, false), windowed_kv += r.kv_bytes_per_token(*form, true);
  int64_t cache = (kv * context + c.state_bytes()) * batch;
  std::map<std::string, std::pair<int64_t, int64_t>> types;  // count and bytes
  auto all = files->weights->tensors();
  for (const auto& t : all) {
    auto& [count, bytes] = types[std::string(type_info(t.type)->name)];
    ++count, bytes += t.bytes;
  }
  model::ModelInfo info = c.info();
  info.kv_bytes_per_token = kv, info.windowed_kv_bytes = windowed_kv;
  std::optional<DraftMemory> draft;
  if (!draft_model.empty()) {
    if (kv_memory.bytes == 0) kv_memory.bytes = engine::default_kv_memory(host_limits().memory_available);
    auto file = hub::local_model(draft_model, hub);
    if (!file.ok()) return fail(file.status());
    auto made = draft_of(*file, c, info, steps, kv_memory.bytes);
    if (!made.ok()) return fail(made.status());
    draft = std::move(*made);
  }
  auto pools = pools_of(info, kv_memory.bytes, steps);
  if (!pools.ok()) {
    std::fprintf(stderr, "kvasir inspect: %s\n", pools.status().message().c_str());
    return kUsage;
  }
  const int64_t parameters = files->weights->parameters(), active = parameters - c.idle_parameters(),
                in_file = files->weights->bytes();  // of dummies these change with what is asked for
  const auto needs = needs_of(*ranks, *files->weights, cache, steps, batch);
  if (!needs.ok()) return fail(needs.status());
  if (as_json) {
    nlohmann::ordered_json j = {{"name", c.name},
                                {"architecture", c.architecture},
                                {"type", c.quantization},
                                {"parameters", parameters},
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
                                {"active_parameters", active},
                                {"weight_bytes", in_file},
                                {"kv_type", form->to_string()},
                                {"attention_dtype", attention_dtype},
                                {"kv_bytes_per_token", kv},
                                {"cache_bytes", cache},
                                {"kv_memory", pools->memory},
                                {"memory",
                                 {{"weights", needs->of.weights},
                                  {"cache", needs->cache},
                                  {"steps", needs->of.steps},
                                  {"program", needs->program},
                                  {"all", needs->all()},
                                  {"limit", needs->limit},
                                  {"free", needs->free},
                                  {"lacking", needs->lacking()}}}};
    if (c.latent.on())
      j["latent"] = {{"rank", c.latent.rank},
                     {"rope", c.latent.rope},
                     {"nope", c.latent.nope},
                     {"value", c.latent.value},
                     {"query_rank", c.latent.query_rank}};
    if (info.state_bytes > 0)
      j["state_bytes_per_sequence"] = info.state_bytes, j["states"] = pools->states.sequences,
      j["kept_states"] = pools->states.kept;
    if (c.encoder_layers > 0) j["encoder_layers"] = c.encoder_layers, j["decoder_layers"] = c.decoder_layers;
    for (const scheduler::PageGroup& g : pools->groups)
      j["pools"].push_back({{"pages", g.pages}, {"page_size", steps.page_size}, {"window", g.window}});
    for (const model::ModelConfig& r : *ranks)
      if (r.part.ranks > 1)
        j["ranks"].push_back({{"heads", r.heads},
                              {"kv_heads", r.kv_heads},
                              {"ffn", r.ffn},
                              {"experts", r.part.experts.count},
                              {"vocab", r.vocab},
                              {"kv_bytes_per_token", r.kv_bytes_per_token(*form, false)}});
    if (draft)
      j["draft_model"] = {{"name", draft->name},
                          {"weight_bytes", draft->weight_bytes},
                          {"kv_bytes_per_token", draft->kv_bytes_per_token},
                          {"pages", draft->pages},
                          {"cache_bytes", draft->bytes}};
    for (auto& [name, t] : types) j["types"][name] = {{"tensors", t.first}, {"bytes", t.second}};
    if (tensors)
      for (const auto& t : all)
        j["tensors"].push_back(
            {{"name", t.name}, {"type", type_info(t.type)->name}, {"rows", t.rows}, {"cols", t.cols}});
    std::puts(j.dump(2, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
    return kOk;
  }
  std::printf("name          %s\narchitecture  %s\ntype          %s\n", c.name.c_str(), c.architecture.c_str(),
              c.quantization.c_str());
  std::printf("parameters    %.1f M in %zu tensors\n", double(parameters) / 1e6, all.size());
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
                c.experts.ffn, c.experts.routing.used, double(active) / 1e6);
  std::printf("vocabulary    %d\ncontext       %d\n", c.vocab, info.context_length);
  if (c.window > 0) std::printf("window        %d\n", c.window);
  for (auto& [name, t] : types)
    std::printf("%-13s %lld tensors, %s\n", name.c_str(), static_cast<long long>(t.first), human(t.second).c_str());
  std::printf("cache         %lld bytes a token in %s\n", static_cast<long long>(kv), form->to_string().c_str());
  if (info.state_bytes > 0)
    std::printf("states        %lld bytes a sequence, of layers of linear attention\n",
                static_cast<long long>(info.state_bytes));
  if (attention_dtype == "fp8") std::printf("attention     queries, keys and values in E4M3\n");
  for (const model::ModelConfig& r : *ranks)
    if (r.part.ranks > 1)
      std::printf(
          "rank %-8d heads %d from %lld, kv heads %d, ffn %d, %sof the vocabulary %d, cache %lld bytes a token\n",
          r.part.rank, r.heads, static_cast<long long>(r.part.heads.first), r.kv_heads, r.ffn,
          r.part.experts.split() ? cat("experts ", r.part.experts.count, ", ").c_str() : "", r.vocab,
          static_cast<long long>(r.kv_bytes_per_token(*form, false)));
  std::printf("memory        weights %s (of %s in the file) + cache %s (%d sequences of %d tokens)\n",
              human(needs->of.weights).c_str(), human(in_file).c_str(), human(cache).c_str(), batch, context);
  std::printf("              + activations %s + server %s = %s on a CPU\n", human(needs->of.steps).c_str(),
              human(needs->program).c_str(), human(needs->all()).c_str());
  std::printf("machine       %s for this process, %s free: %s\n", human(needs->limit).c_str(),
              human(needs->free).c_str(),
              needs->lacking() == 0 ? "it fits"
                                    : cat("lacks ", human(needs->lacking()),
                                          "; fewer or shorter sequences (--batch, --context) or a narrower cache "
                                          "(--kv-dtype) take less")
                                          .c_str());
  std::printf("pages         %s\n", pools->formula.c_str());
  if (draft)
    std::printf("draft model   %s, weights %s + cache %s beside these (%lld pages, %lld bytes a token)\n",
                draft->name.c_str(), human(draft->weight_bytes).c_str(), human(draft->bytes).c_str(),
                static_cast<long long>(draft->pages), static_cast<long long>(draft->kv_bytes_per_token));
  if (tensors)
    for (const auto& t : all)
      std::printf("%-40s %-5s %lld x %lld\n", t.name.c_str(), std::string(type_info(t.type)->name).c_str(),
                  static_cast<long long>(t.rows), static_cast<long long>(t.cols));
  return kOk;
}

}  // namespace

extern const Command inspect_command;
const Command inspect_command{"inspect", "show what a model file is and the memory it needs", inspect};

}  // namespace kvasir::cli
