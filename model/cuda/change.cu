#include <algorithm>
#include <cfloat>
#include <cstring>

#include "model/cuda/change.h"
#include "model/draws.h"

namespace kvasir::model::cuda {
namespace {

using attention::cuda::check;

constexpr int kThreads = 512;
constexpr int64_t kCountedRows = 64;  // rows whose tokens are counted at a time: each has a number a token
// What a token's number says beside how often it is in the answer.
constexpr int32_t kPromptAlone = 1 << 29, kTaken = 1 << 30, kCount = kPromptAlone - 1;
constexpr unsigned kAll = ~0u;

__global__ void add_bias(const Change* changes, const Bias* biases, float* logits, int64_t cols) {
  const Change c = changes[blockIdx.x];
  for (int i = int(threadIdx.x); i < c.bias_count; i += int(blockDim.x))
    atomicAdd(&logits[blockIdx.x * cols + biases[c.bias_first + i].token], biases[c.bias_first + i].bias);
}

// Greater logits first, of equal ones the first id; 0 is less than all.
__device__ uint64_t rank_of(float x, int32_t id) {
  const uint32_t bits = __float_as_uint(x + 0.0f), key = bits >> 31 ? ~bits : bits | 0x80000000u;
  return uint64_t(key) << 32 | ~uint32_t(id);
}

// A pass over the row for each of the likeliest tokens: what is less than the one before, at most.
__global__ void __launch_bounds__(kThreads)
    say_top(const Change* changes, const float* logits, const float* norms, TokenLogprob* top, int64_t cols) {
  __shared__ uint64_t best[kThreads / 32];
  const Change c = changes[blockIdx.x];
  const float* row = logits + blockIdx.x * cols;
  uint64_t before = ~uint64_t(0);
  for (int k = 0; k < c.top; ++k) {
    uint64_t found = 0;
    for (int32_t i = int32_t(threadIdx.x); i < cols; i += kThreads)
      if (const uint64_t r = rank_of(row[i], i); r < before && r > found) found = r;
    for (int s = 16; s > 0; s /= 2) {
      const uint64_t other = __shfl_xor_sync(kAll, found, s);
      found = other > found ? other : found;
    }
    if (threadIdx.x % 32 == 0) best[threadIdx.x / 32] = found;
    __syncthreads();
    for (int w = 0; w < kThreads / 32; ++w) found = best[w] > found ? best[w] : found;
    __syncthreads();
    before = found;
    if (threadIdx.x != 0) continue;
    const auto id = int32_t(~uint32_t(found));
    const bool there = found != 0 && id >= 0 && id < cols;
    top[blockIdx.x * kMostDeviceTop + k] = {there ? id : -1, there ? row[id] - norms[blockIdx.x] : 0.0f};
  }
}

// What is taken from a logit to have its log-probability.
__global__ void keep_norms(const float* logits, const DeviceDraw* out, float* norms, int64_t rows, int64_t cols) {
  const int64_t row = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  const DeviceDraw d = out[row];
  norms[row] = d.bad_logits ? 0 : logits[row * cols + d.token] - d.logprob;
}

struct History {
  const int32_t* tokens;
  const int32_t* before;
  Change change;

