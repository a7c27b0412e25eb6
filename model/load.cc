#include "model/load.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "attention/backend.h"
#include "core/cat.h"
#include "core/check.h"
#include "core/log.h"
#include "model/arch/registry.h"
#include "model/cpu/runner.h"
#ifdef KVASIR_CUDA
#include "model/cuda/runner.h"
#endif
#include "model/device.h"
#include "model/formats/dummy.h"
#include "model/formats/gguf.h"
#include "model/formats/gguf_model.h"
#include "model/formats/mapped_file.h"
#include "model/formats/mistral_vocab.h"
#include "model/formats/safetensors.h"
#include "model/formats/tiktoken_vocab.h"
#include "model/generation_config.h"
#include "model/text/mistral_template.h"

namespace kvasir::model {
namespace {

namespace fs = std::filesystem;
constexpr std::string_view kDummy = "dummy:";
constexpr const char* kTiktoken = "tiktoken.model";
constexpr size_t kMaxText = size_t(256) << 20;

bool holds(const std::string& folder, const std::string& name) {
  std::error_code error;
  return fs::exists(fs::path(folder) / name, error);
}

bool holds_weights(const std::string& folder, const std::string& stem) {
  return holds(folder, stem + ".safetensors") || holds(folder, stem + ".safetensors.index.json");
}

// A folder as Mistral publishes it. Where it is Hugging Face's, too, it is read as such.
bool is_mistral_folder(const std::string& model) {
  return holds(model, "params.json") && holds_weights(model, "consolidated") && !holds_weights(model, "model");
}

// A folder as Hugging Face lays models out; ppl.llm's params.json may stand for config.json. Or Mistral's.
bool is_folder(const std::string& model) {
  std::error_code error;
  if (!fs::is_directory(model, error)) return false;
  const bool config = holds(model, "config.json") || holds(model, "params.json");
  return (config && holds_weights(model, "model")) || is_mistral_folder(model);
}

// A small file of a folder; empty when it is not there.
Result<std::string> read_text(const std::string& folder, const char* name) {
  fs::path path = fs::path(folder) / name;
  std::error_code error;
  if (!fs::exists(path, error)) return std::string();
  KVASIR_ASSIGN(auto file, MappedFile::open(path.string()));
  if (file->bytes().size() > kMaxText)
    return invalid_argument(cat(path.string(), " is ", file->bytes().size(), " bytes long; the limit is ", kMaxText));
  return std::string(reinterpret_cast<const char*>(file->bytes().data()), file->bytes().size());
}

// The file a name stands for: itself, or the one GGUF file of a directory.
Result<std::string> find_file(const std::string& model) {
  std::error_code error;
  if (!fs::is_directory(model, error)) {
    if (!fs::exists(model, error))
      return not_found(cat("model ", model, " does not exist; name a file, a directory or dummy:llama"))
          .with_field("model");
    return model;
  }
  std::vector<std::string> found;
  for (auto& entry : fs::directory_iterator(model, error)) {
    std::string name = entry.path().filename().string();
    size_t part = name.rfind("-of-");
    bool later = part != std::string::npos && part >= 6 && name.substr(part - 6, 6) != "-00001";
    if (name.ends_with(".gguf") && !later) found.push_back(entry.path().string());
  }
  if (found.empty() && fs::exists(fs::path(model) / "params.json", error))
    return not_found(cat("the directory ", model, " holds a params.json without model.safetensors; weights as ONNX or ",
                         "PMX graphs are not read: put the checkpoint they were made from, or a .gguf, beside it"))
        .with_field("model");
  if (found.empty())
    return not_found(cat("the directory ", model, " holds no .gguf file, nor config.json with model.safetensors, nor ",
                         "params.json with consolidated.safetensors"))
        .with_field("model");
  if (found.size() > 1)
    return invalid_argument(cat("the directory ", model, " holds ", found.size(), " models; name one of its files"))
        .with_field("model");
  return found.front();
}

// The type most of the weights' bytes have: norms are float32 in many a model.
std::string main_type(const Weights& weights) {
  std::map<WeightType, int64_t> bytes;
  for (const HostTensor& t : weights.tensors()) bytes[t.type] += t.bytes;
  auto most = std::max_element(bytes.begin(), bytes.end(), [](auto& a, auto& b) { return a.second < b.second; });
  if (most != bytes.end() && most->first == WeightType::u8) {
    const auto all = weights.tensors();
    return std::any_of(all.begin(), all.end(), [](const HostTensor& t) { return t.name.ends_with("_blocks"); })
               ? "MXFP4"
               : "NVFP4";  // nothing else is of U8
  }
  if (most != bytes.end() && most->first == WeightType::i32) return "INT4";
  return most == bytes.end() ? "" : std::string(type_info(most->first)->name);
}

// How sentence-transformers makes embeddings of the model, where the folder says so.
Status read_pooling(const std::string& folder, PoolingRule& rule) {
  KVASIR_ASSIGN(std::string modules, read_text(folder, "modules.json"));
  if (modules.empty()) return {};
  auto read = [&](const std::string& module) { return read_text((fs::path(folder) / module).string(), "config.json"); };
  KVASIR_ASSIGN(rule, pooling_from_modules(modules, (fs::path(folder) / "modules.json").string(), read));
  return {};
}

TensorNames names(const ModelConfig& config) {
  return config.from_mistral ? mistral_names() : TensorNames(find_architecture(config.architecture)->names);
}

Result<ModelConfig> folder_config(const std::string& folder) {
  const std::string params = (fs::path(folder) / "params.json").string();
  if (is_mistral_folder(folder)) {
    KVASIR_ASSIGN(const std::string json, read_text(folder, "params.json"));
    return config_from_mistral(json, params);
  }
  KVASIR_ASSIGN(std::string json, read_text(folder, "config.json"));
  if (!json.empty()) return config_from_json(json, (fs::path(folder) / "config.json").string());
  KVASIR_ASSIGN(json, read_text(folder, "params.json"));
  return config_from_params(json, params);
}

Status gpu_there() {
#ifdef KVASIR_CUDA
  KVASIR_ASSIGN(const attention::Backend* cuda, attention::find_backend("cuda"));
  return cuda->available();
#else
  return failed_precondition("this build has no CUDA part (KVASIR_CUDA=ON adds it)");
#endif
}

// auto is the GPU where there is one that this build can use, and the CPU with a line that says why not.
Result<bool> wants_gpu(const RunnerOptions& options) {
  KVASIR_ASSIGN(const DeviceChoice choice, parse_device(options.device));
  if (prefers_gpu(options)) return true;
  if (choice.kind == DeviceChoice::Kind::cpu) return false;
  Status there = gpu_there();
  if (there.ok()) return false;  // attention cpu, or precise: only the CPU has them
  if (choice.kind == DeviceChoice::Kind::cuda) return there;
  log_info("no GPU in use", {{"reason", there.message()}});
  return false;
}

}  // namespace

bool prefers_gpu(const RunnerOptions& options) {
  const auto choice = parse_device(options.device);
  if (!choice.ok() || choice->kind == DeviceChoice::Kind::cpu) return false;
  const bool asked = choice->kind == DeviceChoice::Kind::cuda || (!options.precise && options.attention != "cpu");
  return asked && gpu_there().ok();
}

std::optional<GpuMemory> gpu_memory() {
#ifdef KVASIR_CUDA
  if (gpu_there().ok()) return cuda::memory_of(0);
#endif
  return std::nullopt;
}

Result<ModelFiles> open_model(const std::string& model) {
  ModelFiles out;
  if (model.starts_with(kDummy)) {
    KVASIR_ASSIGN(out.config, config_from_dummy(std::string_view(model).substr(kDummy.size())));
    out.weights = dummy_weights(out.config);
    return out;
  }
  if (is_folder(model)) {
    KVASIR_ASSIGN(out.config, folder_config(model));
    const char* stem = out.config.from_mistral ? "consolidated" : "model";
    KVASIR_ASSIGN(out.weights,
                  open_safetensors(model, out.config.tied_head, names(out.config), out.config.int4_zero_shift, stem));
    out.config.quantization = main_type(*out.weights);
    KVASIR_TRY(read_pooling(model, out.config.pooling));
    return out;
  }
  KVASIR_ASSIGN(std::string file, find_file(model));
  KVASIR_ASSIGN(auto gguf, Gguf::open(file));
  KVASIR_ASSIGN(out.config, config_from_gguf(*gguf));
  out.weights = gguf_weights(std::move(gguf), names(out.config));
  out.config.quantization = main_type(*out.weights);
  return out;
}

Result<CacheIndexing> read_cache_indexing(const std::string& model) {
  if (model.starts_with(kDummy) || !is_folder(model) || is_mistral_folder(model) || holds(model, "config.json"))
    return CacheIndexing();
  KVASIR_ASSIGN(const ModelConfig config, folder_config(model));
  return CacheIndexing{config.kv_index, config.page_size};
}

Result<GenerationConfig> read_generation_config(const std::string& model) {
  if (model.starts_with(kDummy) || !is_folder(model)) return GenerationConfig();
  KVASIR_ASSIGN(std::string json, read_text(model, "generation_config.json"));
  if (json.empty()) return GenerationConfig();
  return generation_config_from_json(json, (fs::path(model) / "generation_config.json").string());
}

namespace {

// That of a folder without one, by the version of its tokenizer.
void take_mistral_template(int version, bool thinks, const std::string& file, TextAssets& out) {
  const auto config = nlohmann::json::parse(out.tokenizer_config_json, nullptr, false);
  if (!out.chat_template.empty() || (config.is_object() && config.contains("chat_template"))) return;
  out.chat_template = text::mistral_template(version, thinks);
  if (out.chat_template.empty())
    log_warn("no chat template is known for this version of Mistral's tokenizers; chats need one (chat_template)",
             {{"file", file}, {"version", version}});
}

// Mistral's SentencePiece files have their version for an ending: the newest.
struct VersionedFile {
  std::string name;
  int version = 0;
};
VersionedFile find_versioned(const std::string& folder) {
  constexpr std::string_view kBegins[] = {"tokenizer.model.", "tokenizer.mm.model."};
  VersionedFile best;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    for (const std::string_view begin : kBegins) {
      const int version = name.starts_with(begin) ? version_number(std::string_view(name).substr(begin.size())) : 0;
      if (version > best.version || (version == best.version && version > 0 && name < best.name))
        best = {name, version};
    }
  }
  return best;
}

// Of a file whose name does not say it: what tokens there are.
int version_of(const text::GgufVocab& vocab) {
  auto has = [&](const char* token) {
    return std::find(vocab.tokens.begin(), vocab.tokens.end(), token) != vocab.tokens.end();
  };
  return has("[SYSTEM_PROMPT]") ? 7 : has("[INST]") ? 3 : 1;
}

// Of a folder without tokenizer.json: Mistral's own file, or SentencePiece's.
Status read_mistral_vocab(const std::string& folder, TextAssets& out) {
  KVASIR_ASSIGN(const std::string tekken, read_text(folder, "tekken.json"));
  if (!tekken.empty()) {
    const std::string file = (fs::path(folder) / "tekken.json").string();
    KVASIR_ASSIGN(Tekken read, read_tekken(tekken, file));
    out.tokenizer_json = std::move(read.tokenizer_json);
    take_mistral_template(read.version, read.thinks, file, out);
    if (out.tokenizer_config_json.empty()) out.tokenizer_config_json = R"({"bos_token": "<s>", "eos_token": "</s>"})";
    return {};
  }
  VersionedFile found = find_versioned(folder);
  if (found.version == 0) found.name = holds(folder, "spiece.model") ? "spiece.model" : "tokenizer.model";
  KVASIR_ASSIGN(const std::string model, read_text(folder, found.name.c_str()));
  if (model.empty()) return {};
  const std::string file = (fs::path(folder) / found.name).string();
  KVASIR_ASSIGN(out.vocab, vocab_from_sentencepiece(model, file));
  if (found.version > 0 || is_mistral_folder(folder))
    take_mistral_template(found.version > 0 ? found.version : version_of(*out.vocab), false, file, out);
  const auto config = nlohmann::json::parse(out.tokenizer_config_json, nullptr, false);
  if (out.chat_template.empty() && config.is_object() && config.contains("chat_template") &&
      config["chat_template"].is_string())
    out.chat_template = config["chat_template"];
  out.vocab->chat_template = out.chat_template;
  return {};
}

}  // namespace

