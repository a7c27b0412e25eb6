// Decode bandwidth and prefill rate of the cuda back end beside a bare read kernel over the same bytes, all in
// CUDA graphs, L2 cold by rotating caches. One JSON object a line; bench/gpu/attention.py adds the peers.
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "attention/backend.h"
#include "attention/cuda/cuda.h"
#include "attention/cuda/launch.h"
#include "attention/cuda/plan.h"
#include "bench/gpu/graph_time.h"
#include "core/check.h"

using namespace kvasir;
using namespace kvasir::attention;

namespace {

__global__ void __launch_bounds__(512) read_kernel(const uint4* p, int64_t n, uint32_t* sink) {
  uint32_t x = 0;
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + 3 * step < n; i += 4 * step) {
    uint4 a = __ldcs(p + i), b = __ldcs(p + i + step), c = __ldcs(p + i + 2 * step), d = __ldcs(p + i + 3 * step);
    x ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
  }
  for (; i < n; i += step) x ^= p[i].x ^ p[i].y ^ p[i].z ^ p[i].w;
  if (x == 0x12345678u) *sink = x;
}

// Random bits; 16-bit floats stay finite and near one.
__global__ void fill_kernel(uint32_t* p, int64_t n, uint32_t seed, int kind) {
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
    uint32_t x = uint32_t(i) * 2654435761u + seed;
    x ^= x >> 15, x *= 2246822519u, x ^= x >> 13, x *= 3266489917u, x ^= x >> 16;
    if (kind == 0) x = (x & 0x807f807fu) | 0x3f003f00u;  // bfloat16 in +-[0.5, 1)
    if (kind == 1) x = (x & 0x83ff83ffu) | 0x38003800u;  // float16 in +-[0.5, 1)
    if (kind == 2) x &= 0xbfbfbfbfu;                     // FP8 below 2
    if (kind == 4) x = 0x20002000u | (x & 0x03ff03ffu);  // small positive float16: scales
    if (kind == 5) x = 0x3c000000u | (x & 0x007fffffu);  // small positive float32
    if (kind == 6 || kind == 7) {                        // standard normal: E4M3, bfloat16
      const int each = kind == 6 ? 8 : 16;
      uint32_t word = 0;
      for (int b = 0; b < 32; b += each) {
        const float radius = sqrtf(-2.0f * __logf((float(x >> 8) + 1.0f) * 0x1p-24f));
        x = x * 747796405u + 2891336453u, x ^= x >> 16;
        const float y = radius * cospif(float(x >> 8) * 0x1p-23f);
        x = x * 747796405u + 2891336453u, x ^= x >> 15;
        word |= (kind == 6 ? uint32_t(__nv_cvt_float_to_fp8(y, __NV_SATFINITE, __NV_E4M3))
                           : uint32_t(__bfloat16_as_ushort(__float2bfloat16_rn(y))))
                << b;
      }
      x = word;
    }
    p[i] = x;
  }
}

struct Timer {
  cudaStream_t stream;
  Timer() { CUDA(cudaStreamCreate(&stream)); }
  // A card that has computed for some tens of milliseconds is at its power limit: every shape begins rested.
  double time(int count, const std::function<void(int)>& launch, int replays = 7) {
    return bench::graph_time(stream, count, launch, replays, [&] {
      CUDA(cudaStreamSynchronize(stream));
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    });
  }
};

struct Shape {
  std::string name;
  int64_t batch, kv;
  int heads = 32, kv_heads = 8, dim = 128, page = 16;
  DType cache = DType::bf16;
  int group = 0;    // > 0: quantized by group, float16 scales
  int queries = 1;  // a sequence
  int layout = 2;
  int64_t shared = 0;  // cascade: all sequences share this many
  bool invariant = false;
  // What a model gives: packed rows, RoPE, new tokens to append; `apart`: by a kernel of their own.
  bool given = false, apart = false;
  int window = 0, sinks = 0;
  bool streaming = false;  // StreamingLLM's positions: keys are rotated as they are read
  bool latent = false;     // keys alone, of which the last 512 columns are the values
};

