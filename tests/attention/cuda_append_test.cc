// The two ways in which new tokens reach the cache leave the same bits, and every variant of a step is met by both.
#include <cstring>

#include "attention/cuda/launch.h"
#include "attention/cuda/plan.h"
#include "tests/attention/cuda_testing.h"

namespace kvasir::attention {
namespace {
using namespace testing;
using cuda::DeviceMemory;

struct Variant {
  DType io = DType::bf16, cache = DType::bf16;
  int dim = 128, heads = 8, kv_heads = 2, group = 0;
  bool packed = true, bias = false, rope = true, queries = true, contiguous = false;
};

struct Appended {
  std::vector<uint8_t> q, k, v, cache, scale;
  bool operator==(const Appended&) const = default;
};

std::vector<uint8_t> numbers(size_t count, DType type, uint32_t seed) {
  std::vector<uint8_t> out(count * size_t(dtype_bits(type) / 8));
  for (size_t i = 0; i < count; ++i) {
    seed = seed * 1664525u + 1013904223u;
    const float x = float(int32_t(seed)) * 0x1p-30f;
    uint32_t word;
    std::memcpy(&word, &x, 4);
    if (type == DType::f32) std::memcpy(&out[i * 4], &x, 4);
    const uint16_t brain = uint16_t(word >> 16), half = uint16_t((seed >> 16 & 0x83ff) | 0x3800);
    if (type != DType::f32) std::memcpy(&out[i * 2], type == DType::bf16 ? &brain : &half, 2);
  }
  return out;
}

Appended append(const Variant& c, bool by_token) {
  Attributes a;
  a.num_heads = c.heads, a.num_kv_heads = c.kv_heads, a.head_dim = c.dim;
  a.io = a.out = c.io;
  a.is_causal = true;
  const std::vector<int64_t> lengths = {1, 1, 3, 700, 40};
  std::vector<int64_t> seqstarts{0}, kvstarts{0}, start_pos, table;
  constexpr int64_t kPages = 60;
  for (size_t b = 0; b < lengths.size(); ++b) {
    start_pos.push_back(int64_t(b) * 7);
    seqstarts.push_back(seqstarts.back() + lengths[b]);
    kvstarts.push_back(kvstarts.back() + start_pos[b] + lengths[b]);
    for (int64_t p = 0; p < kPages; ++p) table.push_back((int64_t(b) * kPages + kPages - 1 - p) * 16);
  }
  const int64_t B = int64_t(lengths.size()), T = seqstarts.back(), tokens = B * kPages * 16;
  Step step;
  step.batch = B;
  step.seqstarts = seqstarts.data(), step.kvstarts = kvstarts.data(), step.start_pos = start_pos.data();
  step.cachestarts = table.data(), step.max_pages = kPages;
  step.decoding_batches = 2, step.max_seqlen = 700, step.max_kvlen = kPages * 16;
  cuda::Machine machine;
  for (int32_t& warps : machine.stream_warps) warps = 1056;
  machine.prefill = c.contiguous;
  cuda::Planner planner(a, {B, T, kPages * 16, kPages, tokens}, machine);
  std::vector<std::byte> host(planner.bytes());
  planner.plan(step, host.data());

  cuda::Shape s;
  s.heads = c.heads, s.kv_heads = c.kv_heads, s.group = c.heads / c.kv_heads, s.head_dim = c.dim;
  s.mode = int(kvcache::IndexMode::page_table), s.page_shift = 4;
  s.io = s.out = s.work = c.io;
  s.packed = c.packed;
  if (c.rope) s.rope_style = int(RopeStyle::neox), s.rotary_dim = c.dim;
  const size_t q = size_t(T * c.heads * c.dim), kv = size_t(T * c.kv_heads * c.dim), all = q + 2 * kv,
               cached = size_t(tokens * c.kv_heads * c.dim);
  const size_t cache_bytes = size_t(dtype_bytes(c.cache, int64_t(cached)));
  DeviceMemory plan, in, bias, angles, out, cache, scale;
  auto ok = [](const Status& status) { ASSERT_TRUE(status.ok()) << status.to_string(); };
  ok(plan.upload(host.data(), host.size()));
  ok(in.upload(numbers(all, c.io, 1).data(), all * 2));
  ok(bias.upload(numbers(size_t((c.heads + 2 * c.kv_heads) * c.dim), c.io, 2).data(),
                 size_t((c.heads + 2 * c.kv_heads) * c.dim) * 2));
  ok(angles.upload(numbers(size_t(T * c.dim * 2), DType::f32, 3).data(), size_t(T * c.dim * 8)));
  const std::vector<uint8_t> before(std::max(all * 2, cache_bytes * 2), 0x5a);
  ok(out.upload(before.data(), all * 2));
  ok(cache.upload(before.data(), cache_bytes * 2));
  const size_t scales = c.group ? cached / size_t(c.group) * 2 : 16;
  ok(scale.upload(before.data(), scales * 2));
  s.rope = angles.as<float>();
  cuda::Layer l;
  l.query = in.get(), l.key = in.as<uint16_t>() + q, l.value = in.as<uint16_t>() + q + kv;
  l.bias = c.bias ? bias.get() : nullptr;
  l.q = out.get(), l.k_new = out.as<uint16_t>() + q, l.v_new = out.as<uint16_t>() + q + kv;
  l.cache.key = cache.as<uint8_t>(), l.cache.value = l.cache.key + cache_bytes;
  l.cache.head = dtype_bytes(c.cache, c.dim), l.cache.token = l.cache.head * c.kv_heads;
  l.cache.dtype = c.cache;
  if (c.group) {
    l.cache.quant = int(kvcache::QuantKind::group), l.cache.quant_group = c.group;
    l.cache.scale_dtype = DType::f16;
    l.cache.key_scale = scale.as<uint8_t>(), l.cache.value_scale = l.cache.key_scale + scales;
    l.cache.scale_head = c.dim / c.group * 2, l.cache.scale_token = l.cache.scale_head * c.kv_heads;
  } else if (c.cache == DType::i8 || c.cache == DType::f8_e4m3) {
    l.cache.quant = int(kvcache::QuantKind::per_tensor), l.cache.k_scale = 0.02f, l.cache.v_scale = 0.03f;
  }
  EXPECT_TRUE(cuda::append_tokens_takes(s, l.cache));
  const auto v = planner.view(static_cast<std::byte*>(plan.get()));
  if (by_token)
    cuda::launch_append_tokens(s, v, l, planner.launch().tokens, c.queries, true, nullptr);
  else
    cuda::launch_append_any(s, v, l, planner.launch().tokens, c.queries, true, 0, nullptr);
  ok(cuda::check(cudaDeviceSynchronize(), "append"));
  Appended got;
  auto fetch = [&](std::vector<uint8_t>& to, const DeviceMemory& from, size_t begin, size_t bytes) {
    to.resize(bytes);
    ok(cuda::check(cudaMemcpy(to.data(), static_cast<const uint8_t*>(from.get()) + begin, bytes, cudaMemcpyDefault),
                   "fetch"));
  };
  fetch(got.q, out, 0, q * 2);
  fetch(got.k, out, q * 2, kv * 2);
  fetch(got.v, out, (q + kv) * 2, kv * 2);
  fetch(got.cache, cache, 0, cache_bytes * 2);
  fetch(got.scale, scale, 0, scales * 2);
  return got;
}

TEST_F(Cuda, TokensAppendedByTheWarpLeaveTheBitsOfTheOtherWay) {
  struct Cache {
    DType type;
    int group;
  };
  int turn = 0;
  for (DType io : {DType::bf16, DType::f16})
    for (int dim : {64, 128, 256})
      for (Cache cache :
           {Cache{io, 0}, {DType::f8_e4m3, 0}, {DType::i8, 0}, {DType::i8, 8}, {DType::i8, 32}, {DType::i4, 32}})
        for (bool packed : {true, false})
          for (bool rope : {true, false}) {
            Variant c{io, cache.type, dim, 8, 2, cache.group, packed};
            c.rope = rope;
            if (++turn % 3 == 0) c.heads = 9, c.kv_heads = 3;
            if (turn % 5 == 0) c.heads = c.kv_heads = 5;
            c.bias = turn % 2 == 0, c.contiguous = turn % 4 < 2, c.queries = turn % 7 > 0;
            const Appended one = append(c, true), other = append(c, false);
            EXPECT_TRUE(one.q == other.q && one.k == other.k && one.v == other.v) << turn;
            EXPECT_TRUE(one.cache == other.cache && one.scale == other.scale) << turn;
            EXPECT_NE(one.cache, std::vector<uint8_t>(one.cache.size(), 0x5a));
          }
}

}  // namespace
}  // namespace kvasir::attention
