#include <algorithm>
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

// The log-probability of what was drawn is that of its logit before penalties.
__global__ void __launch_bounds__(kThreads)
    say_drawn(const Change* changes, const int32_t* history, const int32_t* before, const float* logits,
              const float* raw, const float* norms, const int32_t* tokens, DeviceDraw* out, int64_t first,
              int64_t cols) {
  __shared__ float was;
  const History h(changes[blockIdx.x], history, before);
  if (!h.penalizes() || out[blockIdx.x].bad_logits) return;
  raw += h.change.history_first + first + blockIdx.x;
  const int32_t token = tokens[blockIdx.x];
  if (threadIdx.x == 0) was = logits[blockIdx.x * cols + token];
  __syncthreads();
  for (int i = int(threadIdx.x); i < h.size(); i += kThreads)
    if (h.at(i) == token && !isnan(raw[i])) was = raw[i];
  __syncthreads();
  if (threadIdx.x == 0) out[blockIdx.x].logprob = was - norms[blockIdx.x];
}

}  // namespace

void Changes::add(int64_t at, int64_t count, const SampleRow& row, int32_t vocab) {
  const SamplingParams& p = *row.params;
  Change c{.repetition = p.repetition_penalty, .presence = p.presence_penalty, .frequency = p.frequency_penalty};
  if (!c.penalizes() && p.logit_bias.empty() && p.logprobs <= 0) return;
  rows.resize(size_t(count));
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
  return c.rows.empty() ||
         (norms_.get() && Layout(c).all <= bytes_ && raw_bytes(c) <= raw_bytes_ && (!c.any_penalty || counted_ > 0));
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
  return check(cudaMemcpyAsync(device_.get(), host_.get(), at.all, cudaMemcpyHostToDevice, stream), "draws");
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
  if (!changes.any_penalty && !changes.any_top) return {};
  float* norms = norms_.as<float>() + first;
  keep_norms<<<unsigned((count + 127) / 128), 128, 0, stream>>>(logits, out, norms, count, cols);
  if (changes.any_top && top)
    say_top<<<unsigned(count), kThreads, 0, stream>>>(rows() + first, logits, norms, top, cols);
  for (int64_t at = 0; changes.any_penalty && at < count; at += counted_)
    penalize<<<unsigned(std::min(counted_, count - at)), kThreads, 0, stream>>>(
        rows() + first + at, history(), before, logits + at * cols, counts_.as<int32_t>(), raw_.as<float>(), first + at,
        cols);
  return check(cudaGetLastError(), "penalties");
}

Status DeviceChanges::after_draw(const Changes& changes, const float* logits, const int32_t* before, DeviceDraw* out,
                                 const int32_t* tokens, int64_t first, int64_t count, int64_t cols,
                                 cudaStream_t stream) {
  if (!changes.any_penalty) return {};
  say_drawn<<<unsigned(count), kThreads, 0, stream>>>(rows() + first, history(), before, logits, raw_.as<float>(),
                                                      norms_.as<float>() + first, tokens, out, first, cols);
  return check(cudaGetLastError(), "log-probabilities");
}

}  // namespace kvasir::model::cuda
