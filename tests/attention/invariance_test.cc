// The same bytes whichever way a row is computed: threads, batch-mates, chunks, decode or prefill.
#include "attention/cpu/kernels.h"
#include "attention/cpu/plan.h"
#include "tests/attention/testing.h"

namespace kvasir::attention {
namespace {
using namespace testing;

CaseOptions long_ones() {
  CaseOptions o;
  o.max_kvlen = 2000;
  o.max_work = 20'000'000;
  return o;
}

TEST(Invariance, OneTwoAndEightThreadsGiveTheSameBytes) {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    const Case c = random_case(seed, long_ones());
    Outcome one = run_on("cpu", c, 1);
    for (int threads : {2, 8}) {
      Outcome o = run_on("cpu", c, threads);
      ASSERT_EQ(one.out.output, o.out.output) << "seed " << seed << ": " << describe(c);
      EXPECT_EQ(std::memcmp(one.out.lse.data(), o.out.lse.data(), one.out.lse.size() * 4), 0);
      EXPECT_EQ(one.after.cache, o.after.cache);
      EXPECT_EQ(one.after.scale, o.after.scale);
    }
  }
}

// A request of n tokens cut at `cuts`, each chunk one call, among `mates` other sequences.
Bytes in_chunks(const CaseShape& base, int64_t n, const std::vector<int64_t>& cuts, bool mates, const Case& donor,
                int threads) {
  CaseShape s = base;
  const Attributes& a = s.attributes;
  Bytes cache, scale, output;
  const int64_t heads_q = int64_t(a.num_heads) * a.head_dim * 4, heads_kv = int64_t(a.num_kv_heads) * a.head_dim * 4;
  int64_t past = 0;
  for (size_t i = 0; i <= cuts.size(); ++i) {
    const int64_t end = i < cuts.size() ? cuts[i] : n, first = mates ? 2 : 0;
    s.sequences.clear();
    if (mates) s.sequences = {{90, 1}, {600, 1}}, s.decoding_batches = 2;
    s.sequences.push_back({past, end - past});
    if (mates) s.sequences.push_back({5, 40});
    Case c = make_case(s, i + 77);
    auto take = [&](Bytes& to, const Bytes& from, int64_t row) {
      const int64_t at = c.seqstarts[size_t(first)];
      std::memcpy(to.data() + at * row, from.data() + past * row, size_t((end - past) * row));
    };
    take(c.query, donor.query, heads_q);
    take(c.key, donor.key, heads_kv);
    take(c.value, donor.value, heads_kv);
    // The sequence keeps one place, at the cache's end, whatever its batch-mates use.
    const int64_t tokens = 2048 + n;
    c.view.max_tokens = tokens;
    c.view.strides = kvcache::layout_strides(2, 1, tokens, 1, a.num_kv_heads, a.head_dim).value();
    Bytes old = std::move(cache);
    c.cache.assign(size_t(dtype_bytes(c.view.dtype, tokens * 2 * a.num_kv_heads * a.head_dim)), 0);
    if (!old.empty()) c.cache = old;
    if (c.view.quant == kvcache::QuantKind::group) {
      const int groups = a.head_dim / c.view.quant_group;
      c.view.scale_strides = kvcache::layout_strides(2, 1, tokens, 1, a.num_kv_heads, groups).value();
      Bytes old_scale = std::move(scale);
      c.scale.assign(size_t(dtype_bytes(c.view.scale_dtype, tokens * 2 * a.num_kv_heads * groups)), 0);
      if (!old_scale.empty()) c.scale = old_scale;
    }
    c.cachestarts[size_t(first)] = 2048;
    Outcome o = run_on("cpu", c, threads);
    EXPECT_TRUE(o.status.ok()) << o.status.to_string();
    const uint8_t* from = o.out.output.data() + c.seqstarts[size_t(first)] * heads_q;
    output.insert(output.end(), from, from + (end - past) * heads_q);
    cache = o.after.cache, scale = o.after.scale;
    past = end;
  }
  return output;
}

TEST(Invariance, ChunkedDecodedAndBatchedEqualWhole) {
  struct Kind {
    DType type;
    int window;
    int heads, kv_heads, dim, group = 0;
  };
  // Where int8 and int4 have groups of 64 or 128, few rows may go to vectors and many to the matrix unit.
  for (Kind k : {Kind{DType::f16, 0, 9, 3, 64}, Kind{DType::f32, 0, 8, 1, 128}, Kind{DType::i8, 0, 4, 4, 64, 32},
                 Kind{DType::f16, 100, 4, 2, 80}, Kind{DType::bf16, 0, 8, 2, 96}, Kind{DType::i4, 0, 8, 1, 128, 32},
                 Kind{DType::i8, 0, 2, 2, 128, 64}, Kind{DType::i8, 100, 4, 2, 128, 128}, Kind{DType::i8, 0, 3, 1, 64},
                 Kind{DType::i8, 0, 4, 1, 64, 64}, Kind{DType::i4, 0, 3, 3, 64, 64}, Kind{DType::i4, 0, 4, 2, 256, 64},
                 Kind{DType::i4, 0, 3, 1, 128, 128}}) {
    CaseShape s = small(k.heads, k.kv_heads, k.dim);
    s.attributes.index_mode = kvcache::IndexMode::offset;
    s.attributes.window = k.window;
    s.cache.dtype = k.type;
    if (k.group > 0) s.cache.quant = kvcache::QuantKind::group, s.cache.quant_group = k.group;
    if (k.type == DType::i8 && k.group == 0) s.cache.quant = kvcache::QuantKind::per_tensor, s.cache.k_scale = 0.03f;
    const int64_t n = 700;
    CaseShape whole = s;
    whole.sequences = {{0, n}};
    const Case donor = make_case(whole, 5);
    const Bytes want = in_chunks(s, n, {}, false, donor, 1);
    EXPECT_EQ(in_chunks(s, n, {}, true, donor, 2), want) << "among batch-mates";
    EXPECT_EQ(in_chunks(s, n, {256, 512}, false, donor, 2), want) << "in even chunks";
    EXPECT_EQ(in_chunks(s, n, {1, 2, 65, 511, 513, 640}, true, donor, 8), want) << "in odd chunks";
    std::vector<int64_t> decodes;
    for (int64_t t = 630; t < n; ++t) decodes.push_back(t);
    EXPECT_EQ(in_chunks(s, n, decodes, true, donor, 2), want) << "prefill and then decodes";
  }
}

// Seed 004's two prompts, 6 and 10 tokens, cut at 3 and 4: extend equals full prefill.
TEST(Invariance, ExtendOfTheSeedsTwoPromptsEqualsFullPrefill) {
  const int64_t lengths[] = {6, 10}, cuts[] = {3, 4};
  for (int i = 0; i < 2; ++i) {
    CaseShape s = small(8, 8, 128);
    s.attributes.index_mode = kvcache::IndexMode::offset;
    CaseShape whole = s;
    whole.sequences = {{0, lengths[i]}};
    const Case donor = make_case(whole, uint64_t(i) + 9);
    EXPECT_EQ(in_chunks(s, lengths[i], {cuts[i]}, false, donor, 2), in_chunks(s, lengths[i], {}, false, donor, 2));
    checked(donor);
  }
}

TEST(Plan, CutsDearItemsAlongKeysAndCoversEveryRowOnce) {
  Attributes a;
  a.num_heads = 9, a.num_kv_heads = 3, a.head_dim = 64;
  const std::vector<SequenceShape> shapes = {
      {1, 5000, 4999, true}, {1, 10, 9, true}, {0, 7, 7, false}, {300, 700, 400, false}};
  for (int threads : {1, 2, 16}) {
    cpu::Plan plan;
    cpu::make_plan(a, shapes, {threads, 100000}, &plan);
    EXPECT_TRUE(threads == 2 || plan.merges.empty() == (threads == 1)) << threads;
    std::vector<std::vector<int>> covered(shapes.size());
    for (size_t b = 0; b < shapes.size(); ++b) covered[b].assign(size_t(shapes[b].seqlen) * 3 * 20, 0);
    for (const cpu::AttendItem& i : plan.items)
      for (int t = i.token_begin; t < i.token_end; ++t)
        for (int split = i.split_begin; split < i.split_end; ++split)
          ++covered[size_t(i.sequence)][size_t((t * 3 + i.kv_head) * 20 + split)];
    for (size_t b = 0; b < shapes.size(); ++b)
      for (int64_t t = 0; t < shapes[b].seqlen; ++t)
        for (int h = 0; h < 3; ++h) {
          const int64_t keys = visible_keys(a, shapes[b], t).hi;
          for (int64_t split = 0; split < 20; ++split) EXPECT_LE(covered[b][size_t((t * 3 + h) * 20 + split)], 1);
          for (int64_t split = 0; split * cpu::kSplit < keys; ++split)
            EXPECT_EQ(covered[b][size_t((t * 3 + h) * 20 + split)], 1);
        }
    for (const cpu::Merge& m : plan.merges) EXPECT_GE(m.splits, 2);
  }
}

TEST(Plan, StaysWithinItsWorkspace) {
  Attributes a;
  a.num_heads = 8, a.num_kv_heads = 1, a.head_dim = 128;
  const std::vector<SequenceShape> shapes(40, {1, 100000, 99999, true});
  cpu::Plan plan;
  cpu::make_plan(a, shapes, {64, 3000}, &plan);
  EXPECT_LE(plan.partial_rows, 3000);
}

// Each instruction set this machine has, against the portable one: conversions and tiles to the bit
// where no sum is taken, and the same tolerance as anything else where one is.
TEST(Kernels, EveryInstructionSetConvertsAlike) {
  using namespace cpu;
  for (const Kernels* k : {kernels_avx512(), kernels_avx2(), kernels_neon()}) {
    if (!k) continue;
    for (DType type : {DType::f16, DType::bf16}) {
      std::vector<uint16_t> codes(65536);
      for (int i = 0; i < 65536; ++i) codes[size_t(i)] = uint16_t(i);
      std::vector<float> x(65536), y(65536);
      k->to_f32(codes.data(), type, 65536, x.data());
      kernels_portable()->to_f32(codes.data(), type, 65536, y.data());
      for (int i = 0; i < 65536; ++i)
        ASSERT_TRUE(std::isnan(y[size_t(i)]) || x[size_t(i)] == y[size_t(i)]) << k->name << " code " << i;
      std::vector<uint16_t> a(65537), b(65537);
      Dice dice(4);
      for (float& f : x) f = std::ldexp(dice.normal(), int(dice.upto(40)) - 28);
      x[7] = 1e38f, x[8] = -1e38f, x[9] = 65520, x[10] = 65519.99f, x[11] = 0x1p-25f, x[12] = 0x1.8p-25f;
      k->from_f32(x.data(), type, 65535, a.data());
      kernels_portable()->from_f32(x.data(), type, 65535, b.data());
      ASSERT_EQ(a, b) << k->name;
    }
  }
}

}  // namespace
}  // namespace kvasir::attention
