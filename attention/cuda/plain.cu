// One block a (query, head), every variant of the operator, any element types: the kernel that is right
// first. The faster ones are chosen where they can be; this one takes what they do not cover.
#include "attention/cuda/device.cuh"
#include "attention/cuda/plain.h"

namespace kvasir::attention::cuda {
namespace {

constexpr int kWarps = 8;

struct KeyRow {
  const uint8_t *key, *value, *key_scale, *value_scale;
  bool fresh;  // still only in k_new / v_new
  int64_t row;
};

__device__ inline float cached(const CacheLayer& c, const uint8_t* row, const uint8_t* scales, bool value, int d) {
  float x = load_float(row, c.dtype, d);
  if (c.quant == int(kvcache::QuantKind::group)) return x * load_float(scales, c.scale_dtype, d >> c.group_shift);
  return x * (value ? c.v_scale : c.k_scale);
}

// kPerLane elements of a row are a lane's: heads of up to 32 * kPerLane. kBiased: by distance.
template <int kPerLane, bool kBiased>
__global__ void __launch_bounds__(kWarps * 32)
    plain_kernel(Shape s, StepView v, Layer l, RelativeBias bias, const QueryRow* rows) {
  __shared__ float part_out[kWarps][32 * kPerLane];
  __shared__ float part_top[kWarps], part_sum[kWarps];
  if (int(blockIdx.y) >= v.counts[kCountPlain]) return;
  const QueryRow row = rows[blockIdx.y];
  const int head = blockIdx.x, kv_head = head / s.group, D = s.head_dim;
  const DeviceSequence seq = v.sequences[row.sequence];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int32_t i = row.token - seq.q_begin, own = seq.kv_len - seq.q_len + i;
  const Range range = visible(s, seq, own);
  const int per_lane = (D + 31) / 32, half = s.rotary_dim / 2;
  const float2* ranks = reinterpret_cast<const float2*>(s.rope_ranks);

  // Element d of a row rotated as if it stood at `rank` (StreamingLLM rotates on reading).
  auto rotated = [&](auto&& at, int d, int32_t rank) -> float {
    float x = at(d);
    if (!s.streaming || s.rope_style == 0 || d >= s.rotary_dim) return x;
    if (s.rope_style == 2) {
      float2 a = ranks[int64_t(rank) * half + d / 2];
      float other = at(d ^ 1);
      return d & 1 ? x * a.x + other * a.y : x * a.x - other * a.y;
    }
    bool first = d < half;
    float2 a = ranks[int64_t(rank) * half + (first ? d : d - half)];
    float other = at(first ? d + half : d - half);
    return first ? x * a.x - other * a.y : x * a.x + other * a.y;
  };

  const int32_t seen = max(range.end - range.begin, 0) + range.sink_end;
  const int64_t q_row = (int64_t(row.token) * s.heads + head) * D;
  float q[kPerLane], acc[kPerLane];
  for (int e = 0; e < kPerLane; ++e) {
    int d = lane * per_lane + e;
    acc[e] = 0.0f;
    float x = e < per_lane && d < D
                  ? rotated([&](int at) { return load_float(l.q, s.work, q_row + at); }, d, max(seen - 1, 0))
                  : 0.0f;
    if (s.streaming && l.q_inverse != 0.0f) x = as_fp8(l, x);
    q[e] = x * s.scale;
  }
  float top = -INFINITY, sum = 0.0f;
  for (int32_t n = warp; n < seen; n += kWarps) {
    const int32_t j = n < range.sink_end ? n : range.begin + (n - range.sink_end);
    KeyRow k{};
    k.fresh = seq.flags & kDeferred && j >= seq.start_pos;
    if (k.fresh) {
      k.row = (int64_t(seq.q_begin + j - seq.start_pos) * s.kv_heads + kv_head) * D;
    } else {
      int64_t place = read_place(s, v, row.sequence, j);
      k.key = l.cache.key + place * l.cache.token + kv_head * l.cache.head;
      k.value = l.cache.value + place * l.cache.token + kv_head * l.cache.head;
      k.key_scale = l.cache.key_scale + place * l.cache.scale_token + kv_head * l.cache.scale_head;
      k.value_scale = l.cache.value_scale + place * l.cache.scale_token + kv_head * l.cache.scale_head;
    }
    float dot = 0.0f;
    for (int e = 0; e < kPerLane; ++e) {
      int d = lane * per_lane + e;
      if (e >= per_lane || d >= D) break;
      float x = rotated(
          [&](int at) {
            return k.fresh ? load_float(l.k_new, s.work, k.row + at) * l.cache.k_scale
                           : cached(l.cache, k.key, k.key_scale, false, at);
          },
          d, n);
      dot += q[e] * x;
    }
    for (int o = 16; o; o >>= 1) dot += __shfl_xor_sync(0xffffffffu, dot, o);
    dot = softcapped(dot, s.softcap);
    if (s.slopes) dot += s.slopes[head] * float(j - own);
    if constexpr (kBiased)
      dot +=
          bias.values[int64_t(head) * (2 * bias.reach + 1) + min(max(j - own, -bias.reach), bias.reach) + bias.reach];
    if (l.mask)
      dot += load_float(l.mask, s.io == DType::f8_e4m3 ? DType::f32 : s.io,
                        head * l.mask_head + int64_t(row.token) * l.mask_row + seq.kv_begin + j);
    if (dot == -INFINITY) continue;
    const float next = fmaxf(top, dot), shrink = expf(top - next), p = expf(dot - next);
    top = next;
    sum = sum * shrink + p;
    for (int e = 0; e < kPerLane; ++e) {
      int d = lane * per_lane + e;
      if (e >= per_lane || d >= D) break;
      float x = k.fresh ? load_float(l.v_new, s.work, k.row + d) * l.cache.v_scale
                        : cached(l.cache, k.value, k.value_scale, true, d);
      acc[e] = acc[e] * shrink + p * x;
    }
  }
  for (int e = 0; e < kPerLane; ++e) {
    int d = lane * per_lane + e;
    if (e < per_lane && d < D) part_out[warp][d] = acc[e];
  }
  if (lane == 0) part_top[warp] = top, part_sum[warp] = sum;
  __syncthreads();

  float all = -INFINITY;
  for (int w = 0; w < kWarps; ++w) all = fmaxf(all, part_top[w]);
  const bool masked = all == -INFINITY;
  const float sink = l.sink_logits ? l.sink_logits[head] : -INFINITY;
  all = fmaxf(all, sink);
  float denominator = sink == -INFINITY ? 0.0f : expf(sink - all);
  for (int w = 0; w < kWarps; ++w)
    denominator += part_top[w] == -INFINITY ? 0.0f : part_sum[w] * expf(part_top[w] - all);
  for (int d = threadIdx.x; d < D; d += kWarps * 32) {
    float x = 0.0f;
    for (int w = 0; w < kWarps; ++w)
      if (part_top[w] != -INFINITY) x += part_out[w][d] * expf(part_top[w] - all);
    store_float(l.out, s.out, q_row + d, masked ? 0.0f : x / denominator * s.out_inv_scale);
  }
  if (l.lse && threadIdx.x == 0)
    l.lse[int64_t(row.token) * s.heads + head] = masked ? -INFINITY : all + logf(denominator);
}

}  // namespace

void launch_plain(const Shape& s, const StepView& v, const Layer& l, const RelativeBias& bias, const QueryRow* rows,
                  int64_t count, cudaStream_t stream) {
  auto* kernel = s.head_dim > 256 ? plain_kernel<18, true> : plain_kernel<8, true>;
  kernel<<<dim3(s.heads, int(count)), kWarps * 32, 0, stream>>>(s, v, l, bias, rows);
}

void launch_plain(const Shape& s, const StepView& v, const Layer& l, const QueryRow* rows, int64_t count,
                  cudaStream_t stream) {
  auto* kernel = s.head_dim > 256 ? plain_kernel<18, false> : plain_kernel<8, false>;
  kernel<<<dim3(s.heads, int(count)), kWarps * 32, 0, stream>>>(s, v, l, RelativeBias{}, rows);
}

}  // namespace kvasir::attention::cuda
