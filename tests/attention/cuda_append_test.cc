// The ways in which new tokens reach the cache leave the same bits.
#include <algorithm>
#include <cmath>
#include <cstdio>
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

// So many decodes that no blocks share a kv head, of all lengths.
std::vector<int64_t> steps_of(int64_t count, int64_t step) {
  std::vector<int64_t> pasts;
  for (int64_t i = 0; i < count; ++i) pasts.push_back(i * step % 640);
  return pasts;
}

// The blocks that attend few decodes append as well, the warps that attend many where the cache has 16 bits. The same
// bytes as by a kernel of its own, in output and cache.
TEST_F(Cuda, DecodesThatAppendWhereTheyAttendLeaveTheBitsOfTheOtherWay) {
  struct Cache {
    DType type;
    int group;
  };
  // Where fewer random cases are asked for (under a sanitizer each takes seconds), fewer of these as well.
  const int64_t every = std::max<int64_t>(1, 300 / std::max<int64_t>(1, setting("KVASIR_ATTENTION_CASES", 300)));
  uint64_t seed = 9000;
  int64_t at = 0;
  int appended_here = 0, compared = 0;
  for (int dim : {64, 128, 256})
    for (Cache cache : {Cache{DType::bf16, 0},
                        {DType::f16, 0},
                        {DType::f8_e4m3, 0},
                        {DType::i8, 0},
                        {DType::i8, 32},
                        {DType::i4, 32}})
      for (auto [heads, kv_heads] : {std::pair{8, 2}, {9, 3}, {5, 5}, {16, 2}})
        for (const std::vector<int64_t>& pasts : {std::vector<int64_t>{0},
                                                  {5},
                                                  {31},
                                                  {32},
                                                  {100},
                                                  {700},
                                                  {1500},
                                                  {3000, 2990},
                                                  {64, 63, 60},
                                                  {700, 690, 650, 701},
                                                  {3000, 5, 0},
                                                  steps_of(70, 13),
                                                  steps_of(150, 3)}) {
          CaseShape shape;
          Attributes& a = shape.attributes;
          a.num_heads = heads, a.num_kv_heads = kv_heads, a.head_dim = dim;
          a.io = a.out = cache.type == DType::f16 || ++seed % 3 == 0 ? DType::f16 : DType::bf16;
          a.return_lse = true;
          a.index_mode = kvcache::IndexMode::page_table;
          a.page_size = seed % 2 ? 16 : 64;
          a.packed_qkv = seed % 5 > 0;
          if (at++ % every != 0) continue;
          if (seed % 7 > 0 || !a.packed_qkv) {
            a.rope.style = RopeStyle::neox, a.rope.rotary_dim = dim;
            for (int i = 0; i < dim / 2; ++i) a.rope.inv_freq.push_back(float(std::pow(10000.0, -2.0 * i / dim)));
          }
          if (seed % 11 == 0) a.window = 128;
          shape.cache.dtype = cache.type, shape.layout = int(seed % 4);
          if (cache.group)
            shape.cache.quant = kvcache::QuantKind::group, shape.cache.quant_group = cache.group,
            shape.cache.scale_dtype = seed % 4 < 2 ? DType::f16 : DType::f32;
          else if (cache.type == DType::i8 || cache.type == DType::f8_e4m3)
            shape.cache.quant = kvcache::QuantKind::per_tensor, shape.cache.k_scale = 0.03f,
            shape.cache.v_scale = 0.025f;
          for (int64_t past : pasts) shape.sequences.push_back({past, 1});
          shape.decoding_batches = int64_t(pasts.size());
          const Case before = make_case(shape, seed);
          Case one = before, other = before;
          CaseOutput of_one, of_other;
          size_t launches[2] = {};
          const Status here = run_on_device(one, &of_one, create_on_device, &launches[0]),
                       apart = run_on_device(other, &of_other, cuda::create_appending_apart, &launches[1]);
          ASSERT_TRUE(here.ok() && apart.ok()) << here.to_string() << apart.to_string();
          appended_here += launches[0] + 1 == launches[1];
          ++compared;
          const std::string what = describe(before);
          EXPECT_TRUE(of_one.output == of_other.output) << what;
          EXPECT_TRUE(of_one.lse == of_other.lse) << what;
          EXPECT_TRUE(one.cache == other.cache && one.scale == other.scale) << what;
        }
  EXPECT_GT(appended_here, compared / 2) << "of " << compared;
  std::printf("%d of %d appended where they attend\n", appended_here, compared);
}

}  // namespace
}  // namespace kvasir::attention
