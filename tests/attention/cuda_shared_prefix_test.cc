// Sequences that share a prefix on the device: each has what it would have by itself, whichever kernel reads the
// prefix.
#include <algorithm>

#include "attention/io.h"
#include "tests/attention/cuda_testing.h"

namespace kvasir::attention {
namespace {
using namespace testing;

// So many sequences of each group with so many keys in common; the last has none.
struct Groups {
  std::vector<std::pair<int, int64_t>> shared;
  int alone = 0;
  int64_t fresh = 1;
};

CaseShape shape_of(const Groups& groups, DType type, int head_dim, int kv_heads, int group, int page_size) {
  CaseShape s;
  Attributes& a = s.attributes;
  a.num_kv_heads = kv_heads, a.num_heads = kv_heads * group, a.head_dim = head_dim;
  a.io = a.out = type;
  a.page_size = page_size;
  a.return_lse = true;
  s.cache.dtype = type;
  int64_t more = 0;
  for (auto [count, keys] : groups.shared)
    for (int i = 0; i < count; ++i) s.sequences.push_back({keys + 7 * ++more % 150, groups.fresh});
  for (int i = 0; i < groups.alone; ++i) s.sequences.push_back({40 + 100 * i, 1});
  if (groups.fresh == 1) s.decoding_batches = int64_t(s.sequences.size());
  return s;
}

// The pages of a group's first sequence stand in the tables of all, and the step says so.
void expect_agreement(const Groups& groups, const CaseShape& s, uint64_t seed, bool masked = false) {
  Case before = make_case(s, seed);
  std::vector<int32_t> group;
  std::vector<int64_t> lengths;
  for (auto [count, keys] : groups.shared) {
    const auto first = int64_t(group.size());
    for (int64_t b = first; b < first + count; ++b) {
      group.push_back(int32_t(lengths.size()));
      for (int64_t p = 0; p < keys / s.attributes.page_size; ++p)
        before.cachestarts[size_t(b * before.max_pages + p)] = before.cachestarts[size_t(first * before.max_pages + p)];
    }
    lengths.push_back(keys / s.attributes.page_size * s.attributes.page_size);
  }
  group.resize(s.sequences.size(), -1);
  if (masked) {
    const int64_t columns = before.kvstarts.back();
    std::vector<float> mask(size_t(before.tokens() * columns));
    Dice dice(seed);
    for (float& x : mask) x = dice.normal();
    before.attn_mask.resize(size_t(dtype_bytes(s.attributes.io, std::ssize(mask))));
    write_elements(mask.data(), s.attributes.io, 0, std::ssize(mask), 1.0f, before.attn_mask.data());
    before.mask_row_stride = columns;
  }
  Case after = before;
  Step again = after.step();
  again.shared_group = group.data(), again.shared_len = lengths.data();
  CaseOutput got;
  const Status status = run_on_device(after, &got, create_on_device, nullptr, &again);
  ASSERT_TRUE(status.ok()) << status.to_string();
  EXPECT_EQ(compare_with_reference(before, after, got, 2.0, 4.0 * row_tolerance(s.attributes.io)), "")
      << describe(before) << " page " << s.attributes.page_size;
}

const Groups kGroups[] = {
    {{{40, 1024}}, 0},                      // one tile of 128 rows and a part, for four heads
    {{{33, 700}, {9, 2048}, {2, 300}}, 3},  // groups of several sizes beside sequences of their own
    {{{70, 256}}, 1},                       // two tiles of keys
    {{{12, 900}, {30, 512}}, 0, 3},         // several new tokens each, as drafts have
    {{{9, 700}}, 0, 8},                     // more than one tile of 32 rows each, where many heads share
};

TEST_F(Cuda, SharedPrefixesOfEveryShape) {
  uint64_t seed = 9100;
  for (const Groups& groups : kGroups)
    for (DType type : {DType::bf16, DType::f16})
      for (int head_dim : {64, 128})
        for (auto [kv_heads, group] : {std::pair{2, 4}, {1, 8}, {3, 1}, {1, 3}})
          expect_agreement(groups, shape_of(groups, type, head_dim, kv_heads, group, seed % 2 ? 16 : 128), ++seed);
}

TEST_F(Cuda, SharedPrefixesOfEveryVariant) {
  uint64_t seed = 9500;
  for (const Groups& groups : kGroups) {
    const CaseShape plain = shape_of(groups, DType::bf16, 128, 2, 4, 16);
    CaseShape softcap = plain, alibi = plain, small_pages = plain, large_pages = plain, scaled = plain;
    softcap.attributes.softcap = 5.0f;
    alibi.attributes.is_alibi = true;
    small_pages.attributes.page_size = 8, large_pages.attributes.page_size = 256;
    scaled.attributes.q_scaling = .5f;
    for (const CaseShape& s : {softcap, alibi, small_pages, large_pages, scaled}) expect_agreement(groups, s, ++seed);
    for (int layout = 0; layout < 4; ++layout) {
      CaseShape s = plain;
      s.layout = layout, s.cache.layers = 3, s.layer = 2;
      expect_agreement(groups, s, ++seed);
    }
    expect_agreement(groups, plain, ++seed, true);
  }
}

}  // namespace
}  // namespace kvasir::attention
