// The seam between the step loop and a network on a device. CPU runs in launch(); CUDA enqueues
// there, and up to depth() launches may be in flight.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/status.h"
#include "core/thread_pool.h"
#include "kvcache/form.h"
#include "model/adapter.h"
#include "model/batch.h"
#include "model/pooling.h"
#include "model/sampling.h"
#include "model/text/text.h"

namespace kvasir::model {

// One of several that compute each step together (model/ranks.h).
struct RankInfo {
  std::string device;  // "node 1, 8 threads"
  int32_t heads = 0, kv_heads = 0, experts = 0;
  int64_t weight_bytes = 0, kv_bytes_per_token = 0;
};

struct ModelInfo {
  std::string name;          // "SmolLM2-135M-Instruct"
  std::string architecture;  // "llama"
  std::string quantization;  // "Q4_1"
  int32_t vocab_size = 0;
  int32_t context_length = 0;
  int32_t layers = 0, hidden = 0, heads = 0, kv_heads = 0, head_dim = 0;
  int32_t sliding_window = 0;   // of `windowed_layers` layers
  int32_t windowed_layers = 0;  // none, some or all
  // StreamingLLM: tokens at the front that every query sees beside its window; context_length is then without end, and
  // trained_context what the model was made for. Sequences are told to the operators without what lies between.
  int32_t attention_sinks = 0;
  int32_t trained_context = 0;
  bool streaming = false;
  int64_t parameters = 0;
  int64_t weight_bytes = 0;
  int64_t kv_bytes_per_token = 0;  // scales included
  int64_t windowed_kv_bytes = 0;   // of them, of layers with a window
  std::string kv_type;             // what the cache is made of, in words
  std::string attention_type;      // what scores are made of, likewise
  PoolingRule pooling;             // of its embeddings
  bool encoder = false;            // every token sees all others: a prompt is computed in one step, and none is drawn
  // An encoder-decoder: the token behind its prompts, from which on the decoder goes; -1: it is none. Prompts are
  // computed in one step, as an encoder's.
  int32_t decoder_start = -1;
  int32_t labels = 0;           // scores of its classification head; 0: it has none
  bool two_separators = false;  // of a pair: an end stands where the second text would begin (RoBERTa)
  int64_t state_bytes = 0;      // of one sequence, beside its keys and values (model/linear_attention.h); 0: none
  int32_t next_layers = 0;      // that predict tokens behind the next one, as its files say
  int64_t kept = 0;             // of a head: columns at Batch::kept_at, of its own rows; 0: it is none
  int64_t given = 0;            // of a head: those of the model's rows; 0: it is none
  int64_t places = 0;           // of a head: for rows of either, in one memory
  std::vector<RankInfo> ranks;  // empty: there is one
};

// What the routers of a mixture of experts have chosen.
struct ExpertLoad {
  int64_t tokens = 0;           // an expert each: a token counts as often as it has experts, in every layer
  int64_t reads = 0;            // experts whose weights a step has read, in all layers
  double worst = 0, usual = 0;  // tokens of the most chosen expert over the mean, lately: of one layer, of all
};

struct RunnerOptions {
  std::string model;                     // file, directory, dummy:...
  std::string device = "auto";           // auto, cpu, cuda
  std::string attention = "auto";        // back end name
  std::string attention_dtype = "auto";  // what scores are made of: auto (what the device has), bf16, fp8
  kvcache::FormWish kv;                  // what the cache is made of
  std::string quantize = "auto";         // of the weights: auto (as stored), bf16, fp8; on a CPU auto alone
  std::string pooling = "auto", embed_normalize = "auto";  // of embeddings; auto: as the model's files have it
  int32_t threads = 0;                                     // 0: what the machine and its cgroup allow
  int32_t ranks = 1;                                       // that compute each step together (model/ranks.h)
  bool batch_invariant = false;                            // a row's logits do not depend on its batch, on a GPU too
  bool precise = false;                                    // float32 activations instead of 12-bit integers
  int32_t page_size = 16;
  kvcache::IndexMode index_mode = kvcache::IndexMode::page_table;  // how batches say where a token lives
  int64_t max_batch = 0, max_tokens = 0, max_kvlen = 0;            // a step's limits
  int32_t attention_window = 0, attention_sinks = 0;               // StreamingLLM; 0: none
  bool graphs = true;  // a GPU replays steps it has launched before; tests compare with launching each
};

// Pages of a cache. With two groups the layers that have a window live in the second, the others in the first;
// with one all layers share it, whatever they see of it.
struct CachePages {
  CachePages(int64_t all) : groups{all} {}  // NOLINT: a number of pages is meant to be one
  CachePages(std::vector<int64_t> by_group, int64_t in_host) : groups(std::move(by_group)), host(in_host) {}
  std::vector<int64_t> groups;
  int64_t host = 0;    // of the second tier, in host memory
  int64_t states = 0;  // not pages: slots for the states of sequences (ModelInfo::state_bytes each)
};

class Runner {
 public:
  virtual ~Runner() = default;
  virtual const ModelInfo& info() const = 0;
  virtual int depth() const = 0;  // launches that may be in flight: CPU 1, CUDA 2

  // Bytes the device can give a cache; -1: it shares the host's memory, and the host's rule holds.
  virtual int64_t cache_room() const { return -1; }
  // Groups of layers that may have pages of their own.
  virtual int cache_groups() const { return 1; }
  // Of mixtures of experts; zeros where it is not counted. Called by who launches.
  virtual ExpertLoad expert_load() const { return {}; }
  // Why no step will ever succeed again: a rank was lost. Called by who launches.
  virtual Status lost() const { return {}; }
  // Called once, before the first launch.
  virtual Status allocate_cache(const CachePages& pages) = 0;

  // PEFT's folder or llama.cpp's GGUF file. From any thread, while steps run; at most `room` bytes are taken.
  virtual Result<AdapterPtr> load_adapter(const std::string& /*path*/, int64_t /*room*/) {
    return unimplemented("this model takes no adapters");
  }

  // A head that drafts for this model out of its hidden states: an EAGLE-3 folder (options.model), or where none is
  // named the layer of multi-token prediction in the model's own files (null: they have none). It shares weights with
  // this runner and must not outlive it. From here on both have `places` for hidden states (Batch::kept_at), of one
  // memory.
  virtual Result<std::unique_ptr<Runner>> load_head(const RunnerOptions& /*options*/, int64_t /*places*/) {
    return unimplemented("this model hands over no hidden states, which a head that drafts needs");
  }

  // rows[i] belongs to batch.logit_rows[i], the pools' rows follow; everything pointed to lives until the matching
  // wait().
  virtual Status launch(const Batch& batch, std::span<const SampleRow> rows) = 0;
  // The oldest launch's results, one a row.
  virtual Result<std::vector<Sampled>> wait() = 0;
};

// Progress in [0,1] while loading.
using Progress = void (*)(void* context, const char* phase, double fraction);
Result<std::unique_ptr<Runner>> load_runner(const RunnerOptions& options, Progress progress = nullptr,
                                            void* context = nullptr);

// What the same model says of text: its vocabulary and chat template, from the GGUF file or the folder's
// tokenizer.json. The tokenizer is null where there is none (dummy models of any vocabulary: they may bring
// a byte-level one, so that load tests see text); the template is null where the model has none.
struct ModelText {
  text::TokenizerPtr tokenizer;
  std::shared_ptr<const text::ChatTemplate> chat_template;
};
Result<ModelText> load_text(const RunnerOptions& options);

}  // namespace kvasir::model
