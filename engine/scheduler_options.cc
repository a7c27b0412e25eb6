#include "engine/scheduler_options.h"

#include <random>

#include "core/cat.h"
#include "core/cpu.h"
#include "engine/kv_memory.h"
#include "engine/recording_file.h"
#include "engine/step_cost.h"
#include "scheduler/recorder.h"

namespace kvasir::engine {
namespace {

// How long a queue may be where nobody says: a client has some patience, and more where answers take long.
constexpr double kLeastWait = 4, kAnswersWait = 3;

}  // namespace

Result<scheduler::Settings> scheduler_options(const EngineOptions& options, const model::Runner& runner,
                                              int64_t kv_memory) {
  const model::ModelInfo& info = runner.info();
  scheduler::Settings o;
  if (!options.cost_model.empty()) KVASIR_TRY(read_cost_model(options.cost_model, &o.cost));
  o.page_size = options.page_size;
  o.index_mode = options.kv_index;
  // The second tier and runs know one pool only, which then keeps every token.
  const bool apart = options.host_kv_memory == 0 && options.kv_index != kvcache::IndexMode::offset &&
                     (runner.cache_groups() > 1 || info.windowed_layers == info.layers);
  if (info.streaming && !apart)
    return invalid_argument(cat("attention_window is ", info.sliding_window,
                                "; what it leaves behind is given back page by page: it needs kv_index page_table or "
                                "token_table and no host_kv_memory"))
        .with_field("attention_window");
  o.recurrent = info.state_bytes > 0;
  if (o.recurrent && options.host_kv_memory > 0)
    return invalid_argument("host_kv_memory is for pages; a model with recurrent states has none to move them with: 0")
        .with_field("host_kv_memory");
  KVASIR_ASSIGN(const StateSlots states, state_slots(kv_memory, info, options.max_running, options.prefix_cache));
  const KvSteps steps{options.page_size, states.sequences, options.max_tokens_per_step};
  KVASIR_ASSIGN(o.groups, kv_pools(kv_memory - states.bytes, info, steps, apart));
  if (options.host_kv_memory > 0) {
    const int64_t page = std::max<int64_t>(1, info.kv_bytes_per_token) * options.page_size;
    o.host_pages = options.host_kv_memory / page;
    if (o.host_pages == 0)
      return invalid_argument(cat("host_kv_memory is ", options.host_kv_memory, " bytes; a page of ", options.page_size,
                                  " tokens of this model takes ", page))
          .with_field("host_kv_memory");
  }
  o.max_context = info.context_length;
  if (options.max_context > 0) o.max_context = std::min(o.max_context, options.max_context);
  o.max_context += info.decoder_start >= 0;
  o.max_tokens_per_step = options.max_tokens_per_step;
  o.max_step_ms = options.max_step_ms;
  o.max_running = states.sequences;
  o.max_draft = o.recurrent ? 0 : options.max_draft;
  o.depth = runner.depth();
  o.kept_states = states.kept;
  o.prefix_cache = options.prefix_cache && (!o.recurrent || o.kept_states > 0);
  o.policy = options.policy;
  o.tenant_weights = options.tenant_weights;
  o.max_waiting = options.max_waiting;
  o.max_waiting_tokens = options.max_waiting_tokens;
  o.tenant_max_waiting = options.tenant_max_waiting;
  o.tenant_max_waiting_tokens = options.tenant_max_waiting_tokens;
  o.max_wait_s = options.max_wait.count() > 0 ? 1e-3 * double(options.max_wait.count()) : kLeastWait;
  o.max_wait_answers = options.max_wait.count() > 0 ? 0 : kAnswersWait;
  o.tenant_queue_share = options.tenant_queue_share;
  o.tenant_cache_share = options.tenant_cache_share;
  if (!options.record.empty()) {
    KVASIR_ASSIGN(auto opened, RecordingFile::open(options.record));
    std::shared_ptr<RecordingFile> file = std::move(opened);
    std::random_device entropy;
    const std::string what_runs = runner.cache_room() >= 0 ? "a GPU" : cat("a CPU with ", cpu().to_string());
    o.recorder = std::make_shared<scheduler::Recorder>(
        [file](std::string lines) { file->write(std::move(lines)); }, uint64_t(entropy()) << 32 | entropy(),
        cat(info.name, ' ', info.quantization, ", cache of ", info.kv_type, ", on ", what_runs));
  }
  return o;
}

}  // namespace kvasir::engine