uint8_t* random_memory(int64_t bytes, int kind, uint32_t seed, cudaStream_t stream) {
  uint8_t* p;
  CUDA(cudaMalloc(&p, size_t(bytes + 256)));
  fill_kernel<<<2048, 256, 0, stream>>>(reinterpret_cast<uint32_t*>(p), bytes / 4, seed, kind);
  return p;
}
int kind_of(DType t) { return t == DType::bf16 ? 0 : t == DType::f16 ? 1 : t == DType::f8_e4m3 ? 2 : 3; }

void decode(Timer& timer, const Shape& s, uint32_t* sink) {
  Attributes a;
  a.num_heads = s.heads, a.num_kv_heads = s.kv_heads, a.head_dim = s.dim;
  a.io = a.out = DType::bf16;
  a.append = a.packed_qkv = s.given;
  if (s.given)
    a.rope.style = RopeStyle::neox, a.rope.rotary_dim = s.dim, a.rope.inv_freq.resize(size_t(s.dim / 2), 0.1f);
  if (s.latent) {
    a.unread_columns = 64;
    a.rope.style = RopeStyle::gptj, a.rope.rotary_dim = 64, a.rope.inv_freq.resize(32, 0.1f);
  }
  a.is_causal = s.queries > 1;
  a.window = s.window, a.sinks = s.sinks, a.streaming_positions = s.streaming;
  a.page_size = s.page;
  a.batch_invariant = s.invariant;
  const int64_t pages = (s.kv + s.page - 1) / s.page, shared_pages = s.shared / s.page;
  const int64_t total_pages = s.batch * (pages - shared_pages) + shared_pages, max_tokens = total_pages * s.page;
  const int64_t row_elements = (s.latent ? 1 : 2) * s.kv_heads * s.dim;
  const int64_t data_bytes = dtype_bytes(s.cache, max_tokens * row_elements);
  const int64_t scale_bytes = s.group ? max_tokens * row_elements / s.group * 2 : 0;
  const int64_t bytes = data_bytes + scale_bytes;
  const int copies = int(std::clamp<int64_t>((300ll << 20) / bytes + 1, 2, 40));
  kvcache::CacheView view;
  view.dtype = s.cache;
  view.max_tokens = max_tokens, view.kv_heads = s.kv_heads, view.head_dim = s.dim;
  auto strides = [&](int64_t d) {
    kvcache::Strides r;
    const int64_t h = s.kv_heads;
    if (s.layout == 3) r = {d, 2 * h * max_tokens * d, h * max_tokens * d, max_tokens * d};
    if (s.layout == 2) r = {h * d, 2 * max_tokens * h * d, max_tokens * h * d, d};
    if (s.layout == 1) r = {2 * h * d, max_tokens * 2 * h * d, h * d, d};
    return r;
  };
  view.strides = strides(s.dim);
  if (s.latent) view.strides = {s.dim, 0, 0, s.dim};
  if (s.cache == DType::f8_e4m3 || (s.cache == DType::i8 && !s.group))
    view.quant = kvcache::QuantKind::per_tensor, view.k_scale = view.v_scale = 0.01f;
  if (s.group)
    view.quant = kvcache::QuantKind::group, view.quant_group = s.group, view.scale_dtype = DType::f16,
    view.scale_strides = strides(s.dim / s.group);

  std::vector<uint8_t*> data, scale;
  for (int i = 0; i < copies; ++i) {
    data.push_back(random_memory(data_bytes, kind_of(s.cache), uint32_t(i), timer.stream));
    scale.push_back(scale_bytes ? random_memory(scale_bytes, 4, uint32_t(i), timer.stream) : nullptr);
  }
  const double of_all = s.window ? std::min(1.0, double(s.window) / double(s.kv)) : 1.0;  // that is read
  const int64_t T = s.batch * s.queries;
  uint8_t* q = random_memory(T * (s.heads + 2 * s.kv_heads) * s.dim * 2, 0, 99, timer.stream);
  uint8_t* out = random_memory(T * s.heads * s.dim * 2, 0, 98, timer.stream);

  std::vector<int64_t> seqstarts{0}, kvstarts{0}, start_pos, table(size_t(s.batch * pages)),
      order(static_cast<size_t>(total_pages));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(1));
  size_t next = size_t(shared_pages);
  for (int64_t b = 0; b < s.batch; ++b) {
    seqstarts.push_back(seqstarts.back() + s.queries);
    kvstarts.push_back(kvstarts.back() + s.kv);
    start_pos.push_back(s.kv - s.queries);
    for (int64_t p = 0; p < pages; ++p)
      table[size_t(b * pages + p)] = order[p < shared_pages ? size_t(p) : next++] * s.page;
  }
  Step step;
  step.batch = s.batch;
  step.seqstarts = seqstarts.data(), step.kvstarts = kvstarts.data(), step.start_pos = start_pos.data();
  step.cachestarts = table.data(), step.max_pages = pages;
  step.decoding_batches = s.queries == 1 ? s.batch : 0;
  step.max_seqlen = s.queries, step.max_kvlen = s.kv;
  std::vector<int32_t> group(static_cast<size_t>(s.batch), 0);
  const int64_t shared_len = s.shared;
  if (s.shared) step.shared_group = group.data(), step.shared_len = &shared_len;

  const Limits limits{s.batch, T, s.kv, pages, max_tokens};
  auto made = s.apart ? cuda::create_appending_apart(a, limits, {nullptr, timer.stream})
                      : cuda_backend().create(a, limits, {nullptr, timer.stream});
  KVASIR_CHECK(made.ok(), made.status().to_string());
  Attention& attention = **made;
  auto tensors = [&](int i) {
    Tensors t;
    t.query = q, t.output = out, t.cache = view;
    t.cache.data = data[size_t(i % copies)], t.cache.scale = scale[size_t(i % copies)];
    return t;
  };
  auto ok = [](const Status& st) { KVASIR_CHECK(st.ok(), st.to_string()); };
  ok(attention.plan(step));
  ok(attention.run(tensors(0)));
  ok(attention.plan(step));
  CUDA(cudaStreamSynchronize(timer.stream));
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 20; ++i) ok(attention.plan(step));
  const double plan_us =
      std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count() / 20;
  CUDA(cudaStreamSynchronize(timer.stream));
  const int count = std::max(copies, 8);
  const double us = timer.time(count, [&](int i) { ok(attention.run(tensors(i))); });
  const double read_us = timer.time(count, [&](int i) {
    read_kernel<<<132 * 4, 512, 0, timer.stream>>>(reinterpret_cast<uint4*>(data[size_t(i % copies)]), data_bytes / 16,
                                                   sink);
    if (scale_bytes)
      read_kernel<<<132 * 4, 512, 0, timer.stream>>>(reinterpret_cast<uint4*>(scale[size_t(i % copies)]),
                                                     scale_bytes / 16, sink);
  });
  printf(
      "{\"decode\": \"%s\", \"batch\": %ld, \"kv\": %ld, \"heads\": [%d, %d], \"dim\": %d, \"page\": %d, \"cache\": "
      "\"%s\", "
      "\"group\": %d, \"queries\": %d, \"layout\": %d, \"us\": %.2f, \"tb_s\": %.3f, \"read_us\": %.2f, \"read_tb_s\": "
      "%.3f, "
      "\"of_ceiling\": %.3f, \"plan_us\": %.1f}\n",
      s.name.c_str(), s.batch, s.kv, s.heads, s.kv_heads, s.dim, s.page, dtype_name(s.cache), s.group, s.queries,
      s.layout, us, double(bytes) * of_all / us * 1e-6, read_us, double(bytes) / read_us * 1e-6, read_us * of_all / us,
      plan_us);
  fflush(stdout);
  for (uint8_t* p : data) cudaFree(p);
  for (uint8_t* p : scale) cudaFree(p);
  cudaFree(q), cudaFree(out);
}

