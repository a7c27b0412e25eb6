// New K/V on their way in: bias, RoPE, quantization, the scattered write, and (for prefill) the same rows
// contiguous as the cache will return them. Also the way back out: gathering what a sequence has.
// A row (one head of one token) belongs to a subwarp whose lanes hold 8 elements each.
#include "attention/cuda/append.cuh"

namespace kvasir::attention::cuda {
namespace {

// Keys, and values where those are not the keys as they lie.
__host__ __device__ inline int stored_rows(const Shape& s, const CacheLayer& c) {
  return (c.key == c.value ? 1 : 2) * s.kv_heads;
}

// New K/V that the cache keeps just as they came: a warp copies a token, all of it in flight at once.
constexpr int kCopyWarps = 8, kCopyFlight = 8;
__global__ void __launch_bounds__(kCopyWarps * 32)
    copy_kernel(const __grid_constant__ Shape s, const __grid_constant__ StepView v, const __grid_constant__ Layer l,
                int phase, uint32_t row_pieces) {
  let_next_kernel_start();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tokens = v.counts[kCountTokens];
  const uint32_t half = s.kv_heads * row_pieces, all = stored_rows(s, l.cache) * row_pieces;  // of 16 bytes
  for (int token = blockIdx.x * kCopyWarps + warp; token < tokens; token += gridDim.x * kCopyWarps) {
    const Token info = v.tokens[token];
    if (info.place < 0 || ((info.flags & kDeferred) != 0) != (phase == 1)) continue;
    if (l.stored_by_prefill && info.flags & kContiguous) continue;
    const int64_t to = int64_t(info.place) * l.cache.token;
    for (uint32_t first = lane; first < all; first += 32 * kCopyFlight) {
      uint4 x[kCopyFlight];
#pragma unroll
      for (int u = 0; u < kCopyFlight; ++u) {
        const uint32_t i = first + u * 32, at = i < half ? i : i - half;
        if (i < all) x[u] = __ldcs(static_cast<const uint4*>(i < half ? l.key : l.value) + int64_t(token) * half + at);
      }
#pragma unroll
      for (int u = 0; u < kCopyFlight; ++u) {
        const uint32_t i = first + u * 32, at = i < half ? i : i - half;
        if (i < all)
          *reinterpret_cast<uint4*>((i < half ? l.cache.key : l.cache.value) + to + (at / row_pieces) * l.cache.head +
                                    at % row_pieces * 16) = x[u];
      }
    }
  }
}

// phase 0: everything, but deferred sequences only become contiguous; 1: store the deferred ones.
__global__ void __launch_bounds__(256, 5)
    append_kernel(Shape s, StepView v, Layer l, int phase, bool queries, int lanes, bool store) {
  let_next_kernel_start();  // whoever starts early waits before it reads what this writes
  // Where nothing is stored there are queries alone.
  const int rows = (queries ? s.heads : 0) + (store ? stored_rows(s, l.cache) : 0);
  const int per_block = 256 / lanes;
  const int lane = threadIdx.x % lanes;
  const int64_t total = int64_t(v.counts[kCountTokens]) * rows;
  const int lanes_in_group = s.head_dim && l.cache.quant_group ? l.cache.quant_group / 8 : 1;
  // Whole warps walk together (the absolute maximum is a shuffle); rows past the end repeat the last one unwritten.
  for (int64_t at = int64_t(blockIdx.x) * per_block; at < total; at += int64_t(gridDim.x) * per_block) {
    int64_t i = at + threadIdx.x / lanes;
    const bool live = i < total && lane * 8 < s.head_dim;
    if (i >= total) i = total - 1;
    const int32_t token = int32_t(uint32_t(i) / uint32_t(rows));  // fits: tokens x heads of one step
    int head = int(uint32_t(i) % uint32_t(rows));
    int part = 0;  // q, k, v
    if (!queries) head += s.heads;
    if (head >= s.heads + s.kv_heads)
      part = 2, head -= s.heads + s.kv_heads;
    else if (head >= s.heads)
      part = 1, head -= s.heads;
    const Token info = v.tokens[token];
    const bool deferred = info.flags & kDeferred;
    const bool wanted = live && (phase == 0 || (part != 0 && deferred));

    const int packed_head = part == 0 ? head : part == 1 ? s.heads + head : s.heads + s.kv_heads + head;
    const void* base = s.packed || part == 0 ? l.query : part == 1 ? l.key : l.value;
    const int64_t row = s.packed ? (int64_t(token) * (s.heads + 2 * s.kv_heads) + packed_head) * s.head_dim
                                 : (int64_t(token) * (part == 0 ? s.heads : s.kv_heads) + head) * s.head_dim;
    const int d = lane * 8;
    Vec8 x{};
    auto load = [&](int at_d) {
      Vec8 y = load8(base, s.io, row + at_d);
      if (l.bias) {
        Vec8 bias = load8(l.bias, s.io, int64_t(packed_head) * s.head_dim + at_d);
        for (int k = 0; k < 8; ++k) y.x[k] += bias.x[k];
      }
      return y;
    };
    auto element = [&](int at_d) {
      float y = load_float(base, s.io, row + at_d);
      return l.bias ? y + load_float(l.bias, s.io, int64_t(packed_head) * s.head_dim + at_d) : y;
    };
    if (wanted) {
      x = load(d);
      if (part != 2 && s.rope_style != 0 && !s.streaming && d < s.rotary_dim) {
        const int half = s.rotary_dim / 2;
        const float4* angles = reinterpret_cast<const float4*>(s.rope) + int64_t(token) * half;
        if (s.rope_style == 2) {
          for (int k = 0; k < 8; k += 2) {
            if (d + k >= s.rotary_dim) break;
            const float4 a = angles[(d + k) / 2];
            const float x0 = x.x[k], x1 = x.x[k + 1];
            x.x[k] = rotated(x0, x1, a);
            x.x[k + 1] = rotated(x1, -x0, a);
          }
        } else if (half % 8 == 0) {  // the partners are eight in a row as well
          const bool first = d < half;
          const Vec8 other = load(first ? d + half : d - half);
          const float4* a = angles + (first ? d : d - half);
          for (int k = 0; k < 8; ++k) x.x[k] = rotated(x.x[k], first ? other.x[k] : -other.x[k], a[k]);
        } else {
          Vec8 all = x;
#pragma unroll 1
          for (int e = d; e < min(d + 8, s.rotary_dim); ++e) {
            const bool first = e < half;
            const float y =
                rotated(element(e), first ? element(e + half) : -element(e - half), angles[first ? e : e - half]);
            for (int k = 0; k < 8; ++k)  // a register is not indexed
              if (k == e - d) all.x[k] = y;
          }
          x = all;
        }
      }
    }
    const int64_t q_row = (int64_t(token) * s.heads + head) * s.head_dim + d;
    if (part == 0 && wanted) {
      if (!s.streaming) query_as_fp8(l, x);  // else once it is rotated, by its reader
      store_query(l, s.work, info.flags, q_row, x);
    }
    const bool write = store && wanted && part != 0 && info.place >= 0 && (phase == 1 || !deferred);
    uint8_t *to = nullptr, *scale_to = nullptr;
    if (write) {
      const int64_t place = info.place;
      to = (part == 2 ? l.cache.value : l.cache.key) + place * l.cache.token + head * l.cache.head;
      if (l.cache.quant_group)
        scale_to = (part == 2 ? l.cache.value_scale : l.cache.key_scale) + place * l.cache.scale_token +
                   head * l.cache.scale_head;
    }
    // Rows of one warp may mix q with k; the shuffles in here must still be met by all of it.
    through_cache(l.cache, s.io == DType::i8, s.io == DType::f8_e4m3, part == 2, lane, lanes_in_group, x, to, scale_to);
    if (live && part != 0 && phase == 0 && !l.given && info.flags & (kContiguous | kDeferred)) {
      void* out = part == 2 ? l.v_new : l.k_new;
      store8(out, s.work, (int64_t(token) * s.kv_heads + head) * s.head_dim + d, x);
    }
  }
}

// KVC's second half (`old` false: every token, repeated, as io) or the prefixes prefill reads (`old` true).
__global__ void __launch_bounds__(256) gather_kernel(Shape s, StepView v, CacheLayer c, void* k_out, void* v_out,
                                                     DType type, int repeat, int lanes, bool old) {
  if (int(blockIdx.y) >= v.counts[kCountSequences]) return;
  const DeviceSequence seq = v.sequences[blockIdx.y];
  if (old && seq.gathered < 0) return;
  const int64_t first = old ? seq.gathered : seq.kv_begin;
  const int32_t tokens = old ? seq.start_pos : seq.kv_len;
  const int rows = 2 * s.kv_heads, per_block = 256 / lanes, lane = threadIdx.x % lanes;
  const int64_t total = int64_t(tokens) * rows;
  if (lane * 8 >= s.head_dim) return;
  for (int64_t i = int64_t(blockIdx.x) * per_block + threadIdx.x / lanes; i < total;
       i += int64_t(gridDim.x) * per_block) {
    const int32_t t = int32_t(i / rows);
    int head = int(i % rows);
    const bool value = head >= s.kv_heads;
    if (value) head -= s.kv_heads;
    // What no query of this step sees is not read (its page may be gone); zeros, so that a weight of zero times
    // it is zero.
    if (old && s.window > 0 && t >= s.sinks && t < seq.start_pos - (s.window - s.sinks) + 1) {
      store8(value ? v_out : k_out, type, ((first + t) * s.kv_heads + head) * s.head_dim + lane * 8, Vec8{});
      continue;
    }
    const int64_t place = read_place(s, v, blockIdx.y, t);
    Vec8 x = load8((value ? c.value : c.key) + place * c.token + head * c.head, c.dtype, lane * 8);
    float scale = 1.0f;
    if (c.quant == int(kvcache::QuantKind::group))
      scale = load_float((value ? c.value_scale : c.key_scale) + place * c.scale_token + head * c.scale_head,
                         c.scale_dtype, lane * 8 >> c.group_shift);
    if (!old) scale *= value ? c.v_scale : c.k_scale;  // prefill multiplies its sums
    for (int k = 0; k < 8; ++k) x.x[k] *= scale;
    if (type == DType::f8_e4m3)
      for (int k = 0; k < 8; ++k) x.x[k] *= s.out_inv_scale;
    for (int r = 0; r < repeat; ++r)
      store8(value ? v_out : k_out, type, (((first + t) * s.kv_heads + head) * repeat + r) * s.head_dim + lane * 8, x);
  }
}

// cosine and sine of every new token's position, once a step for all layers, with what float32 leaves of them: keys
// are stored as a reference in double stores them. Or of every rank, where nothing is stored.
__global__ void rope_kernel(StepView v, const float* inv_freq, int half, float magnitude, int ranks, float* out) {
  const int64_t total = int64_t(ranks > 0 ? ranks : v.counts[kCountTokens]) * half;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < total; i += int64_t(gridDim.x) * blockDim.x) {
    const int32_t token = int32_t(i / half);
    int64_t position = token;
    if (ranks == 0) {
      const DeviceSequence& seq = v.sequences[v.tokens[token].sequence];
      position = seq.start_pos + (token - seq.q_begin);
    }
    double sine, cosine;
    sincos(double(position) * double(inv_freq[i % half]), &sine, &cosine);
    sine *= double(magnitude), cosine *= double(magnitude);
    const float c = float(cosine), s = float(sine);
    if (ranks > 0)
      reinterpret_cast<float2*>(out)[i] = {c, s};
    else
      reinterpret_cast<float4*>(out)[i] = {c, s, float(cosine - double(c)), float(sine - double(s))};
  }
}

int row_lanes(int head_dim) {
  int lanes = 1;
  while (lanes * 8 < head_dim) lanes *= 2;
  return lanes;
}

}  // namespace

