#include "model/cpu/rank.h"

#include <algorithm>

#include "core/cat.h"
#include "core/check.h"

namespace kvasir::model::cpu {
Status Rank::load(Weights& weights, const attention::Backend* attention, const LoadProgress& progress,
                  const Load& network) {
  CpuOptions o;
  o.precise = options_.precise;
  o.max_batch = options_.max_batch;
  o.max_tokens = options_.max_tokens;
  o.max_kvlen = options_.max_kvlen;
  o.max_logit_rows = kLogitRows;
  o.page_size = options_.page_size;
  o.index_mode = options_.index_mode;
  o.attention = attention;
  o.runner = options_;
  o.part = config_.part;
  o.link = link_;
  ops_.emplace(o, pool_, best_kernels());
  pool_.begin_step();  // the workers stay awake between the tensors
  auto loaded = network ? network(*ops_) : load_network(config_, weights, *ops_, progress);
  pool_.end_step();
  if (!loaded.ok()) return loaded.status();
  network_ = std::move(loaded).value();
  return {};
}

Status Rank::allocate_cache(const CachePages& pages) {
  KVASIR_CHECK(caches_.empty() && !pages.groups.empty() && pages.groups.size() <= 2, "the cache is allocated once");
  apart_ = pages.groups.size() > 1;
  CacheLayout layout = cache_layout(config_, form_, options_.page_size, apart_);
  std::vector<kvcache::CacheView> views;
  for (size_t i = 0; i < layout.shapes.size(); ++i) {
    const size_t group = apart_ ? i : 0;
    KVASIR_ASSIGN(auto cache, Cache::make(layout.shapes[i], pages.groups[group], group == 0 ? pages.host : 0));
    views.push_back(cache->view());
    caches_.push_back(std::move(cache));
  }
  if (config_.state_bytes() > 0) KVASIR_TRY(ops_->set_states(pages.states));
  return ops_->set_caches(std::move(views), apart_, std::move(layout.places), form_.tensor_scales);
}

Status Rank::step(const Batch& batch, const std::vector<int32_t>& tokens, int64_t rows, Draws* draws) {
  if (config_.part.rank == config_.dummy_lost_rank && int64_t(batch.step) >= config_.dummy_lost_step)
    return internal_error(cat("the dummy model says so (lost_step=", config_.dummy_lost_step, ")"));
  // One pool of pages may lie in two caches; only one that has a second tier moves pages.
  for (size_t i = 0; i < caches_.size(); ++i) {
    const int32_t group = apart_ ? int32_t(i) : 0;
    if (group == 0)
      for (const PageMove& m : batch.moves) caches_[i]->move(m);
    for (const PageCopy& c : batch.copies)
      if (c.group == group) caches_[i]->copy(c);
  }
  for (const PageCopy& c : batch.copies)
    if (c.group == kvcache::kStateGroup) ops_->copy_state(c.from, c.to);
  if (batch.tokens.empty()) return {};
  pool_.begin_step();
  Status status = forward(batch, tokens, rows, draws);
  pool_.end_step();
  return status;
}

Status Rank::forward(const Batch& batch, const std::vector<int32_t>& tokens, int64_t rows, Draws* draws) {
  KVASIR_TRY(ops_->begin(batch, tokens));
  KVASIR_TRY(network_->forward());
  for (int64_t first = 0; first < rows; first += kLogitRows) {
    const int64_t count = std::min(kLogitRows, rows - first);
    KVASIR_ASSIGN(Buffer logits, network_->logits(first, count));
    if (draws) KVASIR_TRY(draws->draw(pool_, ops_->data(logits), logits.cols, count));
  }
  if (!config_.part.first()) return {};
  const int64_t pooled = batch.pooled_rows();
  for (int64_t first = 0; first < pooled; first += kLogitRows) {
    const int64_t count = std::min(kLogitRows, pooled - first);
    KVASIR_ASSIGN(Buffer hidden, network_->hidden(rows + first, count));
    add_pooled(batch.pools, first, count, ops_->data(hidden), hidden.cols, 1 / config_.logit_scale);
  }
  return {};
}

}  // namespace kvasir::model::cpu
