// Products of E4M3 weights on a GPU, streamed and by the library, and what scales their results.
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "model/cuda/cublas.h"
#include "model/cuda/fp8.h"
#include "model/cuda/kernels.h"
#include "model/cuda/streamed.h"
#include "model/cuda/weight.h"
#include "tests/model/cuda_products.h"

namespace kvasir::model {
namespace {

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

// A checkpoint's E4M3 is multiplied as it is.
TEST_F(CudaProducts, BytesOfACheckpoint) {
  if (!cuda::multiplies_bytes()) GTEST_SKIP() << "skipped: no matrix unit for E4M3";
  cuda::Upload upload(2, nullptr);
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
  ASSERT_TRUE(cuda::load_weight(parts, cuda::Quantize::as_stored, upload, &w).ok());
  ASSERT_EQ(w.packing, cuda::Packing::fp8);
  check_against(
      3, 2 * kRows, kCols, 1e-5, {cuda::Form::f32},
      [&](int64_t f, int64_t i) { return e4m3(bytes[size_t(f * kCols + i)]) * std::ldexp(float(1 + f), -16); },
      [&](const void* in, void* out, cuda::Form form) {
        cuda::launch_streamed_bytes(in, w.data.get(), w.scales.as<float>(), out, 3, 2 * kRows, kCols, form, nullptr);
      });
  ASSERT_TRUE(cuda::load_weight(parts, cuda::Quantize::bf16, upload, &widened).ok());
  ASSERT_EQ(widened.packing, cuda::Packing::bf16);
  std::vector<uint16_t> half(bytes.size());
  ASSERT_EQ(cudaMemcpy(half.data(), widened.data.get(), half.size() * 2, cudaMemcpyDefault), cudaSuccess);
  for (int64_t i = 0; i < 2 * kRows * kCols; ++i)
    ASSERT_NEAR(whole(half[size_t(i)]), e4m3(bytes[size_t(i)]) * std::ldexp(float(1 + i / kCols), -16), 2e-3);
}

}  // namespace
}  // namespace kvasir::model
