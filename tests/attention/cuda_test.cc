// cuda against reference on random cases, by section 9; without a device: skipped.
// KVASIR_ATTENTION_CASES says how many, KVASIR_ATTENTION_SEED starts elsewhere.
#include <tuple>

#include "tests/attention/cuda_testing.h"

namespace kvasir::attention {
namespace {
using namespace testing;

void expect_agreement(int64_t first, int64_t count, const CaseOptions& options) {
  int failures = 0;
  for (int64_t seed = first; seed < first + count && failures < 20; ++seed) {
    const Case before = random_case(uint64_t(seed), options);
    Case after = before;
    CaseOutput got;
    Status status = run_on_device(after, &got);
    // A query with RoPE or a bias is rounded to the io type before the matrix units see it, and int8 groups under
    // 32 are widened to float16 element by element: where scores are huge that alone is more than r.
    const Attributes& a = before.attributes;
    const bool rounded = a.io != DType::f32 && (a.rope.style != RopeStyle::none || !before.qkv_bias.empty() ||
                                                before.view.quant == kvcache::QuantKind::group);
    // FP8 queries of many rows are multiplied in FP8, which has its own r.
    const bool fp8 =
        (a.io == DType::f8_e4m3 || (a.fp8_query && a.io == DType::bf16)) && (a.head_dim == 64 || a.head_dim == 128);
    const double widen = fp8       ? row_tolerance(DType::f8_e4m3) / row_tolerance(a.out)
                         : rounded ? 4.0
                                   : 1.0,
                 slack = a.io == DType::f32 ? 0.0 : widen * row_tolerance(a.io);
    std::string wrong = status.ok() ? compare_with_reference(before, after, got, widen, slack) : status.to_string();
    if (!wrong.empty()) ++failures;
    EXPECT_EQ(wrong, "") << "seed " << seed << ": " << describe(before);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << "the device is lost; seed " << seed << ": " << describe(before);
  }
}

TEST_F(Cuda, RandomCasesAgreeWithTheReference) {
  expect_agreement(setting("KVASIR_ATTENTION_SEED", 1), setting("KVASIR_ATTENTION_CASES", 300), on_device());
}

// Long enough for many tiles, parts and merges.
TEST_F(Cuda, LargerRandomCasesAgreeWithTheReference) {
  CaseOptions options = on_device();
  options.max_kvlen = 2500;
  options.max_work = 60'000'000;
  expect_agreement(setting("KVASIR_ATTENTION_SEED", 1) + 100'000, setting("KVASIR_ATTENTION_CASES", 300) / 8, options);
}

// Cases that read past the table of rank angles, which was sized for steps that append.
TEST_F(Cuda, StreamingPositionsWithoutAppendAgreeWithTheReference) {
  for (int64_t seed : {308096, 309035, 310073}) expect_agreement(seed, 1, on_device());
}

// A key's element whose two products nearly cancel when it is turned: with angles rounded to float32 it was past a
// step.
TEST_F(Cuda, ElementsThatNearlyCancelAreStoredToTheLastPlace) { expect_agreement(6100039, 1, on_device()); }

// Long prompts of FP8 inputs that are multiplied as bfloat16: with their scales in the operands it was past its bound.
TEST_F(Cuda, Fp8InputsAgreeWithTheReferenceInBfloat16) { expect_agreement(2002064, 1, on_device()); }

// Rows of few keys of much the same weight, whose errors do not average out, with what an FP8 output adds to them.
TEST_F(Cuda, Fp8PrefillOfFewKeysAgreesWithTheReference) {
  for (int64_t seed : {13120153, 16600028, 16600048}) expect_agreement(seed, 1, on_device());
}

// Prompts with nothing cached, whose K/V go into a cache of their own type as they are: prefill itself stores them,
// in every layout and in pieces of a row, while decodes beside them are stored before.
TEST_F(Cuda, PromptsStoredWhileTheyAreAttended) {
  uint64_t seed = 1;
  for (int layout = 0; layout < 4; ++layout)
    for (auto [heads, kv_heads, dim] : {std::tuple{8, 2, 128}, {12, 12, 128}, {16, 16, 72}, {9, 3, 64}})
      for (bool decodes : {false, true}) {
        const DType type = seed / 2 % 2 ? DType::bf16 : DType::f16;
        CaseShape shape;
        Attributes& a = shape.attributes;
        a.num_heads = heads, a.num_kv_heads = kv_heads, a.head_dim = dim;
        a.io = a.out = type;
        a.is_causal = true;
        a.index_mode = kvcache::IndexMode::page_table;
        a.page_size = 16;
        shape.cache.dtype = type;
        shape.layout = layout;
        if (decodes) shape.sequences = {{100, 1}, {40, 1}}, shape.decoding_batches = 2;
        for (int64_t n : {40, 140}) shape.sequences.push_back({0, n});
        const Case before = make_case(shape, ++seed);
        Case after = before;
        CaseOutput got;
        const Status status = run_on_device(after, &got);
        ASSERT_TRUE(status.ok()) << status.to_string();
        EXPECT_EQ(compare_with_reference(before, after, got, 1.0, row_tolerance(type)), "") << describe(before);
      }
}

// A step's writes come before its reads, another sequence's as well: a decode has a page that a prompt fills.
TEST_F(Cuda, DecodesReadWhatAPromptOfTheSameStepWrites) {
  CaseShape shape;
  Attributes& a = shape.attributes;
  a.num_heads = 8, a.num_kv_heads = 2, a.head_dim = 128;
  a.io = a.out = DType::bf16;
  a.is_causal = true;
  a.index_mode = kvcache::IndexMode::page_table;
  a.page_size = 16;
  shape.cache.dtype = DType::bf16;
  shape.layout = 2;
  shape.sequences = {{3000, 1}, {100, 1}, {0, 2900}};
  shape.decoding_batches = 2;
  Case before = make_case(shape, 78);
  for (int64_t page : {2, 180})
    before.cachestarts[size_t(page)] = before.cachestarts[size_t(2 * before.max_pages + page)];
  Case after = before;
  CaseOutput got;
  const Status status = run_on_device(after, &got);
  ASSERT_TRUE(status.ok()) << status.to_string();
  EXPECT_EQ(compare_with_reference(before, after, got, 1.0, row_tolerance(a.io)), "") << describe(before);
}

// Chunks beside each other and beside a decode: prefixes of whole tiles and others, pages smaller and larger than a
// tile, more cached keys in one step than the longest sequence has.
TEST_F(Cuda, ChunksOnCachedPrefixesAgreeWithTheReference) {
  uint64_t seed = 500;
  for (int layout = 0; layout < 4; ++layout)
    for (int page : {16, 64, 256})
      for (auto [heads, kv_heads, dim] : {std::tuple{8, 2, 128}, {6, 6, 72}, {9, 3, 64}}) {
        const DType type = ++seed % 2 ? DType::bf16 : DType::f16;
        CaseShape shape;
        Attributes& a = shape.attributes;
        a.num_heads = heads, a.num_kv_heads = kv_heads, a.head_dim = dim;
        a.io = a.out = type;
        a.is_causal = seed % 5 > 0;
        a.return_lse = true;
        a.index_mode = kvcache::IndexMode::page_table;
        a.page_size = page;
        shape.cache.dtype = type;
        shape.layout = layout;
        shape.sequences = {{300, 1}, {384, 40}, {128, 130}, {333, 70}, {127, 33}, {0, 50}, {395, 12}};
        shape.decoding_batches = 1;
        const Case before = make_case(shape, seed);
        Case after = before;
        CaseOutput got;
        const Status status = run_on_device(after, &got);
        ASSERT_TRUE(status.ok()) << status.to_string();
        EXPECT_EQ(compare_with_reference(before, after, got, 1.0, row_tolerance(type)), "") << describe(before);
      }
}

// Wider heads than the fast kernels take, as Gemma 4's: decodes, chunks and a prompt.
TEST_F(Cuda, HeadsOfUpTo512AgreeWithTheReference) {
  uint64_t seed = 900;
  for (auto [heads, kv_heads, dim] : {std::tuple{8, 2, 512}, {4, 4, 320}, {8, 1, 512}})
    for (DType type : {DType::bf16, DType::f16}) {
      CaseShape shape;
      Attributes& a = shape.attributes;
      a.num_heads = heads, a.num_kv_heads = kv_heads, a.head_dim = dim;
      a.io = a.out = type;
      a.is_causal = true;
      a.index_mode = kvcache::IndexMode::page_table;
      a.page_size = 16;
      shape.cache.dtype = type;
      shape.layout = int(seed % 4);
      shape.sequences = {{300, 1}, {40, 1}, {128, 37}, {0, 50}};
      shape.decoding_batches = 2;
      const Case before = make_case(shape, ++seed);
      Case after = before;
      CaseOutput got;
      const Status status = run_on_device(after, &got);
      ASSERT_TRUE(status.ok()) << status.to_string();
      EXPECT_EQ(compare_with_reference(before, after, got, 1.0, row_tolerance(type)), "") << describe(before);
    }
}

// Every kernel of a mixed step at once.
TEST_F(Cuda, PromptsBesideManyDecodes) {
  for (DType cache : {DType::bf16, DType::i8}) {
    CaseShape shape;
    Attributes& a = shape.attributes;
    a.num_heads = 8, a.num_kv_heads = 2, a.head_dim = 128;
    a.io = a.out = DType::bf16;
    a.is_causal = true;
    a.index_mode = kvcache::IndexMode::page_table;
    a.page_size = 16;
    shape.cache.dtype = cache;
    if (cache == DType::i8)
      shape.cache.quant = kvcache::QuantKind::per_tensor, shape.cache.k_scale = 0.03f, shape.cache.v_scale = 0.025f;
    shape.sequences.assign(80, {1500, 1});
    shape.decoding_batches = 80;
    shape.sequences.push_back({700, 5});
    for (int64_t n : {300, 777}) shape.sequences.push_back({0, n});
    const Case before = make_case(shape, 77);
    Case after = before;
    CaseOutput got;
    const Status status = run_on_device(after, &got);
    ASSERT_TRUE(status.ok()) << status.to_string();
    EXPECT_EQ(compare_with_reference(before, after, got, 1.0, row_tolerance(a.io)), "") << describe(before);
  }
}

// The caches whose groups the stream kernel knows when it is compiled: every length of a last tile, runs that are
// merged.
TEST_F(Cuda, DecodesOfTheUsualQuantizedCachesAgreeWithTheReference) {
  for (auto [type, group] : {std::pair{DType::i8, 64}, {DType::i4, 32}})
    for (DType scale : {DType::f16, DType::f32})
      for (DType io : {DType::bf16, DType::f16}) {
        CaseShape shape;
        Attributes& a = shape.attributes;
        a.num_heads = 8, a.num_kv_heads = 2, a.head_dim = 128;
        a.io = a.out = io;
        a.index_mode = kvcache::IndexMode::page_table;
        a.page_size = 16;
        shape.cache.dtype = type, shape.cache.scale_dtype = scale;
        shape.cache.quant = kvcache::QuantKind::group, shape.cache.quant_group = group;
        for (int64_t past : {0, 31, 32, 63, 100, 700, 1500}) shape.sequences.push_back({past, 1});
        shape.sequences.push_back({90, 2});
        const Case before = make_case(shape, uint64_t(group));
        Case after = before;
        CaseOutput got;
        const Status status = run_on_device(after, &got);
        ASSERT_TRUE(status.ok()) << status.to_string();
        EXPECT_EQ(compare_with_reference(before, after, got, 4.0, 4.0 * row_tolerance(io)), "") << describe(before);
      }
}

}  // namespace
}  // namespace kvasir::attention
