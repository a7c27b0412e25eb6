// Section 6: what attention computes, row by row.
#include "attention/rules.h"
#include "tests/attention/testing.h"

namespace kvasir::attention {
namespace {
using namespace testing;

class Attend : public OnBackend {};
KVASIR_ON_BACKENDS(Attend);

TEST_P(Attend, CausalIsBottomRightAligned) {
  CaseShape s = small();
  s.sequences = {{10, 4}};
  Case c = make_case(s);
  reveal_weights(c);
  Outcome o = run(c);
  for (int i = 0; i < 4; ++i)
    for (int h = 0; h < 4; ++h) EXPECT_EQ(seen(o, i, h), range(0, 11 + i));
  EXPECT_FLOAT_EQ(o.row(0, 0)[3], 1.0f / 11);
}

TEST_P(Attend, DecodingBatchesAreExemptFromTheCausalMaskOnly) {
  CaseShape s = small();
  s.sequences = {{5, 3}, {5, 3}};
  s.decoding_batches = 1;
  Case c = make_case(s);
  reveal_weights(c);
  Outcome o = run(c);
  EXPECT_EQ(seen(o, 0, 0), range(0, 8)) << "a decode sees all its keys, whatever its seqlen";
  EXPECT_EQ(seen(o, 3, 0), range(0, 6));
  c.attributes.window = 4;
  EXPECT_EQ(seen(run(c), 0, 0), range(2, 6)) << "the window still applies to it";
  c.attributes.window = 0;
  c.attributes.is_alibi = true;
  EXPECT_EQ(seen(run(c), 0, 0), range(0, 6)) << "and ALiBi's cut";
}

TEST_P(Attend, NotCausalSeesEverything) {
  CaseShape s = small();
  s.attributes.is_causal = false;
  s.sequences = {{5, 3}};
  Case c = make_case(s);
  reveal_weights(c);
  EXPECT_EQ(seen(run(c), 0, 2), range(0, 8));
}

TEST_P(Attend, EmptySequencesWriteNothingAndAreLegal) {
  CaseShape s = small();
  s.sequences = {{3, 0}, {4, 1}, {0, 0}};
  Case c = make_case(s);
  Outcome o = run(c);
  ASSERT_TRUE(o.status.ok()) << o.status.to_string();
  EXPECT_EQ(compare_with_reference(c, o.after, o.out), "");
  s.sequences = {{3, 0}};
  EXPECT_TRUE(run(make_case(s)).status.ok());
}

TEST_P(Attend, MaskIsAdditiveAtTheSequencesRowsAndColumns) {
  CaseShape s = small();
  s.attributes.is_causal = false;
  s.sequences = {{2, 1}, {3, 2}};
  for (int heads : {1, 4}) {
    Case c = make_case(s);
    reveal_weights(c);
    c.mask_row_stride = 11;  // 8 columns are used
    c.mask_head_stride = heads == 1 ? 0 : 3 * 11;
    c.attn_mask.assign(size_t(heads) * 3 * 11 * 4, 0);
    const int head = heads == 1 ? 0 : 2;
    // Sequence 1's second row is row 2; its key 4 is column 3 + 4.
    floats(c.attn_mask)[head * 33 + 2 * 11 + 3 + 4] = -INFINITY;
    floats(c.attn_mask)[head * 33 + 2 * 11 + 3 + 0] = std::log(3.0f);
    Outcome o = run(c);
    EXPECT_EQ(seen(o, 2, 2), range(0, 4));
    EXPECT_FLOAT_EQ(o.row(2, 2)[0], 0.5f);
    EXPECT_EQ(seen(o, 1, 2), range(0, 5));
    EXPECT_EQ(seen(o, 2, 0) == range(0, 5), heads == 4) << "one mask a head, or one for all";
  }
}

TEST_P(Attend, RowWithEverythingMaskedIsExactZeros) {
  CaseShape s = small();
  s.sequences = {{70, 2}};
  Case c = make_case(s);
  c.mask_row_stride = 72;
  c.attn_mask.assign(size_t(2) * 72 * 4, 0);
  for (int j = 0; j < 72; ++j) floats(c.attn_mask)[j] = -INFINITY;
  for (bool sink : {false, true}) {
    if (sink) c.sink_logits = {1, 2, 3, 4};
    Outcome o = run(c);
    for (int h = 0; h < 4; ++h) {
      for (int d = 0; d < 32; ++d) EXPECT_EQ(o.row(0, h)[d], 0.0f);
      EXPECT_EQ(o.lse(0, h), -INFINITY);
      EXPECT_TRUE(std::isfinite(o.lse(1, h)));
    }
  }
}

TEST(AlibiSlopes, PowerOfTwoAndTheRest) {
  std::vector<float> eight = default_alibi_slopes(8), twelve = default_alibi_slopes(12);
  for (int n = 1; n <= 8; ++n) EXPECT_FLOAT_EQ(eight[size_t(n - 1)], std::exp2(-float(n)));
  ASSERT_EQ(twelve.size(), 12u);
  EXPECT_FLOAT_EQ(twelve[7], std::exp2(-8.0f));
  EXPECT_FLOAT_EQ(twelve[8], std::exp2(-0.5f));
  EXPECT_FLOAT_EQ(twelve[9], std::exp2(-1.5f));
}

TEST_P(Attend, AlibiBiasesByDistanceAndCutsAtTheOwnPosition) {
  CaseShape s = small();
  s.attributes.is_alibi = true;
  s.attributes.is_causal = false;
  s.attributes.alibi_slopes = {0.1f, 0.2f, 0.3f, 0.4f};
  s.sequences = {{3, 2}};
  Case c = make_case(s);
  reveal_weights(c);
  Outcome o = run(c);
  EXPECT_EQ(seen(o, 0, 1), range(0, 4));
  for (int h = 0; h < 4; ++h)
    EXPECT_NEAR(std::log(o.row(1, h)[4] / o.row(1, h)[1]), 3 * s.attributes.alibi_slopes[size_t(h)], 1e-5);
}

TEST_P(Attend, RelativeBiasIsByDistanceBothWaysAndGoesOnAsItsLast) {
  CaseShape s = small();
  s.attributes.is_causal = false;
  for (int i = 0; i < 4 * 5; ++i) s.attributes.relative_bias.push_back(0.1f * float(i * i % 7));
  s.sequences = {{3, 9}};
  Case c = make_case(s);
  reveal_weights(c);
  Outcome o = run(c);
  for (int i = 0; i < 9; ++i)
    for (int h = 0; h < 4; ++h)
      for (int j = 0; j < 12; ++j) {
        auto bias = [&](int key) {
          return s.attributes.relative_bias[size_t(h * 5 + 2 + std::clamp(key - 3 - i, -2, 2))];
        };
        EXPECT_NEAR(std::log(o.row(i, h)[j] / o.row(i, h)[0]), bias(j) - bias(0), 1e-5) << i << " " << h << " " << j;
      }
}

TEST_P(Attend, ScaleAndSoftcap) {
  CaseShape s = small(1, 1, 32);
  s.attributes.q_scaling = 0.5f;
  s.sequences = {{1, 1}};
  Case c = make_case(s);
  reveal_weights(c, false);
  const float* q = floats(c.query);
  float k0[32];
  kvcache::CacheView v = c.view;
  v.data = c.cache.data();
  HeldStep held;
  held.assign(c.attributes, c.step());
  kvcache::load_row(v, held.physical(0, 0), 0, 0, false, k0);
  const float* k1 = floats(c.key);
  double dot = 0;
  for (int d = 0; d < 32; ++d) dot += double(q[d]) * (double(k1[d]) - 0);
  double dot0 = 0;
  for (int d = 0; d < 32; ++d) dot0 += double(q[d]) * double(k0[d]);
  const double norm = 0.5 * std::sqrt(32.0);
  Outcome plain = run(c);
  EXPECT_NEAR(std::log(plain.row(0, 0)[1] / plain.row(0, 0)[0]), (dot - dot0) / norm, 1e-4);
  c.attributes.softcap = 2.0f;
  Outcome capped = run(c);
  EXPECT_NEAR(std::log(capped.row(0, 0)[1] / capped.row(0, 0)[0]),
              2 * std::tanh(dot / norm / 2) - 2 * std::tanh(dot0 / norm / 2), 1e-4);
}

TEST(AttendCpu, EveryGroupRatioAndHeadSize) {
  for (int group : {1, 2, 3, 4, 5, 6, 7, 8, 16})
    for (int dim : {32, 40, 64, 80, 96, 112, 128, 192, 256}) {
      CaseShape s = small(group * 2, 2, dim);
      s.sequences = {{70, 1}, {3, 9}};
      s.decoding_batches = 1;
      checked(make_case(s));
    }
}

TEST(AttendCpu, LongContextOverManySplits) {
  CaseShape s = small(4, 1, 64);
  s.sequences = {{3000, 1}, {1023, 2}, {511, 1}, {512, 1}};
  checked(make_case(s));
}

TEST(AttendCpu, DominantKeyAtEveryEdge) {
  for (int64_t edge : {0, 1, 15, 16, 63, 64, 127, 128, 510, 511, 512, 513, 639}) {
    CaseShape s = small(2, 1, 64);
    s.sequences = {{0, 640}};
    Case c = make_case(s);
    std::memcpy(floats(c.key) + edge * 64, floats(c.query) + (639 * 2 + 1) * 64, 256);
    for (int d = 0; d < 64; ++d) floats(c.key)[edge * 64 + d] *= 2.5f;
    Outcome o = checked(c);
    const float* v = floats(c.value) + edge * 64;
    EXPECT_NEAR(o.row(639, 1)[5], v[5], 0.2f * (1 + std::fabs(v[5])));
  }
}

// float16 elements that are 0 or subnormal, a few or all of them, of either sign, with queries that make something of
// them; and a row decoded alone has the bytes it has among others.
// What one undefined or infinite element of the cache makes undefined, and nothing else.
TEST(AttendCpu, UndefinedElementsStaySo) {
  int undefined = 0;
  for (uint16_t x : {0x7c00, 0xfc00, 0x7e00, 0x7c01})
    for (int heads : {1, 3, 8, 12})
      for (int head_dim : {32, 64, 128})
        for (int round = 0; round < 4; ++round) {
          CaseShape s = small(heads, 1, head_dim);
          s.attributes.append = false;
          s.cache.dtype = DType::f16;
          s.sequences = {{139, 11}, {40, 1}};
          Case c = make_case(s);
          Dice dice(uint64_t(heads * 100 + head_dim + round));
          std::memcpy(c.cache.data() + dice.bits() % (c.cache.size() / 2) * 2, &x, 2);
          Outcome ours = run_on("cpu", c), right = run_on("reference", c);
          ASSERT_TRUE(ours.status.ok() && right.status.ok());
          const auto* a = reinterpret_cast<const float*>(ours.out.output.data());
          const auto* b = reinterpret_cast<const float*>(right.out.output.data());
          for (size_t i = 0; i < ours.out.output.size() / 4; ++i) {
            undefined += !std::isfinite(b[i]);
            ASSERT_TRUE(std::isfinite(b[i]) || !std::isfinite(a[i])) << x << " element " << i << ": " << describe(c);
          }
        }
  EXPECT_GT(undefined, 1000);
}

TEST(AttendCpu, ManyQueryHeadsOnSubnormalFloat16) {
  for (int every : {1, 7, 1000})
    for (int heads : {3, 8, 12})
      for (int head_dim : {32, 64, 128, 256}) {
        CaseShape s = small(heads, 1, head_dim);
        s.attributes.append = false;
        s.cache.dtype = DType::f16;
        const int64_t kvlen = 150, fresh = 11;
        s.sequences = {{kvlen - fresh, fresh}};
        Case c = make_case(s);
        Dice dice(uint64_t(every * 1000 + heads));
        for (size_t i = 0; i + 2 <= c.cache.size(); i += 2 * size_t(every)) {
          const uint16_t x = uint16_t(dice.bits() & (i % 5 == 0 ? 0x8000 : 0x83ff));
          std::memcpy(c.cache.data() + i, &x, 2);
        }
        const int64_t row = heads * head_dim;
        for (int64_t i = 0; i < fresh * row; ++i) floats(c.query)[i] *= every == 1 ? 1e5f : 1.0f;
        Outcome o = checked(c);
        if (!o.status.ok()) continue;

        Case alone = c;
        alone.seqstarts = {0, 1}, alone.start_pos = {kvlen - 1};
        alone.max_seqlen = 1;
        alone.query.erase(alone.query.begin(), alone.query.begin() + (fresh - 1) * row * 4);
        Outcome one = run_on("cpu", alone, 1);
        ASSERT_TRUE(one.status.ok()) << one.status.to_string();
        EXPECT_EQ(std::memcmp(one.row(0, 0), o.row(fresh - 1, 0), size_t(row) * 4), 0) << describe(alone);
      }
}

// As many query heads as matrix units are for: groups of every size, scales of either sign, sharp weights; and a row
// decoded alone has the bytes it has among others.
TEST(AttendCpu, ManyQueryHeadsOnQuantizedCaches) {
  for (DType type : {DType::i8, DType::i4})
    for (int group : {0, 32, 64, 128})
      for (int heads : {4, 5, 8, 12})
        for (int head_dim : {64, 96, 128, 160, 256}) {
          if ((group == 0 && type == DType::i4) || (group > 0 && head_dim % group != 0)) continue;
          CaseShape s = small(heads, 1, head_dim);
          s.attributes.append = false;
          s.cache.dtype = type;
          s.cache.quant = group > 0 ? kvcache::QuantKind::group : kvcache::QuantKind::per_tensor;
          s.cache.quant_group = group;
          s.cache.scale_dtype = heads == 5 ? DType::f32 : DType::f16;
          s.cache.k_scale = 0.03f, s.cache.v_scale = 0.025f;
          const int64_t kvlen = 150, fresh = 21;
          s.sequences = {{kvlen - fresh, fresh}};
          Case c = make_case(s);
          const size_t bytes = heads == 5 ? 4 : 2;
          for (size_t i = bytes - 1; i < c.scale.size(); i += 3 * bytes) c.scale[i] ^= 0x80;
          const int64_t row = heads * head_dim;
          for (int64_t i = 0; i < row; ++i) floats(c.query)[(fresh - 1) * row + i] *= 6.0f;
          Outcome o = checked(c);
          if (!o.status.ok()) continue;

          Case alone = c;
          alone.seqstarts = {0, 1}, alone.start_pos = {kvlen - 1};
          alone.max_seqlen = 1;
          alone.query.assign(c.query.end() - row * 4, c.query.end());
          Outcome one = checked(alone);
          EXPECT_EQ(0, std::memcmp(one.row(0, 0), o.row(fresh - 1, 0), size_t(row) * 4)) << describe(c);
        }
}

}  // namespace
}  // namespace kvasir::attention
