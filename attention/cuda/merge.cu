// Partial results become one, exactly and in the order the plan lists them; the sink joins the denominator
// here. Also the table of stream kernels.
#include "attention/cuda/device.cuh"
#include "attention/cuda/launch_early.cuh"
#include "attention/cuda/stream.cuh"

namespace kvasir::attention::cuda {
namespace {

// A block a (query, head); a warp takes kInFlight parts at once, then those as many further on as all warps take.
constexpr int kMergeWarps = 16, kInFlight = 4;

__global__ void __launch_bounds__(kMergeWarps * 32)
    merge_kernel(const __grid_constant__ Shape s, const __grid_constant__ StepView v, const __grid_constant__ Layer l) {
  extern __shared__ float sums[];  // [warps][head_dim]
  __shared__ float tops[kMergeWarps], totals[kMergeWarps];
  let_next_kernel_start();
  const int head = blockIdx.x, warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32,
            D = s.head_dim;
  // The plan is read while the parts are still being computed.
  const bool live = int(blockIdx.y) < v.counts[kCountMerges];
  const Merge m = live ? v.merges[blockIdx.y] : Merge{};
  int64_t row[kInFlight];
  auto find = [&](int first) {
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const int i = first + u * warps;
      row[u] = i < m.end ? int64_t(v.merge_slots[i]) * s.heads + head : -1;
    }
  };
  find(m.begin + warp);
  wait_for_previous_kernel();
  if (!live) return;
  float top = -INFINITY, total = 0.0f, acc[8] = {};
  for (int first = m.begin + warp; first < m.end; first += kInFlight * warps) {
    float lse[kInFlight];
    float4 x[kInFlight][2];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      lse[u] = row[u] >= 0 ? l.partial_lse[row[u]] : -INFINITY;
      const float4* from = reinterpret_cast<const float4*>(l.partial + row[u] * D);
#pragma unroll
      for (int k = 0; k < 2; ++k)
        x[u][k] = row[u] >= 0 && (lane + 32 * k) * 4 < D ? from[lane + 32 * k] : float4{0.0f, 0.0f, 0.0f, 0.0f};
    }
    find(first + kInFlight * warps);
    const float next = fmaxf(fmaxf(fmaxf(lse[0], lse[1]), fmaxf(lse[2], lse[3])), top);
    if (next == -INFINITY) continue;
    const float shrink = expf(top - next);
    top = next;
    total *= shrink;
    for (float& a : acc) a *= shrink;
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const float weight = expf(lse[u] - top);
      total += weight;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        acc[k * 4] += weight * x[u][k].x, acc[k * 4 + 1] += weight * x[u][k].y;
        acc[k * 4 + 2] += weight * x[u][k].z, acc[k * 4 + 3] += weight * x[u][k].w;
      }
    }
  }
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const int d = (lane + 32 * (k / 4)) * 4 + k % 4;
    if (d < D) sums[warp * D + d] = acc[k];
  }
  if (lane == 0) tops[warp] = top, totals[warp] = total;
  __syncthreads();
  float all = -INFINITY;
  for (int w = 0; w < warps; ++w) all = fmaxf(all, tops[w]);
  const bool masked = all == -INFINITY;
  const float sink = l.sink_logits ? l.sink_logits[head] : -INFINITY;
  all = masked ? 0.0f : fmaxf(all, sink);
  float denominator = expf(sink - all);
  for (int w = 0; w < warps; ++w) denominator += totals[w] * expf(tops[w] - all);
  const int64_t to = int64_t(m.token) * s.heads + head;
  const float f = masked ? 0.0f : s.out_inv_scale / denominator;
  for (int d = threadIdx.x; d < D; d += blockDim.x) {
    float x = 0.0f;
    for (int w = 0; w < warps; ++w) x += sums[w * D + d] * expf(tops[w] - all);
    store_float(l.out, s.out, to * D + d, x * f);
  }
  if (l.lse && threadIdx.x == 0) l.lse[to] = masked ? -INFINITY : all + logf(denominator);
}

StreamEntry entry(const Shape& s, const CacheLayer& c, int list) {
  if (s.work != DType::f16 && s.work != DType::bf16) return {};
  const int bits = dtype_bits(c.dtype);
  if (c.token * 8 % 128 || c.head * 8 % 128 || s.head_dim * bits % 128) return {};
  const bool f16 = s.work == DType::f16;
  if (s.streaming) return list == 1 && s.rotary_dim == s.head_dim ? stream_rotated(s, c) : StreamEntry{};
  switch (static_cast<kvcache::QuantKind>(c.quant)) {
    case kvcache::QuantKind::none:
      if (c.dtype == DType::f16) return stream_f16(s.head_dim, list);
      return c.dtype == DType::bf16 && !f16 ? stream_bf16(s.head_dim, list) : StreamEntry{};
    case kvcache::QuantKind::per_tensor:
      return c.dtype == DType::i8 ? stream_i8(s.head_dim, list) : stream_f8(s.head_dim, list);
    case kvcache::QuantKind::group: {
      const int bytes = s.head_dim / c.quant_group * dtype_bits(c.scale_dtype) / 8;
      if (bytes != 2 && bytes % 4) return {};
      if (list == 0 && c.quant_group < 32) return {};  // smaller ones scale elements
      if (list == 0 && s.head_dim == 128 && c.scale_dtype == DType::f16) {
        if (c.dtype == DType::i8 && c.quant_group == 64) return stream_i8_group64();
        if (c.dtype == DType::i4 && c.quant_group == 32) return stream_i4_group32();
      }
      return c.dtype == DType::i8 ? stream_i8_group(s.head_dim, list) : stream_i4(s.head_dim, list);
    }
  }
  return {};
}

int scale_bytes(const Shape& s, const CacheLayer& c) {
  return c.quant == int(kvcache::QuantKind::group) ? s.head_dim / c.quant_group * dtype_bits(c.scale_dtype) / 8 : 0;
}

}  // namespace

int stream_warps(const Shape& s, const CacheLayer& c, int list) {
  StreamEntry e = entry(s, c, list);
  return e.prepare ? kStreamWarps * e.prepare(scale_bytes(s, c)) : 0;
}

int shared_warps(const Shape& s, const CacheLayer& c) {
  StreamEntry e = entry(s, c, 0);
  return e.shared_warps ? e.shared_warps(scale_bytes(s, c)) : 0;
}

bool runs_append(const Shape& s, const CacheLayer& c) {
  StreamEntry e = entry(s, c, 0);
  return e.appends && e.appends();
}

void launch_stream(const Shape& s, const StepView& v, const Layer& l, const StreamList& list, int which,
                   cudaStream_t stream) {
  entry(s, l.cache, which).run(s, v, l, list, scale_bytes(s, l.cache), stream);
}

void launch_merge(const Shape& s, const StepView& v, const Layer& l, int64_t queries, bool fixed, cudaStream_t stream) {
  // Few queries have many parts each: more warps a block, so that one round trip brings them all.
  const int warps = fixed || queries > 8 ? 4 : kMergeWarps;
  launch_early(merge_kernel, dim3(s.heads, int(queries)), warps * 32, size_t(warps * s.head_dim) * 4, stream, s, v, l);
}

}  // namespace kvasir::attention::cuda
