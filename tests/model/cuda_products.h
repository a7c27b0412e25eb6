// What the tests of a GPU's products have in common: random weights of a type, and products against plain sums.
#pragma once

#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "attention/cuda/memory.h"
#include "model/cuda/kernels.h"
#include "model/formats/weight_type.h"
#include "tests/model/cuda_case.h"

namespace kvasir::model {

using CudaProducts = NeedsDevice;

inline uint16_t half(float x) { return f32_to_bf16(x); }
inline float whole(uint16_t x) { return bf16_to_f32(x); }

// A value of E4M3, by its definition.
inline float e4m3(uint8_t b) {
  const int exponent = b >> 3 & 15, fraction = b & 7;
  const float x = exponent == 0 ? std::ldexp(float(fraction), -9) : std::ldexp(float(8 + fraction), exponent - 10);
  return b & 0x80 ? -x : x;
}

// Random rows of a type's blocks whose scales are numbers, dequantized by the host.
struct Quantized {
  HostTensor tensor;
  std::vector<uint8_t> bytes;
  std::vector<float> values;
};
inline constexpr float kWhole = 0x1p-11f;  // of NVFP4
// Those of INT4 have a scale for each `group`.
inline std::unique_ptr<Quantized> quantized(WeightType type, int64_t rows, int64_t cols, uint32_t seed, int64_t group) {
  auto q = std::make_unique<Quantized>();
  const TypeInfo& info = *type_info(type);
  std::mt19937 random(seed);
  q->bytes.resize(size_t(rows * cols / info.block * info.bytes));
  for (uint8_t& b : q->bytes) b = uint8_t(random());
  for (size_t at = 0; at < q->bytes.size(); at += size_t(info.bytes)) {
    auto put = [&](size_t offset, float x) {
      const uint16_t h = f32_to_f16(x);
      std::memcpy(&q->bytes[at + offset], &h, 2);
    };
    const float d = std::ldexp(float(1 + random() % 1000), -18);
    if (type == WeightType::int4) {
      const size_t first = at - at / size_t(info.bytes) % size_t(group / 32) * size_t(info.bytes);
      const float scale[2] = {d, -float(random() % 16) * d};
      std::memcpy(&q->bytes[first], scale, at == first ? 8 : 0);
      std::memcpy(&q->bytes[at], &q->bytes[first], 8);
      continue;
    }
    switch (type) {
      case WeightType::nvfp4:
        std::memcpy(&q->bytes[at], &kWhole, 4);
        q->bytes[at + 4] = 0x39, q->bytes[at + 5] = uint8_t(1 + random() % 0x58);
        break;
      case WeightType::f8_e4m3: q->bytes[at] &= (q->bytes[at] & 0x7f) == 0x7f ? 0xfe : 0xff; break;  // numbers all
      case WeightType::iq4_xs: put(0, d / 64); break;
      case WeightType::mxfp4: q->bytes[at] = uint8_t(110 + random() % 12); break;
      case WeightType::q2_k: put(80, d), put(82, d / 2); break;
      case WeightType::q3_k: put(108, d); break;
      case WeightType::q6_k: put(208, d / 64); break;
      case WeightType::q4_1:
      case WeightType::q5_1: put(0, d), put(2, -7 * d); break;
      case WeightType::q4_k:
      case WeightType::q5_k: put(0, d / 64), put(2, d / 32); break;
      default: put(0, d);
    }
  }
  q->values.resize(size_t(rows * cols));
  const int64_t row_bytes = int64_t(q->bytes.size()) / rows;
  for (int64_t r = 0; r < rows; ++r)
    dequantize(type, &q->bytes[size_t(r * row_bytes)], cols, &q->values[size_t(r * cols)]);
  std::vector<float> scales;
  if (type == WeightType::f8_e4m3)
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < cols; ++c) {
        if (c % 128 == 0) scales.push_back(std::ldexp(float(1 + random() % 1000), -20));
        q->values[size_t(r * cols + c)] *= scales.back();
      }
  q->tensor = {"blk.0.ffn_up.weight", type, rows, cols, q->bytes.data(), int64_t(q->bytes.size())};
  q->tensor.group = group;
  q->tensor.row_scales = std::move(scales);
  return q;
}

// A product against sums of the numbers that `value(feature, element)` of the weights are, in every form.
// `gated_bound`: of forms that multiply two sums, each of which carries the error of its weights.
template <class Value, class Launch>
void check_against(int64_t rows, int64_t n, int64_t k, double bound, const std::vector<cuda::Form>& forms, Value value,
                   Launch launch, double gated_bound = 0) {
  using cuda::Form;
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> in(size_t(rows * k));
  for (uint16_t& x : in) x = half(normal(random));
  attention::cuda::DeviceMemory d_in;
  ASSERT_TRUE(d_in.upload(in.data(), in.size() * 2).ok());
  for (Form form : forms) {
    SCOPED_TRACE(cat(rows, " rows, ", n, " x ", k, ", form ", int(form)));
    const bool gated = form == Form::silu || form == Form::gelu;
    const bool wide = form == Form::f32 || form == Form::added_f32;
    const int64_t out = gated ? n / 2 : n;
    std::vector<float> was(size_t(rows * out)), got(was.size());
    for (float& x : was) x = normal(random);
    attention::cuda::DeviceMemory d_out;
    ASSERT_TRUE(d_out.upload(was.data(), was.size() * 4).ok());
    launch(d_in.get(), d_out.get(), form);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    std::vector<uint16_t> narrow(got.size());
    ASSERT_EQ(cudaMemcpy(wide ? static_cast<void*>(got.data()) : narrow.data(), d_out.get(),
                         got.size() * (wide ? 4 : 2), cudaMemcpyDefault),
              cudaSuccess);
    double worst = 0;
    const int64_t every = 1 + rows * n * k / 20'000'000;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t f = r % every; f < out; f += every) {
        double y[2] = {}, size = 0;
        for (int64_t p = 0; p <= int64_t(gated); ++p)
          for (int64_t i = 0; i < k; ++i) {
            const double x = double(whole(in[size_t(r * k + i)])) * double(value(p * out + f, i));
            y[p] += x, size += x * x;
          }
        const auto at = size_t(r * out + f);
        double want = y[0];
        if (form == Form::added_f32) want += double(was[at]);
        if (form == Form::silu) want = y[0] / (1 + std::exp(-y[0])) * y[1];
        if (form == Form::gelu)
          want = 0.5 * y[0] * (1 + std::tanh(0.7978845608028654 * (y[0] + 0.044715 * y[0] * y[0] * y[0]))) * y[1];
        const double off = std::fabs(double(wide ? got[at] : whole(narrow[at])) - want);
        worst = std::max(worst, off / (std::sqrt(size) + std::fabs(want) + 1e-6));
      }
    EXPECT_LT(worst, gated && gated_bound > 0 ? gated_bound : wide ? bound : bound + 4e-3);
  }
}
inline const std::vector<cuda::Form> kForms = {cuda::Form::f32, cuda::Form::added_f32, cuda::Form::bf16,
                                               cuda::Form::silu, cuda::Form::gelu};

}  // namespace kvasir::model