void launch_append(const Shape& s, const StepView& v, const Layer& l, int64_t tokens, bool queries, bool store,
                   int phase, cudaStream_t stream) {
  if (l.given && !queries && store) {
    const int64_t blocks = (tokens + kCopyWarps - 1) / kCopyWarps;
    copy_kernel<<<int(blocks < 132 * 8 ? blocks : 132 * 8), kCopyWarps * 32, 0, stream>>>(
        s, v, l, phase, uint32_t(s.head_dim * dtype_bits(s.io) / 128));
    return;
  }
  if (phase == 0 && append_tokens_takes(s, l.cache) && l.cache.key != l.cache.value)
    return launch_append_tokens(s, v, l, tokens, queries, store, stream);
  launch_append_any(s, v, l, tokens, queries, store, phase, stream);
}

void launch_append_any(const Shape& s, const StepView& v, const Layer& l, int64_t tokens, bool queries, bool store,
                       int phase, cudaStream_t stream) {
  const int lanes = row_lanes(s.head_dim);
  const int64_t rows = tokens * ((queries ? s.heads : 0) + (store ? stored_rows(s, l.cache) : 0)),
                per_block = 256 / lanes;
  const int64_t blocks = (rows + per_block - 1) / per_block;
  append_kernel<<<int(blocks < 132 * 16 ? blocks : 132 * 16), 256, 0, stream>>>(s, v, l, phase, queries, lanes, store);
}

void launch_gather(const Shape& s, const StepView& v, const CacheLayer& c, void* k_out, void* v_out, DType type,
                   int repeat, bool old, int64_t sequences, cudaStream_t stream) {
  int blocks = sequences >= 64 ? 16 : sequences >= 8 ? 64 : 512;
  gather_kernel<<<dim3(blocks, int(sequences)), 256, 0, stream>>>(s, v, c, k_out, v_out, type, repeat,
                                                                  row_lanes(s.head_dim), old);
}

void launch_rope(const StepView& v, const float* inv_freq, int half, float magnitude, int64_t ranks, int64_t tokens,
                 float* out, cudaStream_t stream) {
  const int64_t blocks = ((ranks > 0 ? ranks : tokens) * half + 255) / 256;
  rope_kernel<<<int(blocks < 1024 ? blocks : 1024), 256, 0, stream>>>(v, inv_freq, half, magnitude, int(ranks), out);
}

}  // namespace kvasir::attention::cuda