// The append kernel by itself, as run() launches it for these inputs.
double append_alone(Timer& timer, const Attributes& a, const Limits& limits, const Step& step, const Tensors& t) {
  cuda::Planner planner(a, limits, {{1056, 1056, 1056}, true});
  std::vector<std::byte> host(planner.bytes());
  planner.plan(step, host.data());
  std::byte* device;
  CUDA(cudaMalloc(&device, host.size()));
  CUDA(cudaMemcpy(device, host.data(), host.size(), cudaMemcpyHostToDevice));
  cuda::Shape s;
  s.heads = a.num_heads, s.kv_heads = a.num_kv_heads, s.group = s.heads / s.kv_heads, s.head_dim = a.head_dim;
  s.mode = int(kvcache::IndexMode::page_table);
  for (int p = a.page_size; p > 1; p /= 2) ++s.page_shift;
  s.io = s.out = s.work = a.io;
  cuda::Layer l;
  l.query = t.query, l.key = t.key, l.value = t.value;
  l.given = 1;
  l.cache.key = static_cast<uint8_t*>(t.cache.data);
  l.cache.value = l.cache.key + t.cache.strides.kv * 2;
  l.cache.token = t.cache.strides.token * 2, l.cache.head = t.cache.strides.head * 2;
  l.cache.dtype = t.cache.dtype;
  const double us = timer.time(4, [&](int) {
    cuda::launch_append(s, planner.view(device), l, planner.launch().tokens, false, true, 0, timer.stream);
  });
  cudaFree(device);
  return us;
}

