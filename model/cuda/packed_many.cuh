// Products by packed weights of many rows, on Hopper's warpgroup instructions: launch_many<PACKING>, instantiated by a
// file for each packing.
//
// Tiles of 128 or 256 features pass through a ring in shared memory: a producer warpgroup fills it, weights by bulk
// copies, rows of the input pair by pair into the order that the packing wants (packed_strip.cuh). Two or
// four consumer warpgroups widen 64 features each in registers and multiply. Where there are fewer tiles than
// multiprocessors, a cluster of blocks shares one: each has a part of k, and they exchange their sums through
// distributed shared memory, in a fixed order.
#pragma once

#include <algorithm>
#include <array>

#include "attention/cuda/shared_memory.h"
#include "attention/cuda/wgmma.cuh"
#include "model/cuda/early.cuh"
#include "model/cuda/packed.h"
#include "model/cuda/packed_strip.cuh"
#include "model/cuda/ring.cuh"
#include "model/cuda/tile_end.cuh"

namespace kvasir::model::cuda {
namespace {

using namespace attention::cuda;

// Warpgroups that multiply, 64 features each. The sums of more rows leave registers for two alone.
template <int kRows>
constexpr int kConsumers = kRows > 64 ? 2 : 4;
template <int kRows>
constexpr int kThreads = (1 + kConsumers<kRows>)*kGroup;
template <int kRows>
constexpr int kTileStrips = 4 * kConsumers<kRows>;  // sixteens of features

struct PackedProduct {
  const __nv_bfloat16* in;
  const uint8_t* weight;
  void* out;
  int64_t n;
  float unit;
  int rows, k, strips, tiles, parts;  // parts: blocks that share a tile
  Form form;
};

template <Packing kPacking, int kRows>
struct Ring {
  static constexpr int kStrips = kTileStrips<kRows>;
  static constexpr int kPiece = 2 * block_bytes(kPacking), kWeights = (kStrips * kPiece + 1023) / 1024 * 1024;
  static constexpr int kInput = kRows * kBlockElements * 2, kStage = kWeights + kInput;
  static constexpr int kFit = (kShared - 2048) / kStage, kStages = kFit > 8 ? 8 : kFit;
  static constexpr int kBytes = kStages * kStage + 1024 + 2 * kStages * int(sizeof(uint64_t));  // 1024 to align
  // Of all warpgroups no more registers than a block is launched with, or setmaxnreg waits for ever.
  static constexpr int kFillRegisters = kRows > 64 ? 72 : 64, kMultiplyRegisters = kRows > 64 ? 216 : 104;
};

__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n" ::: "memory");
}
__device__ inline void store_remote(uint32_t address, int block, const float* v) {
  asm volatile(
      "{.reg .u32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
      "st.shared::cluster.v4.f32 [there], {%2, %3, %4, %5};}\n" ::"r"(address),
      "r"(block), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
      : "memory");
}

// A block's part of the work: these tiles, and of each these steps of k.
struct BlockShare {
  int first, every, begin, end;
  __device__ explicit BlockShare(const PackedProduct& p) {
    const int steps = (p.k + kBlockElements - 1) / kBlockElements, part = int(blockIdx.x) % p.parts;
    first = int(blockIdx.x) / p.parts, every = int(gridDim.x) / p.parts;
    begin = steps * part / p.parts, end = steps * (part + 1) / p.parts;
  }
};

// A warp's share of a tile's weights, a run of bytes for each sixteen features.
template <class R>
__device__ void fill_weights(const PackedProduct& p, uint8_t* stage, uint64_t* full, int tile, int step) {
  constexpr int kShare = R::kStrips / 4;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = warp * kShare;
  const int count = max(0, min(kShare, p.strips - tile * R::kStrips - first));
  const int64_t steps = (p.k + kBlockElements - 1) / kBlockElements;
  if (lane == 0) barrier_expect(full, count * R::kPiece);
  __syncwarp();
  if (lane < count)
    load_bulk(stage + (first + lane) * R::kPiece,
              p.weight + ((int64_t(tile) * R::kStrips + first + lane) * steps + step) * R::kPiece, R::kPiece, full);
}

template <Packing kPacking, int kRows>
__device__ void fill(const PackedProduct& p, const BlockShare& part, uint8_t* ring, uint64_t* full, uint64_t* empty) {
  using R = Ring<kPacking, kRows>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Weights are nobody's result: the first stages' are fetched while the previous kernel still runs.
  int begun = 0;
  for (int tile = part.first, step = part.begin; begun < R::kStages && tile < p.tiles; ++begun) {
    fill_weights<R>(p, ring + begun * R::kStage, &full[begun], tile, step);
    if (++step == part.end) step = part.begin, tile += part.every;
  }
  wait_for_previous_kernel();
  // A warp copies every fourth row, a pair of elements a lane; past the last row, the first again, for sums that nobody
  // wants. Rows are 128 bytes of a swizzle of eight rows, so a lane's place in a row is one of two.
  constexpr int kHeld = 16;  // rows whose addresses stay in registers; those of 64 rows further on are found from them
  const int place = packed_pair<kPacking>(lane), chunk = place / 4;
  const uint32_t first = R::kWeights + warp * 128 + place % 4 * 4;
  const uint32_t to[2] = {first + (chunk ^ warp) * 16, first + (chunk ^ (warp + 4)) * 16 + 512};
  const __nv_bfloat16* rows[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int row = warp + 4 * i;
    rows[i] = p.in + int64_t(row < p.rows ? row : 0) * p.k + part.begin * kBlockElements + lane * 2;
  }
  const int64_t rewind = int64_t(part.end - part.begin) * kBlockElements, further_on = int64_t(64) * p.k;
  RingPlace at;
  for (int tile = part.first; tile < p.tiles; tile += part.every) {
    for (int step = part.begin; step < part.end; ++step, advance<R::kStages>(at)) {
      uint8_t* stage = ring + at.stage * R::kStage;
      barrier_wait(&empty[at.stage], at.phase ^ 1);
      if (--begun < 0) fill_weights<R>(p, stage, &full[at.stage], tile, step);
      const uint32_t even = shared_address(stage) + to[0], odd = shared_address(stage) + to[1];
      const int left = p.k - step * kBlockElements - lane * 2;
      const bool there[2] = {left > 0, left > 64};
#pragma unroll
      for (int i = 0; i < kRows / 4; ++i) {
        const __nv_bfloat16* from = rows[i % kHeld];
        if (i >= kHeld && warp + 4 * i < p.rows) from += further_on;
#pragma unroll
        for (int h = 0; h < 2; ++h)
          copy4((i % 2 ? odd : even) + unsigned(h * kRows * 128 + i / 2 * 1024), from + h * 64, there[h]);
        if (i + kHeld >= kRows / 4) rows[i % kHeld] += kBlockElements;
      }
      arrive_when_copied(&full[at.stage]);
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) rows[i] -= rewind;
  }
}

// The sums of a tile, or of this block's steps of it: sums[strip of the warp][row, by eights][feature and row of it].
template <Packing kPacking, int kRows>
__device__ void multiply(const BlockShare& part, const uint8_t* ring, uint64_t* full, uint64_t* empty, int group,
                         RingPlace& at, float (&sums)[kRows / 2]) {
  using R = Ring<kPacking, kRows>;
  const bool leads = threadIdx.x % kGroup == 0;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  int before = -1;
  uint32_t a[2][8];  // by turns: read until the next group's products have begun
  for (int step = part.begin; step < part.end; ++step) {
    const uint8_t* stage = ring + at.stage * R::kStage;
    barrier_wait(&full[at.stage], at.phase);
    proxy_fence();
    PackedStrip<kPacking> strip;
    strip.read(stage + (group * 4 + warp) * R::kPiece, lane);
#pragma unroll
    for (int j = 0; j < kBlockElements / 32; ++j) {
      const uint64_t rows =
          rows_descriptor(shared_address(stage + R::kWeights + j / 2 * kRows * 128)) + uint64_t(j % 2 * 4);
      strip.widen(j, a[j % 2]);
      hold(sums);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 2; ++i)
        wgmma_rows(Brain{}, sums, a[j % 2] + i * 4, further(rows, i * 2), step > part.begin || j > 0 || i > 0);
      wgmma_commit();
      wgmma_wait<1>();
      if (j == 0 && before >= 0 && leads) barrier_arrive(&empty[before]);  // the step before is multiplied
    }
    before = at.stage;
    advance<R::kStages>(at);
  }
  wgmma_wait<0>();
  hold(sums);
  if (leads && before >= 0) barrier_arrive(&empty[before]);
}

