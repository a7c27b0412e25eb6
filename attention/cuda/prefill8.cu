// Prefill and extend in FP8 on Hopper: inputs and cache E4M3, heads of 128, everything else as in prefill.cu. The whole
// of a sequence is read back from its pages once: K row by row, V turned over, because the matrix units want the
// contracted index of 8-bit operands innermost. Within sixteen keys V lies in the order in which the scores of one
// multiplication become the weights of the next, so those never leave their registers.
#include "attention/cuda/bulk.cuh"
#include "attention/cuda/device.cuh"
#include "attention/cuda/prefill8.h"
#include "attention/cuda/wgmma.cuh"

namespace kvasir::attention::cuda {
namespace {

constexpr int kD = 128, kRows = 128, kKeys = 128, kStages = 3, kTileBytes = 128 * 128;
constexpr float kShift = 8.0f;  // weights up to 256, of E4M3's 448

struct Maps {
  CUtensorMap q, k, v;
};
struct Shared {
  alignas(1024) uint8_t q[kTileBytes];
  uint8_t k[kStages][kTileBytes], v[kStages][kTileBytes];
  uint8_t out[kTileBytes * 2];
  uint64_t q_full, q_empty, k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
};

constexpr int kGatherTokens = 64;

// A block takes 64 tokens of one kv head: K to [rows, kv_heads, D], V to [kv_heads, D, columns].
__global__ void __launch_bounds__(128)
    gather8_kernel(const __grid_constant__ Shape s, const __grid_constant__ StepView v,
                   const __grid_constant__ CacheLayer c, uint8_t* k_out, uint8_t* v_out, int64_t columns) {
  __shared__ uint32_t values[kGatherTokens][kD / 4 + 1];
  let_next_kernel_start();
  if (int(blockIdx.y) >= v.counts[kCountSequences]) return;
  const Sequence seq = v.sequences[blockIdx.y];
  if (seq.gathered < 0) return;
  const int head = blockIdx.z;
  for (int first = blockIdx.x * kGatherTokens; first < seq.kv_len; first += gridDim.x * kGatherTokens) {
    constexpr int kTurns = kGatherTokens * kD / 16 / 128, kStep = 128 / (kD / 16);
    const int row = threadIdx.x / (kD / 16), piece = threadIdx.x % (kD / 16);
    uint4 key[kTurns], value[kTurns];
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int t = first + row + i * kStep;
      // What no query of this step sees is not read (its page may be gone).
      const bool unseen = s.window > 0 && t >= s.sinks && t < seq.start_pos - (s.window - s.sinks) + 1;
      key[i] = value[i] = {};
      if (t < seq.kv_len && !unseen) {
        const int64_t at = read_place(s, v, blockIdx.y, t) * c.token + head * c.head + piece * 16;
        key[i] = *reinterpret_cast<const uint4*>(c.key + at);
        value[i] = *reinterpret_cast<const uint4*>(c.value + at);
      }
    }
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int t = first + row + i * kStep;
      if (t < seq.kv_len)
        *reinterpret_cast<uint4*>(k_out + ((int64_t(seq.gathered) + t) * s.kv_heads + head) * kD + piece * 16) = key[i];
      uint32_t* to = &values[row + i * kStep][piece * 4];
      to[0] = value[i].x, to[1] = value[i].y, to[2] = value[i].z, to[3] = value[i].w;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kD * kGatherTokens / 16; i += 128) {
      const int d = i % kD, sixteen = i / kD * 16;
      if (first + sixteen < seq.kv_len) {
        auto byte = [&](int row) { return values[sixteen + row][d / 4] >> (d % 4) * 8 & 255; };
        uint32_t w[4];
#pragma unroll
        for (int k = 0; k < 4; ++k)
          w[k] = byte(2 * k) | byte(2 * k + 1) << 8 | byte(8 + 2 * k) << 16 | byte(9 + 2 * k) << 24;
        *reinterpret_cast<uint4*>(v_out + (int64_t(head) * kD + d) * columns + seq.gathered + first + sixteen) = {
            w[0], w[1], w[2], w[3]};
      }
    }
    __syncthreads();
  }
}

// Tiles of keys that a tile of queries reads, from the last backwards.
struct Walk {
  int first, end;
  __device__ int count() const { return end - first; }
  __device__ int at(int i) const { return end - 1 - i; }
};
__device__ inline Walk walk_of(const Shape& s, const Sequence& q, int row) {
  const int last = min(row + kRows, q.q_len) - 1;
  const Range lo = visible(s, q, q.start_pos + row), hi = visible(s, q, q.start_pos + last);
  const int begin = s.sinks > 0 ? 0 : lo.begin;
  Walk w{begin / kKeys, (hi.end + kKeys - 1) / kKeys};
  if (w.first > w.end) w.first = w.end;
  return w;
}

