// The products of a CUDA model, and the weights they read, against the host's.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "attention/cuda/memory.h"
#include "model/cuda/cublas.h"
#include "model/cuda/few_rows.h"
#include "model/cuda/fp8.h"
#include "model/cuda/kernels.h"
#include "model/cuda/packed.h"
#include "model/cuda/seeded.h"
#include "model/cuda/streamed.h"
#include "model/cuda/weight.h"
#include "model/formats/dummy.h"
#include "model/formats/int4.h"
#include "model/formats/weight_type.h"
#include "tests/model/cuda_case.h"

namespace kvasir::model {
namespace {

using CudaProducts = NeedsDevice;

// A dummy's weights are the same ones on every device.
TEST_F(CudaProducts, SeededWeightsAreTheOnesOfTheHost) {
  for (const std::string type : {"f32", "f16", "bf16", "q4_0", "q4_1", "q8_0", "int4"}) {
    auto config = config_from_dummy("llama,seed=77777777777,type=" + type);
    ASSERT_TRUE(config.ok());
    const auto host = dummy_weights(*config), device = dummy_weights(*config);
    device->leave_seeded();
    for (auto [rows, cols] : {std::pair<int64_t, int64_t>{3, 32}, {70, 576}}) {
      const auto want = host->get(cat("t", rows), rows, cols), left = device->get(cat("t", rows), rows, cols);
      ASSERT_TRUE(want.ok() && left.ok());
      ASSERT_TRUE(left->seeded && !left->data);
      attention::cuda::DeviceMemory out;
      ASSERT_TRUE(out.allocate(size_t(rows * cols) * 2).ok());
      cuda::launch_seeded(*left, out.get(), nullptr);
      std::vector<uint16_t> got(size_t(rows * cols));
      ASSERT_EQ(cudaMemcpy(got.data(), out.get(), got.size() * 2, cudaMemcpyDefault), cudaSuccess);
      std::vector<float> row(static_cast<size_t>(cols));
      for (int64_t r = 0; r < rows; ++r) {
        dequantize(want->type, want->data + r * want->row_bytes(), cols, row.data());
        for (int64_t i = 0; i < cols; ++i)
          ASSERT_EQ(got[size_t(r * cols + i)], f32_to_bf16(row[size_t(i)])) << type << ", " << r << ", " << i;
      }
    }
    EXPECT_EQ(host->parameters(), device->parameters());
    EXPECT_EQ(host->bytes(), device->bytes());
  }
}

uint16_t half(float x) { return f32_to_bf16(x); }
float whole(uint16_t x) { return bf16_to_f32(x); }

// Against a plain sum of what the rounded operands give, in every form and for shapes that fill no block evenly.
template <class Launch>
void check_products(std::initializer_list<std::array<int64_t, 3>> shapes, Launch launch) {
  using cuda::Form;
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  for (auto [rows, n, k] : shapes)
    for (Form form : {Form::f32, Form::added_f32, Form::bf16, Form::silu, Form::gelu}) {
      SCOPED_TRACE(cat(rows, " rows, ", n, " x ", k, ", form ", int(form)));
      const int64_t parts = form == Form::silu || form == Form::gelu ? 2 : 1;
      const bool wide = form == Form::f32 || form == Form::added_f32;
      std::vector<uint16_t> in(size_t(rows * k)), weight(size_t(parts * n * k));
      for (uint16_t& x : in) x = half(normal(random));
      for (uint16_t& x : weight) x = half(normal(random) / std::sqrt(float(k)));
      std::vector<float> was(size_t(rows * n)), got(size_t(rows * n));
      for (float& x : was) x = normal(random);
      attention::cuda::DeviceMemory d_in, d_weight, d_out;
      ASSERT_TRUE(d_in.upload(in.data(), in.size() * 2).ok());
      ASSERT_TRUE(d_weight.upload(weight.data(), weight.size() * 2).ok());
      ASSERT_TRUE(d_out.upload(was.data(), was.size() * 4).ok());
      launch(d_in.get(), d_weight.get(), d_out.get(), rows, n, k, form, nullptr);
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      std::vector<uint16_t> narrow(got.size());
      ASSERT_EQ(cudaMemcpy(wide ? static_cast<void*>(got.data()) : narrow.data(), d_out.get(),
                           got.size() * (wide ? 4 : 2), cudaMemcpyDefault),
                cudaSuccess);
      double worst = 0;
      const int64_t every = 1 + rows * n * parts * k / 50'000'000;  // some of many
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t f = r % every; f < n; f += every) {
          double y[2] = {};
          for (int64_t p = 0; p < parts; ++p)
            for (int64_t i = 0; i < k; ++i)
              y[p] += double(whole(in[size_t(r * k + i)])) * double(whole(weight[size_t((p * n + f) * k + i)]));
          const auto at = size_t(r * n + f);
          double want = y[0];
          if (form == Form::added_f32) want += double(was[at]);
          if (form == Form::silu) want = y[0] / (1 + std::exp(-y[0])) * y[1];
          if (form == Form::gelu)
            want = 0.5 * y[0] * (1 + std::tanh(0.7978845608028654 * (y[0] + 0.044715 * y[0] * y[0] * y[0]))) * y[1];
          const double off = std::fabs(double(wide ? got[at] : whole(narrow[at])) - want);
          worst = std::max(worst, off / (1 + std::fabs(want)));
        }
      EXPECT_LT(worst, wide ? 1e-5 : 4e-3);
    }
}

// By one way of the library's: the bits of a row are the same alone, among others, and wherever it stands.
TEST_F(CudaProducts, InOneOrderARowHasTheBitsThatItHasAlone) {
  auto library = cuda::Cublas::open(nullptr);
  ASSERT_TRUE(library.ok()) << library.status().to_string();
  constexpr int64_t kRows = 300;
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  for (auto [n, k] :
       {std::pair<int64_t, int64_t>{4096, 14336}, {6144, 4096}, {28672, 512}, {576, 1536}, {49152, 576}, {50, 24}})
    for (cuda::Form form : {cuda::Form::f32, cuda::Form::added_f32, cuda::Form::bf16}) {
      SCOPED_TRACE(cat(n, " x ", k, ", form ", int(form)));
      const auto known = (*library)->has_one_order(n, k, form);
      ASSERT_TRUE(known.ok()) << known.status().to_string();
      printf("%ld x %ld, form %d: %s\n", long(n), long(k), int(form),
             *known ? "by the library" : "by what is for few rows");
      if (!*known) continue;
      std::vector<uint16_t> in(size_t(kRows * k)), weight(size_t(n * k));
      for (size_t i = 0; i < in.size(); ++i) in[i] = i < 4096 ? half(normal(random)) : in[(i * 7 + i / 4096) % 4096];
      for (size_t i = 0; i < weight.size(); ++i)
        weight[i] = i < 65536 ? half(normal(random)) : weight[(i * 5 + i / 65536) % 65536];
      attention::cuda::DeviceMemory d_in, d_weight, d_out;
      ASSERT_TRUE(d_in.upload(in.data(), in.size() * 2).ok());
      ASSERT_TRUE(d_weight.upload(weight.data(), weight.size() * 2).ok());
      ASSERT_TRUE(d_out.allocate(size_t(kRows * n) * 4).ok());
      const int64_t size = form == cuda::Form::bf16 ? 2 : 4;
      auto product = [&](int64_t first, int64_t rows) {
        std::vector<uint8_t> out(size_t(rows * n * size));
        EXPECT_EQ(cudaMemset(d_out.get(), 0, out.size()), cudaSuccess);
        const Status s = (*library)->product_in_one_order(d_in.bytes() + first * k * 2, d_weight.get(), d_out.get(),
                                                          rows, n, k, form);
        EXPECT_TRUE(s.ok()) << s.to_string();
        EXPECT_EQ(cudaMemcpy(out.data(), d_out.get(), out.size(), cudaMemcpyDefault), cudaSuccess);
        return out;
      };
      const auto all = product(0, kRows);
      for (auto [first, rows] :
           {std::pair<int64_t, int64_t>{0, 1}, {7, 64}, {100, 65}, {3, 128}, {44, 256}, {299, 1}}) {
        const auto some = product(first, rows);
        EXPECT_EQ(std::memcmp(some.data(), all.data() + first * n * size, some.size()), 0) << first << ", " << rows;
      }
    }
}

TEST_F(CudaProducts, ProductsOfFewRows) {
  check_products({{1, 16, 32},
                  {1, 960, 576},
                  {3, 48, 288},
                  {8, 576, 1536},
                  {9, 64, 96},
                  {16, 192, 800},
                  {17, 32, 1024},
                  {32, 48, 512}},
                 [](auto... all) {
                   const auto [in, weight, out, rows, n, k, form, stream] = std::tuple(all...);
                   ASSERT_TRUE(cuda::few_rows_takes(rows, n, k, form));
                   cuda::launch_few_rows(all...);
                 });
}

// Tiles of both heights, one and more of them a block, and rings that end in the middle of one.
TEST_F(CudaProducts, ProductsStreamed) {
  check_products({{1, 16, 512},
                  {2, 2144, 512},
                  {3, 4224, 576},
                  {8, 48, 4096},
                  {9, 2112, 704},
                  {12, 4240, 512},
                  {16, 4224, 832},
                  {16, 64, 14336},
                  {17, 2112, 576},
                  {32, 4240, 512},
                  {25, 4256, 832}},
                 [](auto... all) { cuda::launch_streamed(all...); });
}

// A value of E4M3, by its definition.
float e4m3(uint8_t b) {
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
constexpr float kHalfScale = 0x1.2p-11f;  // of NVFP4's first halves
// Those of INT4 have a scale for each `group`.
std::unique_ptr<Quantized> quantized(WeightType type, int64_t rows, int64_t cols, uint32_t seed, int64_t group) {
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
        for (const size_t half : {0, 4}) std::memcpy(&q->bytes[at + half], half ? &d : &kHalfScale, 4);
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
const std::vector<cuda::Form> kForms = {cuda::Form::f32, cuda::Form::added_f32, cuda::Form::bf16, cuda::Form::silu,
                                        cuda::Form::gelu};

// Every code that is a number, in every place of a word.
TEST_F(CudaProducts, ProductsStreamedOfBytes) {
  std::mt19937 random(3);
  for (auto [rows, n, k] : {std::array<int64_t, 3>{1, 32, 128},
                            {2, 2144, 576},
                            {8, 48, 4096},
                            {9, 4256, 1536},
                            {16, 64, 14336},
                            {16, 4224, 832},
                            {13, 9216, 576}}) {
    ASSERT_TRUE(cuda::streamed_bytes_takes(rows, n, k, cuda::Form::bf16));
    std::vector<uint8_t> weight(size_t(n * k));
    for (uint8_t& b : weight) do
        b = uint8_t(random());
      while ((b & 0x7f) == 0x7f);
    std::vector<float> scales(static_cast<size_t>(n));
    for (float& s : scales) s = std::ldexp(float(1 + random() % 256), -14) / std::sqrt(float(k));
    attention::cuda::DeviceMemory d_weight, d_scales;
    ASSERT_TRUE(d_weight.upload(weight.data(), weight.size()).ok());
    ASSERT_TRUE(d_scales.upload(scales.data(), scales.size() * 4).ok());
    check_against(
        rows, n, k, 1e-5, kForms,
        [&](int64_t f, int64_t i) { return e4m3(weight[size_t(f * k + i)]) * scales[size_t(f)]; },
        [&, rows = rows, n = n, k = k](const void* in, void* out, cuda::Form form) {
          const int64_t features = form == cuda::Form::silu || form == cuda::Form::gelu ? n / 2 : n;
          cuda::launch_streamed_bytes(in, d_weight.get(), d_scales.as<float>(), out, rows, features, k, form, nullptr);
        });
  }
}

// The library's, with a scale for each row and feature.
TEST_F(CudaProducts, ProductsOfBytesByTheLibrary) {
  if (!cuda::parse_quantize("fp8").ok()) GTEST_SKIP() << "skipped: no matrix unit for E4M3";
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  {
    auto library = cuda::Cublas::open(stream);
    ASSERT_TRUE(library.ok()) << library.status().to_string();
    std::mt19937 random(4);
    std::normal_distribution<float> normal;
    for (auto [rows, n, k] :
         {std::array<int64_t, 3>{17, 960, 576}, {33, 48, 1536}, {64, 6144, 4096}, {300, 576, 1536}}) {
      std::vector<uint16_t> in(size_t(rows * k)), weight(size_t(n * k));
      for (uint16_t& x : in) x = half(normal(random));
      for (uint16_t& x : weight) x = half(normal(random) / std::sqrt(float(k)));
      attention::cuda::DeviceMemory d_in, d_weight, in_bytes, weight_bytes, in_scales, weight_scales;
      ASSERT_TRUE(d_in.upload(in.data(), in.size() * 2).ok() && d_weight.upload(weight.data(), weight.size() * 2).ok());
      ASSERT_TRUE(in_bytes.allocate(in.size()).ok() && weight_bytes.allocate(weight.size()).ok());
      ASSERT_TRUE(in_scales.allocate(size_t(rows) * 4).ok() && weight_scales.allocate(size_t(n) * 4).ok());
      cuda::launch_to_bytes(d_in.get(), {in_bytes.get(), in_scales.as<float>()}, rows, k, stream);
      cuda::launch_to_bytes(d_weight.get(), {weight_bytes.get(), weight_scales.as<float>()}, n, k, stream);
      // Both as numbers again, which the products are held to.
      auto numbers = [&](attention::cuda::DeviceMemory& elements, attention::cuda::DeviceMemory& scales, int64_t r) {
        std::vector<uint8_t> b(size_t(r * k));
        std::vector<float> s(static_cast<size_t>(r)), out(b.size());
        EXPECT_EQ(cudaMemcpy(b.data(), elements.get(), b.size(), cudaMemcpyDefault), cudaSuccess);
        EXPECT_EQ(cudaMemcpy(s.data(), scales.get(), s.size() * 4, cudaMemcpyDefault), cudaSuccess);
        for (size_t i = 0; i < b.size(); ++i) out[i] = e4m3(b[i]) * s[i / size_t(k)];
        return out;
      };
      ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      const auto x = numbers(in_bytes, in_scales, rows), w = numbers(weight_bytes, weight_scales, n);
      for (size_t i = 0; i < x.size(); ++i) ASSERT_NEAR(x[i], whole(in[i]), std::fabs(whole(in[i])) / 15 + 2e-2f);
      for (int way = 0; way < 6; ++way) {
        const auto form = std::array{cuda::Form::f32, cuda::Form::added_f32, cuda::Form::bf16}[size_t(way % 3)];
        const bool apart = way >= 3, wide = form != cuda::Form::bf16;  // scales by a kernel of their own
        SCOPED_TRACE(cat(rows, " rows, ", n, " x ", k, ", form ", int(form), apart ? ", scaled apart" : ""));
        std::vector<float> got(size_t(rows * n), 0.5f);
        attention::cuda::DeviceMemory out, sums;
        ASSERT_TRUE(out.upload(got.data(), got.size() * 4).ok() && sums.allocate(got.size() * 4).ok());
        const auto *of_rows = in_scales.as<float>(), *of_cols = weight_scales.as<float>();
        const Status s = !apart ? (*library)->product(in_bytes.get(), weight_bytes.get(), out.get(), rows, n, k, form,
                                                      cuda::Elements::fp8_scaled, {of_rows, of_cols})
                                : (*library)->product(in_bytes.get(), weight_bytes.get(), wide ? sums.get() : out.get(),
                                                      rows, n, k, wide ? cuda::Form::f32 : form, cuda::Elements::fp8);
        ASSERT_TRUE(s.ok()) << s.to_string();
        if (apart && wide)
          cuda::launch_scale(sums.as<float>(), {of_rows, of_cols}, form == cuda::Form::added_f32, out.as<float>(), rows,
                             n, stream);
        else if (apart)
          cuda::launch_scale_half(out.get(), {of_rows, of_cols}, rows, n, stream);
        ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        std::vector<uint16_t> narrow(got.size());
        ASSERT_EQ(cudaMemcpy(wide ? static_cast<void*>(got.data()) : narrow.data(), out.get(),
                             got.size() * (wide ? 4 : 2), cudaMemcpyDefault),
                  cudaSuccess);
        double worst = 0;
        for (int64_t r = 0; r < rows; r += 7)
          for (int64_t f = r % 5; f < n; f += 5) {
            double want = form == cuda::Form::added_f32 ? 0.5 : 0;
            for (int64_t i = 0; i < k; ++i) want += double(x[size_t(r * k + i)]) * double(w[size_t(f * k + i)]);
            const auto at = size_t(r * n + f);
            worst =
                std::max(worst, std::fabs(double(wide ? got[at] : whole(narrow[at])) - want) / (1 + std::fabs(want)));
          }
        EXPECT_LT(worst, 1.5e-2) << "the matrix unit's own sums of E4M3 have 14 bits";
      }
    }
  }
  cudaStreamDestroy(stream);
}

// A norm and a gate that give E4M3 give what would be made of their bfloat16.
TEST_F(CudaProducts, FusedBytesAreTheOnesMadeOfHalf) {
  std::mt19937 random(9);
  std::normal_distribution<float> normal;
  for (auto [rows, cols] : {std::pair<int64_t, int64_t>{3, 576}, {40, 4096}, {2, 14336}, {5, 16384}, {1, 40000}}) {
    SCOPED_TRACE(cat(rows, " x ", cols));
    std::vector<float> x(size_t(rows * cols)), weight(static_cast<size_t>(cols));
    std::vector<uint16_t> gates(size_t(2 * rows * cols));
    for (float& v : x) v = normal(random);
    for (float& v : weight) v = normal(random);
    for (uint16_t& v : gates) v = half(normal(random));
    std::fill_n(x.begin(), cols, 0.0f);  // a row without any
    attention::cuda::DeviceMemory d_x, d_weight, d_gates, d_half, bytes[2], scales[2];
    ASSERT_TRUE(d_x.upload(x.data(), x.size() * 4).ok() && d_weight.upload(weight.data(), weight.size() * 4).ok());
    ASSERT_TRUE(d_gates.upload(gates.data(), gates.size() * 2).ok() && d_half.allocate(x.size() * 2).ok());
    for (int i : {0, 1}) ASSERT_TRUE(bytes[i].allocate(x.size()).ok() && scales[i].allocate(size_t(rows) * 4).ok());
    auto of = [&](int i) { return cuda::Bytes{bytes[i].get(), scales[i].as<float>()}; };
    auto same = [&](const char* what) {
      std::vector<uint8_t> b[2];
      std::vector<float> s[2];
      for (int i : {0, 1}) {
        b[i].resize(x.size()), s[i].resize(size_t(rows));
        ASSERT_EQ(cudaMemcpy(b[i].data(), bytes[i].get(), x.size(), cudaMemcpyDefault), cudaSuccess);
        ASSERT_EQ(cudaMemcpy(s[i].data(), scales[i].get(), size_t(rows) * 4, cudaMemcpyDefault), cudaSuccess);
      }
      EXPECT_EQ(s[0], s[1]) << what;
      EXPECT_EQ(b[0], b[1]) << what;
    };
    cuda::launch_glu(false, d_gates.get(), true, d_half.get(), rows, cols, nullptr);
    cuda::launch_to_bytes(d_half.get(), of(0), rows, cols, nullptr);
    cuda::launch_glu_bytes(false, d_gates.get(), {}, of(1), rows, cols, nullptr);
    same("gate");
    if (cols > cuda::most_norm_bytes()) continue;
    cuda::launch_norm_bytes(d_x.as<float>(), d_weight.as<float>(), 1e-5f, d_half.get(), of(1), rows, cols, nullptr);
    cuda::launch_to_bytes(d_half.get(), of(0), rows, cols, nullptr);
    same("norm");
    std::vector<uint16_t> normed(x.size()), plain(x.size());
    ASSERT_EQ(cudaMemcpy(normed.data(), d_half.get(), x.size() * 2, cudaMemcpyDefault), cudaSuccess);
    cuda::launch_norm(d_x.as<float>(), d_weight.as<float>(), 1e-5f, d_half.get(), rows, cols, nullptr);
    ASSERT_EQ(cudaMemcpy(plain.data(), d_half.get(), x.size() * 2, cudaMemcpyDefault), cudaSuccess);
    for (size_t i = 0; i < plain.size(); ++i)
      ASSERT_NEAR(whole(normed[i]), whole(plain[i]), std::fabs(whole(plain[i])) / 100 + 1e-6f);
  }
}

// The same kernels where a product has left its scales to them.
TEST_F(CudaProducts, NormsAndGatesTakeAProductsScales) {
  for (const auto& shape : {std::pair<int64_t, int64_t>{64, 4096}, {17, 576}, {3, 14336}}) {
    const int64_t rows = shape.first, cols = shape.second;
    SCOPED_TRACE(cat(rows, " rows of ", cols));
    std::mt19937 random(11);
    std::normal_distribution<float> normal;
    std::vector<float> x(size_t(rows * cols)), sums(x.size()), weight(static_cast<size_t>(cols)),
        of_rows(static_cast<size_t>(rows)), of_cols(size_t(2 * cols));
    std::vector<uint16_t> gates(2 * x.size());
    for (std::vector<float>* v : {&x, &sums, &weight})
      for (float& f : *v) f = normal(random);
    for (uint16_t& v : gates) v = half(100 * normal(random));
    for (float& f : of_rows) f = 0.01f * (1 + std::fabs(normal(random)));
    for (float& f : of_cols) f = 0.5f + std::fabs(normal(random));
    attention::cuda::DeviceMemory d_x[2], d_sums, d_weight, d_gates, d_half, d_rows, d_cols, bytes[2], scales[2];
    for (int i : {0, 1})
      ASSERT_TRUE(d_x[i].upload(x.data(), x.size() * 4).ok() && bytes[i].allocate(x.size()).ok() &&
                  scales[i].allocate(size_t(rows) * 4).ok());
    ASSERT_TRUE(d_sums.upload(sums.data(), sums.size() * 4).ok() && d_half.allocate(x.size() * 2).ok() &&
                d_weight.upload(weight.data(), weight.size() * 4).ok() &&
                d_gates.upload(gates.data(), gates.size() * 2).ok() &&
                d_rows.upload(of_rows.data(), of_rows.size() * 4).ok() &&
                d_cols.upload(of_cols.data(), of_cols.size() * 4).ok());
    const cuda::Scales by{d_rows.as<float>(), d_cols.as<float>()};
    auto of = [&](int i) { return cuda::Bytes{bytes[i].get(), scales[i].as<float>()}; };
    auto read = [&](int i) {
      std::pair<std::vector<uint8_t>, std::vector<float>> out{std::vector<uint8_t>(x.size()),
                                                              std::vector<float>(size_t(rows))};
      EXPECT_EQ(cudaMemcpy(out.first.data(), bytes[i].get(), x.size(), cudaMemcpyDefault), cudaSuccess);
      EXPECT_EQ(cudaMemcpy(out.second.data(), scales[i].get(), size_t(rows) * 4, cudaMemcpyDefault), cudaSuccess);
      return out;
    };
    cuda::launch_glu_bytes(false, d_gates.get(), by, of(0), rows, cols, nullptr);
    const auto [elements, units] = read(0);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < cols; c += 3) {
        const double row = double(of_rows[size_t(r)]);
        const double gate = double(whole(gates[size_t(2 * r * cols + c)])) * row * double(of_cols[size_t(c)]);
        const double up =
            double(whole(gates[size_t((2 * r + 1) * cols + c)])) * row * double(of_cols[size_t(cols + c)]);
        const double want = gate / (1 + std::exp(-gate)) * up;
        const double got = double(e4m3_to_f32(elements[size_t(r * cols + c)])) * double(units[size_t(r)]);
        ASSERT_NEAR(got, want, std::fabs(want) / 14 + double(units[size_t(r)]) / 256) << r << ", " << c;
      }
    if (cols > cuda::most_norm_bytes()) continue;
    cuda::launch_scale(d_sums.as<float>(), by, true, d_x[0].as<float>(), rows, cols, nullptr);
    cuda::launch_norm_bytes(d_x[0].as<float>(), d_weight.as<float>(), 1e-5f, d_half.get(), of(0), rows, cols, nullptr);
    cuda::launch_add_norm_bytes(d_sums.as<float>(), by, d_x[1].as<float>(), d_weight.as<float>(), 1e-5f, d_half.get(),
                                of(1), rows, cols, nullptr);
    EXPECT_EQ(read(0), read(1));
    std::vector<float> apart(x.size()), together(x.size());
    ASSERT_EQ(cudaMemcpy(apart.data(), d_x[0].get(), x.size() * 4, cudaMemcpyDefault), cudaSuccess);
    ASSERT_EQ(cudaMemcpy(together.data(), d_x[1].get(), x.size() * 4, cudaMemcpyDefault), cudaSuccess);
    EXPECT_EQ(apart, together);
  }
}

// Packed weights of every type, parts of different types too, as they are multiplied, unpacked and looked up.
TEST_F(CudaProducts, ProductsOfPackedWeights) {
  if (!cuda::packs(16, 32)) GTEST_SKIP() << "skipped: no copy engine";
  ThreadPool pool(2);
  using T = WeightType;
  struct Case {
    std::vector<T> types;
    int64_t rows, n, k;  // features of each part
    cuda::Packing packing;
    int64_t group = 0;
  };
  int turn = 0;
  for (const Case& c : {Case{{T::q4_0}, 1, 64, 576, cuda::Packing::q4},
                        {{T::q4_1}, 8, 2144, 1536, cuda::Packing::q4},
                        {{T::q4_k}, 16, 4256, 1280, cuda::Packing::q4},
                        {{T::q4_k}, 11, 32, 14336, cuda::Packing::q4},
                        {{T::q4_k, T::q4_k}, 37, 160, 2048, cuda::Packing::q4},
                        {{T::q4_k, T::q4_k}, 1, 2112, 4096, cuda::Packing::q4},
                        {{T::q4_0, T::q4_1}, 16, 4256, 576, cuda::Packing::q4},
                        {{T::q4_1, T::q4_1}, 9, 160, 8192, cuda::Packing::q4},
                        {{T::q4_0}, 13, 128, 4096, cuda::Packing::q4},
                        {{T::q8_0, T::q8_0}, 16, 64, 4096, cuda::Packing::q8},
                        {{T::q8_0}, 8, 64, 14336, cuda::Packing::q8},
                        {{T::q6_k, T::q6_k}, 5, 2112, 4096, cuda::Packing::q6},
                        {{T::q6_k}, 16, 64, 14336, cuda::Packing::q6},
                        {{T::nvfp4, T::nvfp4}, 3, 2112, 544, cuda::Packing::q6},
                        {{T::nvfp4}, 40, 256, 4096, cuda::Packing::q6},
                        {{T::q8_0}, 1, 960, 576, cuda::Packing::q8},
                        {{T::q8_0}, 5, 4224, 1056, cuda::Packing::q8},
                        {{T::q8_0}, 16, 4256, 2048, cuda::Packing::q8},
                        {{T::q6_k}, 1, 48, 4096, cuda::Packing::q6},
                        {{T::q6_k}, 7, 4256, 1024, cuda::Packing::q6},
                        {{T::q6_k}, 16, 4224, 1280, cuda::Packing::q6},
                        {{T::q5_0}, 3, 96, 608, cuda::Packing::q6},
                        {{T::q5_1}, 3, 96, 576, cuda::Packing::q6},
                        {{T::q5_k}, 12, 96, 512, cuda::Packing::q6},
                        {{T::q3_k}, 2, 96, 768, cuda::Packing::q6},
                        {{T::q2_k}, 2, 96, 768, cuda::Packing::q6},
                        {{T::iq4_nl}, 3, 96, 608, cuda::Packing::q8},
                        {{T::iq4_xs, T::iq4_xs}, 9, 64, 1280, cuda::Packing::q8},
                        {{T::mxfp4}, 5, 4224, 1056, cuda::Packing::q8},
                        {{T::int4}, 2, 96, 608, cuda::Packing::q4, 32},
                        {{T::int4}, 1, 64, 640, cuda::Packing::q4_128, 128},
                        {{T::int4}, 16, 64, 14336, cuda::Packing::q4_128, 128},
                        {{T::int4}, 7, 4256, 1024, cuda::Packing::q4_128, 1024},
                        {{T::int4}, 16, 4224, 1280, cuda::Packing::q4_128, 128},
                        {{T::int4, T::int4}, 37, 160, 2048, cuda::Packing::q4_128, 256},
                        {{T::int4, T::int4}, 1, 2112, 4096, cuda::Packing::q4_128, 128},
                        {{T::int4, T::int4}, 16, 2112, 4096, cuda::Packing::q4_128, 128},
                        {{T::int4, T::q6_k}, 4, 112, 512, cuda::Packing::q6, 128},
                        {{T::int4, T::q4_k}, 4, 112, 512, cuda::Packing::q4, 128},
                        {{T::q4_0}, 16, 36992, 160, cuda::Packing::q4},
                        {{T::f8_e4m3}, 1, 960, 576, cuda::Packing::e4m3},
                        {{T::f8_e4m3}, 5, 4224, 1056, cuda::Packing::e4m3},
                        {{T::f8_e4m3}, 16, 4256, 2048, cuda::Packing::e4m3},
                        {{T::f8_e4m3}, 8, 64, 14336, cuda::Packing::e4m3},
                        {{T::f8_e4m3, T::f8_e4m3}, 16, 64, 4096, cuda::Packing::e4m3},
                        {{T::f8_e4m3, T::f8_e4m3}, 9, 2112, 4096, cuda::Packing::e4m3},
                        {{T::q4_k, T::q4_k, T::q6_k}, 4, 112, 512, cuda::Packing::q6}}) {
    std::vector<std::unique_ptr<Quantized>> parts;
    std::vector<HostTensor> tensors;
    for (T type : c.types) {
      parts.push_back(quantized(type, c.n, c.k, uint32_t(parts.size() + 1), c.group));
      tensors.push_back(parts.back()->tensor);
      if (c.types.size() == 2)
        tensors.back().name = parts.size() == 1 ? "blk.0.ffn_gate.weight" : "blk.0.ffn_up.weight";
    }
    SCOPED_TRACE(cat(type_info(c.types.back())->name, ", ", c.types.size(), " parts"));
    cuda::Weight w;
    ASSERT_TRUE(cuda::load_weight(tensors, cuda::Quantize::as_stored, pool, nullptr, &w).ok());
    ASSERT_EQ(w.packing, c.packing);
    // Gates want their own rows in turn with others'.
    const auto forms = w.half > 0 ? std::vector{cuda::Form::silu, cuda::Form::gelu}
                                  : std::vector{cuda::Form::f32, cuda::Form::added_f32, cuda::Form::bf16};
    auto value = [&](int64_t f, int64_t i) { return parts[size_t(f / c.n)]->values[size_t(f % c.n * c.k + i)]; };
    // d * scale of the K types, and their much larger offsets, are rounded to float16.
    check_against(c.rows, w.rows, c.k, 2e-3, forms, value, [&](const void* in, void* out, cuda::Form form) {
      const int64_t n = form == cuda::Form::silu || form == cuda::Form::gelu ? w.rows / 2 : w.rows;
      cuda::launch_packed(w.packing, in, w.data.get(), w.unit, out, c.rows, n, c.k, form, nullptr);
    });
    // Of many rows elements are rounded to bfloat16 first, as unpacked ones are.
    const int64_t many = std::array{17, 33, 64, 65, 100, 128, 130}[size_t(turn++ % 7)];
    const auto product_of_many = [&](const void* in, void* out, cuda::Form form) {
      const int64_t n = form == cuda::Form::silu || form == cuda::Form::gelu ? w.rows / 2 : w.rows;
      cuda::launch_packed_many(w.packing, in, w.data.get(), w.unit, out, many, n, c.k, form, nullptr);
    };
    check_against(many, w.rows, c.k, 1e-2, forms, value, product_of_many, 8e-2);
    attention::cuda::DeviceMemory out, ids;
    ASSERT_TRUE(out.allocate(size_t(w.rows * c.k) * 4).ok());
    const int64_t first = w.rows / 2;
    cuda::launch_unpack(w.packing, w.data.get(), w.unit, w.half, out.get(), first, w.rows - first, c.k, nullptr);
    std::vector<uint16_t> unpacked(size_t((w.rows - first) * c.k));
    ASSERT_EQ(cudaMemcpy(unpacked.data(), out.get(), unpacked.size() * 2, cudaMemcpyDefault), cudaSuccess);
    for (int64_t i = 0; i < c.k; ++i)
      for (int64_t f = first; f < w.rows; f += 13)
        ASSERT_NEAR(whole(unpacked[size_t((f - first) * c.k + i)]), value(f, i), std::fabs(value(f, i)) / 100 + 1e-4f);
    if (w.half > 0) continue;  // no table of tokens
    const std::vector<int32_t> tokens = {0, -2, int32_t(w.rows - 1)}, drawn = {5, 9};
    attention::cuda::DeviceMemory before;
    ASSERT_TRUE(ids.upload(tokens.data(), 12).ok() && before.upload(drawn.data(), 8).ok());
    cuda::launch_embed_packed(w.packing, ids.as<int32_t>(), before.as<int32_t>(), w.data.get(), w.unit, 2.0f,
                              out.as<float>(), 3, c.k, nullptr);
    std::vector<float> looked_up(size_t(3 * c.k));
    ASSERT_EQ(cudaMemcpy(looked_up.data(), out.get(), looked_up.size() * 4, cudaMemcpyDefault), cudaSuccess);
    for (int64_t i = 0; i < c.k; ++i) {
      int at = 0;
      for (int64_t f : {int64_t(0), int64_t(9), w.rows - 1}) {
        ASSERT_NEAR(looked_up[size_t(at * c.k + i)], 2 * value(f, i), std::fabs(value(f, i)) / 100 + 1e-4f);
        ++at;
      }
    }
  }
}

// As a folder has them, by inputs in turn: in blocks of 128 where a group fills them, else of 32; else bfloat16.
TEST_F(CudaProducts, FourBitsOfFoldersStayPacked) {
  if (!cuda::packs(16, 32)) GTEST_SKIP() << "skipped: no copy engine";
  ThreadPool pool(2);
  constexpr int64_t kRows = 64, kCols = 512;
  std::mt19937 random(3);
  for (int64_t groups : {1, 4, 8, 16, 32}) {
    SCOPED_TRACE(groups);
    std::vector<uint8_t> words(size_t(kRows * kCols / 2)), zeros(size_t(kRows * groups / 2));
    std::vector<uint16_t> scales(size_t(kRows * groups));
    for (uint8_t& b : words) b = uint8_t(random());
    for (uint8_t& b : zeros) b = uint8_t(random());
    for (uint16_t& s : scales) s = f32_to_f16(std::ldexp(float(1 + random() % 1000), -16));
    const Int4 in{.form = Int4::Form::awq,
                  .rows = kRows,
                  .cols = kCols,
                  .groups = groups,
                  .words = words.data(),
                  .zeros = zeros.data(),
                  .scales = reinterpret_cast<const uint8_t*>(scales.data())};
    const auto t = int4_tensor("blk.0.attn_q.weight", in);
    ASSERT_TRUE(t.ok()) << t.status().message();
    cuda::Weight w;
    ASSERT_TRUE(cuda::load_weight({&*t, 1}, cuda::Quantize::as_stored, pool, nullptr, &w).ok());
    ASSERT_EQ(w.packing, groups > 16 ? cuda::Packing::bf16 : groups > 4 ? cuda::Packing::q4 : cuda::Packing::q4_128);
    if (!cuda::is_blocks(w.packing)) continue;
    EXPECT_EQ(w.bytes, kRows * kCols * (groups > 4 ? 5 * 8 : 34) / 64) << "5, and 4.25 bits";
    attention::cuda::DeviceMemory out;
    ASSERT_TRUE(out.allocate(size_t(kRows * kCols) * 2).ok());
    cuda::launch_unpack(w.packing, w.data.get(), w.unit, w.half, out.get(), 0, kRows, kCols, nullptr);
    std::vector<uint16_t> unpacked(size_t(kRows * kCols));
    ASSERT_EQ(cudaMemcpy(unpacked.data(), out.get(), unpacked.size() * 2, cudaMemcpyDefault), cudaSuccess);
    std::vector<float> row(static_cast<size_t>(kCols));
    for (int64_t r = 0; r < kRows; ++r) {
      dequantize(t->type, t->data + r * t->row_bytes(), kCols, row.data());
      for (int64_t c = 0; c < kCols; ++c)
        ASSERT_NEAR(whole(unpacked[size_t(r * kCols + c)]), row[size_t(c)], std::fabs(row[size_t(c)]) / 100 + 1e-4f);
    }
  }
}

// A checkpoint's E4M3 is multiplied as it is.
TEST_F(CudaProducts, BytesOfACheckpoint) {
  if (!cuda::multiplies_bytes()) GTEST_SKIP() << "skipped: no matrix unit for E4M3";
  ThreadPool pool(2);
  constexpr int64_t kRows = 32, kCols = 160;
  std::vector<uint8_t> bytes(size_t(2 * kRows * kCols));
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = uint8_t(i * 37 % 127);
  std::vector<HostTensor> parts(2);
  for (int p : {0, 1}) {
    parts[size_t(p)] = {p ? "blk.0.attn_k.weight" : "blk.0.attn_q.weight",
                        WeightType::f8_e4m3,
                        kRows,
                        kCols,
                        bytes.data() + p * kRows * kCols,
                        kRows * kCols};
    for (int64_t r = 0; r < kRows; ++r)
      parts[size_t(p)].row_scales.push_back(std::ldexp(float(1 + p * kRows + r), -16));
  }
  cuda::Weight w, widened;
  ASSERT_TRUE(cuda::load_weight(parts, cuda::Quantize::as_stored, pool, nullptr, &w).ok());
  ASSERT_EQ(w.packing, cuda::Packing::fp8);
  check_against(
      3, 2 * kRows, kCols, 1e-5, {cuda::Form::f32},
      [&](int64_t f, int64_t i) { return e4m3(bytes[size_t(f * kCols + i)]) * std::ldexp(float(1 + f), -16); },
      [&](const void* in, void* out, cuda::Form form) {
        cuda::launch_streamed_bytes(in, w.data.get(), w.scales.as<float>(), out, 3, 2 * kRows, kCols, form, nullptr);
      });
  ASSERT_TRUE(cuda::load_weight(parts, cuda::Quantize::bf16, pool, nullptr, &widened).ok());
  ASSERT_EQ(widened.packing, cuda::Packing::bf16);
  std::vector<uint16_t> half(bytes.size());
  ASSERT_EQ(cudaMemcpy(half.data(), widened.data.get(), half.size() * 2, cudaMemcpyDefault), cudaSuccess);
  for (int64_t i = 0; i < 2 * kRows * kCols; ++i)
    ASSERT_NEAR(whole(half[size_t(i)]), e4m3(bytes[size_t(i)]) * std::ldexp(float(1 + i / kCols), -16), 2e-3);
}

// A dummy's packed weights are those of the host, packed.
TEST_F(CudaProducts, SeededBlocksAreTheOnesOfTheHost) {
  if (!cuda::packs(16, 32)) GTEST_SKIP() << "skipped: no copy engine";
  ThreadPool pool(2);
  for (const std::string type : {"q4_0", "q4_1", "q8_0", "int4"}) {
    auto config = config_from_dummy("llama,seed=5,type=" + type);
    ASSERT_TRUE(config.ok());
    const auto host = dummy_weights(*config), device = dummy_weights(*config);
    device->leave_seeded();
    const std::vector<HostTensor> there = {*device->get("blk.0.ffn_gate.weight", 48, 608),
                                           *device->get("blk.0.ffn_up.weight", 48, 608)},
                                  here = {*host->get("blk.0.ffn_gate.weight", 48, 608),
                                          *host->get("blk.0.ffn_up.weight", 48, 608)};
    cuda::Weight made, packed;
    ASSERT_TRUE(cuda::load_weight(there, cuda::Quantize::as_stored, pool, nullptr, &made).ok());
    ASSERT_TRUE(cuda::load_weight(here, cuda::Quantize::as_stored, pool, nullptr, &packed).ok());
    ASSERT_EQ(made.packing, packed.packing);
    ASSERT_EQ(made.bytes, packed.bytes);
    std::vector<uint16_t> out[2];
    for (auto [w, o] : {std::pair(&made, &out[0]), std::pair(&packed, &out[1])}) {
      attention::cuda::DeviceMemory half;
      ASSERT_TRUE(half.allocate(size_t(w->rows * w->cols) * 2).ok());
      cuda::launch_unpack(w->packing, w->data.get(), w->unit, w->half, half.get(), 0, w->rows, w->cols, nullptr);
      o->resize(size_t(w->rows * w->cols));
      ASSERT_EQ(cudaMemcpy(o->data(), half.get(), o->size() * 2, cudaMemcpyDefault), cudaSuccess);
    }
    EXPECT_EQ(out[0], out[1]) << type;
  }
}

// What would leave features or elements over goes to the library.
TEST_F(CudaProducts, FewRowsTakeWhatFillsItsBlocks) {
  using cuda::Form;
  EXPECT_TRUE(cuda::few_rows_takes(1, 960, 576, Form::bf16));
  EXPECT_FALSE(cuda::few_rows_takes(33, 960, 576, Form::bf16));
  EXPECT_FALSE(cuda::few_rows_takes(1, 24, 576, Form::silu)) << "48 rows of weights, but 24 features";
  EXPECT_FALSE(cuda::few_rows_takes(1, 960, 584, Form::f32));
  EXPECT_FALSE(cuda::few_rows_takes(9, 4096, 4096, Form::added_f32)) << "long rows";
  EXPECT_FALSE(cuda::few_rows_takes(1, 128256, 4096, Form::f32)) << "many weights";
}

TEST_F(CudaProducts, StreamedTakesManyWeights) {
  using cuda::Form;
  EXPECT_TRUE(cuda::streamed_takes(1, 4096, 14336, Form::added_f32));
  EXPECT_TRUE(cuda::streamed_takes(8, 14336, 4096, Form::silu));
  EXPECT_TRUE(cuda::streamed_takes(32, 4096, 14336, Form::added_f32));
  EXPECT_FALSE(cuda::streamed_takes(33, 4096, 14336, Form::added_f32));
  EXPECT_FALSE(cuda::streamed_takes(17, 128256, 4096, Form::f32)) << "the rows are read too often";
  EXPECT_FALSE(cuda::streamed_takes(9, 49152, 576, Form::f32)) << "short rows";
  EXPECT_FALSE(cuda::streamed_takes(1, 960, 576, Form::bf16)) << "few weights";
  EXPECT_FALSE(cuda::streamed_takes(1, 4104, 4096, Form::bf16)) << "features over";
  EXPECT_FALSE(cuda::streamed_takes(1, 4096, 4128, Form::bf16)) << "elements over";
}

}  // namespace
}  // namespace kvasir::model
