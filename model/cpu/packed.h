// Weights as the CPU kernels want them: groups of 16 rows, interleaved so that one SIMD lane is one
// output row. A lane's sum is exact or takes its row's blocks in order, so no result depends on batch, threads or
// lanes.
//
// A quantized group is a plane of integers, then a plane of scales. Per block of 32 inputs:
//   4 bits: 4 chunks of 64 bytes; chunk c, byte 4*r + j: row r, inputs 4c+j (low nibble), 16+4c+j (high)
//   8 bits: 8 chunks of 64 bytes; chunk c, byte 4*r + j: row r, input 4c+j
//   scales: 16 d, then 16 m (none for zero-point types); once, or for each half of 16 inputs
// A dense group is, for each input, 16 rows.
//
// Weights of 4 bits become integers of their output row: each has one float s, and a weight is s * W,
// W = D * (q - 8) + M with integers D and M of its block (or half), |W| < 2^14. A product of rows is then one exact
// sum of integers, which has the same bits in whatever order and parts a kernel finds it, and is scaled once. D and M
// are the file's scales rounded to 1/16,383 of the row's greatest weight: on SmolLM2 that costs nothing that can be
// told (perplexity 18.36 with 14, 15 and 16 bits; 13 cost a quarter more in mean |log-probability|).
//   scales: for each row the pair D, M of 16 bits (D alone for zero-point types, whose M is 0); once, or for each half
//   after them: 16 s
// Where results are to be float32's own (`exact`) the file's scales stay as they are.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/status.h"
#include "core/thread_pool.h"

namespace kvasir::model {
enum class WeightType : uint32_t;  // formats/weight_type.h: kernels need not know its members
struct HostTensor;
}  // namespace kvasir::model

namespace kvasir::model::cpu {

constexpr int kGroup = 16;

enum class Packing : uint8_t {
  i4_zero,    // Q4_0 as integers of its rows
  i4_min,     // Q4_1, Q4_K, likewise
  i4_halves,  // Q2_K, Q3_K, likewise
  n4_zero,    // Q4_0, exact: m = -8 d, f16 scales
  n4_min,     // Q4_1, exact: f16 scales
  n4_wide,    // Q4_K, exact: f32 scales
  n4_halves,  // Q2_K, Q3_K, exact: f32 scales for each 16
  n8_zero,    // Q8_0: m = -128 d, f16 scales
  n8_wide,    // Q5_0, Q5_1, Q5_K
  n8_halves,  // Q6_K
  f32,
  f16,
  bf16,
};
struct PackingInfo {
  int quant_bytes;  // of 16 rows x 32 inputs
  int scale_bytes;  // likewise
  bool quantized, halves;
  int zero;      // the integer that stands for 0, where there are no minima
  bool of_rows;  // weights are integers of their rows
};
constexpr PackingInfo packing_info(Packing p) {
  switch (p) {
    case Packing::i4_zero: return {256, 32, true, false, 8, true};
    case Packing::i4_min: return {256, 64, true, false, 0, true};
    case Packing::i4_halves: return {256, 128, true, true, 0, true};
    case Packing::n4_zero: return {256, 32, true, false, 8, false};
    case Packing::n4_min: return {256, 64, true, false, 0, false};
    case Packing::n4_wide: return {256, 128, true, false, 0, false};
    case Packing::n4_halves: return {256, 256, true, true, 0, false};
    case Packing::n8_zero: return {512, 32, true, false, 128, false};
    case Packing::n8_wide: return {512, 128, true, false, 0, false};
    case Packing::n8_halves: return {512, 256, true, true, 0, false};
    case Packing::f32: return {2048, 0, false, false, 0, false};
    case Packing::f16:
    case Packing::bf16: return {1024, 0, false, false, 0, false};
  }
  return {};
}
Packing packing_of(WeightType type, bool exact);

struct PackedMatrix {
  Packing packing = Packing::f32;
  int64_t rows = 0, cols = 0;
  int64_t blocks = 0;  // of 32 inputs; the last is filled up with zeros
  int64_t groups = 0;
  int64_t group_bytes = 0;
  const uint8_t* data = nullptr;

  const uint8_t* quants(int64_t group) const { return data + group * group_bytes; }
  const uint8_t* scales(int64_t group) const { return quants(group) + blocks * packing_info(packing).quant_bytes; }
  const float* row_scales(int64_t group) const {  // of packings of_rows: 16
    return reinterpret_cast<const float*>(quants(group) + group_bytes) - kGroup;
  }
  int64_t padded_cols() const { return blocks * 32; }
  int valid(int64_t group) const { return rows - kGroup * group < kGroup ? int(rows - kGroup * group) : kGroup; }
};

// Memory on huge pages, where the system gives them; never given back before the end.
class Arena {
 public:
  Arena() = default;
  ~Arena();
  Arena(const Arena&) = delete;
  uint8_t* allocate(size_t bytes);  // 64-byte aligned, zeroed
  size_t used() const { return used_; }

 private:
  struct Chunk {
    uint8_t* data;
    size_t size, used;
  };
  std::vector<Chunk> chunks_;
  size_t used_ = 0;
};

// The parts stacked by rows. Rows of different types become one packing that holds both.
PackedMatrix pack(std::span<const HostTensor> parts, Arena& arena, ThreadPool& pool, bool exact = false);

// One row as floats: the embedding of a token.
void unpack_row(const PackedMatrix& m, int64_t row, float scale, float* out);

}  // namespace kvasir::model::cpu
