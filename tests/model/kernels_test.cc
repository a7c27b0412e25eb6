// Every instruction set gives the bits of the plain kernels, and those the product of the file's weights.
#include "model/cpu/kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "core/dtype.h"
#include "model/formats/weights.h"

namespace kvasir::model::cpu {
namespace {

constexpr WeightType kTypes[] = {WeightType::f32,   WeightType::f16,    WeightType::bf16,   WeightType::q4_0,
                                 WeightType::q4_1,  WeightType::q5_0,   WeightType::q5_1,   WeightType::q8_0,
                                 WeightType::q2_k,  WeightType::q3_k,   WeightType::q4_k,   WeightType::q5_k,
                                 WeightType::q6_k,  WeightType::iq4_nl, WeightType::iq4_xs, WeightType::mxfp4,
                                 WeightType::nvfp4, WeightType::int4,   WeightType::f8_e4m3};

// Bytes of a tensor whose scales are ordinary numbers.
std::vector<uint8_t> random_tensor(WeightType type, int64_t elements, std::mt19937& random) {
  const TypeInfo& info = *type_info(type);
  std::vector<uint8_t> bytes(size_t(elements / info.block * info.bytes));
  for (uint8_t& b : bytes) b = uint8_t(random());
  std::uniform_real_distribution<float> scale(0.001f, 0.1f);
  auto put16 = [&](size_t at, uint16_t v) { std::memcpy(bytes.data() + at, &v, 2); };
  for (size_t at = 0; at < bytes.size(); at += size_t(info.bytes)) {
    if (type == WeightType::f32) {
      float f = scale(random);
      std::memcpy(bytes.data() + at, &f, 4);
    } else if (type == WeightType::int4) {
      const float d = scale(random), m = -d * float(random() % 16);
      std::memcpy(bytes.data() + at, &d, 4);
      std::memcpy(bytes.data() + at + 4, &m, 4);
    } else if (type == WeightType::mxfp4) {
      bytes[at] = uint8_t(118 + random() % 6);
    } else if (type == WeightType::nvfp4) {
      const float whole = 0.01f;
      std::memcpy(bytes.data() + at, &whole, 4);
      for (int h = 0; h < 2; ++h) bytes[at + 4 + size_t(h)] = uint8_t(random() % 0x7f);
    } else if (type == WeightType::f8_e4m3) {
      if ((bytes[at] & 0x7f) == 0x7f) bytes[at] = 0;
    } else if (type == WeightType::bf16) {
      put16(at, f32_to_bf16(scale(random)));
    } else {
      size_t first = type == WeightType::q2_k   ? 80
                     : type == WeightType::q3_k ? 108
                     : type == WeightType::q6_k ? 208
                                                : 0;
      put16(at + first, f32_to_f16(scale(random)));
      bool two = type == WeightType::q4_1 || type == WeightType::q5_1 || type == WeightType::q2_k ||
                 type == WeightType::q4_k || type == WeightType::q5_k;
      if (two) put16(at + first + 2, f32_to_f16(scale(random)));
    }
  }
  return bytes;
}

struct Product {
  PackedMatrix m;  // as products of integers want it, and with the file's scales
  PackedMatrix exact;
  std::vector<float> x;
  int64_t tokens;
  std::vector<float> integer(const Kernels& k) const {
    QuantRoom room;
    QuantRows in = room.rows(tokens, m.padded_cols());
    for (int64_t t = 0; t < tokens; ++t) k.quantize(x.data() + t * in.cols, m.packing, in, t);
    std::vector<float> y(size_t(tokens * m.rows), 1.0f);
    k.integer(m, 0, m.groups, in, 0, tokens, y.data(), m.rows, true);
    return y;
  }
  std::vector<float> floating(const Kernels& k) const {
    std::vector<float> y(size_t(tokens * m.rows));
    k.floating(exact, 0, m.groups, x.data(), m.padded_cols(), tokens, y.data(), m.rows, false);
    return y;
  }
};

Product product_of(const HostTensor& t, Arena& arena, ThreadPool& pool, std::vector<float> x, int64_t tokens) {
  return {pack({&t, 1}, arena, pool), pack({&t, 1}, arena, pool, true), std::move(x), tokens};
}

TEST(Kernels, EveryInstructionSetGivesTheSameBits) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  ThreadPool pool(1);
  for (WeightType type : kTypes) {
    SCOPED_TRACE(std::string(type_info(type)->name));
    Arena arena;
    int64_t rows = 37, cols = 512;
    auto bytes = random_tensor(type, rows * cols, random);
    HostTensor t{"w", type, rows, cols, bytes.data(), int64_t(bytes.size())};
    Product p = product_of(t, arena, pool, {}, 31);
    p.x.resize(size_t(31 * cols));
    for (float& f : p.x) f = normal(random);
    std::vector<float> base_f = p.floating(kKernelsPortable), base_i;
    if (packing_info(p.m.packing).quantized) base_i = p.integer(kKernelsPortable);
    for (const Kernels* k : runnable_kernels()) {
      EXPECT_EQ(p.floating(*k), base_f) << k->name;
      if (!base_i.empty()) {
        EXPECT_EQ(p.integer(*k), base_i) << k->name;
      }
    }
    std::vector<float> w(static_cast<size_t>(cols)), row(static_cast<size_t>(cols)), rounded(static_cast<size_t>(cols));
    for (int64_t r = 0; r < rows; ++r) {
      dequantize(type, bytes.data() + r * t.row_bytes(), cols, w.data());
      unpack_row(p.exact, r, 1.0f, row.data());
      ASSERT_EQ(w, row);
      unpack_row(p.m, r, 1.0f, rounded.data());
      float most = 0;
      for (float f : w) most = std::max(most, std::fabs(f));
      for (size_t c = 0; c < w.size(); ++c)
        ASSERT_NEAR(rounded[c], w[c], most * (p.m.packing == p.exact.packing ? 0 : 6e-4));
      for (int64_t i = 0; i < 31; i += 10) {
        double sum = 0, size = 0;
        for (int64_t c = 0; c < cols; ++c) {
          double v = double(w[size_t(c)]) * p.x[size_t(i * cols + c)];
          sum += v, size += std::fabs(v);
        }
        EXPECT_NEAR(base_f[size_t(i * rows + r)], sum, 1e-5 * size);
        if (!base_i.empty()) {
          EXPECT_NEAR(base_i[size_t(i * rows + r)] - 1.0, sum, 3e-4 * size);
        }
      }
    }
  }
}

// More inputs and rows than a kernel takes at a time, row counts that no tile divides, and a group of outputs alone or
// beside others.
TEST(Kernels, LongRowsInManyNumbersAreTheSameBits) {
  std::mt19937 random(4);
  std::normal_distribution<float> normal;
  ThreadPool pool(1);
  for (WeightType type : kTypes) {
    if (!type_info(type)->quantized) continue;
    for (int64_t outputs : {10, 100}) {
      Arena arena;
      int64_t cols = 2560;
      auto bytes = random_tensor(type, outputs * cols, random);
      HostTensor t{"w", type, outputs, cols, bytes.data(), int64_t(bytes.size())};
      Product p = product_of(t, arena, pool, {}, 0);
      for (int64_t tokens : {1, 2, 3, 4, 5, 8, 9, 16, 24, 141}) {
        p.tokens = tokens;
        p.x.resize(size_t(tokens * cols));
        for (float& f : p.x) f = normal(random);
        // One input far above the others makes those small integers, of which more fit a sum.
        for (int64_t i = 0; i < tokens; ++i)
          if (i / 4 % 3 != 0) p.x[size_t(i * cols + 7)] = i / 4 % 3 == 1 ? 10.0f : 60.0f;
        std::vector<float> base = p.integer(kKernelsPortable);
        for (const Kernels* k : runnable_kernels())
          EXPECT_EQ(p.integer(*k), base) << type_info(type)->name << " " << k->name << " " << outputs << " " << tokens;
      }
    }
  }
}

// Greatest weights and inputs over rows longer than 32 bits hold, an odd number of blocks, rows of zeros, one block far
// above the others, scales that are no number: the same bits everywhere, near the product, and only their rows NaN.
TEST(Kernels, ExtremeWeightsOfFourBits) {
  constexpr int64_t kRows = 20, kCols = 32 * 145;
  std::mt19937 random(5);
  ThreadPool pool(1);
  for (WeightType type : {WeightType::q4_0, WeightType::q4_1}) {
    SCOPED_TRACE(std::string(type_info(type)->name));
    Arena arena;
    const int64_t size = type_info(type)->bytes;
    auto bytes = random_tensor(type, kRows * kCols, random);
    HostTensor t{"w", type, kRows, kCols, bytes.data(), int64_t(bytes.size())};
    auto block = [&](int64_t row, int64_t b) { return bytes.data() + row * t.row_bytes() + b * size; };
    auto scales = [&](int64_t row, int64_t b, float d, float m) {
      uint16_t both[2] = {f32_to_f16(d), f32_to_f16(m)};
      std::memcpy(block(row, b), both, type == WeightType::q4_1 ? 4 : 2);
    };
    for (int64_t b = 0; b < kCols / 32; ++b) {
      std::memset(block(0, b) + size - 16, 0, 16);
      scales(0, b, 2.0f, -15.0f), scales(1, b, 0, 0), scales(2, b, b == 7 ? 60000.0f : 1e-3f, 0);
    }
    scales(3, 3, NAN, 0), scales(4, 4, INFINITY, 0), scales(5, 5, -INFINITY, 0);
    for (int64_t tokens : {1, 5, 33}) {
      Product p = product_of(t, arena, pool, std::vector<float>(size_t(tokens * kCols), 1.0f), tokens);
      for (int64_t i = kCols; i < tokens * kCols; ++i) p.x[size_t(i)] = i / kCols % 2 ? -1.0f : float(random() % 3);
      const std::vector<float> base = p.integer(kKernelsPortable);
      for (const Kernels* k : runnable_kernels()) {
        const std::vector<float> y = p.integer(*k);
        EXPECT_EQ(std::memcmp(y.data(), base.data(), y.size() * sizeof(float)), 0) << k->name << " " << tokens;
      }
      std::vector<float> w(static_cast<size_t>(kCols));
      for (int64_t row = 0; row < kRows; ++row) {
        if (row >= 3 && row < 6) {
          for (int64_t i = 0; i < tokens; ++i) EXPECT_TRUE(std::isnan(base[size_t(i * kRows + row)])) << row;
          continue;
        }
        dequantize(type, block(row, 0), kCols, w.data());
        for (int64_t i = 0; i < tokens; ++i) {
          double sum = 1, most = 0;
          for (int64_t c = 0; c < kCols; ++c) {
            sum += double(w[size_t(c)]) * p.x[size_t(i * kCols + c)];
            most = std::max(most, std::fabs(double(w[size_t(c)])));
          }
          EXPECT_NEAR(base[size_t(i * kRows + row)], sum, 3e-4 * most * kCols) << row << " " << i;
        }
      }
    }
  }
}

double bytes_in_file(const HostTensor& t) {  // NVFP4's blocks repeat their tensor's scale
  return double(t.bytes) * (t.type == WeightType::nvfp4 ? 0.75 : 1.0);
}

// Rows of different types are one weight, each as narrow as in the file and multiplied as it is alone; where they do
// not end with a group, all of them are float32.
TEST(Packed, PartsOfSeveralTypesKeepTheirOwnForm) {
  constexpr int64_t kCols = 512;
  std::mt19937 random(7);
  ThreadPool pool(1);
  using T = WeightType;
  struct Case {
    std::vector<T> types;
    size_t runs;
    int64_t rows = 48;  // of each
  };
  for (const auto& [types, runs, rows] : std::vector<Case>{{{T::q4_k, T::q4_k, T::q6_k}, 2},
                                                           {{T::q8_0, T::q8_0, T::q4_1}, 2},
                                                           {{T::iq4_xs, T::q8_0, T::q5_k}, 3},
                                                           {{T::q8_0, T::bf16, T::q8_0}, 3},
                                                           {{T::f8_e4m3, T::bf16}, 2},
                                                           {{T::nvfp4, T::f16}, 2},
                                                           {{T::q8_0, T::q6_k, T::q8_0, T::q6_k}, 1},
                                                           {{T::q8_0, T::iq4_nl}, 1, 40}}) {
    SCOPED_TRACE(std::string(type_info(types[0])->name) + " first of " + std::to_string(types.size()));
    std::vector<std::vector<uint8_t>> bytes;
    std::vector<HostTensor> parts;
    double in_file = 0;
    for (T type : types) {
      bytes.push_back(random_tensor(type, rows * kCols, random));
      parts.push_back({"w", type, rows, kCols, bytes.back().data(), int64_t(bytes.back().size())});
      in_file += bytes_in_file(parts.back());
    }
    const auto made = runs_of(parts, false);
    ASSERT_EQ(made.size(), runs);
    Arena arena;
    double in_memory = 0;
    int64_t row = 0;
    for (const auto& run : made) {
      const PackedMatrix m = pack(run, arena, pool);
      in_memory += double(bytes_of(m));
      if (runs == 1) EXPECT_EQ(m.packing, Packing::f32);
      const PackedMatrix alone = pack(run.first(1), arena, pool);
      if (runs > 1) EXPECT_TRUE(alone.packing == m.packing && alone.stored == m.stored && m.rows % 16 == 0);
      std::vector<float> w(static_cast<size_t>(kCols)), got(static_cast<size_t>(kCols)), own(got);
      for (int64_t r = 0; r < m.rows; ++r, ++row) {
        const HostTensor& t = parts[size_t(row / rows)];
        dequantize(t.type, t.data + row % rows * t.row_bytes(), kCols, w.data());
        unpack_row(m, r, 1.0f, got.data());
        if (r < alone.rows && runs > 1) {
          unpack_row(alone, r, 1.0f, own.data());
          ASSERT_EQ(own, got);
        }
        float most = 0;
        for (float f : w) most = std::max(most, std::fabs(f));
        for (size_t c = 0; c < w.size(); ++c)
          ASSERT_NEAR(got[c], w[c], packing_info(m.packing).of_rows ? 6e-4f * most : 0.0f);
      }
    }
    EXPECT_EQ(row, rows * std::ssize(types));
    if (runs > 1) EXPECT_LE(in_memory, (types[0] == T::q4_k ? 1.12 : 1.05) * in_file);
  }
}

// E4M3 with one scale a row or one for each 128 inputs, and rows of both in one matrix: the bits of the plain kernels,
// near the product, no number where a weight of the span is none; 128 inputs that do not divide the row.
TEST(Kernels, BytesWithScales) {
  constexpr int64_t kRows = 40, kCols = 300, kWide = 3;
  std::mt19937 random(9);
  std::normal_distribution<float> normal;
  ThreadPool pool(1);
  const auto bytes = random_tensor(WeightType::f8_e4m3, kRows * kCols, random);
  HostTensor by_row{"w", WeightType::f8_e4m3, kRows, kCols, bytes.data(), int64_t(bytes.size())}, by_span = by_row;
  by_row.row_scales.reserve(size_t{kRows});
  by_span.row_scales.reserve(size_t{kRows * kWide});
  for (int64_t r = 0; r < kRows; ++r) {
    by_row.row_scales.push_back(0.01f * float(1 + r));
    for (int64_t i = 0; i < kWide; ++i) by_span.row_scales.push_back(0.01f * float(1 + r + 50 * i));
  }
  std::vector<uint8_t> broken = bytes;
  broken[size_t(3 * kCols + 130)] = 0xff;
  HostTensor without = by_span;
  without.data = broken.data();
  const std::vector<std::vector<HostTensor>> cases = {{by_row}, {by_span}, {by_span, by_row}, {by_row, without}};
  for (size_t i = 0; i < cases.size(); ++i) {
    const auto& parts = cases[i];
    Arena arena;
    const PackedMatrix m = pack(parts, arena, pool);
    EXPECT_EQ(m.packing, Packing::f8);
    for (int64_t tokens : {1, 2, 33}) {
      const int64_t padded = m.padded_cols();
      Product p{m, m, std::vector<float>(size_t(tokens * padded)), tokens};
      for (int64_t t = 0; t < tokens; ++t)
        for (int64_t c = 0; c < kCols; ++c) p.x[size_t(t * padded + c)] = normal(random);
      const std::vector<float> base = p.floating(kKernelsPortable);
      for (const Kernels* k : runnable_kernels()) {
        const std::vector<float> y = p.floating(*k);
        EXPECT_EQ(std::memcmp(y.data(), base.data(), y.size() * sizeof(float)), 0) << k->name << " " << i;
      }
      std::vector<float> w(size_t{kCols}), row(size_t{kCols});
      for (int64_t r = 0; r < m.rows; ++r) {
        const HostTensor& part = parts[size_t(r / kRows)];
        const int64_t at = r % kRows, scales = part.scales_a_row();
        dequantize(part.type, part.data + at * part.row_bytes(), kCols, w.data());
        for (int64_t c = 0; scales > 0 && c < kCols; ++c)
          w[size_t(c)] *= part.row_scales[size_t(at * scales + (scales > 1 ? c / 128 : 0))];
        unpack_row(m, r, 1, row.data());
        const bool number = i != 3 || r != kRows + 3;
        if (!number) {
          EXPECT_TRUE(std::isnan(row[130]) && !std::isnan(row[0]));
          for (int64_t t = 0; t < tokens; ++t) EXPECT_TRUE(std::isnan(base[size_t(t * m.rows + r)]));
          continue;
        }
        ASSERT_EQ(row, w);
        for (int64_t t = 0; t < tokens; ++t) {
          double sum = 0, size = 0;
          for (int64_t c = 0; c < kCols; ++c) {
            const double v = double(w[size_t(c)]) * p.x[size_t(t * padded + c)];
            sum += v, size += std::fabs(v);
          }
          ASSERT_NEAR(base[size_t(t * m.rows + r)], sum, 1e-5 * size) << r << " " << t;
        }
      }
    }
  }
}

// In memory no type takes more than 5 % above its bytes in the file, whatever it is multiplied as.
TEST(Packed, NoTypeIsWiderThanItsFile) {
  ThreadPool pool(1);
  std::mt19937 random(8);
  for (WeightType type : kTypes)
    for (bool exact : {false, true}) {
      Arena arena;
      const auto bytes = random_tensor(type, 64 * 2560, random);
      const HostTensor t{"w", type, 64, 2560, bytes.data(), int64_t(bytes.size())};
      const PackedMatrix m = pack({&t, 1}, arena, pool, exact);
      const double ratio = double(bytes_of(m)) / bytes_in_file(t);
      printf("%-7s %s %.3f\n", std::string(type_info(type)->name).c_str(), exact ? "exact" : "     ", ratio);
      // One row by Q4_K is multiplied faster from a ninth more.
      EXPECT_LE(ratio, type == WeightType::q4_k && !exact ? 1.12 : 1.05)
          << type_info(type)->name << (exact ? " exact" : "");
      int64_t measured = 0;
      EXPECT_EQ(measure({&t, 1}, exact, &measured).packing, m.packing);
      EXPECT_EQ(measured, bytes_of(m)) << type_info(type)->name;
    }
  // With a scale for each 128 inputs, too.
  Arena arena;
  const auto bytes = random_tensor(WeightType::f8_e4m3, 64 * 2560, random);
  HostTensor t{"w", WeightType::f8_e4m3, 64, 2560, bytes.data(), int64_t(bytes.size())};
  t.row_scales.assign(64 * 20, 0.5f);
  EXPECT_LE(double(bytes_of(pack({&t, 1}, arena, pool))), 1.05 * double(t.bytes));
}

TEST(Kernels, RowsDoNotDependOnHowManyThereAre) {
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  ThreadPool pool(1);
  for (WeightType type : kTypes) {
    Arena arena;
    auto bytes = random_tensor(type, 16 * 256, random);
    HostTensor t{"w", type, 16, 256, bytes.data(), int64_t(bytes.size())};
    Product all = product_of(t, arena, pool, std::vector<float>(23 * 256), 23);
    for (float& f : all.x) f = normal(random);
    std::vector<float> together = all.floating(best_kernels());
    for (int64_t i = 0; i < 23; ++i) {
      Product one{all.m, all.exact, {all.x.begin() + i * 256, all.x.begin() + (i + 1) * 256}, 1};
      std::vector<float> alone = one.floating(best_kernels());
      ASSERT_TRUE(std::equal(alone.begin(), alone.end(), together.begin() + i * 16));
      if (packing_info(all.m.packing).quantized) {
        std::vector<float> a = one.integer(best_kernels()), b = all.integer(best_kernels());
        ASSERT_TRUE(std::equal(a.begin(), a.end(), b.begin() + i * 16));
      }
    }
  }
}

TEST(Kernels, NotANumberIsNeverLost) {
  std::mt19937 random(3);
  ThreadPool pool(1);
  Arena arena;
  auto bytes = random_tensor(WeightType::q4_1, 64 * 64, random);
  HostTensor w{"w", WeightType::q4_1, 64, 64, bytes.data(), int64_t(bytes.size())};
  for (const Kernels* k : runnable_kernels()) {
    std::vector<float> x(64, 1.0f);
    for (int64_t rows : {3, 9}) {
      Product p = product_of(w, arena, pool, std::vector<float>(size_t(rows * 64), 1.0f), rows);
      const std::vector<float> without = p.integer(*k);
      for (int64_t row : {1, 2})
        for (float bad : {NAN, INFINITY}) {
          p.x[size_t(64 * row + 40)] = bad;
          const std::vector<float> y = p.integer(*k);
          for (size_t i = 0; i < y.size(); ++i)
            if (int64_t(i) / 64 == row)
              EXPECT_FALSE(std::isfinite(y[i])) << k->name << i;
            else
              EXPECT_EQ(y[i], without[i]) << k->name << i;
          p.x[size_t(64 * row + 40)] = 1.0f;
        }
    }
    for (float bad : {NAN, INFINITY, -INFINITY}) {
      x[40] = bad;
      EXPECT_TRUE(std::isnan(k->greatest(x.data(), 64))) << k->name << bad;
    }
  }
}

// Lengths that no vector divides, greatest values of either sign and at either end, and shares too small to count.
TEST(Kernels, RowsThatTokensAreDrawnFrom) {
  std::mt19937 random(6);
  std::normal_distribution<float> normal(-20, 8);
  for (int64_t n : {1, 7, 16, 50, 1024, 2077}) {
    std::vector<float> x(static_cast<size_t>(n));
    for (float& f : x) f = normal(random);
    if (n > 7) x[3] = -300, x[5] = -0.0f, x[6] = 30 * float(n % 3);
    const float most = *std::max_element(x.begin(), x.end());
    const auto blocks = static_cast<size_t>((n + kSumBlock - 1) / kSumBlock);
    std::vector<float> sums(blocks), each(x.size());
    kKernelsPortable.exponential_sums(x.data(), n, most, 1.5f, sums.data());
    kKernelsPortable.exponentials(x.data(), n, most, 1.5f, each.data());
    for (size_t b = 0; b < blocks; ++b) {
      double sum = 0;
      for (size_t i = b * kSumBlock; i < std::min(x.size(), (b + 1) * kSumBlock); ++i) {
        const double want = std::exp(1.5 * (double(x[i]) - most));
        EXPECT_NEAR(each[i], want, 1e-37 + 1e-5 * want) << i;
        sum += want;
      }
      EXPECT_NEAR(sums[b], sum, 1e-5 * sum);
    }
    for (const Kernels* k : runnable_kernels()) {
      SCOPED_TRACE(k->name);
      std::vector<float> s(blocks), e(x.size());
      k->exponential_sums(x.data(), n, most, 1.5f, s.data());
      k->exponentials(x.data(), n, most, 1.5f, e.data());
      EXPECT_EQ(s, sums);
      EXPECT_EQ(e, each);
      EXPECT_EQ(k->greatest(x.data(), n), most);
      EXPECT_EQ(k->greatest(x.data(), 0), -INFINITY);
    }
  }
}

TEST(Dequantize, EqualsAnOutsideReader) {
  std::ifstream in("tests/model/fixtures/quants.json");
  auto all = nlohmann::json::parse(in);
  int seen = 0;
  for (WeightType type : kTypes) {
    std::string name(type_info(type)->name);
    if (!all.contains(name)) continue;
    ++seen;
    std::string hex = all[name]["hex"];
    std::vector<uint8_t> bytes;
    for (size_t i = 0; i < hex.size(); i += 2) bytes.push_back(uint8_t(std::stoi(hex.substr(i, 2), nullptr, 16)));
    std::vector<double> want = all[name]["values"];
    std::vector<float> got(want.size());
    dequantize(type, bytes.data(), int64_t(got.size()), got.data());
    for (size_t i = 0; i < got.size(); ++i)
      ASSERT_NEAR(got[i], want[i], 1e-6 * std::max(1.0, std::fabs(want[i]))) << name << i;
  }
  EXPECT_EQ(seen, 13);
}

}  // namespace
}  // namespace kvasir::model::cpu
