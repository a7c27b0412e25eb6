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

// Of top-k on a device, and of the log-probabilities that it says.
constexpr int32_t kMostDeviceTopK = 1024, kMostDeviceTop = 20;

// Whether a device can draw for the row by itself: it is a matter of its logits and one random number; `changes`: and
// of what bias and penalties make of them, of which it may say log-probabilities.
bool draws_on_device(const SampleRow& row, int32_t vocab, bool changes);

class Draws {
 public:
  // `device_changes`: as draws_on_device() has it, where there is a device.
  // `known`: token ids that may go in, where it is not those that may come out.
  Draws(int32_t vocab, int threads, bool device_changes = false, int32_t known = 0);

  // A launch begins: each token id that names a sample of the previous launch becomes that sample.
  Status begin(const Batch& batch, std::span<const SampleRow> rows);
  // The same where launches overlap and each has draws of its own: `before` are those of the previous launch, if that
  // is still in flight. Until these are all drawn, a token id that names one stays as it is, and so does the last token
  // of a history that is for the device.
  Status begin(const Batch& batch, std::span<const SampleRow> rows, const Draws* before);
  const std::vector<int32_t>& tokens() const { return tokens_; }
  // The next rows that begin() was told of, in order and at most so many as the device has room for.
  int64_t rows_left() const { return int64_t(rows_.size()) - drawn_; }
  int64_t rows_drawn() const { return drawn_; }
  // Whether the i-th of them is for the device.
  bool for_device(int64_t i) const { return draws_on_device(row(i), vocab_, device_changes_); }
  const SampleRow& row(int64_t i) const { return rows_[size_t(drawn_ + i)]; }
  // `logits`: `count` rows, `stride` apart, changed in place. With `device` (one a row) only those are there that are
  // not for it; `top`: kMostDeviceTop a row, as many as it asks for.
  void draw(ThreadPool& pool, float* logits, int64_t stride, int64_t count, const DeviceDraw* device = nullptr,
            const TokenLogprob* top = nullptr);
  void end();
  bool all_drawn() const { return rows_left() == 0; }
  // The launch's results, once.
  std::vector<Sampled> take();

 private:
  Status begin(const Batch& batch, std::span<const SampleRow> rows, int64_t samples, const std::vector<int32_t>* known);
  // Of one draw(): its rows of logits.
  struct Logits {
    float* data;
    int64_t stride, count;
  };
  void draw_chain(Sampler& sampler, const Logits& logits, int64_t i);

  const int32_t vocab_, known_;
  const bool device_changes_;
  std::vector<Sampler> samplers_;  // by worker
  std::vector<SampleRow> rows_;
  std::vector<int32_t> tokens_, previous_;
  std::vector<Sampled> samples_;
  std::function<void()> const* wait_for_masks_ = nullptr;  // the batch's
  std::mutex refused_mutex_;
  std::vector<Sampler::Refused> refused_, again_;
  std::vector<int64_t>
      drawing_;  // rows of one draw() that take more than their greatest logit, the first of each chain
  int64_t drawn_ = 0;
  bool in_flight_ = false;
};

}  // namespace kvasir::model
