// StreamingLLM on the device: keys and queries that are rotated as they are read, in every kind of cache, for decodes,
// for prompts, and for chunks that follow, whose queries begin their windows at different keys.
#include <algorithm>

#include "attention/rope.h"
#include "tests/attention/cuda_testing.h"

namespace kvasir::attention {
namespace {
using namespace testing;

using Sequences = std::vector<CaseShape::Sequence>;

struct Kept {
  DType type;
  int group;  // 0: one scale for all; -1: none
  DType io;
};

CaseShape streaming(const Kept& kept, int head_dim, int kv_heads, int group, RopeStyle style) {
  CaseShape s;
  Attributes& a = s.attributes;
  a.num_kv_heads = kv_heads, a.num_heads = kv_heads * group, a.head_dim = head_dim;
  a.io = a.out = kept.io;
  RopeConfig rope;
  rope.style = style, rope.rotary_dim = head_dim;
  a.rope = rope_frequencies(rope).value();
  a.streaming_positions = true;
  a.return_lse = true;
  s.cache.dtype = kept.type;
  if (kept.group > 0) {
    s.cache.quant = kvcache::QuantKind::group, s.cache.quant_group = kept.group, s.cache.scale_dtype = DType::f16;
  } else if (kept.group == 0) {
    s.cache.quant = kvcache::QuantKind::per_tensor;
    s.cache.k_scale = kept.type == DType::i8 ? 0.03f : 0.01f, s.cache.v_scale = kept.type == DType::i8 ? 0.025f : 0.02f;
  }
  return s;
}

void expect_agreement(const CaseShape& s, uint64_t seed) {
  const Case before = make_case(s, seed);
  Case after = before;
  CaseOutput got;
  const Status status = run_on_device(after, &got);
  ASSERT_TRUE(status.ok()) << status.to_string();
  // Queries and keys are rounded to 16 bits once they are rotated.
  EXPECT_EQ(compare_with_reference(before, after, got, 4.0, 4.0 * row_tolerance(s.attributes.io)), "")
      << describe(before);
}

// What is behind the window was cut out of what the operator is told, or was not; few keys, and many.
const Sequences kSteps[] = {
    {{0, 1}, {3, 1}, {40, 1}, {200, 1}, {700, 1}, {1500, 1}},  // decodes
    {{0, 100}, {0, 7}},                                        // prompts
    {{60, 30}, {150, 64}, {400, 5}, {3, 40}},                  // chunks that follow
    {{300, 1}, {90, 1}, {120, 40}, {0, 50}},                   // all of them
};

TEST_F(Cuda, StreamingInEveryKindOfCache) {
  const Kept kinds[] = {
      {DType::bf16, -1, DType::bf16},   {DType::f16, -1, DType::bf16}, {DType::f16, -1, DType::f16},
      {DType::f8_e4m3, 0, DType::bf16}, {DType::i8, 0, DType::bf16},   {DType::i8, 8, DType::bf16},
      {DType::i8, 64, DType::bf16},     {DType::i4, 32, DType::bf16},
  };
  uint64_t seed = 7000;
  for (const Kept& kept : kinds)
    for (int head_dim : {64, 128})
      for (RopeStyle style : {RopeStyle::neox, RopeStyle::gptj})
        for (const Sequences& sequences : kSteps) {
          CaseShape s = streaming(kept, head_dim, 2, 4, style);
          s.attributes.window = 100, s.attributes.sinks = 4;
          s.sequences = sequences;
          expect_agreement(s, ++seed);
        }
}

TEST_F(Cuda, StreamingWithWindowsAndSinksOfAnySize) {
  const std::pair<int, int> windows[] = {{1, 0}, {16, 0}, {64, 63}, {130, 70}, {1024, 4}, {3000, 1}};
  uint64_t seed = 7500;
  for (const auto& [window, sinks] : windows)
    for (int group : {1, 3, 8})
      for (const Sequences& sequences : kSteps) {
        CaseShape s = streaming({DType::bf16, -1, DType::bf16}, 128, 1, group, RopeStyle::neox);
        s.attributes.window = window, s.attributes.sinks = sinks;
        s.sequences = sequences;
        s.decoding_batches = int64_t(std::count_if(sequences.begin(), sequences.end(),
                                                   [](const CaseShape::Sequence& q) { return q.fresh == 1; }));
        expect_agreement(s, ++seed);
      }
}

// Queries that become E4M3 do so once they are rotated, by whoever rotates them.
TEST_F(Cuda, StreamingWithFp8Queries) {
  uint64_t seed = 7800;
  for (int head_dim : {64, 96, 128})  // heads of 96: the kernel of all variants
    for (const Sequences& sequences : kSteps) {
      CaseShape s = streaming({DType::f8_e4m3, 0, DType::bf16}, head_dim, 2, 4, RopeStyle::neox);
      s.attributes.fp8_query = true, s.attributes.q_scale = 0.02f;
      s.attributes.window = 100, s.attributes.sinks = 4;
      s.sequences = sequences;
      expect_agreement(s, ++seed);
    }
}

}  // namespace
}  // namespace kvasir::attention
