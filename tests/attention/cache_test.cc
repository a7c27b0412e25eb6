// Sections 2 to 5: where tokens live, the six layouts, KeyValueCache, quantized caches.
#include <sys/mman.h>

#include "attention/rope.h"
#include "tests/attention/testing.h"

namespace kvasir::attention {
namespace {
using namespace testing;
using kvcache::IndexMode;
using kvcache::QuantKind;

class Cache : public OnBackend {};
KVASIR_ON_BACKENDS(Cache);

CaseShape three() {
  CaseShape s = small();
  s.sequences = {{20, 1}, {7, 3}, {0, 9}};
  s.decoding_batches = 1;
  return s;
}

// Old contents are random by place, so cases of different storage are compared from an empty cache.
CaseShape fresh_only() {
  CaseShape s = small();
  s.sequences = {{0, 33}, {0, 1}, {0, 64}};
  return s;
}

TEST_P(Cache, OffsetPageAndTokenTablesGiveTheSameBytes) {
  CaseOutput first;
  for (IndexMode mode : {IndexMode::offset, IndexMode::page_table, IndexMode::token_table}) {
    CaseShape s = fresh_only();
    s.attributes.index_mode = mode;
    Case c = make_case(s);
    Case donor = make_case(fresh_only());
    c.query = donor.query, c.key = donor.key, c.value = donor.value;
    Outcome o = run(c);
    ASSERT_TRUE(o.status.ok()) << o.status.to_string();
    if (first.output.empty()) first = o.out;
    EXPECT_TRUE(same_bytes(o.out, first));
  }
}

TEST_P(Cache, EveryPageSizeFrom1To256) {
  for (int page = 1; page <= 256; page *= 2) {
    CaseShape s = three();
    s.attributes.page_size = page;
    Case c = make_case(s);
    Outcome o = run(c);
    ASSERT_TRUE(o.status.ok()) << o.status.to_string();
    EXPECT_EQ(compare_with_reference(c, o.after, o.out), "") << "page_size " << page;
  }
}

TEST_P(Cache, PageSizesOfNoPowerOfTwoAndAbove256) {
  for (int page : {3, 5, 12, 24, 63, 65, 100, 255, 257, 384, 512, 1000, 65536}) {
    CaseShape s = three();
    s.sequences[0] = {page < 1000 ? 2 * page + 7 : 300, 1};
    s.attributes.page_size = page;
    Case c = make_case(s);
    Outcome o = run(c);
    ASSERT_TRUE(o.status.ok()) << o.status.to_string();
    EXPECT_EQ(compare_with_reference(c, o.after, o.out), "") << "page_size " << page;
  }
}

// Every page moved by a few tokens, each by another number of them: sizes of a power of two and of none.
TEST_P(Cache, PagesBeginAnywhere) {
  for (int page : {1, 4, 7, 16, 24}) {
    CaseShape s = fresh_only();
    s.attributes.page_size = page;
    Case aligned = make_case(s), c = aligned;
    c.view.max_tokens = 2 * aligned.view.max_tokens + 3;
    c.view.strides = kvcache::layout_strides(2, 3, c.view.max_tokens, 1, 2, 32).value();
    c.cache.assign(size_t(2 * c.view.max_tokens * 2 * 32 * 4), 0xff);
    int64_t moved = 0;
    for (int64_t& start : c.cachestarts)
      if (start >= 0) start += start + moved++ % (page + 1) + 1;
    Outcome x = run(aligned), y = run(c);
    ASSERT_TRUE(y.status.ok()) << y.status.to_string();
    EXPECT_EQ(compare_with_reference(c, y.after, y.out), "") << "page_size " << page;
    EXPECT_TRUE(same_bytes(x.out, y.out)) << "page_size " << page;
  }
}

// What the operators' first page leaves to whoever extends them: two sequences, pages of one token, scattered.
TEST_P(Cache, TwoSequencesInScatteredPagesOfOneToken) {
  CaseShape s = small(8, 2, 64);
  s.sequences = {{3, 1}, {0, 5}};
  s.decoding_batches = 1;
  s.attributes.page_size = 1;
  s.cache.dtype = DType::i8, s.cache.quant = QuantKind::group, s.cache.quant_group = 8;
  s.cache.layers = 2, s.layer = 1;
  for (int layout = 0; layout < 4; ++layout) {
    s.layout = layout;
    Case c = make_case(s);
    ASSERT_GE(c.max_pages, 5);
    bool scattered = false;
    for (int64_t t = 1; t < 4; ++t) scattered |= c.cachestarts[size_t(t)] != c.cachestarts[size_t(t) - 1] + 1;
    EXPECT_TRUE(scattered);
    Outcome o = run(c);
    ASSERT_TRUE(o.status.ok()) << o.status.to_string();
    EXPECT_EQ(compare_with_reference(c, o.after, o.out), "") << "layout " << layout;
    // The same contents in one run of the cache: nothing but the places differs.
    Case run_of_it = c;
    run_of_it.attributes.page_size = 5, run_of_it.max_pages = 1;
    run_of_it.cachestarts = {0, 5};
    run_of_it.view.max_tokens = 10;
    run_of_it.view.strides = kvcache::layout_strides(2, layout, 10, 2, 2, 64).value();
    run_of_it.view.scale_strides = kvcache::layout_strides(2, layout, 10, 2, 2, 8).value();
    run_of_it.cache.assign(10 * 2 * 2 * 2 * 64, 0), run_of_it.scale.assign(10 * 2 * 2 * 2 * 8 * 4, 0);
    for (int64_t t = 0; t < 3; ++t)
      for (int head = 0; head < 2; ++head)
        for (bool value : {false, true}) {
          auto at = [&](const kvcache::Strides& s, int64_t token) {
            return size_t(kvcache::row_element(s, token, 1, head, value));
          };
          const kvcache::CacheView &from = c.view, &to = run_of_it.view;
          const int64_t place = c.cachestarts[size_t(t)];
          std::memcpy(&run_of_it.cache[at(to.strides, t)], &c.cache[at(from.strides, place)], 64);
          std::memcpy(&run_of_it.scale[at(to.scale_strides, t) * 4], &c.scale[at(from.scale_strides, place) * 4], 32);
        }
    EXPECT_EQ(run(c).out.output, run(run_of_it).out.output) << "layout " << layout;
  }
}

TEST_P(Cache, KvlenAtExactPagesReadsNoPageMore) {
  CaseShape s = small();
  s.attributes.page_size = 16;
  s.sequences = {{31, 1}, {0, 16}};
  Case c = make_case(s);
  ASSERT_LT(c.cachestarts[size_t(c.max_pages) + 1], 0) << "the second sequence's second entry is garbage";
  Outcome o = run(c);
  ASSERT_TRUE(o.status.ok()) << o.status.to_string();
  EXPECT_EQ(compare_with_reference(c, o.after, o.out), "");
}

TEST_P(Cache, EntriesBehindAWindowAreNeverRead) {
  CaseShape s = small();
  s.attributes.page_size = 4;
  s.attributes.window = 6;
  s.sequences = {{40, 1}};
  Case c = make_case(s);
  ASSERT_LT(c.cachestarts[0], 0) << "garbage, and legal";
  Outcome o = run(c);
  ASSERT_TRUE(o.status.ok()) << o.status.to_string();
  EXPECT_EQ(compare_with_reference(c, o.after, o.out), "");
}

TEST_P(Cache, SixLayoutsGiveTheSameBytes) {
  CaseOutput first;
  for (int revision : {2, 1})
    for (int layout = 0; layout < 4; ++layout)
      for (DType type : {DType::f32, DType::i4}) {
        CaseShape s = fresh_only();
        s.revision = revision, s.layout = layout;
        s.cache.layers = 3, s.layer = 1;
        if (type == DType::i4) s.cache.dtype = type, s.cache.quant = QuantKind::group, s.cache.quant_group = 16;
        Case c = make_case(s);
        Outcome o = run(c);
        ASSERT_TRUE(o.status.ok()) << o.status.to_string();
        EXPECT_EQ(compare_with_reference(c, o.after, o.out), "") << revision << "/" << layout;
        if (type == DType::i4) continue;
        if (first.output.empty()) first = o.out;
        EXPECT_TRUE(same_bytes(o.out, first)) << "revision " << revision << " layout " << layout;
      }
}

TEST_P(Cache, OnlyTheNewTokensElementsAreWritten) {
  for (DType type : {DType::f16, DType::i8, DType::i4}) {
    CaseShape s = three();
    s.cache.dtype = type;
    s.cache.layers = 2;
    if (type != DType::f16) s.cache.quant = QuantKind::group, s.cache.quant_group = 8, s.cache.scale_dtype = DType::f16;
    Case c = make_case(s);
    Outcome o = run(c);
    int64_t changed = 0;
    for (size_t i = 0; i < c.cache.size(); ++i) changed += c.cache[i] != o.after.cache[i];
    EXPECT_GT(changed, 0);
    EXPECT_LE(changed, dtype_bytes(type, 13 * 2 * 2 * 32)) << "13 new tokens, K and V, 2 heads of 32";
    EXPECT_EQ(compare_with_reference(c, o.after, o.out), "");
  }
}

TEST_P(Cache, MinusZeroIsStoredAsItIs) {
  for (DType type : {DType::f32, DType::f16, DType::bf16, DType::f8_e4m3}) {
    CaseShape s = three();
    s.attributes.io = s.cache.dtype = type;
    if (type == DType::f8_e4m3) s.cache.quant = QuantKind::per_tensor;
    Case c = make_case(s);
    const size_t bytes = size_t(dtype_bytes(type, 1));
    Bytes minus(bytes);
    minus.back() = 0x80;
    for (Bytes* part : {&c.key, &c.value})
      for (size_t i = 0; i < part->size(); ++i) (*part)[i] = minus[i % bytes];
    Outcome o = run(c);
    ASSERT_TRUE(o.status.ok()) << o.status.to_string();
    HeldStep held;
    held.assign(c.attributes, c.step());
    kvcache::CacheView view = o.after.view;
    for (bool value : {false, true}) {
      const int64_t at = kvcache::row_element(view.strides, held.physical(2, 8), c.layer, 1, value);
      for (size_t i = 0; i < 32 * bytes; ++i)
        ASSERT_EQ(o.after.cache[size_t(at) * bytes + i], minus[i % bytes]) << dtype_name(type);
    }
  }
}

TEST_P(Cache, QuantGroupsAndScaleTypes) {
  for (DType type : {DType::i8, DType::i4})
    for (DType scale : {DType::f32, DType::f16})
      for (int group : {8, 16, 32, 64, 128}) {
        CaseShape s = three();
        s.attributes.head_dim = 128;
        s.cache.dtype = type;
        s.cache.quant = QuantKind::group;
        s.cache.quant_group = group;
        s.cache.scale_dtype = scale;
        Case c = make_case(s);
        Outcome o = run(c);
        ASSERT_TRUE(o.status.ok()) << o.status.to_string();
        EXPECT_EQ(compare_with_reference(c, o.after, o.out), "") << describe(c);
      }
}

// Where the kv stride is 0: one head of 576, as latent attention has it, few rows and many, and rotated keys.
TEST_P(Cache, ValuesAreTheKeysAsTheyLie) {
  const struct {
    DType dtype;
    QuantKind quant;
    int group;
  } kinds[] = {{DType::f32, QuantKind::none, 0},  {DType::f16, QuantKind::none, 0},
               {DType::bf16, QuantKind::none, 0}, {DType::f8_e4m3, QuantKind::per_tensor, 0},
               {DType::i8, QuantKind::group, 64}, {DType::i4, QuantKind::group, 32}};
  for (const auto& kind : kinds)
    for (int heads : {2, 12})
      for (bool roped : {false, true}) {
        CaseShape s = three();
        s.attributes.num_heads = heads, s.attributes.num_kv_heads = 1, s.attributes.head_dim = 576;
        s.cache.dtype = kind.dtype, s.cache.quant = kind.quant, s.cache.quant_group = kind.group;
        if (roped)
          s.attributes.rope = rope_frequencies({.style = RopeStyle::gptj, .rotary_dim = 64}).value();
        else
          s.sequences = {{0, 1}, {0, 3}, {0, 70}}, s.decoding_batches = 0;
        Case c = make_case(s), twice = c;
        c.view.strides.kv = c.view.scale_strides.kv = 0;
        c.view.v_scale = twice.view.v_scale = c.view.k_scale;
        twice.value = twice.key;
        const Outcome o = run(c);
        ASSERT_TRUE(o.status.ok()) << o.status.to_string();
        EXPECT_EQ(compare_with_reference(c, o.after, o.out), "") << describe(c);
        // Nothing is rotated, and all is new: as if each key had been given as a value, too.
        if (!roped) EXPECT_TRUE(same_bytes(o.out, run(twice).out)) << describe(c);
      }
}

TEST(CacheOfKeysAlone, WhatItCannotBeIsRefused) {
  auto refusal = [](auto change) {
    CaseShape s = three();
    Case c = make_case(s);
    c.view.strides.kv = c.view.scale_strides.kv = 0;
    change(c);
    return run_on("cpu", c).status.field();
  };
  EXPECT_EQ(refusal([](Case& c) { c.attributes.window = c.attributes.cyclic_capacity = 16; }), "cyclic_capacity");
  EXPECT_EQ(refusal([](Case& c) {
              c.view.dtype = DType::f8_e4m3, c.view.quant = QuantKind::per_tensor, c.view.v_scale = 2 * c.view.k_scale;
            }),
            "v_scale");
}

// A scale for each element, for two and for four; heads of no whole vector too; few rows and many, and rotated keys.
TEST_P(Cache, GroupsBelowEight) {
  for (DType type : {DType::i8, DType::i4})
    for (DType scale : {DType::f32, DType::f16})
      for (int group : {1, 2, 4})
        for (int head_dim : {20, 64, 512}) {
          CaseShape s = three();
          s.attributes.head_dim = head_dim;
          s.cache.dtype = type;
          s.cache.quant = QuantKind::group;
          s.cache.quant_group = group;
          s.cache.scale_dtype = scale;
          Case c = make_case(s);
          Outcome o = run(c);
          ASSERT_TRUE(o.status.ok()) << o.status.to_string();
          EXPECT_EQ(compare_with_reference(c, o.after, o.out), "") << describe(c);
        }
}

// A decode gives the bits that the same row has among many.
TEST_P(Cache, GroupsBelowEightAreTheSameForFewRowsAndMany) {
  CaseShape s = small(2, 2, 64);
  s.sequences = {{0, 90}};
  s.cache.dtype = DType::i4, s.cache.quant = QuantKind::group, s.cache.quant_group = 2;
  Case prefill = make_case(s);
  Outcome whole = run(prefill);
  ASSERT_TRUE(whole.status.ok()) << whole.status.to_string();
  Case again = prefill;
  again.attributes.append = false;
  again.cache = whole.after.cache, again.scale = whole.after.scale;
  again.seqstarts = {0, 1}, again.start_pos = {89}, again.max_seqlen = 1;
  again.query.erase(again.query.begin(), again.query.begin() + 89 * 2 * 64 * 4);
  Outcome last = run(again);
  for (int h = 0; h < 2; ++h) EXPECT_EQ(std::memcmp(last.row(0, h), whole.row(89, h), 64 * 4), 0);
}

TEST_P(Cache, PerTensorInt8AndFp8) {
  for (DType type : {DType::i8, DType::f8_e4m3}) {
    CaseShape s = three();
    s.cache.dtype = type;
    s.cache.quant = QuantKind::per_tensor;
    s.cache.k_scale = 0.02f, s.cache.v_scale = 0.03f;
    Case c = make_case(s);
    Outcome o = run(c);
    EXPECT_EQ(compare_with_reference(c, o.after, o.out), "");
  }
}

TEST_P(Cache, NewTokensAreAttendedAsTheCacheReturnsThem) {
  // A prefill through an int4 cache, then its last token again as a decode over what was stored.
  CaseShape s = small();
  s.cache.dtype = DType::i4, s.cache.quant = QuantKind::group, s.cache.quant_group = 8;
  s.sequences = {{0, 20}};
  Case prefill = make_case(s);
  Outcome whole = run(prefill);
  Case again = prefill;
  again.attributes.append = false;
  again.cache = whole.after.cache, again.scale = whole.after.scale;
  again.seqstarts = {0, 1};
  again.start_pos = {19};
  again.max_seqlen = 1;
  again.query.erase(again.query.begin(), again.query.begin() + 19 * 4 * 32 * 4);
  Outcome last = run(again);
  for (int h = 0; h < 4; ++h) EXPECT_EQ(std::memcmp(last.row(0, h), whole.row(19, h), 32 * 4), 0);
}

TEST_P(Cache, KvcStoresThenGivesBackEverythingRepeated) {
  for (DType type : {DType::f16, DType::i8}) {
    CaseShape s = three();
    s.cache.dtype = type;
    if (type == DType::i8) s.cache.quant = QuantKind::group, s.cache.quant_group = 16;
    Case c = make_case(s);
    c.op = Op::key_value_cache;
    c.num_repeat = 3;
    Outcome o = run(c);
    ASSERT_TRUE(o.status.ok()) << o.status.to_string();
    EXPECT_EQ(compare_with_reference(c, o.after, o.out), "");
    const float* k = reinterpret_cast<const float*>(o.out.key.data());
    for (int64_t t = 0; t < c.kvstarts.back(); ++t)  // repeat-interleave: heads 0 0 0 1 1 1
      for (int r = 1; r < 3; ++r)
        for (int h = 0; h < 2; ++h)
          EXPECT_EQ(std::memcmp(k + (t * 6 + h * 3) * 32, k + (t * 6 + h * 3 + r) * 32, 128), 0);
    EXPECT_NEAR(k[(21 + 7) * 6 * 32], floats(c.key)[1 * 2 * 32], type == DType::f16 ? 2e-3 : 3e-2)
        << "sequence 1's first new token is its 8th";
  }
}

TEST_P(Cache, KvcStoresInt8InputAsItIs) {
  CaseShape s = small();
  s.attributes.io = DType::i8, s.attributes.out = DType::f32;
  s.cache.dtype = DType::i8, s.cache.quant = QuantKind::per_tensor, s.cache.k_scale = 0.5f;
  s.attributes.index_mode = IndexMode::offset;
  s.sequences = {{0, 2}};
  Case c = make_case(s);
  c.op = Op::key_value_cache;
  c.key[0] = uint8_t(-128);
  Outcome o = run(c);
  ASSERT_TRUE(o.status.ok()) << o.status.to_string();
  const float* k = reinterpret_cast<const float*>(o.out.key.data());
  EXPECT_EQ(k[0], -64.0f) << "-128 survives, though quantizing never gives it";
  EXPECT_EQ(compare_with_reference(c, o.after, o.out), "");
}

TEST_P(Cache, KvcGivesBackInt8AsItIsStored) {
  CaseShape s = three();
  s.attributes.io = s.attributes.out = DType::i8;
  s.cache.dtype = DType::i8, s.cache.quant = QuantKind::per_tensor, s.cache.k_scale = 0.5f;
  s.attributes.page_size = 6;
  Case c = make_case(s);
  c.op = Op::key_value_cache;
  c.num_repeat = 2;
  Outcome o = run(c);
  ASSERT_TRUE(o.status.ok()) << o.status.to_string();
  EXPECT_EQ(compare_with_reference(c, o.after, o.out), "");
  ASSERT_GE(o.out.value.size(), size_t(c.kvstarts.back() * 4 * 32));
  for (int64_t i = 0; i < 9; ++i)  // the third sequence is all new
    for (int64_t head = 0; head < 4; ++head) {
      const int64_t at = ((c.kvstarts[2] + i) * 4 + head) * 32, from = ((c.seqstarts[2] + i) * 2 + head / 2) * 32;
      EXPECT_EQ(std::memcmp(o.out.key.data() + at, c.key.data() + from, 32), 0);
      EXPECT_EQ(std::memcmp(o.out.value.data() + at, c.value.data() + from, 32), 0);
    }
  // Of elements with scales that are no tensor's there is nothing to give back as it is.
  c.view.quant = QuantKind::group, c.view.quant_group = 8, c.attributes.io = DType::f32;
  c.view.scale_dtype = DType::f32, c.scale.assign(size_t(c.view.max_tokens) * 2 * 2 * 4 * 4, 0);
  c.view.scale_strides = kvcache::layout_strides(2, 3, c.view.max_tokens, 1, 2, 4).value();
  const Status refused = run(c).status;
  EXPECT_EQ(refused.field(), "out_dtype") << refused.to_string();
}

// A cache of more than 2^31 elements that is mostly a hole: only the touched pages exist.
TEST_P(Cache, SparseCachePast2To31Elements) {
  CaseShape s = small(2, 1, 64);
  s.attributes.index_mode = IndexMode::offset;
  s.sequences = {{0, 40}};
  s.cache.dtype = DType::f16;
  for (int layout : {0, 3}) {
    s.layout = layout;
    Case near = make_case(s), far = near;
    const int64_t tokens = int64_t(20) << 20;  // x 2 x 64 = 2.7e9 elements
    const size_t bytes = size_t(tokens) * 2 * 64 * 2;
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) GTEST_SKIP() << "5 GiB of address space are not to be had here";
    far.view.max_tokens = tokens;
    far.view.strides = kvcache::layout_strides(2, layout, tokens, 1, 1, 64).value();
    far.view.data = memory;
    far.cache.clear();
    far.cachestarts = {tokens - 40};
    Outcome x = run(near), y = run(far);
    EXPECT_TRUE(y.status.ok()) << y.status.to_string();
    EXPECT_TRUE(same_bytes(x.out, y.out));
    EXPECT_GT((tokens - 1) * far.view.strides.token + far.view.strides.kv, int64_t(1) << 31);
    munmap(memory, bytes);
  }
}

}  // namespace
}  // namespace kvasir::attention