__device__ inline uint32_t pack8(float x0, float x1, float x2, float x3) {
  uint32_t y;
  asm("{.reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, %2, %1; cvt.rn.satfinite.e4m3x2.f32 hi, %4, %3; "
      "mov.b32 %0, {lo, hi};}"
      : "=r"(y)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return y;
}

template <bool kExtra>
__global__ void __launch_bounds__(384, 1)
    prefill8_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Shape s,
                    const __grid_constant__ StepView v, const __grid_constant__ Layer l, const PrefillTile* tiles) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // elsewhere nobody launches it
  extern __shared__ uint8_t raw[];
  Shared& sh = *reinterpret_cast<Shared*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t(1023));
  if (threadIdx.x == 0) {
    barrier_init(&sh.q_full, 1);
    barrier_init(&sh.q_empty, 2);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&sh.k_full[i], 1);
      barrier_init(&sh.v_full[i], 1);
      barrier_init(&sh.k_empty[i], 2);
      barrier_init(&sh.v_empty[i], 2);
    }
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
  }
  __syncthreads();
  const int total = v.counts[kCountTiles] * s.heads;
  wait_for_kernel_ahead();

  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;\n");
    if (threadIdx.x == 0) {
      int fill = 0, phase = 1, q_phase = 1;
      for (int w = blockIdx.x; w < total; w += gridDim.x, q_phase ^= 1) {
        const PrefillTile tile = tiles[w / s.heads];
        const int head = w % s.heads, kv_head = head / s.group;
        const Sequence seq = v.sequences[tile.sequence];
        const Walk walk = walk_of(s, seq, tile.row);
        auto load_queries = [&] {
          barrier_wait(&sh.q_empty, q_phase);
          barrier_expect(&sh.q_full, kTileBytes);
          load_tile(sh.q, &maps.q, 0, head, seq.q_begin + tile.row, &sh.q_full);
        };
        if (walk.count() == 0) load_queries();
        for (int i = 0; i < walk.count(); ++i) {
          const int row = seq.gathered + walk.at(i) * kKeys;
          barrier_wait(&sh.k_empty[fill], phase);
          barrier_expect(&sh.k_full[fill], kTileBytes);
          load_tile(sh.k[fill], &maps.k, 0, kv_head, row, &sh.k_full[fill]);
          if (i == 0) load_queries();
          barrier_wait(&sh.v_empty[fill], phase);
          barrier_expect(&sh.v_full[fill], kTileBytes);
          load_tile(sh.v[fill], &maps.v, row, 0, kv_head, &sh.v_full[fill]);
          if (++fill == kStages) fill = 0, phase ^= 1;
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;\n");
    const int group = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const int g = lane / 4, tid = lane % 4, in_tile = group * 64 + warp * 16 + g;  // and + 8
    const float unit = s.scale * s.q_scale * l.cache.k_scale, scale = kExtra ? 1.0f : unit * kLog2e;
    const uint64_t q_rows = rows_descriptor(shared_address(sh.q) + group * 64 * 128);

    int use = 0, phase = 0, q_phase = 0;
    for (int w = blockIdx.x; w < total; w += gridDim.x, q_phase ^= 1) {
      const PrefillTile tile = tiles[w / s.heads];
      const int head = w % s.heads;
      const Sequence seq = v.sequences[tile.sequence];
      const Walk walk = walk_of(s, seq, tile.row);
      const int count = walk.count();
      int row_own[2], row_begin[2], row_end[2];
      for (int h = 0; h < 2; ++h) {
        row_own[h] = seq.start_pos + tile.row + in_tile + h * 8;
        const Range r = visible(s, seq, row_own[h]);
        row_begin[h] = r.begin, row_end[h] = r.end;
      }
      const Range low = visible(s, seq, seq.start_pos + tile.row + group * 64);
      const Range high = visible(s, seq, seq.start_pos + tile.row + group * 64 + 63);
      const float slope = kExtra && s.slopes ? s.slopes[head] * kLog2e : 0.0f;

      float score[kKeys / 2], out[kD / 2], top[2] = {-INFINITY, -INFINITY}, sum[2] = {}, shrink[2];
      uint32_t weights[kKeys / 8];
#pragma unroll
      for (float& x : out) x = 0.0f;

      auto multiply_keys = [&] {
        wgmma_fence();
        const uint64_t k_rows = rows_descriptor(shared_address(sh.k[use]));
#pragma unroll
        for (int k = 0; k < kD / 32; ++k) wgmma_tiles8(score, q_rows + k * 2, k_rows + k * 2, k > 0);
        wgmma_commit();
      };
      auto multiply_values = [&](int stage) {
        const uint64_t elements = rows_descriptor(shared_address(sh.v[stage]));
#pragma unroll
        for (int k = 0; k < kKeys / 32; ++k) wgmma_weights8(out, weights + k * 4, elements + k * 2);
        wgmma_commit();
      };
      // Masks tile i in `score`, moves the running maximum, leaves weights in place of scores.
      auto softmax = [&](int i) {
        const int base = walk.at(i) * kKeys, limit = seq.kv_len;
        if constexpr (kExtra) {
#pragma unroll
          for (int e = 0; e < kKeys / 2; ++e) {
            const int j = base + (e / 4) * 8 + tid * 2 + e % 2, h = (e / 2) % 2;
            float x = score[e] * unit;
            if (s.softcap > 0.0f) {
              const float z = exp2_fast(x / s.softcap * (2.0f * kLog2e));
              x = s.softcap * (1.0f - __fdividef(2.0f, z + 1.0f));
            }
            x = x * kLog2e + slope * float(j - row_own[h]);
            const int r = tile.row + in_tile + h * 8;
            if (l.mask && j < limit && r < seq.q_len)
              x += kLog2e * load_float(l.mask, s.work,
                                       head * l.mask_head + int64_t(seq.q_begin + r) * l.mask_row + seq.kv_begin + j);
            score[e] = x;
          }
        }
        if (!(base >= high.begin && base + kKeys <= min(limit, low.end))) {
#pragma unroll
          for (int e = 0; e < kKeys / 2; ++e) {
            const int j = base + (e / 4) * 8 + tid * 2 + e % 2, h = (e / 2) % 2;
            if (!(j < min(limit, row_end[h]) && (j >= row_begin[h] || j < s.sinks))) score[e] = -INFINITY;
          }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float tops[4] = {top[h], top[h], top[h], top[h]};  // four chains instead of one four times as long
#pragma unroll
          for (int e = 0; e < kKeys / 2; ++e)
            if ((e / 2) % 2 == h) tops[(e / 4) % 4] = fmaxf(tops[(e / 4) % 4], score[e]);
          float most = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
          most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
          most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
          const float base_of = most == -INFINITY ? 0.0f : most * scale;
          shrink[h] = exp2_fast(top[h] * scale - base_of);
          top[h] = most;
          float more[4] = {};
#pragma unroll
          for (int e = 0; e < kKeys / 2; ++e)
            if ((e / 2) % 2 == h) {
              score[e] = exp2_fast(score[e] * scale - (base_of - kShift));
              more[(e / 4) % 4] += score[e];
            }
          sum[h] = sum[h] * shrink[h] + ((more[0] + more[1]) + (more[2] + more[3]));
        }
      };
      auto pack = [&] {
#pragma unroll
        for (int i = 0; i < kKeys / 8; ++i) {  // columns of tiles 2 * (i / 2) and the next, rows g and g + 8 in turn
          const float* x = score + (i / 2) * 8 + (i % 2) * 2;
          weights[i] = pack8(x[0], x[1], x[4], x[5]);
        }
      };
      auto advance = [&] {
        if (++use == kStages) use = 0, phase ^= 1;
      };

      barrier_wait(&sh.q_full, q_phase);
      int previous = 0, previous_phase = 0;
      if (count > 0) {
        barrier_wait(&sh.k_full[use], phase);
        multiply_keys();
        wgmma_wait<0>();
        hold(score);
        if (thread == 0) barrier_arrive(&sh.k_empty[use]);
        softmax(0);
        pack();
        previous = use, previous_phase = phase;
        advance();
      }
      for (int i = 1; i < count; ++i) {
        barrier_wait(&sh.k_full[use], phase);
        multiply_keys();
        barrier_wait(&sh.v_full[previous], previous_phase);
        multiply_values(previous);
        wgmma_wait<1>();
        hold(score);
        if (thread == 0) barrier_arrive(&sh.k_empty[use]);
        softmax(i);
        wgmma_wait<0>();
        hold(out);
        if (thread == 0) barrier_arrive(&sh.v_empty[previous]);
#pragma unroll
        for (int e = 0; e < kD / 2; ++e) out[e] *= shrink[(e / 2) % 2];
        pack();
        previous = use, previous_phase = phase;
        advance();
      }
      if (thread == 0) barrier_arrive(&sh.q_empty);
      if (count > 0) {
        barrier_wait(&sh.v_full[previous], previous_phase);
        wgmma_fence();
        multiply_values(previous);
        wgmma_wait<0>();
        hold(out);
        if (thread == 0) barrier_arrive(&sh.v_empty[previous]);
      }

      float factor[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 1);
        sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 2);
        const bool masked = !(sum[h] > 0.0f);
        const float base = top[h] * scale - kShift;  // log2 of what `sum` is counted in
        float total = sum[h];
        if (l.sink_logits && !masked) total += exp2f(l.sink_logits[head] * kLog2e - base);
        factor[h] = masked ? 0.0f : l.cache.v_scale * s.out_inv_scale / total;
        const int r = tile.row + in_tile + h * 8;
        if (l.lse && tid == 0 && r < seq.q_len)
          l.lse[int64_t(seq.q_begin + r) * s.heads + head] = masked ? -INFINITY : base * kLn2 + logf(total);
      }
      if (s.out == DType::bf16) {
        // Through shared memory, so that rows leave in whole 16-byte pieces.
        uint8_t* mine = sh.out + group * 64 * kD * 2;
#pragma unroll
        for (int i = 0; i < kD / 4; ++i) {
          const int r = warp * 16 + g + (i % 2) * 8, chunk = i / 2;
          *reinterpret_cast<uint32_t*>(mine + r * kD * 2 + ((chunk ^ (r & 7)) * 16) + tid * 4) =
              Brain::pack(out[i * 2] * factor[i % 2], out[i * 2 + 1] * factor[i % 2]);
        }
        __syncwarp();
        for (int i = lane; i < 16 * kD / 8; i += 32) {
          const int r = warp * 16 + i / (kD / 8), chunk = i % (kD / 8), row = tile.row + group * 64 + r;
          if (row < seq.q_len)
            *reinterpret_cast<uint4*>(static_cast<uint16_t*>(l.out) +
                                      (int64_t(seq.q_begin + row) * s.heads + head) * kD + chunk * 8) =
                *reinterpret_cast<const uint4*>(mine + r * kD * 2 + ((chunk ^ (r & 7)) * 16));
        }
        __syncwarp();
      } else {
#pragma unroll
        for (int e = 0; e < kD / 2; ++e) {
          const int h = (e / 2) % 2, r = tile.row + in_tile + h * 8;
          if (r < seq.q_len)
            store_float(l.out, s.out, (int64_t(seq.q_begin + r) * s.heads + head) * kD + (e / 4) * 8 + tid * 2 + e % 2,
                        out[e] * factor[h]);
        }
      }
    }
  }
