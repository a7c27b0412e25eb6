// Decode in GB/s and prefill in GFLOP/s, beside the read bandwidth and the FMA peak of the same run.
//   attention_bench [--threads N] [--quick] [--svg FILE]
// Processor time of each thread, medians of the rounds; every thread runs its own copy of the same work,
// so the figures are those of N threads at once.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "attention/backend.h"
#include "attention/cases/random_case.h"
#include "bench/attention/limits.h"
#include "bench/attention/plot.h"
#include "core/cat.h"

namespace kvasir::bench {
namespace {

using namespace attention;
using kvcache::QuantKind;

int g_threads = 1;

double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

// Seconds a round takes a thread when all of them do it at once: work(thread) prepares and returns the round.
template <class Work>
double seconds(int rounds, const Work& work) {
  std::vector<double> took(static_cast<size_t>(g_threads));
  std::vector<std::thread> threads;
  for (int t = 0; t < g_threads; ++t)
    threads.emplace_back([&, t] {
      auto round = work(t);
      round();
      std::vector<double> times;
      for (int i = 0; i < rounds; ++i) {
        const double start = thread_seconds();
        round();
        times.push_back(thread_seconds() - start);
      }
      took[size_t(t)] = median(times);
    });
  for (auto& t : threads) t.join();
  return std::accumulate(took.begin(), took.end(), 0.0) / g_threads;
}

struct Limit {
  double read_gbs = 0, fma_gflops = 0;  // of one thread, when g_threads are at it
};

Limit measure_limits(size_t bytes) {
  Limit l;
  std::vector<void*> memory;
  for (int t = 0; t < g_threads; ++t) {
    memory.push_back(huge_memory(bytes));
    std::memset(memory.back(), t + 1, bytes);
  }
  static volatile uint64_t keep [[maybe_unused]];
  l.read_gbs =
      double(bytes) / 1e9 / seconds(7, [&](int t) { return [&, t] { keep = read_all(memory[size_t(t)], bytes); }; });
  for (void* m : memory) free_huge(m, bytes);
  double flops = 0;
  static float sink[64];
  const double s = seconds(5, [&](int t) {
    return [&, t] {
      const double f = fma_rounds(2'000'000, &sink[t]);
      if (t == 0) flops = f;
    };
  });
  l.fma_gflops = flops / 1e9 / s;
  return l;
}

struct Kind {
  const char* name;
  DType type;
  QuantKind quant;
};
constexpr Kind kKinds[] = {{"float32", DType::f32, QuantKind::none},   {"float16", DType::f16, QuantKind::none},
                           {"bfloat16", DType::bf16, QuantKind::none}, {"fp8", DType::f8_e4m3, QuantKind::per_tensor},
                           {"int8/64", DType::i8, QuantKind::group},   {"int4/64", DType::i4, QuantKind::group}};

CaseShape shape_of(const Kind& k, int heads, int kv_heads, int dim) {
  CaseShape s;
  s.attributes.num_heads = heads;
  s.attributes.num_kv_heads = kv_heads;
  s.attributes.head_dim = dim;
  s.attributes.page_size = 64;
  s.cache.dtype = k.type;
  s.cache.quant = k.quant;
  s.cache.quant_group = 64;
  s.cache.scale_dtype = DType::f16;
  s.cache.k_scale = s.cache.v_scale = 0.02f;
  return s;
}

// A prepared call whose cache lies on huge pages.
struct Prepared {
  Case c;
  CaseOutput out;
  std::unique_ptr<Attention> op;
  Tensors tensors;
  void* cache = nullptr;
  explicit Prepared(const CaseShape& s) : c(make_case(s)) {
    auto made = (*find_backend("cpu"))->create(c.attributes, c.limits(), {});
    op = std::move(made).value();
    if (Status planned = op->plan(c.step()); !planned.ok())
      std::printf("%s\n", planned.to_string().c_str()), std::exit(1);
    tensors = case_tensors(c, &out);
    cache = huge_memory(c.cache.size());
    std::memcpy(cache, c.cache.data(), c.cache.size());
    tensors.cache.data = cache;
  }
  ~Prepared() { free_huge(cache, 0); }
  Prepared(const Prepared&) = delete;
  void run() { (void)op->run(tensors); }
};

// Bytes of keys and values (and scales) that one decode must read.
double decode_bytes(const Case& c, int64_t keys) {
  const double row = double(dtype_bytes(c.view.dtype, c.view.head_dim)) +
                     (c.view.quant == QuantKind::group ? 2.0 * c.view.head_dim / c.view.quant_group : 0);
  return 2.0 * double(keys) * c.view.kv_heads * row;
}

void decode(const Limit& limit, int dim, int64_t keys, int rounds, Plot* plot) {
  std::printf("\ndecode, head %d, 8 kv heads, %lld keys a thread: one query token\n", dim, (long long)keys);
  std::printf("%-9s %3s %9s %7s %9s %7s %10s %8s\n", "cache", "G", "GB/s", "of read", "GFLOP/s", "of FMA", "tokens/s",
              "x f16");
  for (int group : {1, 2, 4, 8}) {
    double f16 = 0;
    for (const Kind& k : {kKinds[1], kKinds[0], kKinds[2], kKinds[3], kKinds[4], kKinds[5]}) {
      CaseShape s = shape_of(k, 8 * group, 8, dim);
      s.sequences = {{keys - 1, 1}};
      s.decoding_batches = 1;
      double bytes = 0;
      const double took = seconds(rounds, [&](int t) {
        auto p = std::make_shared<Prepared>(s);
        if (t == 0) bytes = decode_bytes(p->c, keys);
        return [p] { p->run(); };
      });
      const double gbs = bytes / 1e9 / took, gflops = 4.0 * double(keys) * dim * 8 * group / 1e9 / took;
      if (k.type == DType::f16) f16 = took;
      std::printf("%-9s %3d %9.1f %6.0f%% %9.1f %6.0f%% %10.1f %8.2f\n", k.name, group, gbs * g_threads,
                  100 * gbs / limit.read_gbs, gflops * g_threads, 100 * gflops / limit.fma_gflops, g_threads / took,
                  f16 / took);
      plot->add(cat("decode ", k.name, " D", dim, " G", group), gbs / limit.read_gbs, gflops / limit.fma_gflops);
    }
  }
}

void prefill(const Limit& limit, int tokens, int rounds, Plot* plot) {
  std::printf("\nprefill, %d tokens, causal, 8 query heads on 2 kv heads\n", tokens);
  std::printf("%-9s %5s %9s %7s\n", "cache", "head", "GFLOP/s", "of FMA");
  for (int dim : {64, 128})
    for (const Kind& k : {kKinds[0], kKinds[1], kKinds[4]}) {
      CaseShape s = shape_of(k, 8, 2, dim);
      s.sequences = {{0, tokens}};
      const double took = seconds(rounds, [&](int) {
        auto p = std::make_shared<Prepared>(s);
        return [p] { p->run(); };
      });
      const double gflops = 4.0 * dim * 8 * (double(tokens) * (tokens + 1) / 2) / 1e9 / took;
      std::printf("%-9s %5d %9.1f %6.0f%%\n", k.name, dim, gflops * g_threads, 100 * gflops / limit.fma_gflops);
      plot->add(cat("prefill ", k.name, " D", dim), 0, gflops / limit.fma_gflops);
    }
}

int main_(int argc, char** argv) {
  bool quick = false;
  std::string svg;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg == "--quick")
      quick = true;
    else if (arg == "--threads" && i + 1 < argc)
      g_threads = std::max(1, std::atoi(argv[++i]));
    else if (arg == "--svg" && i + 1 < argc)
      svg = argv[++i];
    else
      return std::fprintf(stderr, "usage: attention_bench [--threads N] [--quick] [--svg FILE]\n"), 2;
  }
  const size_t bytes = size_t(quick ? 96 : 256) << 20;  // past L3
  const Limit limit = measure_limits(bytes);
  std::printf("threads %d: read %.1f GB/s, FMA %.1f GFLOP/s (float32), by processor time\n", g_threads,
              limit.read_gbs * g_threads, limit.fma_gflops * g_threads);
  Plot plot(cat("Attention on the CPU, ", g_threads, " thread(s): share of the machine's own limit"));
  for (int dim : {64, 128}) decode(limit, dim, (quick ? 16384 : 65536) * 64 / dim, quick ? 3 : 5, &plot);
  prefill(limit, quick ? 512 : 2048, quick ? 3 : 5, &plot);
  if (!svg.empty() && !plot.write(svg)) return std::fprintf(stderr, "cannot write %s\n", svg.c_str()), 1;
  return 0;
}

}  // namespace
}  // namespace kvasir::bench

int main(int argc, char** argv) { return kvasir::bench::main_(argc, argv); }
