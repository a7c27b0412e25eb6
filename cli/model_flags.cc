#include "cli/model_flags.h"

#include <algorithm>
#include <charconv>

#include "model/device.h"
#include "model/load.h"

namespace kvasir::cli {
namespace {

constexpr int kGpuStepMs = 26;

// "acme=2.5": a tenant and its share.
Result<std::pair<std::string, double>> parse_weight(const std::string& text) {
  size_t eq = text.rfind('=');
  double weight = 0;
  if (eq != std::string::npos && eq > 0) {
    auto [end, error] = std::from_chars(text.data() + eq + 1, text.data() + text.size(), weight);
    if (error == std::errc() && end == text.data() + text.size() && weight > 0 && weight <= 1000)
      return std::pair(text.substr(0, eq), weight);
  }
  return invalid_argument(
      cat("tenant_weight is '", text, "'; it must be TENANT=WEIGHT with a weight above 0, at most 1000"));
}

}  // namespace

void define_cache_form(Options& o, kvcache::FormWish& wish) {
  o.add("kv_dtype", &wish.dtype,
        "Element type of the cache; auto is the checkpoint's (kv_cache_scheme), else 16 bits. int8 and int4 have a "
        "scale "
        "for each kv_group elements; fp8 has the checkpoint's k_scale and v_scale, else 1")
      .one_of({"auto", "float32", "float16", "bfloat16", "fp8", "int8", "int4"});
  o.add(
       "kv_group", &wish.group,
       "Elements of an int8 or int4 cache that share a scale: a power of two up to 128 (on a GPU from 8), dividing the "
       "head size; 0: one scale for all; -1: 64 for int8 and 32 for int4, or what divides the head size")
      .range(-1, 128);
  o.add("kv_scale_dtype", &wish.scale_dtype, "Type of a group's scale; auto is float16")
      .one_of({"auto", "float32", "float16"});
  o.add("kv_k_scale", &wish.k_scale, "Scale of all keys, for fp8 and for int8 with kv_group 0; 0: the checkpoint's")
      .at_least(0);
  o.add("kv_v_scale", &wish.v_scale, "Scale of all values, likewise").at_least(0);
  o.add(
       "kv_layout", &wish.layout,
       "How the cache lies, outer dimension first (T tokens, L layers, H heads, D elements, 2 for key and value): 0 is "
       "TL2HD, 1 LT2HD, 2 L2THD, 3 L2HTD, and two named so; auto is 3")
      .one_of(kvcache::kLayoutNames);
}

void define_attention_dtype(Options& o, std::string& dtype) {
  o.add("attention_dtype", &dtype,
        "What attention's scores are made of: auto is float32 on a CPU and bf16 on a GPU; fp8 rounds queries to E4M3, "
        "takes keys and values from an FP8 cache (which kv_dtype auto is then), and on a GPU multiplies prompts so")
      .one_of({"auto", "bf16", "fp8"});
}

void ModelFlags::define(Options& o) {
  o.section("Model");
  o.add("model", &model.model, "The model: a .gguf file, a folder, hf:ORG/REPO[:FILE], or dummy:... for load tests")
      .value_name("MODEL");
  hub.define(o);
  o.add(
       "device", &model.device,
       "What it runs on: auto, cpu, cuda, or cuda with the numbers of its GPUs (cuda:1; cuda:0,1 splits the model over "
       "two)")
      .value_name("DEVICE");
  o.check([this] { return model::parse_device(model.device).status(); });
  o.add("threads", &model.threads, "Threads of a step; 0 is what the machine and its control group allow")
      .range(0, 1024);
  o.add("ranks", &model.ranks,
        "Parts the model is split into, which compute each step together: by heads, columns and experts. On GPUs each "
        "has one of its own; on a CPU its own threads, and its own node of memory where the machine has several")
      .range(1, model::kMostRanks);
  o.alias("gpus", "ranks");
  o.add("attention", &model.attention, "Attention back end; auto takes the best one here").value_name("NAME");
  define_attention_dtype(o, model.attention_dtype);
  o.add("chat_template", &engine.chat_template, "Jinja file that replaces the model's own chat template")
      .value_name("FILE");
  o.add("template_dates", &engine.template_dates,
        "Tell chat templates the day, as date_string and datetime, as llama-server does; else those of Llama 3 and "
        "others write the date they have, as transformers does");
  o.add("max_context", &engine.max_context,
        "Tokens of a request at most, prompt and answer; 0, and more than the model was made for, is the model's own")
      .range(0, 1 << 24);
  o.add("attention_window", &model.attention_window,
        "Endless generation (StreamingLLM): each layer sees so many tokens, attention_sinks of them the first ones of "
        "the "
        "text; pages between are given back, and a request may be longer than the model's context; 0: all tokens are "
        "seen")
      .range(0, 1 << 24);
  o.add("attention_sinks", &model.attention_sinks, "First tokens that stay in sight; counted inside attention_window")
      .range(0, 1 << 20);
  o.add("batch_invariant", &model.batch_invariant,
        "The same logits, to the bit, alone or in any batch and in any chunks; a CPU has them always");
  o.add("quantize", &model.quantize,
        "Weights on a GPU: as stored (quantized GGUF stays packed), all as bfloat16, or E4M3 with a scale a row; a CPU "
        "knows auto alone")
      .one_of({"auto", "bf16", "fp8"});
  o.add("pooling", &model.pooling,
        "Embeddings are the last token's hidden state, the mean of all tokens', or the first token's (cls); auto is "
        "what "
        "the model's files say (modules.json, pooling_type), else last")
      .one_of({"auto", "last", "mean", "cls"});
  o.add("embed_normalize", &model.embed_normalize,
        "Embeddings have length 1, where a request does not say; auto is what the model's files say, else yes")
      .one_of({"auto", "yes", "no"});
  o.add("precise", &model.precise, "float32 activations instead of 12-bit integers: slower, closer to the reference");

  o.section("Cache and steps");
  o.add(
      "kv_memory", &kv_memory,
      "Memory of the KV cache; 0 is, on a CPU, a quarter of what is free and at most 4 GiB, and on a GPU what is left");
  define_cache_form(o, model.kv);
  o.add("host_kv_memory", &host_kv_memory,
        "Memory of a second tier of the cache, in the host: what leaves the device moves there; 0: none");
  kv_index_option_ =
      &o.add("kv_index", &kv_index_, "How the cache is indexed: by pages, by tokens, or one run of it a request")
           .one_of({"page_table", "token_table", "offset"});
  o.add("cost_model", &engine.cost_model,
        "JSON with what a step costs here (configs/cost): it decides between moving pages and computing them again")
      .value_name("FILE");
  page_size_option_ = &o.add("page_size", &engine.page_size,
                             "Tokens a page of the cache; a step must have room for one beside max_running. On a GPU a "
                             "power of two up to 256")
                           .range(1, kvcache::kMostPageTokens);
  prefix_cache_option_ =
      &o.add("prefix_cache", &engine.prefix_cache, "Keep the pages of finished requests for prompts that begin alike");
  max_tokens_option_ =
      &o.add("max_tokens_per_step", &engine.max_tokens_per_step,
             cat("Tokens a step computes at most: decodes first, then prompts; where nothing is said, ", kGpuTokens,
                 " on a GPU"))
           .range(16, 1 << 20);
  max_step_ms_option_ =
      &o.add(
            "max_step_ms", &engine.max_step_ms,
            cat("Milliseconds a step is to take while somebody waits for the next token: prompts beside it are read in "
                "smaller parts, of a page at least, or as long as the decodes themselves take. What steps take is "
                "learned from those that ran; 0: no bound",
                bounds_steps() ? cat("; where nothing is said, ", kGpuStepMs, " on a GPU") : ""))
           .range(0, 60000);
  o.add("record", &engine.record,
        "Write what the scheduler was asked and planned, for kvasir simulate; no text is kept")
      .value_name("FILE");
  o.add("max_draft", &engine.max_draft,
        "Speculative decoding: where an answer repeats the prompt or itself (prompt lookup), so many of its next "
        "tokens are drafted from there at most and verified in one step. The answers are the same; how many tokens pay "
        "is learned. A grammar drafts what it leaves no choice about. With max_step_ms; 0: none")
      .range(0, 64);
  o.add("draft_model", &engine.draft_model,
        "A smaller model of the same vocabulary that drafts where nothing else does: a .gguf file, a folder, "
        "hf:ORG/REPO[:FILE] or dummy:... Or an EAGLE-3 head that was made for the model (a folder of safetensors; not "
        "with ranks). It runs on the same device; its cache, of 16 bits, is a part of kv_memory. How many tokens pay, "
        "with its own time, is learned")
      .value_name("MODEL");
  o.add("mtp", &engine.mtp,
        "Where no draft_model is named: draft with the model's own layer of multi-token prediction, if its files carry "
        "one (GLM 4.5 and later, DeepSeek V3; not with ranks)");
  max_running_option_ = &o.add("max_running", &engine.max_running,
                               cat("Sequences in a step at most; where nothing is said, ", kGpuRunning, " on a GPU"))
                             .range(1, 65536);
  o.check([this] {
    fit_device();
    return check();
  });
}

// Whether somebody waits for each token: `kvasir generate` begins with another default.
bool ModelFlags::bounds_steps() const { return engine.max_step_ms == engine::EngineOptions().max_step_ms; }

// A GPU's step costs hardly more for what fits beside its weights.
void ModelFlags::fit_device() {
  if (!model::prefers_gpu(model)) return;
  auto unsaid = [](const Option* o) { return o->source() == "default"; };
  if (unsaid(max_running_option_) && (unsaid(max_tokens_option_) || engine.max_tokens_per_step > 2 * kGpuRunning))
    engine.max_running = kGpuRunning;
  if (unsaid(max_step_ms_option_) && bounds_steps()) engine.max_step_ms = kGpuStepMs;
  if (unsaid(max_tokens_option_)) engine.max_tokens_per_step = std::max<int64_t>(kGpuTokens, 2 * engine.max_running);
}

Status ModelFlags::check() const {
  if (const int64_t least = int64_t(engine.max_running) + engine.page_size; engine.max_tokens_per_step < least)
    return invalid_argument(cat("max_tokens_per_step is ", engine.max_tokens_per_step, "; it must be at least ", least,
                                " (max_running and page_size), or prompts would wait for ever"));
  if (kv_index_ == "offset" && (engine.prefix_cache || host_kv_memory.bytes > 0))
    return invalid_argument(
        cat("kv_index is offset, which keeps one run of the cache a request; ",
            engine.prefix_cache ? "turn prefix_cache off (--no-prefix-cache)" : "leave host_kv_memory at 0"));
  if (model.attention_sinks > 0 && model.attention_sinks >= model.attention_window)
    return invalid_argument(cat("attention_sinks is ", model.attention_sinks,
                                "; sinks are counted inside attention_window, which is ", model.attention_window,
                                ": there must be fewer of them"));
  if (model.attention_window > 0 && (kv_index_ == "offset" || host_kv_memory.bytes > 0))
    return invalid_argument(cat("attention_window is ", model.attention_window,
                                "; what it leaves behind is given back page by page: it needs kv_index page_table or "
                                "token_table and no host_kv_memory"));
  if (engine.max_draft > 0 && engine.max_draft != engine::EngineOptions().max_draft) {  // the default gives way
    if (engine.max_step_ms == 0)
      return invalid_argument(
          cat("max_draft is ", engine.max_draft, "; it needs max_step_ms, with which is learned what steps take"));
  }
  if (!engine.draft_model.empty() && (engine.max_draft == 0 || engine.max_step_ms == 0))
    return invalid_argument(cat("draft_model is ", engine.draft_model, "; it needs ",
                                engine.max_draft == 0 ? "max_draft above 0, the most tokens of a draft"
                                                      : "max_step_ms, with which is learned what steps take"));
  if (engine.max_step_ms > 0 && engine.max_step_ms < 1)
    return invalid_argument(
        cat("max_step_ms is ", engine.max_step_ms, "; it must be 0 (no bound), or from 1 to 60000"));
  return {};
}

void ModelFlags::define_adapters(Options& o) {
  o.section("Adapters");
  o.add("lora", &lora_,
        "NAME=PATH of a low-rank adapter (LoRA, rsLoRA, DoRA) that requests may name: a folder as PEFT writes it, or a "
        "GGUF file as llama.cpp's converter does. On a CPU")
      .value_name("NAME=PATH");
  o.add("lora_memory", &lora_memory, "Memory of all adapters together; one that does not fit is refused");
  o.check([this]() -> Status {
    engine.adapters.clear();
    for (const std::string& text : lora_) {
      const size_t equals = text.find('=');
      if (equals == std::string::npos || equals + 1 == text.size())
        return invalid_argument(cat("lora is '", text, "'; it must be NAME=PATH"));
      engine::AdapterSource source{text.substr(0, equals), text.substr(equals + 1)};
      if (Status s = engine::check_adapter_name(source.name); !s.ok())
        return invalid_argument(cat("lora has the name '", source.name, "'; ", s.message()));
      for (const auto& other : engine.adapters)
        if (other.name == source.name) return invalid_argument(cat("lora names '", source.name, "' twice"));
      engine.adapters.push_back(std::move(source));
    }
    return {};
  });
}

void ModelFlags::define_queue(Options& o) {
  o.section("Scheduling");
  o.add("policy", &engine.policy, "Who runs first").one_of({"fcfs", "lpm", "priority", "deadline", "fair"});
  o.add("max_waiting", &engine.max_waiting, "Requests that may wait; more are refused with a time to try again")
      .range(1, 1e7);
  o.add("max_waiting_tokens", &engine.max_waiting_tokens, "Prompt tokens that may wait").range(1, 1e12);
  o.add("max_wait", &engine.max_wait,
        "Who would have to wait longer is refused at once; 0: three times as long as an answer takes, and at least 4 s")
      .at_least(0);
  o.add("tenant_queue_share", &engine.tenant_queue_share,
        "What one tenant may have waiting, in parts of what is left for all; 1: half when alone; 0: no bound")
      .range(0, 1000);
  o.add("tenant_max_waiting", &engine.tenant_max_waiting,
        "Requests of one tenant that may wait; 0: no bound of its own")
      .range(0, 1e7);
  o.add("tenant_max_waiting_tokens", &engine.tenant_max_waiting_tokens, "Prompt tokens of one tenant that may wait")
      .range(0, 1e12);
  o.add("tenant_cache_share", &engine.tenant_cache_share, "Part of the cache that one tenant's prefixes may fill")
      .range(0.001, 1);
  o.add("tenant_weight", &tenant_weights_,
        "TENANT=WEIGHT for the policy fair; a tenant that is not named has its key's, or 1")
      .value_name("TENANT=WEIGHT");
  o.check([this]() -> Status {
    engine.tenant_weights.clear();
    for (const std::string& text : tenant_weights_) {
      KVASIR_ASSIGN(auto weight, parse_weight(text));
      engine.tenant_weights.insert(std::move(weight));
    }
    return {};
  });

  o.add("cache_event_ring", &cache_event_ring_,
        "Cache events of a tenant that a router may ask for again (SubscribeKvEvents)")
      .range(1, 1 << 24);

  o.section("Readers and liveness");
  o.add("event_buffer", &event_buffer_, "Tokens a slow reader may leave unread before its request is paused")
      .range(1, 1 << 20);
  o.add("slow_reader_limit", &engine.slow_reader_limit,
        "How long a paused reader may read nothing before it is cut off")
      .at_least(0.1);
  o.add("watchdog_seconds", &engine.watchdog, "Work pending and no step finished for so long is reported as stuck")
      .at_least(0.1);
  o.add("step_trace", &engine.step_trace, "Write a Chrome trace of the steps").value_name("FILE");
}

Status ModelFlags::fetch() {
  KVASIR_ASSIGN(model.model, hub::local_model(model.model, hub));
  if (!engine.draft_model.empty()) {
    KVASIR_ASSIGN(engine.draft_model, hub::local_model(engine.draft_model, hub));
  }
  KVASIR_ASSIGN(const auto said, model::read_cache_indexing(model.model));
  auto unsaid = [](const Option* o) { return o && o->source() == "default"; };
  if (said.page_size > 0 && unsaid(page_size_option_)) engine.page_size = said.page_size;
  if (!said.kv_index.empty() && unsaid(kv_index_option_)) {
    kv_index_ = said.kv_index;
    if (kv_index_ == "offset" && unsaid(prefix_cache_option_)) engine.prefix_cache = false;
  }
  if (said.page_size > 0 || !said.kv_index.empty())
    log_info("the cache is as params.json says, but for what the options say",
             {{"kv_index", kv_index_}, {"page_size", engine.page_size}, {"prefix_cache", engine.prefix_cache}});
  return check();
}

engine::EngineOptions ModelFlags::engine_options() const {
  engine::EngineOptions out = engine;
  out.kv_memory = kv_memory.bytes;
  out.host_kv_memory = host_kv_memory.bytes;
  out.adapter_memory = lora_memory.bytes;
  if (kv_index_ == "token_table") out.kv_index = kvcache::IndexMode::token_table;
  if (kv_index_ == "offset") out.kv_index = kvcache::IndexMode::offset;
  out.event_buffer = int32_t(event_buffer_);
  out.cache_event_ring = int32_t(cache_event_ring_);
  return out;
}

}  // namespace kvasir::cli
