#include "model/cuda/weight.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/dtype.h"
#include "model/cuda/fp8.h"
#include "model/cuda/packed.h"
#include "model/cuda/seeded.h"

namespace kvasir::model::cuda {
namespace {

using attention::cuda::check;

Status upload_half(const HostTensor& t, void* to, Upload& upload) {
  if (t.seeded) {
    launch_seeded(t, to, upload.stream());
    return check(cudaGetLastError(), "seeded weights");
  }
  if (t.type == WeightType::bf16) return upload.copy(to, t.data, t.bytes);
  const int64_t scales = t.scales_a_row();
  return upload.write(to, t.rows * t.cols * 2, t.cols * 2, [&](int64_t at, int64_t, std::byte* made) {
    thread_local std::vector<float> row;
    row.resize(size_t(t.cols));
    const int64_t r = at / (t.cols * 2);
    dequantize(t.type, t.data + r * t.row_bytes(), t.cols, row.data());
    auto* out = reinterpret_cast<uint16_t*>(made);
    for (int64_t i = 0; i < t.cols; ++i) {
      const float by = scales == 0 ? 1.0f : t.row_scales[size_t(r * scales + (scales > 1 ? i / 128 : 0))];
      out[i] = f32_to_bf16(row[size_t(i)] * by);
    }
  });
}

// The power of two in units of which the largest scale is a float16 far from overflow.
float unit_of(std::span<const HostTensor> parts, ThreadPool& pool) {
  float most = 0;
  for (const HostTensor& t : parts) {
    if (t.seeded) {
      most = std::max(most, seeded_unit(t) * 0x1p14f);
      continue;
    }
    std::vector<float> found(size_t(pool.threads()), 0.0f);
    pool.for_each(t.rows, 16, [&](int64_t r, int worker) {
      Unpacked u;
      float& m = found[size_t(worker)];
      for (int64_t i = 0; i < t.cols / 32; ++i) {
        unpack32(t.type, t.data + r * t.row_bytes(), i, &u);
        for (int h = 0; h < 2; ++h) m = std::max({m, std::fabs(u.d[h]), std::fabs(u.m[h])});
      }
    });
    most = std::max(most, *std::max_element(found.begin(), found.end()));
  }
  return most > 0 && std::isfinite(most) ? std::exp2(std::ceil(std::log2(most)) - 14) : 1.0f;
}

Status upload_blocks(const HostTensor& t, const Weight& w, int64_t first, Upload& upload) {
  if (t.seeded) {
    launch_seeded_blocks(t, w.packing, w.unit, w.half, w.data.get(), first, upload.stream());
    return check(cudaGetLastError(), "seeded weights");
  }
  const int64_t steps = block_count(w.cols), strips = t.rows / kBlockRows, size = block_bytes(w.packing);
  // q8 has no m: its middle is 128.
  const int shift = w.packing == Packing::q8 ? 128 - type_info(t.type)->zero : 0;
  const int64_t scales = t.scales_a_row();
  // Two strips lie in turn, block by block, but those of a gate, whose neighbours come from another tensor.
  const int64_t together = w.half > 0 ? 1 : 2, unit = together * steps * size;
  auto make = [&](int64_t at, int64_t bytes, std::byte* made) {
    auto* host = reinterpret_cast<uint8_t*>(made);
    std::memset(host, 0, size_t(bytes));
    const int64_t first_row = at / unit * together * kBlockRows;
    Unpacked u;
    for (int64_t row = 0; row < together * kBlockRows; ++row)
      for (int64_t i = 0; i < t.cols / 32; ++i) {
        const int64_t from = first_row + row;
        uint16_t d[2], m[2];
        if (w.packing == Packing::e4m3) {
          std::memcpy(u.q, t.data + from * t.row_bytes() + i * 32, sizeof(u.q));
          const auto by = std::bit_cast<uint32_t>(t.row_scales[size_t(from * scales + (scales > 1 ? i / 4 : 0))]);
          d[0] = uint16_t(by), m[0] = uint16_t(by >> 16);
        } else {
          unpack32(t.type, t.data + from * t.row_bytes(), i, &u);
          for (uint8_t& q : u.q) q = uint8_t(q + shift);
          for (int h = 0; h < 2; ++h) d[h] = f32_to_f16(u.d[h] / w.unit), m[h] = f32_to_f16(u.m[h] / w.unit);
        }
        const int64_t block = w.half > 0 ? i / 4 : block_at(row / kBlockRows, i / 4, steps, 0);
        pack32(w.packing, host + block * size, int(row % kBlockRows), int(i % 4), u.q, d, m);
      }
  };
  std::byte* to = w.data.bytes();
  if (w.half > 0)  // every other block
    return upload.write_spaced(to + (first > 0 ? size : 0), strips * steps * size, unit, size, make);
  return upload.write(to + first / kBlockRows * steps * size, strips * steps * size, unit, make);
}

Status load_bytes(std::span<const HostTensor> parts, Upload& upload, Weight* w) {
  KVASIR_TRY(w->data.allocate(size_t(w->rows * w->cols)));
  KVASIR_TRY(w->scales.allocate(size_t(w->rows) * sizeof(float)));
  int64_t first = 0;
  for (const HostTensor& t : parts) {
    void *elements = w->data.bytes() + first * t.cols, *scales = w->scales.as<float>() + first;
    first += t.rows;
    if (t.scales_a_row() == 1) {  // E4M3 as the checkpoint has it
      KVASIR_TRY(upload.copy(elements, t.data, t.bytes));
      KVASIR_TRY(upload.copy(scales, t.row_scales.data(), std::ssize(t.row_scales) * int64_t(sizeof(float))));
      continue;
    }
    DeviceMemory half;
    KVASIR_TRY(half.allocate(size_t(t.rows * t.cols) * 2));
    KVASIR_TRY(upload_half(t, half.get(), upload));
    launch_to_bytes(half.get(), {elements, static_cast<float*>(scales)}, t.rows, t.cols, upload.stream());
    KVASIR_TRY(check(cudaStreamSynchronize(upload.stream()), "quantizing weights"));
  }
  return {};
}

}  // namespace

bool multiplies_bytes() {
  int device = 0, major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 9;
}

Result<Quantize> parse_quantize(const std::string& word) {
  if (word.empty() || word == "auto") return Quantize::as_stored;
  if (word == "bf16") return Quantize::bf16;
  if (word != "fp8")
    return invalid_argument(cat("quantize is ", word, "; it is auto, bf16 or fp8")).with_field("quantize");
  if (!multiplies_bytes())
    return invalid_argument("quantize is fp8, which needs compute capability 9.0; auto and bf16 run on this GPU")
        .with_field("quantize");
  return Quantize::fp8;
}

Status load_weight(std::span<const HostTensor> parts, Quantize quantize, Upload& upload, Weight* w) {
  const PackingChoice chosen = choose_packing(parts, quantize, packs());
  w->packing = chosen.packing, w->rows = chosen.rows, w->cols = chosen.cols, w->bytes = chosen.bytes;
  if (w->packing == Packing::fp8) return load_bytes(parts, upload, w);
  KVASIR_TRY(upload.allocate(&w->data, w->bytes));
  if (!is_blocks(w->packing)) {
    std::byte* to = w->data.bytes();
    for (const HostTensor& t : parts) {
      const bool as_stored = w->packing == Packing::mxfp4;
      KVASIR_TRY(as_stored ? upload.copy(to, t.data, t.bytes) : upload_half(t, to, upload));
      to += as_stored ? t.bytes : t.rows * t.cols * 2;
    }
    return {};
  }
  if (w->packing != Packing::e4m3) w->unit = unit_of(parts, upload.pool());
  if (parts.size() == 2 && parts[0].rows == parts[1].rows && parts[0].name.find("ffn_gate") != std::string::npos)
    w->half = parts[0].rows / kBlockRows;
  // What a row's last block has past its end.
  KVASIR_TRY(check(cudaMemsetAsync(w->data.get(), 0, size_t(w->bytes), upload.stream()), "weights"));
  int64_t first = 0;
  for (const HostTensor& t : parts) {
    KVASIR_TRY(upload_blocks(t, *w, first, upload));
    first += t.rows;
  }
  return {};
}

Result<const void*> as_half(const Weight& w, DeviceMemory* room, cudaStream_t stream) {
  if (w.packing == Packing::bf16) return static_cast<const void*>(w.data.get());
  if (!room->get()) KVASIR_TRY(room->allocate(size_t(w.rows * w.cols) * 2));
  if (w.packing == Packing::fp8)
    launch_from_bytes({w.data.get(), w.scales.as<float>()}, room->get(), w.rows, w.cols, stream);
  else
    launch_unpack(w.packing, w.data.get(), w.unit, w.half, room->get(), 0, w.rows, w.cols, stream);
  KVASIR_TRY(check(cudaGetLastError(), "unpacking a weight"));
  return static_cast<const void*>(room->get());
}

}  // namespace kvasir::model::cuda