#endif
}

// Three dimensions of bytes, as boxes of 128 x 128.
bool encode(CUtensorMap* map, const void* base, cuuint64_t inner, cuuint64_t middle, cuuint64_t outer,
            bool middle_in_box) {
  const cuuint64_t sizes[3] = {inner, middle, outer}, strides[2] = {inner, inner * middle};
  const cuuint32_t box[3] = {128, middle_in_box ? 128u : 1u, middle_in_box ? 1u : 128u}, ones[3] = {1, 1, 1};
  return encode_function()(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<void*>(base), sizes, strides, box, ones,
                           CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <bool kExtra>
cudaError_t launch(const Maps& maps, const Shape& s, const StepView& v, const Layer& l, const PrefillTile* tiles,
                   int blocks, cudaStream_t stream) {
  auto* kernel = prefill8_kernel<kExtra>;
  constexpr int bytes = int(sizeof(Shared)) + 1024;
  static const cudaError_t ready = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (ready != cudaSuccess) return ready;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(384);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, maps, s, v, l, tiles);
}

}  // namespace

bool prefill8_supports(const Shape& s, const CacheLayer& c, int compute_capability) {
  return compute_capability == 90 && s.head_dim == kD && s.io == DType::f8_e4m3 && c.dtype == DType::f8_e4m3 &&
         s.rope_style == 0 && !s.packed && s.cyclic == 0 && c.token % 16 == 0 && c.head % 16 == 0 &&
         encode_function() != nullptr;
}

