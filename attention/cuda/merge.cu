// Partial results become one, exactly and in the order the plan lists them; the sink joins the denominator
// here. Also the table of stream kernels.
#include "attention/cuda/device.cuh"
#include "attention/cuda/stream.cuh"

namespace kvasir::attention::cuda {
namespace {

// A block a (query, head): each warp takes every fourth part, several loads in flight.
__global__ void __launch_bounds__(128)
    merge_kernel(const __grid_constant__ Shape s, const __grid_constant__ StepView v, const __grid_constant__ Layer l) {
  __shared__ float sums[4][256], tops[4], totals[4];
  asm volatile("griddepcontrol.wait;" ::: "memory");  // started while the parts were still being computed
  if (int(blockIdx.y) >= v.counts[kCountMerges]) return;
  const int head = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, D = s.head_dim;
  const Merge m = v.merges[blockIdx.y];
  float top = -INFINITY, total = 0.0f, acc[8] = {};
  for (int first = m.begin + warp; first < m.end; first += 16) {
    float lse[4];
    float4 x[4][2];
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      const int i = first + u * 4;
      const int64_t row = int64_t(v.merge_slots[min(i, m.end - 1)]) * s.heads + head;
      lse[u] = i < m.end ? l.partial_lse[row] : -INFINITY;
      const float4* from = reinterpret_cast<const float4*>(l.partial + row * D);
#pragma unroll
      for (int k = 0; k < 2; ++k)
        x[u][k] = (lane + 32 * k) * 4 < D ? from[lane + 32 * k] : float4{0.0f, 0.0f, 0.0f, 0.0f};
    }
    const float next = fmaxf(fmaxf(fmaxf(lse[0], lse[1]), fmaxf(lse[2], lse[3])), top);
    if (next == -INFINITY) continue;
    const float shrink = expf(top - next);
    top = next;
    total *= shrink;
    for (float& a : acc) a *= shrink;
#pragma unroll
    for (int u = 0; u < 4; ++u) {
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
    if (d < D) sums[warp][d] = acc[k];
  }
  if (lane == 0) tops[warp] = top, totals[warp] = total;
  __syncthreads();
  float all = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
  const bool masked = all == -INFINITY;
  const float sink = l.sink_logits ? l.sink_logits[head] : -INFINITY;
  all = masked ? 0.0f : fmaxf(all, sink);
  float denominator = expf(sink - all), factor[4];
  for (int w = 0; w < 4; ++w) {
    factor[w] = expf(tops[w] - all);
    denominator += totals[w] * factor[w];
  }
  const int64_t row = int64_t(m.token) * s.heads + head;
  const float f = masked ? 0.0f : s.out_inv_scale / denominator;
  for (int d = threadIdx.x; d < D; d += 128) {
    float x = 0.0f;
    for (int w = 0; w < 4; ++w) x += sums[w][d] * factor[w];
    store_float(l.out, s.out, row * D + d, x * f);
  }
  if (l.lse && threadIdx.x == 0) l.lse[row] = masked ? -INFINITY : all + logf(denominator);
}

StreamEntry entry(const Shape& s, const CacheLayer& c, int row_tiles) {
  if (s.work != DType::f16 && s.work != DType::bf16) return {};
  const int bits = dtype_bits(c.dtype);
  if (c.token * 8 % 128 || c.head * 8 % 128 || s.head_dim * bits % 128) return {};
  const bool f16 = s.work == DType::f16;
  switch (static_cast<kvcache::QuantKind>(c.quant)) {
    case kvcache::QuantKind::none:
      if (c.dtype == DType::f16) return stream_f16(s.head_dim, row_tiles);
      return c.dtype == DType::bf16 && !f16 ? stream_bf16(s.head_dim, row_tiles) : StreamEntry{};
    case kvcache::QuantKind::per_tensor:
      return c.dtype == DType::i8 ? stream_i8(s.head_dim, row_tiles) : stream_f8(s.head_dim, row_tiles);
    case kvcache::QuantKind::group: {
      const int bytes = s.head_dim / c.quant_group * dtype_bits(c.scale_dtype) / 8;
      if (bytes != 2 && bytes % 4) return {};
      return c.dtype == DType::i8 ? stream_i8_group(s.head_dim, row_tiles) : stream_i4(s.head_dim, row_tiles);
    }
  }
  return {};
}

int scale_bytes(const Shape& s, const CacheLayer& c) {
  return c.quant == int(kvcache::QuantKind::group) ? s.head_dim / c.quant_group * dtype_bits(c.scale_dtype) / 8 : 0;
}

}  // namespace

int stream_warps(const Shape& s, const CacheLayer& c, int row_tiles) {
  StreamEntry e = entry(s, c, row_tiles);
  return e.prepare ? kStreamWarps * e.prepare(scale_bytes(s, c)) : 0;
}

void launch_stream(const Shape& s, const StepView& v, const Layer& l, const StreamList& list, int row_tiles,
                   cudaStream_t stream) {
  entry(s, l.cache, row_tiles).run(s, v, l, list, scale_bytes(s, l.cache), stream);
}

void launch_merge(const Shape& s, const StepView& v, const Layer& l, int64_t queries, cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(s.heads, int(queries));
  config.blockDim = dim3(128);
  config.stream = stream;
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = 1;
  cudaLaunchKernelEx(&config, merge_kernel, s, v, l);
}

}  // namespace kvasir::attention::cuda