template <Form kForm>
struct FormIs {
  static constexpr Form form = kForm;
  static constexpr bool fuses = kForm == Form::silu || kForm == Form::gelu || kForm == Form::apart;
};
// with(FormIs<form>())
template <class With>
__device__ void by_form(Form form, With with) {
  switch (form) {
    case Form::f32: return with(FormIs<Form::f32>());
    case Form::added_f32: return with(FormIs<Form::added_f32>());
    case Form::bf16: return with(FormIs<Form::bf16>());
    case Form::silu: return with(FormIs<Form::silu>());
    case Form::gelu: return with(FormIs<Form::gelu>());
    case Form::apart: return with(FormIs<Form::apart>());
  }
}

// Four sums: of features g and g + 8 of a strip, each of two rows. For gates: of a gate, and of what it lets through.
template <class Is>
__device__ void put(Is, const PackedProduct& p, int64_t strip, int row0, const float* sums) {
  const int lane = threadIdx.x % 32, g = lane / 4, first = row0 + lane % 4 * 2;
  if (strip >= p.strips) return;
  const int64_t feature = strip * (Is::fuses ? 8 : 16) + g;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int64_t row = first + c;
    if (row >= p.rows) return;
    const float y = sums[c] * p.unit, z = sums[2 + c] * p.unit;
    if constexpr (Is::form == Form::apart) {
      float* both = static_cast<float*>(p.out) + row * 2 * p.n + feature;
      both[0] = y, both[p.n] = z;
    } else if constexpr (Is::fuses) {
      static_cast<__nv_bfloat16*>(p.out)[row * p.n + feature] =
          __float2bfloat16_rn((Is::form == Form::gelu ? gelu_tanh(y) : silu(y)) * z);
    } else if constexpr (Is::form == Form::bf16) {
      auto* out = static_cast<__nv_bfloat16*>(p.out) + row * p.n + feature;
      out[0] = __float2bfloat16_rn(y), out[8] = __float2bfloat16_rn(z);
    } else {
      float* out = static_cast<float*>(p.out) + row * p.n + feature;
      constexpr bool kAdd = Is::form == Form::added_f32;
      out[0] = kAdd ? out[0] + y : y, out[8] = kAdd ? out[8] + z : z;
    }
  }
}
// The blocks of a cluster add their sums up, each a share of them: fours of a thread's sums, dealt out in turn.
template <int kRows>
__device__ void exchange(const PackedProduct& p, uint8_t* ring, int group, int tile, const float (&sums)[kRows / 2]) {
  constexpr int kFours = kRows / 8, kMany = kConsumers<kRows> * kGroup;
  const int part = int(blockIdx.x) % p.parts, each = (kFours + p.parts - 1) / p.parts;
  const int thread = threadIdx.x - kGroup, warp = threadIdx.x / 32 % 4;
  const bool multiplies = group >= 0;
  cluster_sync();  // every ring is free
  const uint32_t to = shared_address(ring) + unsigned(part * each * kMany + thread) * 16;
  if (multiplies) {
#pragma unroll
    for (int u = 0; u < kFours; ++u)
      if (u * 8 < p.rows) store_remote(to + unsigned(u / p.parts * kMany) * 16, u % p.parts, &sums[u * 4]);
  }
  cluster_sync();
  if (!multiplies) return;
  by_form(p.form, [&](auto form) {
    for (int u = part; u < kFours && u * 8 < p.rows; u += p.parts) {
      float sum[4] = {};
      for (int from = 0; from < p.parts; ++from) {
        const auto& v = reinterpret_cast<const float4*>(ring)[(from * each + u / p.parts) * kMany + thread];
        sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
      }
      put(form, p, int64_t(tile) * kTileStrips<kRows> + group * 4 + warp, u * 8, sum);
    }
  });
}

