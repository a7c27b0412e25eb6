// Prefill in FP8, alone and beside decodes: E4M3 inputs against the reference on the same values.
#include "attention/rope.h"
#include "tests/attention/cuda_testing.h"

namespace kvasir::attention {
namespace {
using namespace testing;

TEST_F(Cuda, Fp8PrefillAgreesWithTheReference) {
  using Sequences = std::vector<CaseShape::Sequence>;
  const std::pair<Sequences, int> steps[] = {
      {{{0, 128}}, 0},
      {{{0, 300}, {0, 9}, {0, 129}}, 0},
      {{{300, 100}, {127, 65}}, 0},
      {{{90, 1}, {400, 1}, {0, 257}}, 2},
      {{{40, 5}, {31, 40}, {1, 300}}, 0},
  };
  uint64_t seed = 900;
  for (int variant = 0; variant < 7; ++variant)
    for (const auto& [sequences, decodes] : steps) {
      CaseShape s;
      Attributes& a = s.attributes;
      a.num_heads = 4, a.num_kv_heads = 2, a.head_dim = variant == 6 ? 64 : 128;
      a.io = DType::f8_e4m3, a.q_scale = 0.02f;
      a.out = variant == 1 ? DType::f8_e4m3 : DType::bf16, a.out_scale = 0.01f;
      a.return_lse = true;
      a.is_causal = variant != 2;
      if (variant == 3) a.window = 150, a.sinks = 3;
      if (variant == 4) a.softcap = 5.0f;
      if (variant == 5) a.is_alibi = true;
      s.cache.dtype = DType::f8_e4m3, s.cache.quant = kvcache::QuantKind::per_tensor;
      s.cache.k_scale = 0.01f, s.cache.v_scale = 0.02f;
      s.sequences = sequences, s.decoding_batches = decodes;
      const Case before = make_case(s, ++seed);
      Case after = before;
      CaseOutput got;
      const Status status = run_on_device(after, &got);
      ASSERT_TRUE(status.ok()) << status.to_string();
      // Weights of three bits, and an output of three more.
      const double r = row_tolerance(DType::f8_e4m3) * (a.out == DType::f8_e4m3 ? 1.5 : 1.0);
      EXPECT_EQ(compare_with_reference(before, after, got, r / row_tolerance(a.out), r), "") << describe(before);
    }
}

// Thousands of weights in one sum: kept in the matrix units, which have 14 bits for it in FP8, it falls short by 6 %.
TEST_F(Cuda, Fp8PrefillOnALongContextAgreesWithTheReference) {
  CaseShape s;
  Attributes& a = s.attributes;
  a.num_heads = a.num_kv_heads = 1, a.head_dim = 128;
  a.io = DType::f8_e4m3, a.q_scale = 0.02f;
  a.out = DType::bf16;
  a.return_lse = true;
  s.cache.dtype = DType::f8_e4m3, s.cache.quant = kvcache::QuantKind::per_tensor;
  s.cache.k_scale = 0.01f, s.cache.v_scale = 0.02f;
  s.sequences = {{8000, 130}};
  const Case before = make_case(s, 950);
  Case after = before;
  CaseOutput got;
  const Status status = run_on_device(after, &got);
  ASSERT_TRUE(status.ok()) << status.to_string();
  const double r = row_tolerance(DType::f8_e4m3);
  EXPECT_EQ(compare_with_reference(before, after, got, r / row_tolerance(a.out), r), "") << describe(before);
}

// As a model is served with FP8 attention: packed bfloat16 rows with a bias, rotated and rounded on their way in;
// prompts and chunks are multiplied as E4M3, decodes read the rounded queries.
TEST_F(Cuda, Fp8AttentionOfPackedRotatedRowsAgreesWithTheReference) {
  using Sequences = std::vector<CaseShape::Sequence>;
  const std::pair<Sequences, int> steps[] = {
      {{{0, 128}}, 0},
      {{{0, 300}, {0, 9}, {0, 129}}, 0},
      {{{300, 100}, {127, 65}}, 0},
      {{{90, 1}, {400, 1}, {0, 257}}, 2},
      {{{33, 1}, {200, 1}, {1000, 1}}, 3},
      {{{500, 1}}, 1},
  };
  uint64_t seed = 960;
  for (int head_dim : {64, 80, 128, 256})  // of 80 and 256: the values in FP8, the products in bfloat16
    for (int variant = 0; variant < 6; ++variant)
      for (const auto& [sequences, decodes] : steps) {
        CaseShape s;
        Attributes& a = s.attributes;
        a.num_heads = 4, a.num_kv_heads = variant == 1 ? 1 : 2, a.head_dim = head_dim;
        a.io = a.out = DType::bf16;
        a.packed_qkv = true;
        a.fp8_query = true, a.q_scale = variant == 0 ? 1.0f : 0.02f;
        a.return_lse = true;
        RopeConfig rope;
        rope.style = variant == 2 ? RopeStyle::gptj : RopeStyle::neox, rope.rotary_dim = head_dim;
        if (variant == 3) rope.rotary_dim = head_dim / 2;
        a.rope = rope_frequencies(rope).value();
        if (variant == 4) a.window = 150, a.sinks = 3;
        if (variant == 5) a.softcap = 5.0f;
        s.cache.dtype = DType::f8_e4m3, s.cache.quant = kvcache::QuantKind::per_tensor;
        s.cache.k_scale = 0.01f, s.cache.v_scale = 0.02f;
        s.sequences = sequences, s.decoding_batches = decodes;
        const Case before = make_case(s, ++seed);
        Case after = before;
        CaseOutput got;
        const Status status = run_on_device(after, &got);
        ASSERT_TRUE(status.ok()) << status.to_string();
        const double r = row_tolerance(DType::f8_e4m3);
        EXPECT_EQ(compare_with_reference(before, after, got, r / row_tolerance(a.out), r), "") << describe(before);
      }
}

}  // namespace
}  // namespace kvasir::attention