Result<TextAssets> load_text_assets(const std::string& model) {
  TextAssets out;
  if (model.starts_with(kDummy)) {
    KVASIR_ASSIGN(auto config, config_from_dummy(std::string_view(model).substr(kDummy.size())));
    out.vocab = dummy_vocab(config);
  } else if (is_folder(model)) {
    KVASIR_ASSIGN(out.tokenizer_json, read_text(model, "tokenizer.json"));
    KVASIR_ASSIGN(out.tokenizer_config_json, read_text(model, "tokenizer_config.json"));
    KVASIR_ASSIGN(out.chat_template, read_text(model, "chat_template.jinja"));
    if (out.tokenizer_json.empty()) KVASIR_TRY(read_mistral_vocab(model, out));
    if (out.tokenizer_json.empty() && !out.vocab) {
      KVASIR_ASSIGN(const std::string ranks, read_text(model, kTiktoken));
      if (!ranks.empty()) {
        KVASIR_ASSIGN(out.tokenizer_json,
                      read_tiktoken(ranks, out.tokenizer_config_json, (fs::path(model) / kTiktoken).string()));
      }
    }
    KVASIR_ASSIGN(GenerationConfig generation, read_generation_config(model));
    out.end_of_generation = std::move(generation.end_of_generation);
    return out;
  } else {
    KVASIR_ASSIGN(std::string file, find_file(model));
    KVASIR_ASSIGN(auto gguf, Gguf::open(file));
    KVASIR_ASSIGN(out.vocab, gguf_vocab(*gguf));
  }
  out.chat_template = out.vocab->chat_template;
  return out;
}

