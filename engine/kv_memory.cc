#include "engine/kv_memory.h"

#include "core/cat.h"

namespace kvasir::engine {
namespace {

// A tiny model's token is a few bytes; a table of more pages than this helps nobody.
constexpr int64_t kMostPages = int64_t(1) << 20;

}  // namespace

Result<int64_t> kv_pages(int64_t kv_memory, int32_t page_size, int64_t bytes_per_token) {
  int64_t page = bytes_per_token * page_size;
  int64_t pages = page > 0 ? std::min(kv_memory / page, kMostPages) : kMostPages;
  if (pages < 2)
    return failed_precondition(cat("kv-memory is ", kv_memory, " bytes; a page of ", page_size,
                                   " tokens of this model takes ", page,
                                   " and two are the least: give --kv-memory at least ", 2 * page));
  return pages;
}

Result<std::vector<scheduler::PageGroup>> kv_pools(int64_t kv_memory, const model::ModelInfo& model,
                                                   const KvSteps& steps, bool apart) {
  KVASIR_ASSIGN(const int64_t together, kv_pages(kv_memory, steps.page_size, model.kv_bytes_per_token));
  std::vector<scheduler::PageGroup> pools{{together, 0}};
  if (model.windowed_layers == model.layers && apart)
    pools[0].window = model.sliding_window, pools[0].sinks = model.attention_sinks;
  if (model.windowed_layers == 0 || model.windowed_layers == model.layers || !apart) return pools;

  auto pages = [&](int64_t tokens) { return (tokens + steps.page_size - 1) / steps.page_size; };
  const int64_t wanted = steps.max_running * (pages(model.sliding_window) + 2) + pages(steps.max_tokens_per_step);
  const int64_t windowed = std::min(together, wanted);
  const int64_t page = steps.page_size * (model.kv_bytes_per_token - model.windowed_kv_bytes);
  const int64_t left = kv_memory - windowed * steps.page_size * model.windowed_kv_bytes;
  const int64_t full = left / std::max<int64_t>(1, page);
  pools[0].pages = std::clamp(full, together, kMostPages);
  pools.push_back({windowed, model.sliding_window});
  return pools;
}

Result<StateSlots> state_slots(int64_t kv_memory, const model::ModelInfo& model, int32_t max_running, bool keeps) {
  if (model.state_bytes == 0) return StateSlots{max_running};
  const int64_t room = kv_memory / 2 / model.state_bytes;
  if (room < 1)
    return failed_precondition(cat("kv-memory is ", kv_memory, " bytes; the state of a sequence of this model takes ",
                                   model.state_bytes, ", and states have at most half: give --kv-memory at least ",
                                   2 * model.state_bytes));
  const int64_t reserved = keeps ? std::min<int64_t>(max_running, (room + 2) / 4) : 0;
  const auto sequences = int32_t(std::min<int64_t>(max_running, room - reserved));
  const auto kept = keeps ? int32_t(std::min<int64_t>(max_running, room - sequences)) : 0;
  return StateSlots{sequences, kept, (sequences + kept) * model.state_bytes};
}

int64_t memory_for(int64_t sequences, int64_t tokens, const model::ModelInfo& model, int32_t max_running) {
  const int64_t pages = sequences * tokens * model.kv_bytes_per_token;
  if (model.state_bytes == 0) return pages;
  int64_t room = sequences;  // of states, some of which are kept for prefixes
  while (room - std::min<int64_t>(max_running, (room + 2) / 4) < sequences) ++room;
  return std::max(2 * room * model.state_bytes, pages + std::min(pages, 2 * max_running * model.state_bytes));
}

DraftPages draft_pages(int64_t kv_memory, const model::ModelInfo& model, const model::ModelInfo& draft,
                       const KvSteps& steps) {
  const int64_t page = std::max<int64_t>(1, draft.kv_bytes_per_token) * steps.page_size;
  const int64_t own = std::max<int64_t>(1, model.kv_bytes_per_token) * steps.page_size;
  const int64_t context = (draft.context_length + steps.page_size - 1) / steps.page_size;
  DraftPages out;
  out.pages = std::min({kv_memory / (own + page), kv_memory / 2 / page, steps.max_running * context, kMostPages});
  out.pages = std::max<int64_t>(1, out.pages);
  out.bytes = out.pages * page;
  return out;
}

}  // namespace kvasir::engine