// Causal prefill of `batch` sequences of `tokens` on `old` cached ones; the cache is written as well. `fp8`: the scale
// of E4M3 queries, where all is that; at 80 scores deviate by 1.4, at 0.05 they are much the same. `normal`: what is
// given and cached are standard normal numbers, by which scores deviate by 1. `served`: rows as a model gives them,
// packed bfloat16 that is rotated first, on a cache of bfloat16 or FP8, or of that with queries in FP8 as well.
enum class Served { no, bf16, fp8_cache, fp8 };
void prefill(Timer& timer, const std::string& name, int64_t batch, int64_t tokens, int64_t old, int dim = 128,
             int page = 16, int64_t decodes = 0, int64_t decode_kv = 0, float fp8 = 0.0f, bool normal = false,
             Served served = Served::no) {
  Attributes a;
  a.num_heads = 32, a.num_kv_heads = 8, a.head_dim = dim;
  a.io = a.out = DType::bf16;
  a.page_size = page;
  const int element = fp8 > 0 ? 1 : 2;
  if (fp8 > 0) a.io = DType::f8_e4m3, a.q_scale = fp8;
  if (served != Served::no) {
    a.packed_qkv = true, a.fp8_query = served == Served::fp8;
    a.rope.style = RopeStyle::neox, a.rope.rotary_dim = dim, a.rope.inv_freq.resize(size_t(dim / 2), 0.1f);
  }
  const int64_t B = decodes + batch, kv = std::max(batch > 0 ? tokens + old : 0, decode_kv),
                pages = (kv + page - 1) / page;
  const int64_t max_tokens = B * pages * page, T = decodes + batch * tokens;
  kvcache::CacheView view;
  view.dtype = DType::bf16, view.max_tokens = max_tokens, view.kv_heads = 8, view.head_dim = dim;
  view.strides = {8 * dim, 2 * max_tokens * 8 * dim, max_tokens * 8 * dim, dim};
  if (fp8 > 0)
    view.dtype = DType::f8_e4m3, view.quant = kvcache::QuantKind::per_tensor,
    view.k_scale = view.v_scale = normal ? 1.0f : 0.05f;
  if (served == Served::fp8_cache || served == Served::fp8)
    view.dtype = DType::f8_e4m3, view.quant = kvcache::QuantKind::per_tensor;
  const int kind = normal ? (fp8 > 0 ? 6 : 7) : kind_of(view.dtype);
  view.data = random_memory(dtype_bytes(view.dtype, max_tokens * 2 * 8 * dim),
                            normal && view.dtype == DType::f8_e4m3 ? 6 : kind, 1, timer.stream);
  // Inputs in turn, so that none is found in L2.
  const int64_t one = T * 48 * dim * element;
  const int copies = int(std::clamp<int64_t>((100ll << 20) / one + 1, 2, 40));
  const int64_t q_rows = served == Served::no ? 32 : 48;
  uint8_t* q = random_memory(copies * T * q_rows * dim * element, kind, 2, timer.stream);
  uint8_t* k = random_memory(copies * T * 8 * dim * element, kind, 3, timer.stream);
  uint8_t* v = random_memory(copies * T * 8 * dim * element, kind, 4, timer.stream);
  uint8_t* out = random_memory(copies * T * 32 * dim * 2, 0, 5, timer.stream);
  std::vector<int64_t> seqstarts{0}, kvstarts{0}, start_pos, table(static_cast<size_t>(B * pages));
  std::vector<int64_t> order(static_cast<size_t>(B * pages));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(1));
  for (size_t i = 0; i < table.size(); ++i) table[i] = order[i] * page;
  for (int64_t b = 0; b < B; ++b) {
    const int64_t n = b < decodes ? 1 : tokens, pos = b < decodes ? decode_kv - 1 : old;
    seqstarts.push_back(seqstarts.back() + n);
    kvstarts.push_back(kvstarts.back() + pos + n);
    start_pos.push_back(pos);
  }
  Step step;
  step.batch = B;
  step.seqstarts = seqstarts.data(), step.kvstarts = kvstarts.data(), step.start_pos = start_pos.data();
  step.cachestarts = table.data(), step.max_pages = pages;
  step.decoding_batches = decodes;
  step.max_seqlen = std::max<int64_t>(tokens, 1), step.max_kvlen = kv;
  auto made = cuda_backend().create(a, {B, T, kv, pages, max_tokens}, {nullptr, timer.stream});
  KVASIR_CHECK(made.ok(), made.status().to_string());
  auto ok = [](const Status& st) { KVASIR_CHECK(st.ok(), st.to_string()); };
  Tensors t;
  t.query = q, t.key = k, t.value = v, t.output = out, t.cache = view;
  ok((*made)->plan(step));
  ok((*made)->run(t));
  ok((*made)->plan(step));
  CUDA(cudaStreamSynchronize(timer.stream));
  const double us = timer.time(std::max(copies, 4), [&](int i) {
    Tensors turn = t;
    const int64_t n = i % copies * T * dim;
    turn.query = q + n * q_rows * element, turn.key = k + n * 8 * element, turn.value = v + n * 8 * element;
    turn.output = out + n * 32 * 2;
    ok((*made)->run(turn));
  });
  const double append_us =
      fp8 > 0 || served != Served::no ? 0.0 : append_alone(timer, a, {B, T, kv, pages, max_tokens}, step, t);
  const double flops = 4.0 * 32 * dim * double(batch) * double(tokens) * (double(old) + double(tokens) / 2);
  printf(
      "{\"prefill\": \"%s\", \"batch\": %ld, \"tokens\": %ld, \"old\": %ld, \"dim\": %d, \"page\": %d, \"decodes\": "
      "%ld, "
      "\"us\": %.1f, \"append_us\": %.1f, \"tflops\": %.1f, \"tflops_without_append\": %.1f}\n",
      name.c_str(), batch, tokens, old, dim, page, decodes, us, append_us, flops / us * 1e-6,
      flops / (us - append_us) * 1e-6);
  fflush(stdout);
  cudaFree(view.data), cudaFree(q), cudaFree(k), cudaFree(v), cudaFree(out);
}

