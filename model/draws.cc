#include "model/draws.h"

#include <algorithm>
#include <utility>

#include "core/cat.h"
#include "core/check.h"

namespace kvasir::model {

bool draws_on_device(const SampleRow& r, bool changes) {
  const SamplingParams& p = *r.params;
  for (const SamplingNumber& n : kSamplingNumbers)
    if (!n.on_device && n.set(p)) return false;
  if (!p.logprob_token_ids.empty() || !p.bad_sequences.empty() || p.post_sampling_probs) return false;
  const bool changed = p.logprobs >= 0 || !p.logit_bias.empty() || p.repetition_penalty != 1 ||
                       p.presence_penalty != 0 || p.frequency_penalty != 0 || r.mask || r.constraint || r.score_only;
  return !changed || (changes && p.logprobs <= kMostDeviceTop);
}

Draws::Draws(int32_t vocab, int threads, bool device_changes, int32_t known)
    : vocab_(vocab),
      known_(known > 0 ? known : vocab),
      device_changes_(device_changes),
      samplers_(size_t(threads), Sampler(vocab)) {}

Status Draws::begin(const Batch& batch, std::span<const SampleRow> rows) {
  return begin(batch, rows, int64_t(previous_.size()), &previous_);
}

Status Draws::begin(const Batch& batch, std::span<const SampleRow> rows, const Draws* before) {
  previous_.clear();
  if (before == nullptr) return begin(batch, rows, 0, &previous_);
  // A row that failed gave none; whoever goes on with it fails, too, and its mates do not.
  if (before->all_drawn())
    for (const Sampled& s : before->samples_) previous_.push_back(std::max(0, s.token));
  return begin(batch, rows, int64_t(before->samples_.size()), before->all_drawn() ? &previous_ : nullptr);
}

Status Draws::begin(const Batch& batch, std::span<const SampleRow> rows, int64_t samples,
                    const std::vector<int32_t>* known) {
  KVASIR_CHECK(!in_flight_, "a launch is in flight already");
  KVASIR_CHECK(int64_t(rows.size()) + batch.pooled_rows() == int64_t(batch.logit_rows.size()), rows.size(),
               " sample rows for ", batch.logit_rows.size());
  auto resolve = [&](int32_t& t) {
    const int64_t row = -1 - int64_t(t);
    KVASIR_CHECK(row < samples, "the step names sample row ", row, " of ", samples);
    if (known) t = (*known)[size_t(row)];
  };
  tokens_ = batch.tokens;
  for (int32_t& t : tokens_) {
    if (t < 0) {
      resolve(t);
      if (!known) continue;
    }
    if (t < 0 || t >= known_)
      return invalid_argument(cat("token id ", t, " is outside the vocabulary of ", known_)).with_field("prompt");
  }
  rows_.assign(rows.begin(), rows.end());
  for (SampleRow& row : rows_) {
    if (!row.last || *row.last >= 0) continue;
    if (!known && draws_on_device(row, device_changes_)) continue;
    KVASIR_CHECK(known, "a history goes on with a sample that is not there yet");
    resolve(*row.last);
  }
  wait_for_masks_ = &batch.wait_for_masks;
  drawn_ = 0;
  samples_.assign(rows.size(), {});
  return {};
}

// What a device has drawn, unless a constraint refuses it.
bool Draws::judge(const Logits& logits, int64_t i) {
  const auto r = size_t(drawn_ + i);
  const SampleRow& row = rows_[r];
  const DeviceDraw& drawn = logits.said.draws[i];
  Sampled& out = samples_[r];
  if (drawn.bad_logits || drawn.nothing_allowed) {
    out.bad_logits = drawn.bad_logits != 0, out.nothing_allowed = !out.bad_logits;
    return true;
  }
  out.token = drawn.token, out.logprob = drawn.logprob;
  for (int32_t k = 0; logits.said.top && k < row.params->logprobs; ++k)
    if (const TokenLogprob& t = logits.said.top[i * kMostDeviceTop + k]; t.token >= 0) out.top.push_back(t);
  if (!row.constraint || row.constraint->take(out.token, false)) return true;
  (void)row.constraint->mask();  // on its way from now on
  return false;
}

// A row, then those behind it that follow its token, until one gives another token, or waits for its mask: a constraint
// goes with what is drawn and is never taken back.
void Draws::draw_chain(Sampler& sampler, const Logits& logits, int64_t i) {
  for (; i < logits.count; ++i) {
    const auto r = size_t(drawn_ + i);
    if (rows_[r].after >= 0 && samples_[r - 1].token != rows_[r].after) return;
    Sampler::Refused refused{.row = i};
    const bool over = said_by_device(logits, i) ? judge(logits, i)
                                                : sampler.sample(logits.row(i, vocab_), rows_[r], samples_[r], refused);
    if (!over) {
      std::lock_guard lock(refused_mutex_);
      refused_.push_back(std::move(refused));
      return;
    }
    if (r + 1 == rows_.size() || rows_[r + 1].after < 0) return;
  }
}

// Of again_ those whose logits a device has, where their masks are there.
Status Draws::redraw(const Logits& logits) {
  masked_.clear();
  redrawn_at_.assign(again_.size(), -1);
  for (size_t k = 0; k < again_.size(); ++k) {
    if (!said_by_device(logits, again_[k].row)) continue;
    const int64_t at = drawn_ + again_[k].row;
    const SampleRow& row = rows_[size_t(at)];
    const uint32_t* mask = row.constraint->mask();
    if (mask == nullptr) continue;
    redrawn_at_[k] = std::ssize(masked_);
    masked_.push_back({at, &row, mask});
  }
  redrawn_.assign(masked_.size(), {});
  return masked_.empty() ? Status() : (*logits.said.redraw)(masked_, redrawn_);
}

void Draws::draw_again(Sampler& sampler, const Logits& logits, size_t nth) {
  const Sampler::Refused& again = again_[nth];
  const auto r = size_t(drawn_ + again.row);
  Sampled& out = samples_[r];
  if (!said_by_device(logits, again.row)) {
    sampler.sample_again(logits.row(again.row, vocab_), rows_[r], again, out);
  } else if (redrawn_at_[nth] < 0) {
    out.token = -1, out.late = true;
  } else {
    const DeviceDraw& drawn = redrawn_[size_t(redrawn_at_[nth])];
    out.token = drawn.token, out.logprob = drawn.logprob;
    out.nothing_allowed = drawn.nothing_allowed || !rows_[r].constraint->take(drawn.token, true);
    if (out.nothing_allowed) out.token = -1;
  }
  if (r + 1 < rows_.size() && rows_[r + 1].after >= 0) draw_chain(sampler, logits, again.row + 1);
}

Status Draws::draw(ThreadPool& pool, float* logits, int64_t stride, int64_t count, const Said& said) {
  KVASIR_CHECK(count <= rows_left(), count, " rows of logits for ", rows_left());
  const Logits all{logits, stride, count, said};
  refused_.clear();
  drawing_.clear();
  for (int64_t i = 0; i < count; ++i) {
    const auto r = size_t(drawn_ + i);
    if (said_by_device(all, i) && !rows_[r].constraint)
      (void)judge(all, i);
    else if (i == 0 || rows_[r].after < 0)
      drawing_.push_back(i);
  }
  pool.for_each(int64_t(drawing_.size()), 1,
                [&](int64_t k, int worker) { draw_chain(samplers_[size_t(worker)], all, drawing_[size_t(k)]); });
  while (!refused_.empty()) {
    again_.clear();
    std::swap(again_, refused_);
    auto lacks_mask = [&](const Sampler::Refused& r) { return !rows_[size_t(drawn_ + r.row)].constraint->mask(); };
    int64_t lacking = 0;  // each is asked, so that all masks are on their way
    for (const Sampler::Refused& r : again_) lacking += lacks_mask(r);
    if (lacking > 0 && *wait_for_masks_) (*wait_for_masks_)();
    KVASIR_TRY(redraw(all));
    pool.for_each(int64_t(again_.size()), 1,
                  [&](int64_t k, int worker) { draw_again(samplers_[size_t(worker)], all, size_t(k)); });
  }
  drawn_ += count;
  return {};
}

void Draws::end() {
  previous_.clear();
  for (const Sampled& s : samples_) previous_.push_back(s.token);
  rows_.clear();
  drawn_ = 0;
  in_flight_ = true;
}

std::vector<Sampled> Draws::take() {
  KVASIR_CHECK(in_flight_, "wait() without a launch()");
  in_flight_ = false;
  return std::move(samples_);
}

}  // namespace kvasir::model
