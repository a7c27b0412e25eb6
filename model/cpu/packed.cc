#include "model/cpu/packed.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>

#include "core/check.h"
#include "core/dtype.h"
#include "model/cpu/pack_stored.h"
#include "model/formats/weights.h"

namespace kvasir::model::cpu {
namespace {
constexpr size_t kHuge = size_t(2) << 20;
constexpr size_t kChunk = size_t(64) << 20;
constexpr int64_t kScaleBlocks = 4;  // of E4M3, where a row has several scales

void put_scale(uint8_t* plane, bool wide, int index, float value) {
  if (wide) {
    std::memcpy(plane + 4 * index, &value, 4);
  } else {
    uint16_t h = f32_to_f16(value);  // exact where it came from a float16
    std::memcpy(plane + 2 * index, &h, 2);
  }
}

// Row r's 32 integers of a block.
void pack_integers(uint8_t* block, bool nibbles, int r, const uint8_t* q) {
  if (nibbles) {
    for (int c = 0; c < 4; ++c)
      for (int j = 0; j < 4; ++j) block[64 * c + 4 * r + j] = uint8_t(q[4 * c + j] | (q[16 + 4 * c + j] << 4));
  } else {
    for (int c = 0; c < 8; ++c) std::memcpy(block + 64 * c + 4 * r, q + 4 * c, 4);
  }
}

// Row r of a group, from its file form.
void pack_blocks(const PackedMatrix& m, uint8_t* group, int r, WeightType type, const uint8_t* row) {
  PackingInfo info = packing_info(m.packing);
  bool wide = !info.f16_scales();
  uint8_t* scales = group + m.blocks * info.quant_bytes;
  Unpacked u;
  for (int64_t b = 0; b < m.blocks; ++b, group += info.quant_bytes, scales += info.scale_bytes) {
    unpack32(type, row, b, &u);
    pack_integers(group, info.quant_bytes == 256, r, u.q);
    for (int h = 0; h < (info.halves ? 2 : 1); ++h) {
      put_scale(scales, wide, 32 * h + r, u.d[h]);
      if (info.zero == 0) put_scale(scales, wide, 32 * h + 16 + r, u.m[h]);
    }
  }
}

// The same as integers of the row. `at` is room for the scales of a row: d, and what q = 8 stands for.
void pack_of_rows(const PackedMatrix& m, uint8_t* group, int r, WeightType type, const uint8_t* row,
                  std::vector<float>& at) {
  constexpr float kMost = 16375;  // rounding adds 8 halves and one
  PackingInfo info = packing_info(m.packing);
  const int parts = info.halves ? 2 : 1;
  const int half = 1 << (type_info(type)->bits - 1);  // fewer bits than 4 lie around 8, too
  uint8_t* scales = group + m.blocks * info.quant_bytes;
  at.resize(size_t(2 * m.blocks * parts));
  float most = 0;
  bool finite = true;
  Unpacked u;
  for (int64_t b = 0; b < m.blocks; ++b) {
    unpack32(type, row, b, &u);
    for (uint8_t& q : u.q) q = uint8_t(q + 8 - half);
    pack_integers(group + b * info.quant_bytes, true, r, u.q);
    for (int h = 0; h < parts; ++h) {
      const float d = u.d[h], middle = info.zero ? 0.0f : u.m[h] + float(half) * d;
      at[size_t(2 * (b * parts + h))] = d, at[size_t(2 * (b * parts + h)) + 1] = middle;
      finite &= std::isfinite(d) && std::isfinite(middle);
      most = std::max({most, std::fabs(middle - 8 * d), std::fabs(middle + 7 * d)});
    }
  }
  // What is no number makes every sum of its row none.
  const float scale = finite ? most / kMost : NAN;
  std::memcpy(group + m.group_bytes - kGroup * sizeof(float) + size_t(r) * sizeof(float), &scale, sizeof(float));
  if (!(scale > 0)) return;
  for (int64_t i = 0; i < m.blocks * parts; ++i) {
    const auto d = int16_t(std::lrint(at[size_t(2 * i)] / scale)),
               middle = int16_t(std::lrint(at[size_t(2 * i) + 1] / scale));
    if (info.zero) {
      std::memcpy(scales + 2 * (kGroup * i + r), &d, 2);
    } else {
      std::memcpy(scales + 4 * (kGroup * i + r), &d, 2);
      std::memcpy(scales + 4 * (kGroup * i + r) + 2, &middle, 2);
    }
  }
}

// The scale of a row's E4M3 from the block on.
float scale_at(const HostTensor& t, int64_t row, int64_t block) {
  const int64_t wide = t.scales_a_row();
  return wide == 0 ? 1.0f : t.row_scales[size_t(row * wide + (wide > 1 ? block / kScaleBlocks : 0))];
}

void pack_e4m3(const PackedMatrix& m, uint8_t* group, int r, const HostTensor& t, int64_t row) {
  const uint8_t* from = t.data + row * t.row_bytes();
  for (int64_t k = 0; k < m.cols; ++k) group[k / 2 * 32 + 2 * r + k % 2] = from[k];
  uint8_t* scales = group + m.blocks * packing_info(Packing::f8).quant_bytes;
  for (int64_t b = 0; b < m.blocks; b += m.span, scales += kGroup * sizeof(float)) {
    const uint8_t *first = from + 32 * b, *end = from + std::min(m.cols, 32 * (b + m.span));
    const bool numbers = std::none_of(first, end, [](uint8_t code) { return (code & 0x7f) == 0x7f; });
    const float by = numbers ? 256 * scale_at(t, row, b) : NAN;
    std::memcpy(scales + size_t(r) * sizeof by, &by, sizeof by);
  }
}

// A row of whatever type as floats.
void pack_floats(const PackedMatrix& m, uint8_t* group, int r, const HostTensor& t, int64_t row,
                 std::vector<float>& floats) {
  floats.resize(size_t(m.cols));
  dequantize(t.type, t.data + row * t.row_bytes(), m.cols, floats.data());
  if (t.type == WeightType::f8_e4m3)
    for (int64_t k = 0; k < m.cols; ++k) floats[size_t(k)] *= scale_at(t, row, k / 32);
  for (int64_t k = 0; k < m.cols; ++k)
    std::memcpy(group + size_t(16 * k + r) * sizeof(float), &floats[size_t(k)], sizeof(float));
}

void pack_dense(const PackedMatrix& m, uint8_t* group, int r, const uint8_t* row) {
  size_t each = m.packing == Packing::f32 ? 4 : 2;
  for (int64_t k = 0; k < m.cols; ++k) std::memcpy(group + size_t(16 * k + r) * each, row + size_t(k) * each, each);
}

}  // namespace

Packing packing_of(WeightType type, bool exact) {
  if (type == WeightType::f16) return Packing::f16;
  if (type == WeightType::bf16) return Packing::bf16;
  if (type == WeightType::f8_e4m3) return Packing::f8;
  if (const Stored stored = stored_of(type, exact); stored != Stored::none)
    return exact ? stored_info(stored).exact : stored_info(stored).form;
  switch (type) {
    case WeightType::q4_0: return exact ? Packing::n4_zero : Packing::i4_zero;
    case WeightType::q4_1: return exact ? Packing::n4_min : Packing::i4_min;
    case WeightType::q4_k: return Packing::i4_min;
    case WeightType::int4: return exact ? Packing::n4_wide : Packing::i4_min;
    case WeightType::q8_0: return Packing::n8_zero;
    default: return Packing::f32;
  }
}

Arena::~Arena() {
  for (Chunk& c : chunks_) ::munmap(c.data, c.size);
}

uint8_t* Arena::allocate(size_t bytes) {
  bytes = (bytes + 63) & ~size_t(63);
  if (chunks_.empty() || chunks_.back().size - chunks_.back().used < bytes) {
    // Untouched pages cost nothing, so the rest of a chunk that did not fit is no loss.
    size_t size = (std::max(bytes, kChunk) + 2 * kHuge - 1) & ~(kHuge - 1);
    void* p = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    ::madvise(p, size, MADV_HUGEPAGE);
    size_t skip = (kHuge - reinterpret_cast<uintptr_t>(p) % kHuge) % kHuge;
    chunks_.push_back({static_cast<uint8_t*>(p), size, skip});
  }
  Chunk& c = chunks_.back();
  uint8_t* out = c.data + c.used;
  c.used += bytes;
  used_ += bytes;
  return out;
}

namespace {

bool same_form(const HostTensor& a, const HostTensor& b, bool exact) {
  return packing_of(a.type, exact) == packing_of(b.type, exact) && stored_of(a.type, exact) == stored_of(b.type, exact);
}

// All of a matrix but its data.
PackedMatrix shape_of(std::span<const HostTensor> parts, bool exact) {
  KVASIR_CHECK(!parts.empty(), "a matrix of no parts");
  PackedMatrix m;
  m.cols = parts[0].cols;
  m.packing = packing_of(parts[0].type, exact), m.stored = stored_of(parts[0].type, exact);
  for (const HostTensor& t : parts) {
    KVASIR_CHECK(t.cols == m.cols, t.name, " is ", t.cols, " wide, not ", m.cols);
    if (!same_form(t, parts[0], exact)) m.packing = Packing::f32, m.stored = Stored::none;
    m.rows += t.rows;
  }
  m.blocks = (m.cols + 31) / 32;
  m.groups = (m.rows + kGroup - 1) / kGroup;
  if (m.narrow()) {
    m.group_bytes = stored_info(m.stored).group_bytes(m.blocks);
    return m;
  }
  const PackingInfo info = packing_info(m.packing);
  m.group_bytes = (m.blocks * (info.quant_bytes + info.scale_bytes) + 63) & ~int64_t(63);
  if (info.of_rows) m.group_bytes += kGroup * int64_t(sizeof(float));
  if (m.packing == Packing::f8) {
    const bool several =
        std::any_of(parts.begin(), parts.end(), [](const HostTensor& t) { return t.scales_a_row() > 1; });
    m.span = several ? kScaleBlocks : m.blocks;
    m.group_bytes += (m.blocks + m.span - 1) / m.span * kGroup * int64_t(sizeof(float));
  }
  return m;
}

}  // namespace

std::vector<std::span<const HostTensor>> runs_of(std::span<const HostTensor> parts, bool exact) {
  std::vector<std::span<const HostTensor>> runs;
  int64_t rows = 0;
  for (size_t i = 0, first = 0; i < parts.size(); ++i) {
    rows += parts[i].rows;
    if (i + 1 < parts.size() && same_form(parts[first], parts[i + 1], exact)) continue;
    if (i + 1 < parts.size() && (rows % kGroup != 0 || runs.size() + 1 == kMostRuns)) return {parts};
    runs.push_back(parts.subspan(first, i + 1 - first));
    first = i + 1;
  }
  return runs;
}

PackedMatrix measure(std::span<const HostTensor> parts, bool exact, int64_t* bytes) {
  const PackedMatrix m = shape_of(parts, exact);
  *bytes = bytes_of(m);
  return m;
}

PackedMatrix pack(std::span<const HostTensor> parts, Arena& arena, ThreadPool& pool, bool exact) {
  PackedMatrix m = shape_of(parts, exact);
  const PackingInfo info = packing_info(m.packing);
  uint8_t* data = arena.allocate(size_t(m.groups * m.group_bytes));
  m.data = data;
  pool.for_each(m.groups, 4, [&](int64_t g, int) {
    std::vector<float> dense;  // or a row's scales
    for (int r = 0; r < kGroup; ++r) {
      int64_t row = g * kGroup + r;
      if (row >= m.rows) break;
      const HostTensor* t = parts.data();
      while (row >= t->rows) row -= t->rows, ++t;
      const uint8_t* source = t->data + row * t->row_bytes();
      uint8_t* group = data + g * m.group_bytes;
      if (m.narrow()) {
        store_row(m, group, r, t->type, source);
      } else if (info.of_rows) {
        pack_of_rows(m, group, r, t->type, source, dense);
      } else if (info.quantized) {
        pack_blocks(m, group, r, t->type, source);
      } else if (m.packing == Packing::f8) {
        pack_e4m3(m, group, r, *t, row);
      } else if (!type_info(t->type)->quantized && packing_of(t->type, exact) == m.packing) {
        pack_dense(m, group, r, source);
      } else {
        pack_floats(m, group, r, *t, row, dense);
      }
    }
  });
  return m;
}

void unpack_row(const PackedMatrix& m, int64_t row, float scale, float* out) {
  if (m.narrow()) return unpack_stored_row(m, row, scale, out);
  PackingInfo info = packing_info(m.packing);
  const uint8_t *q = m.quants(row / kGroup), *s = m.scales(row / kGroup);
  int r = int(row % kGroup);
  auto half_at = [](const uint8_t* p, int64_t i) {
    uint16_t h;
    std::memcpy(&h, p + 2 * i, 2);
    return h;
  };
  auto float_at = [](const uint8_t* p, int64_t i) {
    float f;
    std::memcpy(&f, p + 4 * i, 4);
    return f;
  };
  bool wide = !info.f16_scales();
  for (int64_t k = 0; k < m.cols; ++k) {
    if (m.packing == Packing::f8) {
      float number;
      dequantize(WeightType::f8_e4m3, q + k / 2 * 32 + 2 * r + k % 2, 1, &number);
      out[k] = scale * (number * (m.span_scales(row / kGroup, k / 32)[r] * 0x1p-8f));
      continue;
    }
    if (!info.quantized) {
      int64_t at = 16 * k + r;
      out[k] = scale * (m.packing == Packing::f32   ? float_at(q, at)
                        : m.packing == Packing::f16 ? f16_to_f32(half_at(q, at))
                                                    : bf16_to_f32(half_at(q, at)));
      continue;
    }
    int64_t b = k / 32;
    int j = int(k % 32), half = info.halves ? j / 16 : 0;
    const uint8_t *quants = q + b * info.quant_bytes, *scales = s + b * info.scale_bytes;
    int value = info.quant_bytes == 512 ? quants[64 * (j / 4) + 4 * r + j % 4]
                                        : (quants[64 * (j % 16 / 4) + 4 * r + j % 4] >> (j < 16 ? 0 : 4)) & 15;
    if (info.of_rows) {
      const int64_t at = kGroup * half + r;
      const int16_t d = int16_t(half_at(scales, info.zero ? at : 2 * at));
      const int16_t middle = info.zero ? int16_t(0) : int16_t(half_at(scales, 2 * at + 1));
      out[k] = scale * (m.row_scales(row / kGroup)[r] * float(d * (value - 8) + middle));
      continue;
    }
    auto scale_at = [&](int i) { return wide ? float_at(scales, i) : f16_to_f32(half_at(scales, i)); };
    float d = scale_at(32 * half + r);
    float min = info.zero != 0 ? float(-info.zero) * d : scale_at(32 * half + 16 + r);
    out[k] = scale * std::fma(d, float(value), min);
  }
}

}  // namespace kvasir::model::cpu
