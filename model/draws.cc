#include "model/draws.h"

#include <algorithm>
#include <utility>

#include "core/cat.h"
#include "core/check.h"

namespace kvasir::model {

bool draws_on_device(const SampleRow& r, int32_t vocab, bool changes) {
  const SamplingParams& p = *r.params;
  for (const SamplingNumber& n : kSamplingNumbers)
    if (!n.on_device && n.set(p)) return false;
  const bool changed = p.logprobs >= 0 || !p.logit_bias.empty() || p.repetition_penalty != 1 ||
                       p.presence_penalty != 0 || p.frequency_penalty != 0;
  return (!changed || (changes && p.logprobs <= kMostDeviceTop)) && !r.mask && !r.constraint && !r.score_only &&
         (p.temperature == 0 || (p.typical_p >= 1 && (p.top_k <= kMostDeviceTopK || p.top_k >= vocab)));
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
    if (!known && draws_on_device(row, vocab_, device_changes_)) continue;
    KVASIR_CHECK(known, "a history goes on with a sample that is not there yet");
    resolve(*row.last);
  }
  wait_for_masks_ = &batch.wait_for_masks;
  drawn_ = 0;
  samples_.assign(rows.size(), {});
  return {};
}

// A row, then those behind it that follow its token, until one gives another token, or waits for its mask: a constraint
// goes with what is drawn and is never taken back.
void Draws::draw_chain(Sampler& sampler, const Logits& logits, int64_t i) {
  for (; i < logits.count; ++i) {
    const auto r = size_t(drawn_ + i);
    if (rows_[r].after >= 0 && samples_[r - 1].token != rows_[r].after) return;
    Sampler::Refused refused{.row = i};
    if (!sampler.sample({logits.data + i * logits.stride, size_t(vocab_)}, rows_[r], samples_[r], refused)) {
      std::lock_guard lock(refused_mutex_);
      refused_.push_back(std::move(refused));
      return;
    }
    if (r + 1 == rows_.size() || rows_[r + 1].after < 0) return;
  }
}

void Draws::draw(ThreadPool& pool, float* logits, int64_t stride, int64_t count, const DeviceDraw* device,
                 const TokenLogprob* top) {
  KVASIR_CHECK(count <= rows_left(), count, " rows of logits for ", rows_left());
  const Logits all{logits, stride, count};
  refused_.clear();
  drawing_.clear();
  for (int64_t i = 0; i < count; ++i) {
    const auto r = size_t(drawn_ + i);
    Sampled& out = samples_[r];
    if (!device || !for_device(i)) {
      if (i == 0 || rows_[r].after < 0) drawing_.push_back(i);
    } else if (device[i].bad_logits) {
      out.bad_logits = true;
    } else {
      out.token = device[i].token, out.logprob = device[i].logprob;
      for (int32_t k = 0; top && k < rows_[r].params->logprobs; ++k)
        if (const TokenLogprob& t = top[i * kMostDeviceTop + k]; t.token >= 0) out.top.push_back(t);
    }
  }
  pool.for_each(int64_t(drawing_.size()), 1,
                [&](int64_t k, int worker) { draw_chain(samplers_[size_t(worker)], all, drawing_[size_t(k)]); });
  while (!refused_.empty()) {
    if (*wait_for_masks_) (*wait_for_masks_)();
    again_.clear();
    std::swap(again_, refused_);
    pool.for_each(int64_t(again_.size()), 1, [&](int64_t k, int worker) {
      const Sampler::Refused& again = again_[size_t(k)];
      const auto r = size_t(drawn_ + again.row);
      Sampler& sampler = samplers_[size_t(worker)];
      sampler.sample_again({logits + again.row * stride, size_t(vocab_)}, rows_[r], again, samples_[r]);
      if (r + 1 < rows_.size() && rows_[r + 1].after >= 0) draw_chain(sampler, all, again.row + 1);
    });
  }
  drawn_ += count;
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
