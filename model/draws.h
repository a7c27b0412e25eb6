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

// Of the log-probabilities that a device says.
constexpr int32_t kMostDeviceTop = 20;

// Whether a device can draw for the row by itself: it is a matter of its logits and one random number; `changes`: and
// of what bias, penalties and masks make of them, of which it may say log-probabilities. What a constraint refuses of
// it is drawn again by a Redraw.
bool draws_on_device(const SampleRow& row, bool changes);

// Draws again, among what a mask allows, from rows whose logits are still on a device.
struct MaskedRow {
  int64_t at = 0;  // of the launch's rows
  const SampleRow* row = nullptr;
  const uint32_t* mask = nullptr;
};
using Redraw = std::function<Status(std::span<const MaskedRow> rows, std::span<DeviceDraw> out)>;

// What a device says of the rows of one draw(): a draw each, and kMostDeviceTop likeliest, as many as the row asks for.
struct Said {
  const DeviceDraw* draws = nullptr;  // null: there is no device
  const TokenLogprob* top = nullptr;
  const Redraw* redraw = nullptr;
};

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
  bool for_device(int64_t i) const { return draws_on_device(row(i), device_changes_); }
  const SampleRow& row(int64_t i) const { return rows_[size_t(drawn_ + i)]; }
  // `logits`: `count` rows, `stride` apart, changed in place. With a device only those are there that are not for it.
  Status draw(ThreadPool& pool, float* logits, int64_t stride, int64_t count, const Said& said = {});
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
    const Said& said;
    std::span<float> row(int64_t i, int32_t vocab) const { return {data + i * stride, size_t(vocab)}; }
  };
  bool said_by_device(const Logits& logits, int64_t i) const { return logits.said.draws && for_device(i); }
  bool judge(const Logits& logits, int64_t i);
  void draw_chain(Sampler& sampler, const Logits& logits, int64_t i);
  Status redraw(const Logits& logits);
  void draw_again(Sampler& sampler, const Logits& logits, size_t nth);

  const int32_t vocab_, known_;
  const bool device_changes_;
  std::vector<Sampler> samplers_;  // by worker
  std::vector<SampleRow> rows_;
  std::vector<int32_t> tokens_, previous_;
  std::vector<Sampled> samples_;
  std::function<void()> const* wait_for_masks_ = nullptr;  // the batch's
  std::mutex refused_mutex_;
  std::vector<Sampler::Refused> refused_, again_;
  std::vector<MaskedRow> masked_;    // of again_, those that a device draws
  std::vector<DeviceDraw> redrawn_;  // by masked_
  std::vector<int64_t> redrawn_at_;  // by again_: which of these; -1: none
  std::vector<int64_t>
      drawing_;  // rows of one draw() that take more than their greatest logit, the first of each chain
  int64_t drawn_ = 0;
  bool in_flight_ = false;
};

}  // namespace kvasir::model