template <Packing kPacking, int kRows>
__global__ void __launch_bounds__(kThreads<kRows>, 1) packed_many(PackedProduct p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using R = Ring<kPacking, kRows>;
  extern __shared__ uint8_t shared[];
  uint8_t* ring = shared + (1024 - (shared_address(shared) & 1023)) % 1024;
  auto* full = reinterpret_cast<uint64_t*>(ring + R::kStages * R::kStage);
  uint64_t* empty = full + R::kStages;
  const int group = int(threadIdx.x) / kGroup - 1;  // -1: the producer
  if (threadIdx.x == 0) {
    for (int i = 0; i < R::kStages; ++i) barrier_init(&full[i], 4 + kGroup), barrier_init(&empty[i], kConsumers<kRows>);
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
  }
  __syncthreads();
  let_next_kernel_start();
  const BlockShare part(p);
  float sums[kRows / 2];
  if (group < 0) {
    give_registers<R::kFillRegisters>();
    fill<kPacking, kRows>(p, part, ring, full, empty);
    asm volatile("cp.async.wait_all;\n" ::: "memory");  // the ring is others' to write into, once the cluster has met
    if (p.parts > 1) exchange<kRows>(p, ring, group, part.first, sums);
    return;
  }
  take_registers<R::kMultiplyRegisters>();
  wait_for_previous_kernel();  // results of it may be what this one adds to or overwrites
  const int warp = threadIdx.x / 32 % 4;
  RingPlace at;
  for (int tile = part.first; tile < p.tiles; tile += part.every) {
    multiply<kPacking, kRows>(part, ring, full, empty, group, at, sums);
    if (p.parts > 1) {
      exchange<kRows>(p, ring, group, tile, sums);
    } else {
      by_form(p.form, [&](auto form) {
#pragma unroll
        for (int u = 0; u < kRows / 8; ++u)
          put(form, p, int64_t(tile) * kTileStrips<kRows> + group * 4 + warp, u * 8, &sums[u * 4]);
      });
    }
  }
#endif
}

