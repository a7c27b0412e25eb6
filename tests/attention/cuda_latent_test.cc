// Caches of keys alone on the device: values are the keys as they lie, one head of 576 for all queries.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention/io.h"
#include "attention/rope.h"
#include "kvcache/view.h"
#include "tests/attention/cuda_testing.h"
#include "tests/attention/testing.h"

namespace kvasir::attention {
namespace {
using namespace testing;
using kvcache::QuantKind;

constexpr int kUnread = 64;

CaseShape latent(int heads, DType type) {
  CaseShape s;
  Attributes& a = s.attributes;
  a.num_heads = heads, a.num_kv_heads = 1, a.head_dim = 576, a.unread_columns = kUnread;
  a.io = a.out = type;
  a.is_causal = a.return_lse = true;
  a.rope = rope_frequencies({.style = RopeStyle::gptj, .rotary_dim = 64}).value();
  a.page_size = 16;
  s.cache.dtype = type;
  return s;
}

Case keys_alone(const CaseShape& s, uint64_t seed) {
  Case c = make_case(s, seed);
  c.view.strides.kv = c.view.scale_strides.kv = 0;
  c.view.v_scale = c.view.k_scale;
  return c;
}

std::vector<float> row_of(const Bytes& b, DType type, int64_t row, int64_t cols) {
  std::vector<float> out(static_cast<size_t>(cols));
  read_elements(b.data(), type, row * cols, cols, 1.0f, out.data());
  return out;
}

// All but the columns that nobody reads, which may be anything.
void expect_agreement(const Case& before, Create create = create_on_device) {
  constexpr double widen = 4;  // queries are rounded once they are rotated
  Case after = before;
  CaseOutput got;
  const Status status = run_on_device(after, &got, create);
  ASSERT_TRUE(status.ok()) << status.to_string() << describe(before);
  const Attributes& a = before.attributes;
  const Outcome want = run_on("reference", before);
  ASSERT_TRUE(want.status.ok()) << want.status.to_string();
  const size_t each = size_t(dtype_bits(a.out) / 8), bytes = size_t(a.head_dim) * each;
  for (int64_t row = 0; row < before.tokens() * a.num_heads; ++row) {
    const auto x = row_of(want.out.output, a.out, row, a.head_dim), y = row_of(got.output, a.out, row, a.head_dim);
    double error = 0, length = 0;
    for (size_t d = size_t(a.unread_columns); d < x.size(); ++d)
      error += double(x[d] - y[d]) * double(x[d] - y[d]), length += double(x[d]) * double(x[d]);
    ASSERT_LE(std::sqrt(error), 2 * widen * row_tolerance(a.out) * std::sqrt(length))
        << "row " << row << " of " << describe(before);
    std::memcpy(got.output.data() + size_t(row) * bytes, want.out.output.data() + size_t(row) * bytes,
                size_t(a.unread_columns) * each);
  }
  EXPECT_EQ(compare_with_reference(before, after, got, widen, widen * row_tolerance(a.io)), "") << describe(before);
}

const std::vector<CaseShape::Sequence> kMixed = {{0, 1},   {62, 1},  {63, 1}, {64, 1}, {129, 1},
                                                 {300, 1}, {100, 3}, {0, 7},  {60, 9}};

// Heads of one tile and of some, full ones and others; pages small and large, RoPE's pairs both ways and none.
TEST_F(Cuda, LatentAttentionAgreesWithTheReference) {
  uint64_t seed = 1;
  for (int heads : {1, 6, 20, 64, 128})
    for (DType type : {DType::bf16, DType::f16}) {
      CaseShape s = latent(heads, type);
      s.sequences = kMixed, s.decoding_batches = 6;
      s.layout = int(seed % 4);
      s.attributes.packed_qkv = seed % 2;
      s.attributes.page_size = seed % 3 == 0 ? 1 : seed % 3 == 1 ? 16 : 128;
      if (seed % 5 == 0) s.attributes.rope = rope_frequencies({.style = RopeStyle::neox, .rotary_dim = 64}).value();
      if (seed % 5 == 1) s.attributes.rope = {};
      expect_agreement(keys_alone(s, ++seed));
    }
}

// So long that many blocks have a part; tokens that are found one by one, and one after another; nothing to append.
TEST_F(Cuda, LatentAttentionOfLongSequences) {
  for (auto mode : {kvcache::IndexMode::page_table, kvcache::IndexMode::token_table, kvcache::IndexMode::offset})
    for (bool append : {true, false}) {
      CaseShape s = latent(16, DType::bf16);
      s.sequences = {{9000, 1}, {3, 1}, {300, 9}}, s.decoding_batches = 2;
      s.attributes.index_mode = mode, s.attributes.append = append;
      expect_agreement(keys_alone(s, 7));
    }
}

// By the plain kernel: other caches, wherever all columns are wanted, other sizes, and beside a learned sink or a mask.
TEST_F(Cuda, CachesOfKeysAloneOfEveryKind) {
  const struct {
    DType dtype;
    QuantKind quant;
    int group;
  } kinds[] = {{DType::f32, QuantKind::none, 0},  {DType::f16, QuantKind::none, 0},
               {DType::bf16, QuantKind::none, 0}, {DType::f8_e4m3, QuantKind::per_tensor, 0},
               {DType::i8, QuantKind::group, 64}, {DType::i4, QuantKind::group, 32}};
  uint64_t seed = 40;
  for (const auto& kind : kinds)
    for (int head_dim : {576, 40, 128}) {
      CaseShape s = latent(12, DType::bf16);
      s.attributes.head_dim = head_dim;
      if (head_dim % 32) s.attributes.rope = rope_frequencies({.style = RopeStyle::gptj, .rotary_dim = 8}).value();
      s.attributes.unread_columns = 0;
      s.cache.dtype = kind.dtype, s.cache.quant = kind.quant, s.cache.quant_group = kind.group;
      if (kind.group > 0 && head_dim % kind.group) s.cache.quant_group = 8;
      s.sequences = {{90, 1}, {0, 3}, {5, 70}}, s.decoding_batches = 1;
      expect_agreement(keys_alone(s, ++seed));
    }
  CaseShape s = latent(16, DType::bf16);
  s.sequences = kMixed, s.decoding_batches = 6;
  Case sinks = keys_alone(s, 3);
  for (int h = 0; h < 16; ++h) sinks.sink_logits.push_back(float(h) * 0.3f - 2);
  expect_agreement(sinks);
}

// All sequences of a step share their first 256 tokens.
class Sharing final : public Attention {
 public:
  explicit Sharing(std::unique_ptr<Attention> of) : of_(std::move(of)) {}
  Status plan(const Step& step) override {
    Step s = step;
    const std::vector<int32_t> groups(size_t(step.batch), 0);
    const int64_t length = 256;
    s.shared_group = groups.data(), s.shared_len = &length;
    return of_->plan(s);
  }
  Status run(const Tensors& t) override { return of_->run(t); }
  Status store_and_gather(const KvcTensors& t) override { return of_->store_and_gather(t); }

 private:
  std::unique_ptr<Attention> of_;
};
Result<std::unique_ptr<Attention>> create_sharing(const Attributes& a, const Limits& l, const DeviceContext& c) {
  KVASIR_ASSIGN(auto of, cuda_backend().create(a, l, c));
  return std::unique_ptr<Attention>(std::make_unique<Sharing>(std::move(of)));
}

// Their first pages are read by one block for four queries.
TEST_F(Cuda, LatentAttentionOfASharedPrefix) {
  CaseShape s = latent(16, DType::bf16);
  s.sequences = {{400, 1}, {300, 1}, {300, 2}, {257, 1}, {500, 1}, {900, 1}}, s.decoding_batches = 2;
  Case c = keys_alone(s, 9);
  for (int64_t b = 1; b < 6; ++b)
    for (int64_t page = 0; page < 16; ++page)
      c.cachestarts[size_t(b * c.max_pages + page)] = c.cachestarts[size_t(page)];
  expect_agreement(c, create_sharing);
}

}  // namespace
}  // namespace kvasir::attention
