// What every runner does on the host around a step, whatever its device: the tokens that go in, and from each row of
// logits the token that comes out.
#pragma once

#include <functional>
#include <mutex>
#include <span>
#include <vector>

#include "core/status.h"
#include "core/thread_pool.h"
#include "model/batch.h"
#include "model/sampler.h"

namespace kvasir::model {

class Draws {
 public:
  Draws(int32_t vocab, int threads);

  // A launch begins: each token id that names a sample of the previous launch becomes that sample.
  Status begin(const Batch& batch, std::span<const SampleRow> rows);
  const std::vector<int32_t>& tokens() const { return tokens_; }
  // The next rows that begin() was told of, in order and at most so many as the device has room for.
  int64_t rows_left() const { return int64_t(rows_.size()) - drawn_; }
  int64_t rows_drawn() const { return drawn_; }
  // Whether the i-th of them takes its greatest logit and nobody asks for more: a device can say so by itself.
  bool takes_greatest(int64_t i) const;
  // `logits`: `count` rows, `stride` apart, changed in place. With `greatest` (one a row) only those are there that do
  // not take it.
  void draw(ThreadPool& pool, float* logits, int64_t stride, int64_t count, const Greatest* greatest = nullptr);
  void end();
  // The launch's results, once.
  std::vector<Sampled> take();

 private:
  const int32_t vocab_;
  std::vector<Sampler> samplers_;  // by worker
  std::span<const SampleRow> rows_;
  std::vector<int32_t> tokens_, previous_;
  std::vector<Sampled> samples_;
  std::function<void()> const* wait_for_masks_ = nullptr;  // the batch's
  std::mutex refused_mutex_;
  std::vector<Sampler::Refused> refused_;
  std::vector<int64_t> drawing_;  // rows of one draw() that take more than their greatest logit
  int64_t drawn_ = 0;
  bool in_flight_ = false;
};

}  // namespace kvasir::model
