// kvasir inspect: what a model file is, and the memory it takes to serve.
#include <algorithm>
#include <bit>
#include <cstdio>
#include <optional>
#include <string>

#include "cli/command.h"
#include "cli/hub/hub.h"
#include "cli/inspect_report.h"
#include "cli/model_flags.h"
#include "core/config.h"
#include "core/host.h"
#include "core/log.h"
#include "kvcache/view.h"
#include "model/arch/registry.h"
#include "model/attention_dtype.h"
#include "model/cache_form.h"
#include "model/cpu/footprint.h"
#include "model/cuda/footprint.h"
#include "model/formats/gguf.h"
#include "model/head.h"

namespace kvasir::cli {
namespace {

struct InspectFlags {
  std::string model, draft_model;
  int batch = 16, context = 0, ranks = 1;
  bool tensors = false, as_json = false, architectures = false;
  ByteSize kv_memory;
  engine::KvSteps steps;
  hub::HubOptions hub;
  kvcache::FormWish wish;
  std::string attention_dtype = "auto", device = "cpu", quantize = "auto";

  bool on_gpu() const { return device == "cuda"; }
  void define(Options& o);
};

// `memory`: what was said, or what serve would take, as `whence` tells.
Result<PageMemory> pools_of(const model::ModelInfo& info, int64_t memory, const std::string& whence,
                            const engine::KvSteps& steps) {
  PageMemory out;
  out.memory = memory;
  KVASIR_ASSIGN(const engine::StateSlots states, engine::state_slots(out.memory, info, steps.max_running, true));
  out.formula = whence + human(memory);
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

// The memory of the pages, and how it was computed.
std::pair<int64_t, std::string> page_memory(const InspectFlags& flags, const Needs& needs) {
  if (flags.kv_memory.bytes > 0) return {flags.kv_memory.bytes, ""};
  if (!needs.on_gpu)
    return {engine::default_kv_memory(needs.free), cat("min(", human(needs.free), " free / 4, 4 GiB) = ")};
  const int64_t left = (needs.free - (needs.all() - needs.cache)) * flags.ranks;
  if (needs.is_there() && left > needs.cache * flags.ranks) return {left, "what else is free there: "};
  return {needs.cache * flags.ranks, "the cache above: "};
}

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
  KVASIR_ASSIGN(const auto footprint, model::cpu::footprint(ranks, weights, o));
  out.weights = footprint.weights, out.steps = footprint.steps;
  const HostLimits host = host_limits();
  out.limit = host.memory_limit, out.free = host.memory_available;
  return out;
}

// Of the GPU that has most to hold.
Result<Needs> gpu_needs_of(const std::vector<model::ModelConfig>& ranks, model::Weights& weights, int64_t cache,
                           const engine::KvSteps& steps, const InspectFlags& flags, int context) {
  model::RunnerOptions o;
  o.page_size = steps.page_size, o.quantize = flags.quantize;
  o.max_batch = std::max<int64_t>(steps.max_running, flags.batch);
  o.max_tokens = std::max<int64_t>(steps.max_tokens_per_step, flags.batch + steps.page_size);
  o.max_kvlen = context;
  Needs out{.on_gpu = true, .cache = cache / std::ssize(ranks)};
  for (const model::ModelConfig& r : ranks) {
    KVASIR_ASSIGN(const auto footprint, model::cuda::footprint(r, weights, o));
    if (footprint.all() > out.weights + out.steps + out.program)
      out.weights = footprint.weights, out.steps = footprint.steps, out.program = footprint.libraries;
  }
  if (const auto gpu = model::gpu_memory())
    out.gpu = gpu->name, out.limit = gpu->total, out.free = gpu->free - gpu->total / 20;
  return out;
}

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
  const TensorTypes types = types_of((*gguf)->tensors());
  std::printf("name          %s\narchitecture  %s\n",
              std::string((*gguf)->string("general.name").value_or("-")).c_str(),
              std::string((*gguf)->string("general.architecture").value_or("-")).c_str());
  print_types(types);
}

void InspectFlags::define(Options& o) {
  o.positional(
      "model", &model,
      "A GGUF file, a directory with config.json and safetensors (or Mistral's params.json), hf:ORG/REPO[:FILE], or "
      "dummy:...");
  o.add("batch", &batch, "Sequences at once, for the memory needed").range(1, 100000);
  o.add("context", &context, "Tokens of each; 0, or more than the model was made for, is all it can").range(0, 1 << 24);
  o.add("ranks", &ranks, "Show what each of so many ranks has").range(1, model::kMostRanks).only_flag();
  o.add("device", &device, "Whose memory is told: cpu, or cuda (a GPU's; with --ranks, each GPU's)").only_flag();
  o.add("quantize", &quantize, "Weights on a GPU: auto (as stored), bf16, fp8").only_flag();
  o.add("kv_memory", &kv_memory, "Memory of the KV cache; 0 is serve's default").only_flag();
  o.add("draft_model", &draft_model, "The model or head that drafts beside it, and its part of that memory")
      .value_name("MODEL")
      .only_flag();
  define_attention_dtype(o, attention_dtype);
  define_cache_form(o, wish);
  o.add("page_size", &steps.page_size, "Tokens a page of the cache; on a GPU a power of two up to 256")
      .range(1, kvcache::kMostPageTokens)
      .only_flag();
  o.add("architectures", &architectures, "List the architectures that are served, as a table of Markdown").only_flag();
  o.add("tensors", &tensors, "List every tensor").only_flag();
  o.add("json", &as_json, "One JSON object").only_flag();
  hub.define(o);
  o.example("kvasir inspect dummy:llama-3.1-8b,type=bf16 --device cuda --quantize fp8 --context 8192",
            "what a GPU has to hold for 16 sequences");
  o.example("kvasir inspect model.gguf --batch 32 --context 4096", "the memory 32 sequences of 4,096 tokens take");
}

// What is wrong with the model, or with the flags (`usage`).
struct Refusal {
  Status why;
  bool usage = false;
};

// Fills `found` from the model's files.
std::optional<Refusal> look(InspectFlags& flags, Inspection& found) {
  const model::ModelConfig& c = found.files.config;
  model::Weights& weights = *found.files.weights;
  found.attention_dtype = flags.attention_dtype;
  found.batch = flags.batch, found.context = flags.context == 0 ? c.context : std::min(flags.context, c.context);
  if (found.context < flags.context)
    log_warn("the context is cut to what the model was made for", {{"context", flags.context}, {"model", c.context}});
  found.page_size = flags.steps.page_size, found.list_tensors = flags.tensors;
  const auto wish = model::cache_wish(c, flags.wish, flags.attention_dtype);
  if (!wish.ok()) return Refusal{wish.status(), true};
  auto form = model::cache_form_of(c, *wish, flags.on_gpu() ? DType::bf16 : DType::f16, weights);
  if (!form.ok()) return Refusal{form.status(), true};
  found.form = std::move(*form);
  auto ranks = model::split_over_ranks(c, weights, flags.ranks);
  if (!ranks.ok()) return Refusal{ranks.status()};
  found.ranks = std::move(*ranks);
  found.info = c.info();
  found.info.kv_bytes_per_token = found.info.windowed_kv_bytes = 0;  // of all ranks
  for (const model::ModelConfig& r : found.ranks) {
    found.info.kv_bytes_per_token += r.kv_bytes_per_token(found.form, false);
    found.info.windowed_kv_bytes += r.kv_bytes_per_token(found.form, true);
  }
  if (flags.on_gpu()) flags.steps.max_running = kGpuRunning, flags.steps.max_tokens_per_step = kGpuTokens;
  found.cache = engine::memory_for(found.batch, found.context, found.info, flags.steps.max_running);
  found.tensors = weights.tensors();
  found.types = types_of(found.tensors);
  found.parameters = weights.parameters(), found.bytes = weights.bytes();
  auto needs = flags.on_gpu() ? gpu_needs_of(found.ranks, weights, found.cache, flags.steps, flags, found.context)
                              : needs_of(found.ranks, weights, found.cache, flags.steps, flags.batch);
  if (!needs.ok()) return Refusal{needs.status()};
  found.needs = *needs;
  auto [memory, whence] = page_memory(flags, found.needs);
  if (!flags.draft_model.empty()) {
    const auto file = hub::local_model(flags.draft_model, flags.hub);
    if (!file.ok()) return Refusal{file.status()};
    auto draft = draft_of(*file, c, found.info, flags.steps, memory);
    if (!draft.ok()) return Refusal{draft.status()};
    found.draft = std::move(*draft);
  }
  auto pages = pools_of(found.info, memory, whence, flags.steps);
  if (!pages.ok()) return Refusal{pages.status(), true};
  found.pages = std::move(*pages);
  return std::nullopt;
}

int inspect(int argc, char** argv) {
  InspectFlags flags;
  Options o("kvasir inspect", cat("Shows what a model file is: architecture, tensors, types, context, memory needed "
                                  "here on a CPU or a GPU and whether "
                                  "there is as much; of one that cannot be served, what is missing. Architectures: ",
                                  model::known_architectures(), "."));
  flags.define(o);
  if (auto code = o.parse(argc, argv)) return *code;
  if (flags.architectures) return list_architectures(), kOk;
  auto fail = [](const std::string& why, int code) {
    std::fprintf(stderr, "kvasir inspect: %s\n", why.c_str());
    return code;
  };
  if (flags.model.empty()) return fail("name a model", kUsage);
  if (flags.device != "cpu" && flags.device != "cuda")
    return fail(cat("device is ", flags.device, "; it must be cpu or cuda"), kUsage);
  if (flags.quantize != "auto" && flags.quantize != "bf16" && flags.quantize != "fp8")
    return fail(cat("quantize is ", flags.quantize, "; it must be auto, bf16 or fp8"), kUsage);
  if (flags.quantize != "auto" && !flags.on_gpu())
    return fail(cat("quantize is ", flags.quantize, ", which is for a GPU's weights: add --device cuda"), kUsage);
  const uint32_t page = uint32_t(flags.steps.page_size);
  if (flags.on_gpu() && (page > 256 || !std::has_single_bit(page)))
    return fail(cat("page-size is ", page, "; on a GPU it must be a power of two up to 256"), kUsage);
  const auto path = hub::local_model(flags.model, flags.hub);
  if (!path.ok()) return fail(path.status().to_string(), kFailed);
  auto files = model::open_model(*path);
  if (!files.ok()) {
    if (!flags.as_json) describe_unserved(*path);
    return fail(files.status().to_string(), kFailed);
  }
  Inspection found;
  found.files = std::move(*files);
  if (const auto refusal = look(flags, found))
    return refusal->usage ? fail(refusal->why.message(), kUsage) : fail(refusal->why.to_string(), kFailed);
  if (flags.as_json)
    std::puts(inspection_json(found).dump(2, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
  else
    print_inspection(found);
  return kOk;
}

}  // namespace

extern const Command inspect_command;
const Command inspect_command{"inspect", "show what a model file is and the memory it needs", inspect};

}  // namespace kvasir::cli
