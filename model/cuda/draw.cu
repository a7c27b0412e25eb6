#include <cfloat>
#include <climits>

#include "model/cuda/draw.h"
#include "model/philox.h"

namespace kvasir::model::cuda {
namespace {

// A block has a row. Sums run over runs of tokens, one a warp, so that they are the same every time.
constexpr int kThreads = 1024, kWarps = kThreads / 32, kBins = 2048;
constexpr int kMostTopK = 1024;  // of which the greatest are sorted
constexpr unsigned kAll = ~0u;
constexpr float kLeastAllowed = -3.4028232635611926e38f;  // a forbidden logit is -FLT_MAX

struct DrawScratch {
  uint32_t count[kBins];
  unsigned long long mass[kBins];
  double sums[kWarps], more_sums[kWarps];
  uint32_t ties[kWarps];
  uint64_t sorted[kMostTopK];
  // What choose() found.
  int32_t bin;
  uint32_t above;
  unsigned long long mass_above, all;
  int32_t found, kept;
};

// Greater logits have greater keys; -0 is 0.
__device__ uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ float logit_of(uint32_t key) { return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key); }

// One row and its distribution, of which the greatest logit weighs 1.
struct Distribution {
  const float* logits;
  int32_t size;
  float max, scale;

  __device__ float weight(float x) const { return expf((x - max) * scale); }
  // Weights as whole numbers, whose sums are the same in any order.
  __device__ unsigned long long mass(float x) const { return __float2ull_rn(weight(x) * 0x1p40f); }
  // By how much less likely than the greatest, as a logarithm; the same bits wherever it is asked for.
  __device__ double surprise(float x) const { return __dmul_rn(__dsub_rn(double(max), double(x)), double(scale)); }
  // The run of a warp.
  __device__ int32_t run() const { return (size + kThreads - 1) / kThreads * 32; }
  __device__ int32_t begin(int warp) const { return min(size, warp * run()); }
};

// In what order tokens are taken: greater keys first, and of equal ones the first ids; coarse() goes the other way.
struct ByWeight {
  __device__ int32_t coarse(const Distribution& row, float x) const {
    return int32_t(fminf((row.max - x) * row.scale * 64, kBins - 1));
  }
  __device__ uint32_t key(const Distribution&, float x) const { return key_of(x); }
};
// By how far a token's surprise is from what is to be expected. Both lack the logarithm of the weights' sum.
struct ByOddness {
  double expected = 0;
  __device__ float odd(const Distribution& row, float x) const {
    return __double2float_rn(fabs(__dsub_rn(row.surprise(x), expected)));
  }
  __device__ int32_t coarse(const Distribution& row, float x) const {
    return int32_t(fminf(odd(row, x) * 64, kBins - 1));
  }
  __device__ uint32_t key(const Distribution& row, float x) const { return ~__float_as_uint(odd(row, x)); }
};

// The last that is taken in an order.
struct Border {
  uint32_t key = 0;
  int32_t last_tie = INT_MAX;
  __device__ bool has(uint32_t k, int32_t id) const { return k > key || (k == key && id <= last_tie); }
};

// Who may be drawn.
struct Kept {
  float least_logit = -FLT_MAX, least = 0;  // nobody below, nobody lighter
  Border heaviest, typical;
  ByOddness order;
  bool by_weight = false, by_oddness = false;  // whether the borders are there
  __device__ bool has(const Distribution& row, float x, int32_t id) const {
    return x >= least_logit && (!by_weight || heaviest.has(key_of(x), id)) &&
           (!by_oddness || typical.has(order.key(row, x), id)) && (least == 0 || row.weight(x) >= least);
  }
};

// The bin in which those before it and its own reach `tokens`, or where tokens is 0 `mass`. Of warp 0.
__device__ void choose(DrawScratch& s, uint32_t tokens, double mass) {
  if (threadIdx.x >= 32) return;
  constexpr int kEach = kBins / 32;
  const int lane = int(threadIdx.x), first = lane * kEach;
  uint32_t count = 0;
  unsigned long long weighs = 0;
  int last = -1;
  for (int i = 0; i < kEach; ++i) {
    count += s.count[first + i], weighs += s.mass[first + i];
    if (s.count[first + i]) last = first + i;
  }
  uint32_t count_to = count;
  unsigned long long mass_to = weighs;
  for (int d = 1; d < 32; d *= 2) {
    const uint32_t c = __shfl_up_sync(kAll, count_to, d);
    const unsigned long long m = __shfl_up_sync(kAll, mass_to, d);
    if (lane >= d) count_to += c, mass_to += m;
  }
  uint32_t above = s.above + count_to - count;
  unsigned long long mass_above = s.mass_above + mass_to - weighs;
  auto reached = [&](uint32_t c, unsigned long long m) { return tokens ? c >= tokens : double(m) >= mass; };
  const unsigned there = __ballot_sync(kAll, count > 0 && reached(above + count, mass_above + weighs));
  const unsigned any = __ballot_sync(kAll, count > 0);
  const int hit = there ? __ffs(there) - 1 : 31 - __clz(any);  // rounding may leave it past the end
  __syncwarp();                                                // all of them have read what one writes
  if (lane != hit) return;
  int bin = first;
  for (; bin < last; ++bin) {
    if (s.count[bin] && reached(above + s.count[bin], mass_above + s.mass[bin])) break;
    above += s.count[bin], mass_above += s.mass[bin];
  }
  s.bin = bin, s.above = above, s.mass_above = mass_above;
}

__device__ void clear(DrawScratch& s) {
  for (int i = int(threadIdx.x); i < kBins; i += kThreads) s.count[i] = 0, s.mass[i] = 0;
  __syncthreads();
}

// Of those that are kept so far the border of the first `tokens` in an order, or where that is 0 of the first that hold
// `share` of their mass. `exact`: the last tie is said even where all are in.
template <class Order>
__device__ Border border(const Distribution& row, DrawScratch& s, const Kept& from, const Order& order, uint32_t tokens,
                         double share, bool exact = false) {
  clear(s);
  if (threadIdx.x == 0) s.above = 0, s.mass_above = 0, s.all = 0;
  for (int32_t i = int32_t(threadIdx.x); i < row.size; i += kThreads) {
    const float x = row.logits[i];
    if (!from.has(row, x, i)) continue;
    atomicAdd(&s.count[order.coarse(row, x)], 1u);
    atomicAdd(&s.mass[order.coarse(row, x)], row.mass(x));
  }
  __syncthreads();
  unsigned long long part = 0;
  for (int i = int(threadIdx.x); i < kBins; i += kThreads) part += s.mass[i];
  atomicAdd(&s.all, part);
  __syncthreads();
  const double mass = share * double(s.all);
  choose(s, tokens, mass);
  __syncthreads();
  const int32_t coarse = s.bin;
  // Then by the bits of their keys, the greatest first.
  uint32_t prefix = 0;
  for (int level = 0; level < 3; ++level) {
    const int shift = level == 0 ? 21 : level == 1 ? 10 : 0, bits = level == 2 ? 10 : 11;
    const uint32_t mask = (1u << bits) - 1;
    clear(s);
    for (int32_t i = int32_t(threadIdx.x); i < row.size; i += kThreads) {
      const float x = row.logits[i];
      if (order.coarse(row, x) != coarse || !from.has(row, x, i)) continue;
      const uint32_t key = order.key(row, x);
      if (level > 0 && key >> (shift + bits) != prefix) continue;
      const uint32_t bin = mask - (key >> shift & mask);
      atomicAdd(&s.count[bin], 1u);
      atomicAdd(&s.mass[bin], row.mass(x));
    }
    __syncthreads();
    choose(s, tokens, mass);
    __syncthreads();
    prefix = prefix << bits | (mask - uint32_t(s.bin));
    __syncthreads();
  }
  // Of those that have this very key, the first ids are enough.
  const uint32_t same = s.count[s.bin];
  const double each = double(s.mass[s.bin]) / same;
  uint32_t in = tokens ? tokens - s.above : uint32_t(ceil(fmin((mass - double(s.mass_above)) / each, double(same))));
  in = max(1u, min(in, same));
  __syncthreads();  // all of them have read what the next one clears
  if (in == same && !exact) return {prefix, INT_MAX};
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  const int32_t begin = row.begin(warp), end = row.begin(warp + 1);
  auto ties_with = [&](int32_t i) {
    const float x = row.logits[i];
    return order.key(row, x) == prefix && from.has(row, x, i);
  };
  uint32_t mine = 0;
  for (int32_t i = begin + lane; i < end; i += 32) mine += ties_with(i);
  mine = __reduce_add_sync(kAll, mine);
  if (lane == 0) s.ties[warp] = mine;
  __syncthreads();
  uint32_t before = 0;
  for (int w = 0; w < warp; ++w) before += s.ties[w];
  if (before < in && before + mine >= in) {
    for (int32_t i = begin; i < end; i += 32) {
      const bool tie = i + lane < end && ties_with(i + lane);
      const unsigned ties = __ballot_sync(kAll, tie);
      if (before + uint32_t(__popc(ties)) >= in) {
        if (tie && before + uint32_t(__popc(ties & ((2u << lane) - 1))) == in) s.found = i + lane;
        break;
      }
      before += uint32_t(__popc(ties));
    }
  }
  __syncthreads();
  const Border out{prefix, s.found};
  __syncthreads();
  return out;
}

// Two sums over a row, the same every time; the count of those that are summed.
struct Sums {
  double a, b;
  uint32_t count;
};
template <class F>  // f(x, id, a, b): whether they are there
__device__ Sums sums(const Distribution& row, DrawScratch& s, F f) {
  double a = 0, b = 0;
  uint32_t count = 0;
  for (int32_t i = int32_t(threadIdx.x); i < row.size; i += kThreads) {
    double x = 0, y = 0;
    if (!f(row.logits[i], i, x, y)) continue;
    a += x, b += y, ++count;
  }
  for (int d = 16; d > 0; d /= 2) a += __shfl_xor_sync(kAll, a, d), b += __shfl_xor_sync(kAll, b, d);
  count = __reduce_add_sync(kAll, count);
  const int warp = int(threadIdx.x) / 32;
  if (threadIdx.x % 32 == 0) s.sums[warp] = a, s.more_sums[warp] = b, s.ties[warp] = count;
  __syncthreads();
  Sums all{0, 0, 0};
  for (int w = 0; w < kWarps; ++w) all.a += s.sums[w], all.b += s.more_sums[w], all.count += s.ties[w];
  __syncthreads();
  return all;
}

// top-n-sigma: of the logits that are allowed at all.
__device__ float least_of_sigma(const Distribution& row, DrawScratch& s, float n) {
  const Sums all = sums(row, s, [](float x, int32_t, double& a, double& b) {
    a = double(x), b = double(x) * double(x);
    return x != -FLT_MAX;
  });
  const double mean = all.a / all.count, variance = fmax(0.0, all.b / all.count - mean * mean);
  return fmaxf(__fsub_rn(row.max, __fmul_rn(n, float(sqrt(variance)))), kLeastAllowed);
}

// Surprise that is to be expected of those that are kept.
__device__ double expected_surprise(const Distribution& row, DrawScratch& s, const Kept& kept) {
  const Sums all = sums(row, s, [&](float x, int32_t id, double& a, double& b) {
    if (!kept.has(row, x, id)) return false;
    const auto w = double(row.weight(x));
    a = w, b = w > 0 ? w * row.surprise(x) : 0;
    return true;
  });
  return all.b / all.a;
}

__device__ float heaviest_weight(const Distribution& row, DrawScratch& s, const Kept& kept) {
  if (threadIdx.x == 0) s.bin = 0;
  __syncthreads();
  float most = 0;
  for (int32_t i = int32_t(threadIdx.x); i < row.size; i += kThreads)
    if (const float x = row.logits[i]; kept.has(row, x, i)) most = fmaxf(most, row.weight(x));
  atomicMax(&s.bin, __float_as_int(most));  // of numbers not below 0 their bits have their order
  __syncthreads();
  const float out = __int_as_float(s.bin);
  __syncthreads();
  return out;
}

// Sums of what precedes and includes each lane's.
__device__ double sum_to(double v, int lane) {
  for (int d = 1; d < 32; d *= 2) {
    const double o = __shfl_up_sync(kAll, v, d);
    if (lane >= d) v += o;
  }
  return v;
}

// The token in whose share of what is kept, in the order of ids, u falls.
__device__ int32_t draw_by_id(const Distribution& row, DrawScratch& s, const Kept& kept, double u) {
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  const int32_t begin = row.begin(warp), end = row.begin(warp + 1);
  auto weight = [&](int32_t i) {
    const float x = row.logits[i];
    return kept.has(row, x, i) ? double(row.weight(x)) : 0.0;
  };
  double sum = 0;
  for (int32_t i = begin + lane; i < end; i += 32) sum += weight(i);
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(kAll, sum, d);
  if (lane == 0) s.sums[warp] = sum;
  __syncthreads();
  double all = 0;
  for (double x : s.sums) all += x;
  const double target = u * all;
  double below = 0;
  int hit = 0, w = 0;  // rounding may leave the target past the end: then it is the last that weighs anything
  for (; w < kWarps; ++w) {
    if (s.sums[w] > 0) hit = w;
    if (below + s.sums[w] > target) break;
    below += s.sums[w];
  }
  if (w == kWarps) below = target - s.sums[hit];
  if (warp == hit) {
    int32_t found = begin;
    for (int32_t i = begin; i < end; i += 32) {
      const double mine = i + lane < end ? weight(i + lane) : 0;
      const double to = below + sum_to(mine, lane);
      const unsigned some = __ballot_sync(kAll, mine > 0), past = __ballot_sync(kAll, mine > 0 && to > target);
      if (past) {
        found = i + __ffs(past) - 1;
        break;
      }
      if (some) found = i + 31 - __clz(some);
      below = __shfl_sync(kAll, to, 31);
    }
    if (lane == 0) s.found = found;
  }
  __syncthreads();
  return s.found;
}

// The same among the `tokens` greatest, in the order of their weights.
__device__ int32_t draw_of_few(const Distribution& row, DrawScratch& s, const Kept& kept, float least_logit,
                               uint32_t tokens, const Wish& wish) {
  if (threadIdx.x == 0) s.kept = 0;
  for (int i = int(threadIdx.x); i < kMostTopK; i += kThreads) s.sorted[i] = 0;
  __syncthreads();
  for (int32_t i = int32_t(threadIdx.x); i < row.size; i += kThreads) {
    const float x = row.logits[i];
    if (kept.has(row, x, i)) s.sorted[atomicAdd(&s.kept, 1)] = uint64_t(key_of(x)) << 32 | ~uint32_t(i);
  }
  __syncthreads();
  int n = 2;
  while (n < int(tokens)) n *= 2;
  const int i = int(threadIdx.x);
  for (int size = 2; size <= n; size *= 2)  // bitonic, the greatest first
    for (int d = size / 2; d > 0; d /= 2) {
      const int other = i ^ d;
      if (i < n && other > i) {
        const uint64_t a = s.sorted[i], b = s.sorted[other];
        if ((a < b) == ((i & size) == 0)) s.sorted[i] = b, s.sorted[other] = a;
      }
      __syncthreads();
    }
  if (i == 0) {
    auto weight = [&](int at) { return row.weight(logit_of(uint32_t(s.sorted[at] >> 32))); };
    double all = 0, sum = 0;
    auto below_least = [&](int at) { return logit_of(uint32_t(s.sorted[at] >> 32)) < least_logit; };
    for (int k = 0; k < int(tokens) && !below_least(k); ++k) all += double(weight(k));
    int end = 0;
    for (; end < int(tokens); ++end) {
      const float w = weight(end);
      if (end > 0 && below_least(end)) break;
      if (end > 0 && (w == 0 || w < wish.min_p || (wish.top_p < 1 && sum >= double(wish.top_p) * all))) break;
      sum += double(w);
    }
    const double target = wish.u * sum;
    double below = 0;
    int at = 0;
    for (; at + 1 < end; ++at)
      if ((below += double(weight(at))) > target) break;
    s.found = int32_t(~uint32_t(s.sorted[at]));
  }
  __syncthreads();
  return s.found;
}

// Whatever is asked for: typical-p, and a top-k of more than are sorted, whose draws go by these orders.
__device__ int32_t draw_of_any(const Distribution& row, DrawScratch& s, Kept kept, const Wish& wish) {
  auto keep_heaviest = [&](uint32_t tokens, double share) {
    kept.heaviest = border(row, s, kept, ByWeight(), tokens, share, kept.by_weight);  // within the one before
    kept.by_weight = true;
  };
  if (wish.top_k > 0) keep_heaviest(uint32_t(wish.top_k), 1);
  const bool typical = wish.typical_p < 1;
  if (typical) {
    kept.order.expected = expected_surprise(row, s, kept);
    kept.typical = border(row, s, kept, kept.order, 0, double(wish.typical_p));
    kept.by_oddness = true;
  }
  if (wish.top_p < 1) keep_heaviest(0, double(wish.top_p));
  if (wish.min_p > 0) kept.least = __fmul_rn(wish.min_p, heaviest_weight(row, s, kept));
  return typical ? border(row, s, kept, kept.order, 0, wish.u, true).last_tie
                 : border(row, s, kept, ByWeight(), 0, wish.u, true).last_tie;
}

__global__ void __launch_bounds__(kThreads) draw(const float* logits, const Wish* wishes, DeviceDraw* out,
                                                 int32_t* tokens, int64_t cols, const int32_t* which) {
  __shared__ DrawScratch s;
  const Wish wish = wishes[blockIdx.x];
  const DeviceDraw greatest = out[blockIdx.x];
  if (wish.scale == 0 || greatest.bad_logits || greatest.nothing_allowed) return;
  Distribution row{logits + (which ? int64_t(which[blockIdx.x]) : int64_t(blockIdx.x)) * cols, int32_t(cols), 0,
                   wish.scale};
  row.max = row.logits[greatest.token];
  Kept kept;
  if (wish.top_n_sigma > 0) kept.least_logit = least_of_sigma(row, s, wish.top_n_sigma);
  int32_t token;
  if (wish.typical_p < 1 || wish.top_k > kMostTopK) {
    token = draw_of_any(row, s, kept, wish);
  } else if (wish.top_k > 0) {
    Kept first;
    first.heaviest = border(row, s, Kept(), ByWeight(), uint32_t(wish.top_k), 1), first.by_weight = true;
    token = draw_of_few(row, s, first, kept.least_logit, uint32_t(wish.top_k), wish);
  } else {
    if (wish.top_p < 1) kept.heaviest = border(row, s, kept, ByWeight(), 0, double(wish.top_p)), kept.by_weight = true;
    kept.least = wish.min_p;
    token = draw_by_id(row, s, kept, wish.u);
  }
  if (threadIdx.x != 0) return;
  out[blockIdx.x] = {token, greatest.logprob + (row.logits[token] - row.max), 0, 0};
  tokens[blockIdx.x] = token;
}

}  // namespace

Wish wish_of(const SampleRow& row, int32_t vocab, uint32_t nth) {
  const SamplingParams& p = *row.params;
  Wish w;
  if (row.score_only) return w;
  w.scale = p.temperature > 0 ? (1.0f / p.temperature < 1e8f ? 1.0f / p.temperature : 1e8f) : 0.0f;
  w.top_p = p.top_p, w.min_p = p.min_p, w.typical_p = p.typical_p, w.top_n_sigma = p.top_n_sigma;
  w.top_k = p.top_k > 0 && p.top_k < vocab ? p.top_k : 0;
  w.u = uniform(p.seed, row.choice, row.position, nth);
  return w;
}

void launch_draw(const float* logits, const Wish* wishes, DeviceDraw* out, int32_t* tokens, int64_t rows, int64_t cols,
                 cudaStream_t stream, const int32_t* which) {
  draw<<<unsigned(rows), kThreads, 0, stream>>>(logits, wishes, out, tokens, cols, which);
}

}  // namespace kvasir::model::cuda