cudaError_t launch_prefill8(const Shape& s, const StepView& v, const Layer& l, const PrefillTile* tiles, int64_t count,
                            int64_t query_rows, int64_t old_rows, int64_t sequences, int multiprocessors,
                            cudaStream_t stream) {
  const int blocks = sequences >= 64 ? 8 : sequences >= 8 ? 32 : 256;
  gather8_kernel<<<dim3(blocks, int(sequences), s.kv_heads), 128, 0, stream>>>(
      s, v, l.cache, static_cast<uint8_t*>(l.k_old), static_cast<uint8_t*>(l.v_old), old_rows);
  Maps maps;
  if (!encode(&maps.q, l.query, kD, cuuint64_t(s.heads), cuuint64_t(query_rows), false) ||
      !encode(&maps.k, l.k_old, kD, cuuint64_t(s.kv_heads), cuuint64_t(old_rows), false) ||
      !encode(&maps.v, l.v_old, cuuint64_t(old_rows), kD, cuuint64_t(s.kv_heads), true))
    return cudaErrorInvalidValue;
  const int64_t all = count * s.heads;
  const int grid = int(all < multiprocessors ? all : multiprocessors);
  return s.softcap > 0.0f || s.slopes || l.mask ? launch<true>(maps, s, v, l, tiles, grid, stream)
                                                : launch<false>(maps, s, v, l, tiles, grid, stream);
}

}  // namespace kvasir::attention::cuda
