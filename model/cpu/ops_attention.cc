// Attention of the host's operations: its kinds, the caches they have, and a step in the operators' own terms.
#include "model/cpu/ops.h"

#include "core/cat.h"
#include "model/attention_dtype.h"
#include "model/attention_step.h"
#include "model/streaming.h"

namespace kvasir::model::cpu {

Result<int32_t> CpuOps::add_attention(const attention::Attributes& attributes) {
  KVASIR_ASSIGN(attention::Attributes a, streamed(with_dtype(attributes, options_.runner), options_.runner));
  a.index_mode = options_.index_mode;
  a.page_size = options_.page_size;
  kinds_.push_back(std::move(a));
  side_of_.emplace_back();
  windowed_.push_back(attributes.window > 0);
  return int32_t(kinds_.size() - 1);
}

Result<int32_t> CpuOps::add_attention_of(Side side, const attention::Attributes& attributes) {
  KVASIR_ASSIGN(const int32_t kind, add_attention(attributes));
  kinds_.back().index_mode = kvcache::IndexMode::token_table;
  side_of_.back() = side;
  return kind;
}

Status CpuOps::set_caches(std::vector<kvcache::CacheView> caches, bool apart, std::vector<int32_t> places,
                          std::vector<kvcache::TensorScales> scales) {
  caches_ = std::move(caches);
  apart_ = apart;
  scales_ = std::move(scales);
  places_ = std::move(places);
  attention::Limits limits = limits_of(options_);
  for (size_t kind = 0; kind < kinds_.size(); ++kind) {
    limits.cache_tokens = caches_[cache_of(kind)].max_tokens;
    KVASIR_ASSIGN(auto attention, options_.attention->create(kinds_[kind], limits, {.pool = &pool_}));
    attentions_.push_back(std::move(attention));
  }
  return {};
}

Status CpuOps::begin(const Batch& batch, const std::vector<int32_t>& tokens) {
  batch_ = &batch;
  tokens_ = &tokens;
  adapter_rows_.begin(batch, options_.part.rank);
  const bool sided = !side_of_.empty() && side_of_[0];  // all kinds of an encoder-decoder are
  if (sided && std::ssize(batch.sources) != batch.size())
    return internal_error(cat("a step of ", batch.size(), " sequences says the sources of ", batch.sources.size()));
  if (sided) sides_.take(batch, tokens, options_.index_mode, options_.page_size);
  for (size_t kind = 0; kind < attentions_.size(); ++kind) {
    const Batch& of = side_of_[kind] ? sides_.of(*side_of_[kind]) : batch;
    KVASIR_TRY(attentions_[kind]->plan(step_of(of, apart_ ? cache_of(kind) : 0)));
  }
  return {};
}

Result<int64_t> CpuOps::turn_to(Side side) {
  batch_ = &sides_.of(side);
  tokens_ = &batch_->tokens;
  return int64_t(tokens_->size());
}

Status CpuOps::attend(const Attend& how, Buffer qkv, Buffer out) {
  attention::Tensors t;
  t.query = data(qkv);
  t.output = data(out);
  t.sink_logits = vector(how.sinks);
  t.cache = cache_for(how);
  if (!scales_.empty()) t.q_scale = scales_[size_t(how.layer)].q;
  t.layer = places_[size_t(how.layer)];
  return attentions_[size_t(how.kind)]->run(t);
}

kvcache::CacheView CpuOps::cache_for(const Attend& how) const {
  kvcache::CacheView c = caches_[cache_of(size_t(how.kind))];
  if (!scales_.empty()) c.k_scale = scales_[size_t(how.layer)].k, c.v_scale = scales_[size_t(how.layer)].v;
  if (kvcache::keys_alone(c)) c.v_scale = c.k_scale;
  return c;
}

Status CpuOps::store(const Attend& how, Buffer keys, Buffer values) {
  attention::KvcTensors t;
  t.key = data(keys), t.value = data(values);
  t.cache = cache_for(how);
  t.layer = places_[size_t(how.layer)];
  return attentions_[size_t(how.kind)]->store_and_gather(t);
}

}  // namespace kvasir::model::cpu