namespace {

constexpr int64_t kFastHead = 256;  // wider ones have no fast kernel on a GPU

int64_t widest_head(const ModelConfig& c) {
  int64_t widest = 0;
  for (int32_t i = 0; i < c.layers; ++i) widest = std::max<int64_t>(widest, c.head_dim_of(i));
  return widest;
}

// Why `auto` takes the CPU for it though there is a GPU; empty: it takes the GPU.
std::string why_no_gpu(const ModelConfig& c) {
  if (c.state_bytes() > 0 && !c.linear.fits_gpu()) return "no kernel there takes its linear attention";
  if (c.sizes_by_layer && widest_head(c) > kFastHead)
    return cat("heads of ", widest_head(c), " are slow there; device cuda takes it all the same");
  return "";
}

}  // namespace

Result<std::unique_ptr<Runner>> load_runner(const RunnerOptions& options, Progress progress, void* context) {
  KVASIR_ASSIGN(bool gpu, wants_gpu(options));
  KVASIR_ASSIGN(ModelFiles files, open_model(options.model));
  KVASIR_TRY(choose_pooling(options.pooling, options.embed_normalize, files.config.pooling));
  if (const std::string why = gpu && options.device == "auto" ? why_no_gpu(files.config) : ""; !why.empty()) {
    gpu = false;
    log_info("no GPU in use", {{"reason", why}});
  }
  RunnerOptions o = options;  // with the usual limits where the caller has none
  if (o.max_batch <= 0) o.max_batch = 64;
  if (o.max_tokens <= 0) o.max_tokens = 512;
  // Pages behind a window are given back when the plans that name them have retired, of which there are two at most.
  if (o.attention_window > 0) o.max_kvlen = o.attention_window + 3 * (o.max_tokens + o.page_size);
  if (o.max_kvlen <= 0) o.max_kvlen = files.config.context;
  files.config.rope.configured_context = std::min<int64_t>(o.max_kvlen, files.config.context);
#ifdef KVASIR_CUDA
  if (gpu) return cuda::make_runner(files.config, std::move(files.weights), o, {progress, context});
#endif
  KVASIR_CHECK(!gpu, "a GPU was chosen by a build that has none");
  return cpu::make_runner(files.config, std::move(files.weights), o, {progress, context});
}

}  // namespace kvasir::model
