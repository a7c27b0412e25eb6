// Batch-invariant mode on the device: a row's bytes are its own, whatever stands beside it and however it came there.
#include <cstring>

#include "kvcache/view.h"
#include "tests/attention/cuda_testing.h"

namespace kvasir::attention {
namespace {
using namespace testing;

struct Kind {
  DType cache;
  kvcache::QuantKind quant;
  int window;
  bool latent = false;  // keys alone, for all heads
};

CaseShape shape_of(const Kind& k) {
  CaseShape s;
  Attributes& a = s.attributes;
  a.num_heads = 8, a.num_kv_heads = k.latent ? 1 : 2, a.head_dim = k.latent ? 576 : 128;
  a.unread_columns = k.latent ? 64 : 0;
  a.io = a.out = DType::bf16;
  a.batch_invariant = true;
  a.window = k.window;
  a.index_mode = kvcache::IndexMode::offset;
  s.cache.dtype = k.cache, s.cache.quant = k.quant;
  if (k.quant == kvcache::QuantKind::group) s.cache.quant_group = 64, s.cache.scale_dtype = DType::f16;
  if (k.quant == kvcache::QuantKind::per_tensor) s.cache.k_scale = s.cache.v_scale = 0.03f;
  return s;
}

// `donor`'s n tokens as chunks cut at `cuts`, each one call, among `mates` other sequences; the output's bytes.
Bytes in_chunks(CaseShape s, int64_t n, const std::vector<int64_t>& cuts, bool mates, const Case& donor) {
  const Attributes a = s.attributes;
  const int64_t q_row = int64_t(a.num_heads) * a.head_dim * 2, kv_row = int64_t(a.num_kv_heads) * a.head_dim * 2;
  const int64_t room = 4096, tokens = room + n;  // its place is the cache's end, whatever its mates use
  Bytes cache(size_t(dtype_bytes(s.cache.dtype, tokens * 2 * a.num_kv_heads * a.head_dim)));
  Bytes scale(s.cache.quant == kvcache::QuantKind::group
                  ? size_t(dtype_bytes(s.cache.scale_dtype, tokens * 2 * a.num_kv_heads * 2))
                  : 0);
  Bytes output;
  int64_t past = 0;
  for (size_t i = 0; i <= cuts.size(); ++i) {
    const int64_t end = i < cuts.size() ? cuts[i] : n, first = mates ? 2 : 0;
    s.sequences.clear();
    s.decoding_batches = 0;
    if (mates) s.sequences = {{90, 1}, {600, 1}}, s.decoding_batches = 2;
    s.sequences.push_back({past, end - past});
    if (mates) s.sequences.push_back({5, 40});
    Case c = make_case(s, i + 77);
    const int64_t at = c.seqstarts[size_t(first)];
    auto take = [&](Bytes& to, const Bytes& from, int64_t row) {
      std::memcpy(to.data() + at * row, from.data() + past * row, size_t((end - past) * row));
    };
    take(c.query, donor.query, q_row);
    take(c.key, donor.key, kv_row);
    take(c.value, donor.value, kv_row);
    c.view.max_tokens = tokens;
    c.view.strides = kvcache::layout_strides(2, 1, tokens, 1, a.num_kv_heads, a.head_dim).value();
    if (a.unread_columns > 0) c.view.strides.kv = 0;
    c.cache = cache;
    if (!scale.empty()) {
      c.view.scale_strides = kvcache::layout_strides(2, 1, tokens, 1, a.num_kv_heads, 2).value();
      c.scale = scale;
    }
    c.cachestarts[size_t(first)] = room;
    CaseOutput out;
    const Status status = run_on_device(c, &out);
    EXPECT_TRUE(status.ok()) << status.to_string();
    const uint8_t* from = out.output.data() + at * q_row;
    output.insert(output.end(), from, from + (end - past) * q_row);
    cache = c.cache, scale = c.scale;
    past = end;
  }
  return output;
}

TEST_F(Cuda, BatchInvariantBytesDoNotDependOnMatesNorChunks) {
  for (const Kind& k :
       {Kind{DType::bf16, kvcache::QuantKind::none, 0}, Kind{DType::bf16, kvcache::QuantKind::none, 200},
        Kind{DType::f8_e4m3, kvcache::QuantKind::per_tensor, 0}, Kind{DType::i8, kvcache::QuantKind::group, 0},
        Kind{DType::bf16, kvcache::QuantKind::none, 0, true}}) {
    const CaseShape s = shape_of(k);
    const int64_t n = 1300;  // past the first fixed cut
    CaseShape whole = s;
    whole.sequences = {{0, n}};
    const Case donor = make_case(whole, 5);
    const Bytes want = in_chunks(s, n, {}, false, donor);
    const std::string what = cat(dtype_name(k.cache), " window ", k.window);
    EXPECT_TRUE(in_chunks(s, n, {}, true, donor) == want) << what << " among batch-mates";
    EXPECT_TRUE(in_chunks(s, n, {512, 1024}, false, donor) == want) << what << " in even chunks";
    EXPECT_TRUE(in_chunks(s, n, {1, 2, 65, 511, 513, 640}, true, donor) == want) << what << " in odd chunks";
    std::vector<int64_t> decodes;
    for (int64_t t = 1270; t < n; ++t) decodes.push_back(t);
    EXPECT_TRUE(in_chunks(s, n, decodes, true, donor) == want) << what << " prefill and then decodes";
  }
}

}  // namespace
}  // namespace kvasir::attention