cudaLaunchConfig_t config_of(int blocks, int threads, int bytes, cudaStream_t stream, cudaLaunchAttribute* two,
                             int parts) {
  two[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  two[0].val.programmaticStreamSerializationAllowed = 1;
  two[1].id = cudaLaunchAttributeClusterDimension;
  two[1].val.clusterDim.x = unsigned(parts), two[1].val.clusterDim.y = two[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(blocks)), config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = size_t(bytes), config.stream = stream;
  config.attrs = two, config.numAttrs = parts > 1 ? 2 : 1;
  return config;
}

// Blocks that share a tile: what takes the fewest steps of one, an exchange being worth three.
template <Packing kPacking, int kRows>
int parts_of(int tiles, int steps) {
  constexpr int kMost = 8, kExchange = 3;
  auto* kernel = packed_many<kPacking, kRows>;
  static const auto clusters = [&] {  // that run at once, by their size
    std::array<int, kMost + 1> most{};
    for (int parts = 2; parts <= kMost; ++parts) {
      cudaLaunchAttribute two[2];
      const cudaLaunchConfig_t config =
          config_of(parts * 64, kThreads<kRows>, Ring<kPacking, kRows>::kBytes, nullptr, two, parts);
      if (cudaOccupancyMaxActiveClusters(&most[size_t(parts)], kernel, &config) != cudaSuccess) {
        cudaGetLastError();
        most[size_t(parts)] = 0;
      }
    }
    return most;
  }();
  int best = 1, least = (tiles + device().multiprocessors - 1) / device().multiprocessors * steps;
  for (int parts = 2; parts <= std::min(kMost, steps); ++parts) {
    if (tiles > clusters[size_t(parts)]) continue;
    const int takes = (steps + parts - 1) / parts + kExchange;
    if (takes < least) best = parts, least = takes;
  }
  return best;
}

template <Packing kPacking, int kRows>
void run(PackedProduct p, cudaStream_t stream) {
  p.tiles = (p.strips + kTileStrips<kRows> - 1) / kTileStrips<kRows>;
  auto* kernel = packed_many<kPacking, kRows>;
  constexpr int kBytes = Ring<kPacking, kRows>::kBytes;
  static std::atomic<uint64_t> given;
  if (attention::cuda::allow_shared(kernel, kBytes, given) != cudaSuccess) return;
  p.parts = parts_of<kPacking, kRows>(p.tiles, int(block_count(p.k)));
  cudaLaunchAttribute two[2];
  const int blocks = p.parts > 1 ? p.tiles * p.parts : std::min(p.tiles, device().multiprocessors);
  const cudaLaunchConfig_t config = config_of(blocks, kThreads<kRows>, kBytes, stream, two, p.parts);
  cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace

template <Packing kPacking>
void launch_many(const void* in, const void* weight, float unit, void* out, int64_t rows, int64_t n, int64_t k,
                 Form form, cudaStream_t stream) {
  const PackedProduct p{.in = static_cast<const __nv_bfloat16*>(in),
                        .weight = static_cast<const uint8_t*>(weight),
                        .out = out,
                        .n = n,
                        .unit = unit * kStripUnit,
                        .rows = int(rows),
                        .k = int(k),
                        .strips = int(n / (fuses_gates(form) ? 8 : 16)),
                        .tiles = 0,
                        .parts = 1,
                        .form = form};
  rows <= 64 ? run<kPacking, 64>(p, stream) : run<kPacking, 128>(p, stream);
}

}  // namespace kvasir::model::cuda
