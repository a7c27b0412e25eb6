// Weights as the CPU kernels want them: groups of 16 rows, interleaved so that one SIMD lane is one
// output row. A lane's sum is exact or takes its row's blocks in order, so no result depends on batch, threads or
// lanes.
//
// A quantized group is a plane of integers, then a plane of scales. Per block of 32 inputs:
//   4 bits: 4 chunks of 64 bytes; chunk c, byte 4*r + j: row r, inputs 4c+j (low nibble), 16+4c+j (high)
//   8 bits: 8 chunks of 64 bytes; chunk c, byte 4*r + j: row r, input 4c+j
//   scales: 16 d, then 16 m (none for zero-point types); once, or for each half of 16 inputs
// A dense group is, for each input, 16 rows. E4M3 stands two inputs together, byte 2*r + j: row r, input 2k+j, and is
// followed by 16 floats for each `span` blocks: 256 times the rows' scales, not a number where one of the weights is
// none.
//
// Weights of 4 bits become integers of their output row: each has one float s, and a weight is s * W,
// W = D * (q - 8) + M with integers D and M of its block (or half), |W| < 2^14. A product of rows is then one exact
// sum of integers, which has the same bits in whatever order and parts a kernel finds it, and is scaled once. D and M
// are the file's scales rounded to 1/16,383 of the row's greatest weight: on SmolLM2 that costs nothing that can be
// told (perplexity 18.36 with 14, 15 and 16 bits; 13 cost a quarter more in mean |log-probability|).
//   scales: for each row the pair D, M of 16 bits (D alone for zero-point types, whose M is 0); once, or for each half
//   after them: 16 s
// Where results are to be float32's own (`exact`) the file's scales stay as they are.
//
// Types whose files are smaller than that lie as stored.h says, and become this while they are multiplied.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/status.h"
#include "core/thread_pool.h"
#include "model/cpu/stored.h"

namespace kvasir::model {
enum class WeightType : uint32_t;  // formats/weight_type.h: kernels need not know its members
struct HostTensor;
}  // namespace kvasir::model

namespace kvasir::model::cpu {

Packing packing_of(WeightType type, bool exact);
// How a type lies where that is narrower than its packing.
Stored stored_of(WeightType type, bool exact);

struct PackedMatrix {
  Packing packing = Packing::f32;  // what kernels multiply
  Stored stored = Stored::none;    // how rows lie that kernels expand to that
  int64_t rows = 0, cols = 0;
  int64_t blocks = 0;  // of 32 inputs; the last is filled up with zeros
  int64_t groups = 0;
  int64_t group_bytes = 0;
  int64_t span = 0;  // of E4M3: blocks that have the same scales
  const uint8_t* data = nullptr;

  bool narrow() const { return stored != Stored::none; }
  const uint8_t* quants(int64_t group) const { return data + group * group_bytes; }
  const uint8_t* scales(int64_t group) const { return quants(group) + blocks * packing_info(packing).quant_bytes; }
  const float* span_scales(int64_t group, int64_t block) const {  // of E4M3: 16
    return reinterpret_cast<const float*>(scales(group)) + block / span * kGroup;
  }
  const float* row_scales(int64_t group) const {  // of packings of_rows, and wherever rows are narrow: 16
    return reinterpret_cast<const float*>(quants(group + 1)) - kGroup;
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

constexpr size_t kMostRuns = 3;  // q, k and v
// The parts of a weight that are one matrix of pack(): those of one form. Rows of another form follow where those
// before fill whole groups; else all are one.
std::vector<std::span<const HostTensor>> runs_of(std::span<const HostTensor> parts, bool exact);

// The parts stacked by rows; those of different forms become float32.
PackedMatrix pack(std::span<const HostTensor> parts, Arena& arena, ThreadPool& pool, bool exact = false);

// Its shape without data, and the bytes that pack() would take for it.
PackedMatrix measure(std::span<const HostTensor> parts, bool exact, int64_t* bytes);

// What a matrix takes.
inline int64_t bytes_of(const PackedMatrix& m) { return m.groups * m.group_bytes; }

// One row as floats: the embedding of a token.
void unpack_row(const PackedMatrix& m, int64_t row, float scale, float* out);

}  // namespace kvasir::model::cpu
