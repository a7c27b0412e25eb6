// What requests change of their logits before a token is drawn, and say of them after, done where the logits are: bias,
// penalties over prompt and answer, masks, the likeliest tokens' log-probabilities, a prompt's tokens'. As the host's
// sampler has it (model/sampler.cc): log-probabilities are of the distribution after bias and before penalties.
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
  int32_t top = 0;      // so many log-probabilities are wanted
  int32_t mask = -1;    // of the launch's
  bool scores = false;  // no draw: `target` and its log-probability
  int32_t target = -1;

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
  std::vector<const uint32_t*> masks;  // each once, whatever rows share it
  bool any_penalty = false, any_top = false, any_score = false, any_constraint = false;

  // What must be known of the distribution before penalties and masks.
  bool any_norm() const { return any_penalty || any_top || any_score || any_constraint || !masks.empty(); }
  // What makes the greatest logit another one.
  bool any_less() const { return any_penalty || !masks.empty(); }

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
  // What after_draw() does, for rows that were drawn again: `which` of those from `first` on, one each of `out` and
  // `tokens`.
  Status after_redraw(const float* logits, const int32_t* which, const int32_t* before, DeviceDraw* out,
                      const int32_t* tokens, int64_t first, int64_t count, int64_t cols, cudaStream_t stream);

 private:
  // Copies those that are not there from the launch before.
  Status upload_masks(const Changes& changes, cudaStream_t stream);
  const Change* rows() const { return device_.as<Change>(); }
  const int32_t* history() const { return reinterpret_cast<const int32_t*>(device_.bytes() + history_at_); }

  attention::cuda::PinnedMemory host_, host_masks_;
  attention::cuda::DeviceMemory device_, counts_, raw_, norms_, masks_;
  size_t bytes_ = 0, history_at_ = 0, biases_at_ = 0, raw_bytes_ = 0;
  size_t mask_words_ = 0, mask_room_ = 0, masks_there_ = 0;
  int64_t counted_ = 0;  // rows whose tokens are counted at a time
};

// Forbids what masks lack, one mask a row, in place. Of rows of broken logits nothing: they are to stay broken.
void launch_forbid(const uint32_t* masks, const int32_t* which, const DeviceDraw* drawn, float* logits, int64_t rows,
                   int64_t cols, cudaStream_t stream);

}  // namespace kvasir::model::cuda
