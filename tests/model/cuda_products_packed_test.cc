// Products of packed weights on a GPU: of GGUF files, of folders with 4 bits, of a dummy.
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "model/cuda/packed.h"
#include "model/cuda/seeded.h"
#include "model/cuda/weight.h"
#include "model/formats/dummy.h"
#include "model/formats/int4.h"
#include "tests/model/cuda_products.h"

namespace kvasir::model {
namespace {

// Packed weights of every type, parts of different types too, as they are multiplied, unpacked and looked up.
TEST_F(CudaProducts, ProductsOfPackedWeights) {
  if (!cuda::packs()) GTEST_SKIP() << "skipped: no copy engine";
  cuda::Upload upload(2, nullptr);
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
    ASSERT_TRUE(cuda::load_weight(tensors, cuda::Quantize::as_stored, upload, &w).ok());
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
  if (!cuda::packs()) GTEST_SKIP() << "skipped: no copy engine";
  cuda::Upload upload(2, nullptr);
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
    ASSERT_TRUE(cuda::load_weight({&*t, 1}, cuda::Quantize::as_stored, upload, &w).ok());
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

// A dummy's packed weights are those of the host, packed.
TEST_F(CudaProducts, SeededBlocksAreTheOnesOfTheHost) {
  if (!cuda::packs()) GTEST_SKIP() << "skipped: no copy engine";
  cuda::Upload upload(2, nullptr);
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
    ASSERT_TRUE(cuda::load_weight(there, cuda::Quantize::as_stored, upload, &made).ok());
    ASSERT_TRUE(cuda::load_weight(here, cuda::Quantize::as_stored, upload, &packed).ok());
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

}  // namespace
}  // namespace kvasir::model
