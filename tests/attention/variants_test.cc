// Section 7: the fused variants.
#include "attention/rope.h"
#include "tests/attention/testing.h"

namespace kvasir::attention {
namespace {
using namespace testing;

class Variant : public OnBackend {};
KVASIR_ON_BACKENDS(Variant);

Rope plain_rope(RopeStyle style, int dim) {
  RopeConfig r;
  r.style = style;
  r.rotary_dim = dim;
  return rope_frequencies(r).value();
}

TEST_P(Variant, PackedQkvEqualsSeparateInputsAndBiasIsAddedFirst) {
  CaseShape s = small();
  s.attributes.rope = plain_rope(RopeStyle::neox, 32);
  s.sequences = {{4, 3}};
  Case apart = make_case(s), packed = apart;
  packed.attributes.packed_qkv = true;
  packed.query.clear();
  packed.qkv_bias.assign(8 * 32 * 4, 0);
  for (int i = 0; i < 8 * 32; ++i) floats(packed.qkv_bias)[i] = 0.25f * float(i % 5);
  for (int t = 0; t < 3; ++t)
    for (int h = 0; h < 8; ++h)
      for (int d = 0; d < 32; ++d) {
        float* at = h < 4   ? floats(apart.query) + (t * 4 + h) * 32 + d
                    : h < 6 ? floats(apart.key) + (t * 2 + h - 4) * 32 + d
                            : floats(apart.value) + (t * 2 + h - 6) * 32 + d;
        float raw = *at;
        *at = raw + floats(packed.qkv_bias)[h * 32 + d];
        packed.query.insert(packed.query.end(), reinterpret_cast<uint8_t*>(&raw), reinterpret_cast<uint8_t*>(&raw) + 4);
      }
  Outcome x = run(apart), y = run(packed);
  for (int t = 0; t < 3; ++t)
    for (int h = 0; h < 4; ++h)
      for (int d = 0; d < 32; ++d) EXPECT_NEAR(x.row(t, h)[d], y.row(t, h)[d], 2e-6);
}

TEST_P(Variant, RopeRotatesKeysBeforeTheyAreCached) {
  for (RopeStyle style : {RopeStyle::neox, RopeStyle::gptj}) {
    CaseShape s = small(1, 1, 32);
    s.attributes.rope = plain_rope(style, 16);
    s.sequences = {{7, 1}};
    Case c = make_case(s);
    Outcome o = run(c);
    kvcache::CacheView v = o.after.view;
    v.data = o.after.cache.data();
    HeldStep held;
    held.assign(c.attributes, c.step());
    float stored[32];
    kvcache::load_row(v, held.physical(0, 7), 0, 0, false, stored);
    const float* k = floats(c.key);
    for (int i = 0; i < 8; ++i) {
      const int a = style == RopeStyle::neox ? i : 2 * i, b = style == RopeStyle::neox ? i + 8 : 2 * i + 1;
      const double angle = 7 * std::pow(10000.0, -2.0 * i / 16);
      EXPECT_NEAR(stored[a], k[a] * std::cos(angle) - k[b] * std::sin(angle), 1e-5);
      EXPECT_NEAR(stored[b], k[b] * std::cos(angle) + k[a] * std::sin(angle), 1e-5);
    }
    for (int d = 16; d < 32; ++d) EXPECT_EQ(stored[d], k[d]) << "past rotary_dim nothing turns";
  }
}

TEST_P(Variant, SlidingWindow) {
  CaseShape s = small();
  s.attributes.window = 5;
  s.sequences = {{20, 1}, {3, 6}};
  Case c = make_case(s);
  reveal_weights(c);
  Outcome o = run(c);
  EXPECT_EQ(seen(o, 0, 0), range(16, 21));
  EXPECT_EQ(seen(o, 1, 0), range(0, 4));
  EXPECT_EQ(seen(o, 6, 0), range(4, 9));
}

TEST_P(Variant, SinksAreCountedInsideTheWindow) {
  CaseShape s = small();
  s.attributes.window = 6;
  s.attributes.sinks = 2;
  s.sequences = {{20, 1}};
  Case c = make_case(s);
  reveal_weights(c);
  std::set<int> want = range(17, 21);
  want.merge(range(0, 2));
  EXPECT_EQ(seen(run(c), 0, 0), want);
}

// The same request through a cache of C slots and through one that keeps everything.
TEST_P(Variant, CyclicCacheEqualsAWindowOverAnUnboundedOne) {
  for (int sinks : {0, 3})
    for (int64_t chunk : {1, 4, 30}) {
      CaseShape s = small();
      s.attributes.window = 12;
      s.attributes.sinks = sinks;
      s.sequences = {{0, chunk}};
      Case all, ring;
      for (int64_t past = 0; past < 60; past += chunk) {
        CaseShape wide = s, tight = s;
        wide.attributes.index_mode = tight.attributes.index_mode = kvcache::IndexMode::offset;
        tight.attributes.cyclic_capacity = 14;
        wide.sequences = tight.sequences = {{past, chunk}};
        Case a = make_case(wide, uint64_t(past) + 1), b = make_case(tight, uint64_t(past) + 1);
        b.query = a.query, b.key = a.key, b.value = a.value;
        auto fix = [&](Case& c, const Case& before, int64_t slots) {  // one fixed place, kept from step to step
          c.cachestarts = {0};
          c.view.max_tokens = slots;
          c.view.strides = kvcache::layout_strides(2, 1, slots, 1, 2, 32).value();
          if (past == 0)
            c.cache.assign(size_t(slots) * 2 * 2 * 32 * 4, 0xff);
          else
            c.cache = before.cache;
        };
        fix(a, all, 100);
        fix(b, ring, 14);
        Outcome x = run(a), y = run(b);
        ASSERT_TRUE(y.status.ok()) << y.status.to_string();
        EXPECT_TRUE(same_bytes(x.out, y.out)) << "sinks " << sinks << " chunk " << chunk << " past " << past;
        all = x.after, ring = y.after;
      }
    }
}

TEST_P(Variant, CyclicCacheWithBeamsIsATypedError) {
  CaseShape s = small();
  s.attributes.window = 4;
  s.attributes.cyclic_capacity = 8;
  s.sequences = {{6, 1}, {6, 1}};
  s.beam_width = 2;
  Outcome o = run(make_case(s));
  EXPECT_EQ(o.status.code(), Code::invalid_argument);
  EXPECT_EQ(o.status.field(), "cache_indirection");
}

TEST_P(Variant, StreamingPositionsAreRanks) {
  // With every key the same vector, a score depends on the rotation alone: sink j stands at distance
  // min(t, W-1) - j, whatever t is, so far-apart decodes give the same weights.
  CaseShape s = small(1, 1, 64);
  s.attributes.rope = plain_rope(RopeStyle::neox, 64);
  s.attributes.window = 8;
  s.attributes.sinks = 2;
  s.attributes.streaming_positions = true;
  std::vector<std::vector<float>> weights;
  for (int64_t past : {20, 55}) {
    s.sequences = {{past, 1}};
    Case c = make_case(s);
    reveal_weights(c, false);
    for (int d = 0; d < 64; ++d) floats(c.query)[d] = floats(c.key)[d] = 0.3f;
    kvcache::CacheView v = c.view;
    v.data = c.cache.data();
    HeldStep held;
    held.assign(c.attributes, c.step());
    std::vector<float> same(64, 0.3f);
    for (int64_t t = 0; t < past; ++t)
      if (held.physical(0, t) >= 0) kvcache::store_row(v, held.physical(0, t), 0, 0, false, same.data());
    Outcome o = run(c);
    std::vector<float> w;
    for (int j : seen(o, 0, 0)) w.push_back(o.row(0, 0)[j]);
    EXPECT_EQ(w.size(), 8u);
    weights.push_back(w);
  }
  for (size_t i = 0; i < 8; ++i) EXPECT_NEAR(weights[0][i], weights[1][i], 1e-6);
}

TEST_P(Variant, StreamingPrefillIsDenseInsideOneCall) {
  CaseShape s = small();
  s.attributes.rope = plain_rope(RopeStyle::neox, 32);
  s.attributes.window = 6;
  s.attributes.sinks = 1;
  s.attributes.streaming_positions = true;
  s.sequences = {{0, 12}, {15, 4}};
  Case c = make_case(s);
  reveal_weights(c);
  Outcome o = run(c);
  EXPECT_EQ(seen(o, 11, 0), range(0, 12));
  std::set<int> later = range(14, 19);  // sink, window of the last token, its own call
  later.insert(0);
  EXPECT_EQ(seen(o, 15, 0), later);
}

TEST_P(Variant, LearnedSinkLogitTakesItsShareOfTheDenominator) {
  CaseShape s = small();
  s.sequences = {{3, 1}};
  Case c = make_case(s);
  reveal_weights(c);
  c.sink_logits = {0.0f, 1.0f, -100.0f, 100.0f};
  Outcome o = run(c);
  EXPECT_NEAR(o.row(0, 0)[0], 1 / 5.0, 1e-6);
  EXPECT_NEAR(o.row(0, 1)[0], 1 / (4 + std::exp(1.0)), 1e-6);
  EXPECT_NEAR(o.row(0, 2)[0], 1 / 4.0, 1e-6);
  EXPECT_NEAR(o.row(0, 3)[0], 0, 1e-30);
  EXPECT_NEAR(o.lse(0, 1), std::log(4 + std::exp(1.0)), 1e-5);
}

TEST_P(Variant, BeamsReadThroughTheirIndirection) {
  CaseShape s = small();
  s.attributes.index_mode = kvcache::IndexMode::token_table;
  s.sequences = {{6, 1}, {6, 1}, {6, 1}};
  s.beam_width = 3;
  Case c = make_case(s);
  reveal_weights(c);
  // Token t of beam b carries unit vector t + 7 * b; beam 1 reads tokens 3..5 from beam 2, all before from 0.
  HeldStep held;
  held.assign(c.attributes, c.step());
  kvcache::CacheView v = c.view;
  v.data = c.cache.data();
  for (int b = 0; b < 3; ++b)
    for (int t = 0; t < 6; ++t)
      for (int h = 0; h < 2; ++h) {
        std::vector<float> unit(32, 0.0f);
        unit[size_t(t + 7 * b)] = 1;
        kvcache::store_row(v, held.physical(b, t), 0, h, true, unit.data());
      }
  c.indirection.assign(c.indirection.size(), 0);
  for (int b = 0; b < 3; ++b) c.indirection[size_t(b * c.max_kvlen + 6)] = b;
  for (int t = 3; t < 6; ++t) c.indirection[size_t(c.max_kvlen + t)] = 2;
  std::set<int> want = range(0, 3);
  want.merge(range(14 + 3, 14 + 6));
  want.insert(6);  // its own new token
  EXPECT_EQ(seen(run(c), 1, 0), want);
}

TEST_P(Variant, CrossAttentionReadsWhatKvcStored) {
  CaseShape store = small();
  store.attributes.index_mode = kvcache::IndexMode::offset;
  store.sequences = {{0, 9}, {0, 4}};
  Case encoder = make_case(store);
  encoder.op = Op::key_value_cache;
  Outcome stored = run(encoder);
  ASSERT_TRUE(stored.status.ok()) << stored.status.to_string();
  CaseShape attend = store;
  attend.attributes.append = false;
  attend.attributes.is_causal = false;
  attend.sequences = {{0, 2, 9}, {0, 5, 4}};
  Case decoder = make_case(attend);
  decoder.cachestarts = encoder.cachestarts;
  decoder.view = stored.after.view;
  decoder.cache = stored.after.cache;
  decoder.key.clear(), decoder.value.clear();
  Outcome o = run(decoder);
  ASSERT_TRUE(o.status.ok()) << o.status.to_string();
  EXPECT_EQ(o.after.cache, stored.after.cache) << "nothing is written";
  reveal_weights(decoder);
  o = run(decoder);
  EXPECT_EQ(seen(o, 0, 0), range(0, 9));
  EXPECT_EQ(seen(o, 6, 3), range(0, 4));
}

TEST_P(Variant, Fp8InAndOut) {
  CaseShape s = small(4, 2, 64);
  s.attributes.io = s.attributes.out = DType::f8_e4m3;
  s.attributes.q_scale = 0.02f;
  s.attributes.out_scale = 0.01f;
  s.cache.dtype = DType::f8_e4m3;
  s.cache.quant = kvcache::QuantKind::per_tensor;
  s.cache.k_scale = 0.01f, s.cache.v_scale = 0.02f;
  s.sequences = {{10, 30}};
  Case c = make_case(s);
  Outcome o = run(c);
  ASSERT_TRUE(o.status.ok()) << o.status.to_string();
  EXPECT_EQ(compare_with_reference(c, o.after, o.out), "");
}

// Queries of 16 and 32 bits that become E4M3 once they have their bias and are rotated, for prompts and decodes alike.
TEST_P(Variant, Fp8QueriesAreRoundedOnceTheyAreRotated) {
  for (DType io : {DType::f32, DType::bf16}) {
    CaseShape s = small(4, 2, 64);
    Attributes& a = s.attributes;
    a.io = a.out = io;
    a.packed_qkv = true;
    RopeConfig rope;
    rope.rotary_dim = 64;
    a.rope = rope_frequencies(rope).value();
    s.cache.dtype = DType::f8_e4m3;
    s.cache.quant = kvcache::QuantKind::per_tensor;
    s.cache.k_scale = 0.01f, s.cache.v_scale = 0.02f;
    s.sequences = {{10, 30}, {70, 1}};
    Case plain = make_case(s), fp8 = plain;
    fp8.attributes.fp8_query = true, fp8.attributes.q_scale = 0.25f;
    Outcome o = run(fp8);
    ASSERT_TRUE(o.status.ok()) << o.status.to_string();
    EXPECT_EQ(compare_with_reference(fp8, o.after, o.out), "");
    EXPECT_NE(o.out.output, run(plain).out.output) << "it can be seen";
  }
  CaseShape s = small(4, 2, 64);
  s.attributes.io = DType::f8_e4m3, s.attributes.fp8_query = true;
  s.cache.dtype = DType::f8_e4m3, s.cache.quant = kvcache::QuantKind::per_tensor;
  s.sequences = {{0, 3}};
  Case c = make_case(s);
  EXPECT_EQ(run(c).status.field(), "fp8_query");
}

// Two halves of the keys, attended apart and merged by their log-sum-exp, are the whole.
TEST_P(Variant, LogSumExpMergesParts) {
  CaseShape s = small();
  s.attributes.append = false;
  s.attributes.is_causal = false;
  s.attributes.index_mode = kvcache::IndexMode::offset;
  s.sequences = {{0, 1, 30}};
  Case whole = make_case(s), left = whole, right = whole;
  left.kvstarts = {0, 11};
  right.kvstarts = {0, 19};
  right.cachestarts[0] += 11;
  Outcome w = run(whole), l = run(left), r = run(right);
  for (int h = 0; h < 4; ++h) {
    const double a = std::exp(double(l.lse(0, h)) - w.lse(0, h)), b = std::exp(double(r.lse(0, h)) - w.lse(0, h));
    EXPECT_NEAR(a + b, 1, 1e-5);
    for (int d = 0; d < 32; ++d) EXPECT_NEAR(a * l.row(0, h)[d] + b * r.row(0, h)[d], w.row(0, h)[d], 1e-5);
  }
}

}  // namespace
}  // namespace kvasir::attention