  __device__ History(const Change& c, const int32_t* history, const int32_t* before)
      : tokens(history + c.history_first), before(before), change(c) {}
  __device__ int size() const { return change.outputs + change.prompts + (change.last >= 0); }
  __device__ int32_t at(int i) const { return i < change.outputs + change.prompts ? tokens[i] : before[change.last]; }
  __device__ bool of_prompt(int i) const { return i >= change.outputs && i < change.outputs + change.prompts; }
  __device__ bool penalizes() const { return change.repetition != 1 || change.presence != 0 || change.frequency != 0; }
};

// Whoever comes first to a token of a row's history changes its logit, and keeps what it was.
__global__ void __launch_bounds__(kThreads)
    penalize(const Change* changes, const int32_t* history, const int32_t* before, float* logits, int32_t* counts,
             float* raw, int64_t first, int64_t cols) {
  const History h(changes[blockIdx.x], history, before);
  if (!h.penalizes()) return;
  int32_t* count = counts + blockIdx.x * cols;
  float* row = logits + blockIdx.x * cols;
  raw += h.change.history_first + first + blockIdx.x;  // each row has room for its last token, too
  auto each = [&](auto f) {
    for (int i = int(threadIdx.x); i < h.size(); i += kThreads) f(i, h.at(i));
    __syncthreads();
  };
  each([&](int i, int32_t t) {
    if (!h.of_prompt(i)) atomicAdd(&count[t], 1);
  });
  each([&](int i, int32_t t) {
    if (h.of_prompt(i)) atomicCAS(&count[t], 0, kPromptAlone);
  });
  each([&](int i, int32_t t) {
    const int32_t was = atomicOr(&count[t], kTaken), n = was & kCount;
    raw[i] = was & kTaken ? __int_as_float(0x7fffffff) : row[t];
    if (was & kTaken) return;
    float l = row[t];
    if (h.change.repetition != 1) l = l > 0 ? __fdiv_rn(l, h.change.repetition) : __fmul_rn(l, h.change.repetition);
    if (n > 0) l = __fsub_rn(l, __fadd_rn(h.change.presence, __fmul_rn(h.change.frequency, float(n))));
    row[t] = l;
  });
  each([&](int, int32_t t) { count[t] = 0; });
}

// A block of a row's tokens; masks are the rows' own, or the launch's where `changes` are there.
__global__ void __launch_bounds__(kThreads)
    forbid(const Change* changes, const uint32_t* masks, const int32_t* which, const DeviceDraw* drawn, float* logits,
           int64_t words, int64_t cols) {
  const int32_t mask = changes ? changes[blockIdx.x].mask : int32_t(blockIdx.x);
  if (mask < 0 || drawn[blockIdx.x].bad_logits) return;
  const uint32_t* bits = masks + mask * words;
  float* row = logits + (which ? int64_t(which[blockIdx.x]) : int64_t(blockIdx.x)) * cols;
  for (int64_t i = int64_t(blockIdx.y) * kThreads + threadIdx.x; i < cols; i += int64_t(gridDim.y) * kThreads)
    if (!(bits[i / 32] >> (i % 32) & 1)) row[i] = -FLT_MAX;
}
constexpr unsigned kBlocksOfMask = 8;  // a row

// The log-probability of what was drawn is that of its logit before penalties and masks; of what a prompt goes on with
// there is nothing else to say. Rows drawn again (`which`) are among the row's changes, norms and logits.
__global__ void __launch_bounds__(kThreads)
    say_drawn(const Change* changes, const int32_t* history, const int32_t* before, const float* logits,
              const float* raw, const float* norms, const int32_t* tokens, DeviceDraw* out, const int32_t* which,
              int64_t first, int64_t cols) {
  __shared__ float was;
  const int64_t at = which ? which[blockIdx.x] : blockIdx.x;
  const History h(changes[at], history, before);
  const DeviceDraw drawn = out[blockIdx.x];
  if (h.change.scores && threadIdx.x == 0) {
    const int32_t target = h.change.target;
    const bool known = target >= 0 && target < cols;
    out[blockIdx.x] = {target, known && !drawn.bad_logits ? logits[at * cols + target] - norms[at] : 0.0f,
                       drawn.bad_logits, 0};
  }
  if (h.change.scores || drawn.bad_logits || drawn.nothing_allowed) return;
  if (!h.penalizes() && h.change.mask < 0 && !which) return;
  raw += h.change.history_first + first + at;
  const int32_t token = tokens[blockIdx.x];
  if (threadIdx.x == 0) was = logits[at * cols + token];
  __syncthreads();
  for (int i = int(threadIdx.x); h.penalizes() && i < h.size(); i += kThreads)
    if (h.at(i) == token && !isnan(raw[i])) was = raw[i];
  __syncthreads();
  if (threadIdx.x == 0) out[blockIdx.x].logprob = was - norms[at];
}

}  // namespace

void Changes::add(int64_t at, int64_t count, const SampleRow& row, int32_t vocab) {
  const SamplingParams& p = *row.params;
  Change c;
  if (row.score_only)
    c.scores = any_score = true, c.target = row.target;
  else
    c.repetition = p.repetition_penalty, c.presence = p.presence_penalty, c.frequency = p.frequency_penalty;
  const uint32_t* mask = row.score_only ? nullptr : row.mask;
  const bool follows = row.constraint && !row.score_only;
  if (!c.penalizes() && p.logit_bias.empty() && p.logprobs <= 0 && !mask && !follows && !c.scores) return;
  rows.resize(size_t(count));
  any_constraint |= follows;
  if (mask) {
    const auto known = std::find(masks.begin(), masks.end(), mask);
    c.mask = int32_t(known - masks.begin());
    if (known == masks.end()) masks.push_back(mask);
  }
  c.top = std::max(0, p.logprobs);
  any_top |= c.top > 0;
  c.bias_first = int32_t(biases.size()), c.bias_count = int32_t(p.logit_bias.size());
  for (const auto& [token, bias] : p.logit_bias) biases.push_back({token, bias});
  c.history_first = int32_t(history.size());
  if (c.penalizes()) {
    any_penalty = true;
    auto take = [&](int32_t t) {
      if (t >= 0 && t < vocab) history.push_back(t);
    };
    for (int32_t t : row.output) take(t);
    if (row.last && *row.last >= 0) take(*row.last);
    if (row.last && *row.last < 0) c.last = -1 - *row.last;
    c.outputs = int32_t(history.size()) - c.history_first;
    if (c.repetition != 1)
      for (int32_t t : row.prompt) take(t);
    c.prompts = int32_t(history.size()) - c.history_first - c.outputs;
  }
  rows[size_t(at)] = c;
}

// Where the parts of what is copied begin, and how long it is.
struct Layout {
  size_t history, biases, all;
  explicit Layout(const Changes& c)
      : history(c.rows.size() * sizeof(Change)),
        biases(history + (c.history.size() * sizeof(int32_t) + 7) / 8 * 8),
        all(biases + c.biases.size() * sizeof(Bias)) {}
};
static size_t raw_bytes(const Changes& c) {
  return c.any_penalty ? (c.history.size() + c.rows.size()) * sizeof(float) : 0;
}

bool DeviceChanges::has_room(const Changes& c) const {
  return c.rows.empty() || (norms_.get() && Layout(c).all <= bytes_ && raw_bytes(c) <= raw_bytes_ &&
                            c.masks.size() <= mask_room_ && (!c.any_penalty || counted_ > 0));
}

// With some to spare: histories grow.
Status DeviceChanges::make_room(const Changes& c, int64_t most_rows, int32_t vocab, cudaStream_t stream) {
  if (has_room(c)) return {};
  if (const size_t bytes = Layout(c).all; bytes > bytes_) {
    bytes_ = 0;
    KVASIR_TRY(host_.allocate(2 * bytes));
    KVASIR_TRY(device_.allocate(2 * bytes));
    bytes_ = 2 * bytes;
  }
  if (!norms_.get()) KVASIR_TRY(norms_.allocate(size_t(most_rows) * sizeof(float)));
  if (c.any_penalty && counted_ == 0) {
    const size_t counts = size_t(kCountedRows * vocab) * sizeof(int32_t);
    KVASIR_TRY(counts_.allocate(counts));
    KVASIR_TRY(check(cudaMemsetAsync(counts_.get(), 0, counts, stream), "penalties"));
    counted_ = kCountedRows;
  }
  if (const size_t count = c.masks.size(); count > mask_room_) {
    mask_words_ = size_t(vocab + 31) / 32;
    mask_room_ = masks_there_ = 0;
    KVASIR_TRY(host_masks_.allocate(2 * count * mask_words_ * sizeof(uint32_t)));
    KVASIR_TRY(masks_.allocate(2 * count * mask_words_ * sizeof(uint32_t)));
    mask_room_ = 2 * count;
  }
  if (const size_t raw = raw_bytes(c); raw > raw_bytes_) {
    raw_bytes_ = 0;
    KVASIR_TRY(raw_.allocate(2 * raw));
    raw_bytes_ = 2 * raw;
  }
  return {};
}

Status DeviceChanges::upload(const Changes& c, cudaStream_t stream) {
  const Layout at(c);
  history_at_ = at.history, biases_at_ = at.biases;
  std::memcpy(host_.bytes(), c.rows.data(), c.rows.size() * sizeof(Change));
  std::memcpy(host_.bytes() + at.history, c.history.data(), c.history.size() * sizeof(int32_t));
  std::memcpy(host_.bytes() + at.biases, c.biases.data(), c.biases.size() * sizeof(Bias));
  KVASIR_TRY(check(cudaMemcpyAsync(device_.get(), host_.get(), at.all, cudaMemcpyHostToDevice, stream), "draws"));
  return upload_masks(c, stream);
}

// A sequence's mask is most often the one that it had two steps ago, and comparing is cheaper than the way there.
Status DeviceChanges::upload_masks(const Changes& c, cudaStream_t stream) {
  const size_t bytes = mask_words_ * sizeof(uint32_t);
  for (size_t i = 0; i < c.masks.size(); ++i) {
    std::byte* host = host_masks_.bytes() + i * bytes;
    if (i < masks_there_ && std::memcmp(host, c.masks[i], bytes) == 0) continue;
    std::memcpy(host, c.masks[i], bytes);
    KVASIR_TRY(
        check(cudaMemcpyAsync(masks_.bytes() + i * bytes, host, bytes, cudaMemcpyHostToDevice, stream), "masks"));
  }
  masks_there_ = std::max(masks_there_, c.masks.size());
  return {};
}

Status DeviceChanges::bias(const Changes& changes, float* logits, int64_t first, int64_t count, int64_t cols,
                           cudaStream_t stream) {
  if (changes.biases.empty()) return {};
  const auto* biases = reinterpret_cast<const Bias*>(device_.bytes() + biases_at_);
  add_bias<<<unsigned(count), 128, 0, stream>>>(rows() + first, biases, logits, cols);
  return check(cudaGetLastError(), "bias");
}

Status DeviceChanges::before_draw(const Changes& changes, float* logits, const DeviceDraw* out, const int32_t* before,
                                  TokenLogprob* top, int64_t first, int64_t count, int64_t cols, cudaStream_t stream) {
  if (!changes.any_norm()) return {};
  float* norms = norms_.as<float>() + first;
  keep_norms<<<unsigned((count + 127) / 128), 128, 0, stream>>>(logits, out, norms, count, cols);
  if (changes.any_top && top)
    say_top<<<unsigned(count), kThreads, 0, stream>>>(rows() + first, logits, norms, top, cols);
  for (int64_t at = 0; changes.any_penalty && at < count; at += counted_)
    penalize<<<unsigned(std::min(counted_, count - at)), kThreads, 0, stream>>>(
        rows() + first + at, history(), before, logits + at * cols, counts_.as<int32_t>(), raw_.as<float>(), first + at,
        cols);
  if (!changes.masks.empty())
    forbid<<<dim3(unsigned(count), kBlocksOfMask), kThreads, 0, stream>>>(
        rows() + first, masks_.as<uint32_t>(), nullptr, out, logits, int64_t(mask_words_), cols);
  return check(cudaGetLastError(), "penalties and masks");
}

Status DeviceChanges::after_draw(const Changes& changes, const float* logits, const int32_t* before, DeviceDraw* out,
                                 const int32_t* tokens, int64_t first, int64_t count, int64_t cols,
                                 cudaStream_t stream) {
  if (!changes.any_less() && !changes.any_score) return {};
  say_drawn<<<unsigned(count), kThreads, 0, stream>>>(rows() + first, history(), before, logits, raw_.as<float>(),
                                                      norms_.as<float>() + first, tokens, out, nullptr, first, cols);
  return check(cudaGetLastError(), "log-probabilities");
}

Status DeviceChanges::after_redraw(const float* logits, const int32_t* which, const int32_t* before, DeviceDraw* out,
                                   const int32_t* tokens, int64_t first, int64_t count, int64_t cols,
                                   cudaStream_t stream) {
  say_drawn<<<unsigned(count), kThreads, 0, stream>>>(rows() + first, history(), before, logits, raw_.as<float>(),
                                                      norms_.as<float>() + first, tokens, out, which, first, cols);
  return check(cudaGetLastError(), "log-probabilities");
}

void launch_forbid(const uint32_t* masks, const int32_t* which, const DeviceDraw* drawn, float* logits, int64_t rows,
                   int64_t cols, cudaStream_t stream) {
  forbid<<<dim3(unsigned(rows), kBlocksOfMask), kThreads, 0, stream>>>(nullptr, masks, which, drawn, logits,
                                                                       (cols + 31) / 32, cols);
}

}  // namespace kvasir::model::cuda
