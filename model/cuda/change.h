// What requests change of their logits before a token is drawn, and say of them after, done where the logits are: bias,
// penalties over prompt and answer, the likeliest tokens' log-probabilities. As the host's sampler has it
// (model/sampler.cc): log-probabilities are of the distribution after bias and before penalties.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "attention/cuda/memory.h"
#include "model/sampling.h"

namespace kvasir::model::cuda {

// Of one row.
struct Change {
  int32_t bias_first = 0, bias_count = 0;
  int32_t history_first = 0, outputs = 0, prompts = 0;  // tokens of the answer, then of the prompt
  int32_t last = -1;  // one more of the answer: that row of the previous step's tokens
  float repetition = 1, presence = 0, frequency = 0;
  int32_t top = 0;  // so many log-probabilities are wanted

  bool penalizes() const { return repetition != 1 || presence != 0 || frequency != 0; }
};
struct Bias {
  int32_t token;
  float bias;
};

// Of all rows of a launch.
struct Changes {
  std::vector<Change> rows;  // empty: nobody changes anything
  std::vector<int32_t> history;
  std::vector<Bias> biases;
  bool any_penalty = false, any_top = false;

  void clear() { *this = Changes(); }
  // Row `at` of `count`; tokens outside the vocabulary are nobody's.
  void add(int64_t at, int64_t count, const SampleRow& row, int32_t vocab);
};

// The room on a device for one launch's changes, and what is done with them around the draw of some of its rows.
class DeviceChanges {
 public:
  // Makes room where there is too little, which may wait for the device.
  bool has_room(const Changes& changes) const;
  Status make_room(const Changes& changes, int64_t most_rows, int32_t vocab, cudaStream_t stream);
  // Copies them over.
  Status upload(const Changes& changes, cudaStream_t stream);
  // `logits`, `out`, `tokens` and `top` (null: not wanted here) are those of rows [first, first + count). before_draw()
  // takes launch_greatest() to have run since bias(); where it says that logits changed it must run again. `before`:
  // the previous step's tokens.
  Status bias(const Changes& changes, float* logits, int64_t first, int64_t count, int64_t cols, cudaStream_t stream);
  Status before_draw(const Changes& changes, float* logits, const DeviceDraw* out, const int32_t* before,
                     TokenLogprob* top, int64_t first, int64_t count, int64_t cols, cudaStream_t stream);
  Status after_draw(const Changes& changes, const float* logits, const int32_t* before, DeviceDraw* out,
                    const int32_t* tokens, int64_t first, int64_t count, int64_t cols, cudaStream_t stream);

 private:
  const Change* rows() const { return device_.as<Change>(); }
  const int32_t* history() const { return reinterpret_cast<const int32_t*>(device_.bytes() + history_at_); }

  attention::cuda::PinnedMemory host_;
  attention::cuda::DeviceMemory device_, counts_, raw_, norms_;
  size_t bytes_ = 0, history_at_ = 0, biases_at_ = 0, raw_bytes_ = 0;
  int64_t counted_ = 0;  // rows whose tokens are counted at a time
};

}  // namespace kvasir::model::cuda
