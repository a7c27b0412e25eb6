#include "model/cuda/packing_choice.h"

#include <algorithm>
#include <numeric>

namespace kvasir::model::cuda {
namespace {

Packing packing_of(const HostTensor& t) {
  switch (t.type) {
    case WeightType::int4: return t.group > 0 && t.group % kBlockElements == 0 ? Packing::q4_128 : Packing::q4;
    case WeightType::q4_0:
    case WeightType::q4_1:
    case WeightType::q4_k: return Packing::q4;
    case WeightType::iq4_nl:
    case WeightType::iq4_xs:
    case WeightType::mxfp4:
    case WeightType::q8_0: return Packing::q8;
    case WeightType::nvfp4:
    case WeightType::q2_k:
    case WeightType::q3_k:
    case WeightType::q5_0:
    case WeightType::q5_1:
    case WeightType::q5_k:
    case WeightType::q6_k: return Packing::q6;
    case WeightType::f8_e4m3: return Packing::e4m3;
    default: return Packing::bf16;
  }
}

// One packing for all parts: q6 holds every type that those of four bits do, and six bits with a scale for each 16.
Packing common_packing(std::span<const HostTensor> parts, int64_t rows, int64_t cols) {
  Packing all = packing_of(parts[0]);
  for (const HostTensor& t : parts) {
    const Packing p = packing_of(t);
    if (p == all) continue;
    const bool small = has_offset(p) && has_offset(all);
    all = !small ? Packing::bf16 : is_nibbles(p) && is_nibbles(all) ? Packing::q4 : Packing::q6;
  }
  const bool fits = rows % 16 == 0 && cols % 32 == 0 &&
                    std::all_of(parts.begin(), parts.end(), [](auto& t) { return t.rows % (2 * kBlockRows) == 0; });
  return is_blocks(all) && fits ? all : Packing::bf16;
}

bool becomes_bytes(std::span<const HostTensor> parts, int64_t rows, int64_t cols) {
  return rows % 16 == 0 && cols % 16 == 0 && std::all_of(parts.begin(), parts.end(), [](const HostTensor& t) {
           return t.name.starts_with("blk.") && t.name.find("ffn_gate_inp") == std::string::npos;
         });
}

}  // namespace

// A tensor of its own (blk.3.ffn_up.17.weight) or one of all (blk.3.ffn_up_exps.weight).
bool of_expert(const HostTensor& t) {
  return t.name.find("_exps") != std::string::npos || std::count(t.name.begin(), t.name.end(), '.') > 3;
}

PackingChoice choose_packing(std::span<const HostTensor> parts, Quantize quantize, bool packs) {
  PackingChoice out{.cols = parts[0].cols};
  for (const HostTensor& t : parts) out.rows += t.rows;
  const bool stored = quantize == Quantize::as_stored, expert = of_expert(parts[0]);
  auto all = [&](auto&& is) { return std::all_of(parts.begin(), parts.end(), is); };
  const bool bytes = stored && all([](const HostTensor& t) { return t.scales_a_row() == 1; });
  if (((quantize == Quantize::fp8 && !expert) || bytes) && becomes_bytes(parts, out.rows, out.cols)) {
    out.packing = Packing::fp8;
    out.bytes = out.rows * (out.cols + int64_t(sizeof(float)));
  } else if (stored && expert && all([](const HostTensor& t) { return t.type == WeightType::mxfp4; })) {
    out.packing = Packing::mxfp4;
    out.bytes = std::accumulate(parts.begin(), parts.end(), int64_t(0), [](int64_t n, auto& t) { return n + t.bytes; });
  } else {
    const bool plain = quantize == Quantize::bf16 || !packs;
    out.packing = plain ? Packing::bf16 : common_packing(parts, out.rows, out.cols);
    out.bytes = is_blocks(out.packing) ? out.rows / kBlockRows * block_count(out.cols) * block_bytes(out.packing)
                                       : out.rows * out.cols * 2;
  }
  return out;
}

}  // namespace kvasir::model::cuda
