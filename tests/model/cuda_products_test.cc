// Products of bfloat16 weights on a GPU, and the weights of a dummy.
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "model/cuda/cublas.h"
#include "model/cuda/few_rows.h"
#include "model/cuda/kernels.h"
#include "model/cuda/seeded.h"
#include "model/cuda/streamed.h"
#include "model/formats/dummy.h"
#include "tests/model/cuda_products.h"

namespace kvasir::model {
namespace {

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