// What an append of a model's own step costs: packed rows of q, k and v with RoPE on their way into a bfloat16 cache
// and, contiguous, to prefill (`contiguous`), beside the bytes that this takes. Inputs in turn, so that none is found
// in L2.
void append(Timer& timer, int64_t batch, int64_t tokens, bool contiguous, int heads = 32, int kv_heads = 8,
            int dim = 128) {
  Attributes a;
  a.num_heads = heads, a.num_kv_heads = kv_heads, a.head_dim = dim;
  a.io = a.out = DType::bf16;
  a.packed_qkv = true;
  const int64_t pages = (tokens + 15) / 16, T = batch * tokens, max_tokens = batch * pages * 16;
  std::vector<int64_t> seqstarts{0}, kvstarts{0}, start_pos(size_t(batch), 0), table(size_t(batch * pages));
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), std::mt19937(1));
  for (int64_t& p : table) p *= 16;
  for (int64_t b = 0; b < batch; ++b) seqstarts.push_back((b + 1) * tokens), kvstarts.push_back((b + 1) * tokens);
  Step step;
  step.batch = batch;
  step.seqstarts = seqstarts.data(), step.kvstarts = kvstarts.data(), step.start_pos = start_pos.data();
  step.cachestarts = table.data(), step.max_pages = pages;
  step.max_seqlen = tokens, step.max_kvlen = tokens;
  cuda::Machine machine;
  machine.stream_warps[0] = machine.stream_warps[1] = machine.stream_warps[2] = 1056;
  machine.prefill = contiguous;
  cuda::Planner planner(a, {batch, T, tokens, pages, max_tokens}, machine);
  std::vector<std::byte> host(planner.bytes());
  planner.plan(step, host.data());
  std::byte* device;
  CUDA(cudaMalloc(&device, host.size()));
  CUDA(cudaMemcpy(device, host.data(), host.size(), cudaMemcpyHostToDevice));
  cuda::Shape s;
  s.heads = heads, s.kv_heads = kv_heads, s.group = heads / kv_heads, s.head_dim = dim;
  s.mode = int(kvcache::IndexMode::page_table), s.page_shift = 4;
  s.io = s.out = s.work = a.io;
  s.packed = 1, s.rope_style = int(RopeStyle::neox), s.rotary_dim = dim;
  const int64_t in = T * (heads + 2 * kv_heads) * dim * 2, kv = T * 2 * kv_heads * dim * 2;
  const int copies = int(std::clamp<int64_t>((100ll << 20) / in + 1, 2, 40));
  uint8_t* angles = random_memory(T * dim / 2 * 16, 5, 1, timer.stream);
  uint8_t* qkv = random_memory(copies * in, 0, 2, timer.stream);
  uint8_t* cache = random_memory(max_tokens * 2 * kv_heads * dim * 2, 0, 3, timer.stream);
  uint8_t* made = random_memory(copies * (in + kv), 0, 4, timer.stream);
  s.rope = reinterpret_cast<float*>(angles);
  cuda::Layer l;
  l.cache.key = cache, l.cache.value = cache + max_tokens * kv_heads * dim * 2;
  l.cache.token = dim * 2, l.cache.head = max_tokens * dim * 2;  // as the runner lays it out
  l.cache.dtype = DType::bf16;
  const double us = timer.time(copies, [&](int i) {
    l.query = qkv + i * in;
    l.q = made + i * (in + kv), l.k_new = made + i * (in + kv) + in, l.v_new = made + i * (in + kv) + in + kv / 2;
    cuda::launch_append(s, planner.view(device), l, planner.launch().tokens, true, true, 0, timer.stream);
  });
  const double bytes = double(2 * in + (contiguous ? kv : 0)) + double(T) * dim * 8;
  printf(
      "{\"append\": [%ld, %ld], \"heads\": [%d, %d], \"dim\": %d, \"contiguous\": %d, \"us\": %.2f, \"tb_s\": %.3f}\n",
      batch, tokens, heads, kv_heads, dim, int(contiguous), us, bytes / us * 1e-6);
  fflush(stdout);
  cudaFree(device), cudaFree(angles), cudaFree(qkv), cudaFree(cache), cudaFree(made);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string only = argc > 1 ? argv[1] : "";
  Timer timer;
  uint32_t* sink;
  CUDA(cudaMalloc(&sink, 256));
  std::vector<Shape> shapes;
  const std::vector<std::pair<int64_t, int64_t>> sizes{{256, 1024}, {64, 2048}, {16, 4096}, {1, 131072}, {1, 8192}};
  for (int page : {16, 128})
    for (auto [b, kv] : sizes) shapes.push_back({"bf16", b, kv, 32, 8, 128, page});
  for (auto [b, kv] : sizes) shapes.push_back({"head-major", b, kv, 32, 8, 128, 16, DType::bf16, 0, 1, 3});
  for (auto [b, kv] : sizes) shapes.push_back({"fp8", b, kv, 32, 8, 128, 16, DType::f8_e4m3});
  for (auto [b, kv] : sizes) shapes.push_back({"int8", b, kv, 32, 8, 128, 16, DType::i8});
  for (auto [b, kv] : sizes) shapes.push_back({"int8 group 64", b, kv, 32, 8, 128, 16, DType::i8, 64});
  for (auto [b, kv] : {std::pair<int64_t, int64_t>{2, 8192}, {4, 16384}, {8, 4096}})
    shapes.push_back({"few", b, kv, 32, 8, 128, 16});
  shapes.push_back({"int8 group 8", 64, 2048, 32, 8, 128, 16, DType::i8, 8});
  shapes.push_back({"int4 group 32", 64, 2048, 32, 8, 128, 16, DType::i4, 32});
  shapes.push_back({"mha", 64, 1024, 32, 32, 128, 16});
  shapes.push_back({"mha", 16, 2048, 32, 32, 128, 16});
  for (int dim : {64, 96, 256}) shapes.push_back({"head size", 64, 2048, 32, 8, dim, 16});
  shapes.push_back({"page 1", 64, 2048, 32, 8, 128, 1, DType::bf16, 0, 1, 1});
  shapes.push_back({"page 1", 256, 1024, 32, 8, 128, 1, DType::bf16, 0, 1, 1});
  shapes.push_back({"verify 4", 64, 2048, 32, 8, 128, 16, DType::bf16, 0, 4});
  shapes.push_back({"verify 8", 64, 2048, 32, 8, 128, 16, DType::bf16, 0, 8});
  Shape shared{"shared 8k", 64, 8192 + 128, 32, 8, 128, 16};
  shared.shared = 8192;
  shapes.push_back(shared);
  Shape invariant{"invariant", 64, 2048, 32, 8, 128, 16};
  invariant.invariant = true;
  shapes.push_back(invariant);
  invariant.batch = 1, invariant.kv = 131072;
  shapes.push_back(invariant);
  shapes.push_back({"plan", 1024, 512, 32, 8, 128, 16});
  for (auto [b, kv] : {std::pair<int64_t, int64_t>{1, 200},
                       {1, 1024},
                       {1, 8192},
                       {1, 131072},
                       {4, 4096},
                       {8, 2048},
                       {16, 1024},
                       {32, 1024},
                       {64, 1024},
                       {128, 1024}})
    for (bool apart : {true, false, true, false}) {
      shapes.push_back({apart ? "step, append apart" : "step", b, kv, 32, 8, 128, 16, DType::bf16, 0, 1, 3});
      shapes.back().given = true, shapes.back().apart = apart;
      if (kv > 8192) continue;
      Shape small = shapes.back();
      small.heads = 9, small.kv_heads = 3, small.dim = 64;
      shapes.push_back(small);
      small = shapes[shapes.size() - 2];
      small.cache = DType::i8;
      shapes.push_back(small);
    }
  // Latent attention of DeepSeek V2 Lite, GLM 4.7 Flash, Kimi K2 and DeepSeek V3; prompts too.
  for (int heads : {16, 20, 64, 128})
    for (auto [b, kv, queries] : {std::tuple<int64_t, int64_t, int>{1, 8192, 1},
                                  {1, 131072, 1},
                                  {16, 4096, 1},
                                  {64, 4096, 1},
                                  {256, 1024, 1},
                                  {64, 4096, 4},
                                  {1, 4096, 4096}}) {
      shapes.push_back({"latent", b, kv, heads, 1, 576, 16, DType::bf16, 0, queries});
      shapes.back().latent = true;
    }
  // StreamingLLM beside a window that keys have their positions for already, by turns.
  for (auto [b, kv] : {std::pair<int64_t, int64_t>{1, 8192}, {16, 8192}, {64, 8192}})
    for (DType type : {DType::bf16, DType::f8_e4m3})
      for (bool streaming : {false, true, false, true}) {
        shapes.push_back({streaming ? "window, streaming" : "window", b, kv, 32, 8, 128, 16, type, 0, 1, 3});
        shapes.back().given = true, shapes.back().streaming = streaming;
        shapes.back().window = 4096, shapes.back().sinks = 4;
      }
  for (const Shape& s : shapes)
    if (only.empty() || s.name.find(only) != std::string::npos) decode(timer, s, sink);
  const auto prefill_if = [&](const std::string& name, auto... shape) {
    if (only.empty() || ("prefill " + name).find(only) != std::string::npos) prefill(timer, name, shape...);
  };
  if (only.empty() || only == "append") {
    for (auto [b, n] : {std::pair<int64_t, int64_t>{1, 8192}, {1, 2048}, {1, 1024}, {1, 512}, {1, 256}, {1, 128}})
      append(timer, b, n, true);
    append(timer, 1, 2048, true, 9, 3, 64);
    append(timer, 1, 8192, true, 9, 3, 64);
    for (int64_t b : {1, 8, 64, 128, 256, 512}) append(timer, b, 1, false);
  }
  prefill_if("8k", 1, 8192, 0);
  prefill_if("2k", 4, 2048, 0);
  prefill_if("512", 16, 512, 0);
  prefill_if("8k head 64", 1, 8192, 0, 64);
  prefill_if("8k head 96", 1, 8192, 0, 96);
  prefill_if("8k fp8", 1, 8192, 0, 128, 16, 0, 0, 0.05f);
  prefill_if("8k fp8 spread", 1, 8192, 0, 128, 16, 0, 0, 80.0f);
  prefill_if("8k normal", 1, 8192, 0, 128, 16, 0, 0, 0.0f, true);
  prefill_if("8k fp8 normal", 1, 8192, 0, 128, 16, 0, 0, 1.0f, true);
  prefill_if("2k fp8", 4, 2048, 0, 128, 16, 0, 0, 0.05f);
  prefill_if("2k fp8 spread", 4, 2048, 0, 128, 16, 0, 0, 80.0f);
  for (int turn = 0; turn < 2; ++turn)
    for (auto [name, served] : {std::pair{"served bf16", Served::bf16},
                                {"served fp8 cache", Served::fp8_cache},
                                {"served fp8", Served::fp8}}) {
      prefill_if(name, 1, 8192, 0, 128, 16, 0, 0, 0.0f, true, served);
      prefill_if(name, 4, 2048, 0, 128, 16, 0, 0, 0.0f, true, served);
      prefill_if(name, 1, 2048, 6144, 128, 16, 0, 0, 0.0f, true, served);
      prefill_if(name, 1, 8192, 0, 64, 16, 0, 0, 0.0f, true, served);
    }
  prefill_if("extend 2k on 30k", 1, 2048, 30720);
  prefill_if("extend's unchunked", 1, 11392, 0);
  prefill_if("chunks", 2, 1024, 0);
  prefill_if("mixed", 2, 1024, 0, 128, 16, 200, 2048);
  prefill_if("decodes", 0, 0, 0, 128, 16, 200, 2048);
  return 0;
}
