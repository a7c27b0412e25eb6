// Decode in GB/s and prefill in GFLOP/s, beside what this machine can do: reads of the same cache and
// float32 FMAs of the same instruction set, measured in turn with every round of every row.
// Processor time of each thread, medians of the rounds; every thread works on its own cache, all at once.
#include <algorithm>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>
#include <thread>

#include "bench/attention/plot.h"
#include "bench/attention/workload.h"
#include "bench/limits.h"
#include "core/cat.h"
#include "core/cpu.h"

namespace kvasir::bench {
namespace {

using kvcache::QuantKind;

constexpr const char* kUsage =
    "usage: attention_bench [--threads N] [--cache-mb N] [--rounds N] [--only TEXT] [--json FILE] [--svg FILE]\n"
    "  KVASIR_ISA=avx2 measures another instruction set; --only decode-float16 a part of the rows.\n";

struct Options {
  int threads = 1, rounds = 5;
  size_t cache_mb = 1024;  // a thread: past any L3
  std::string only, json, svg;
};

constexpr CacheKind kF16 = {"float16", DType::f16, QuantKind::none, 0};
constexpr CacheKind kF32 = {"float32", DType::f32, QuantKind::none, 0};
constexpr CacheKind kInt8 = {"int8/64", DType::i8, QuantKind::group, 64};
constexpr CacheKind kDecodeKinds[] = {kF16,
                                      kF32,
                                      {"bfloat16", DType::bf16, QuantKind::none, 0},
                                      {"fp8", DType::f8_e4m3, QuantKind::per_tensor, 0},
                                      kInt8,
                                      {"int4/64", DType::i4, QuantKind::group, 64}};
constexpr CacheKind kPrefillKinds[] = {kF32, kF16, kInt8};

// Of one thread, while all are at it.
struct Seconds {
  double read = 0, work = 0, f16 = 0, fma = 0;
};

double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

struct Row {
  std::string name;
  double gbs = 0, read_gbs = 0, gflops = 0, peak_gflops = 0;  // all threads together
  double f16_tokens = 0;
  double tokens = 0, of_f16 = 0;  // decode: keys a second, and against float16's

  double of_read() const { return gbs / read_gbs; }
  double of_fma() const { return gflops / peak_gflops; }
  // The roofline of issue 4: whichever of the two limits is the lower one is reached.
  bool decode_reaches() const { return of_read() >= 0.8 || of_fma() >= 0.7; }
  bool prefill_reaches() const { return of_fma() >= 0.5; }
};

class Bench {
 public:
  explicit Bench(Options o) : o_(std::move(o)) {
    for (int t = 0; t < o_.threads; ++t) {
      caches_.push_back(std::make_unique<HugeMemory>(o_.cache_mb << 20));
      f16_caches_.push_back(std::make_unique<HugeMemory>(o_.cache_mb << 20));
    }
  }

  void decode(int dim) {
    std::printf("\ndecode, head %d, 8 kv heads, one query token, %zu MB of cache a thread\n", dim, o_.cache_mb);
    std::printf("%-9s %3s %9s %8s %9s %7s %11s %7s  %s\n", "cache", "G", "GB/s", "of read", "GFLOP/s", "of FMA",
                "Mkeys/s", "x f16", "the lower of 80% of read and 70% of FMA");
    for (const CacheKind& kind : kDecodeKinds)
      for (int group : {1, 2, 4, 8}) {
        Row row;
        row.name = cat("decode-", kind.name, "-D", dim, "-G", group);
        if (!wanted(row.name)) continue;
        CallShape s{kind, 8 * group, 8, dim, 0, 1};
        // Scales have memory of their own.
        const int64_t data = 2 * s.kv_heads * dtype_bytes(kind.type, dim);
        const int64_t keys = int64_t(caches_[0]->size()) / data / 64 * 64;
        s.past = keys - 1;
        CallShape f16 = s;
        f16.kind = kF16;
        f16.past = int64_t(caches_[0]->size()) / (4 * s.kv_heads * dim) / 64 * 64 - 1;
        measure(s, 4.0 * double(keys) * dim * s.heads, double(keys * token_bytes(s)), &row, &f16);
        row.tokens *= double(keys);
        row.of_f16 = row.tokens / row.f16_tokens;
        std::printf("%-9s %3d %9.1f %7.0f%% %9.1f %6.0f%% %11.2f %7.2f  %s\n", kind.name, group, row.gbs,
                    100 * row.of_read(), row.gflops, 100 * row.of_fma(), row.tokens / 1e6, row.of_f16,
                    row.decode_reaches() ? "reached" : "missed");
        std::fflush(stdout);
        rows_.push_back(row);
      }
  }

  void prefill(int dim) {
    constexpr int64_t kTokens = 2048;
    std::printf("\nprefill, head %d, %lld tokens, causal, 8 query heads on 2 kv heads\n", dim, (long long)kTokens);
    std::printf("%-9s %9s %7s  %s\n", "cache", "GFLOP/s", "of FMA", "50% of FMA");
    for (const CacheKind& kind : kPrefillKinds) {
      Row row;
      row.name = cat("prefill-", kind.name, "-D", dim);
      if (!wanted(row.name)) continue;
      measure({kind, 8, 2, dim, 0, kTokens}, 4.0 * dim * 8 * (double(kTokens) * (kTokens + 1) / 2), 0, &row);
      row.tokens *= double(kTokens);
      std::printf("%-9s %9.1f %6.0f%%  %s\n", kind.name, row.gflops, 100 * row.of_fma(),
                  row.prefill_reaches() ? "reached" : "missed");
      std::fflush(stdout);
      rows_.push_back(row);
    }
  }

  bool write() const {
    Plot plot(cat("Attention on the CPU, ", simd_name(), ", ", o_.threads, " thread(s): share of the machine's limit"));
    for (const Row& r : rows_) plot.add(r.name, r.of_read(), r.of_fma());
    if (!o_.svg.empty() && !plot.write(o_.svg)) return complain(o_.svg);
    return o_.json.empty() || write_json() || complain(o_.json);
  }

 private:
  static bool complain(const std::string& path) {
    std::fprintf(stderr, "attention_bench: cannot write %s\n", path.c_str());
    return false;
  }

  bool wanted(const std::string& name) const { return name.find(o_.only) != std::string::npos; }

  // Read, work, FMA; read, work, FMA: what the neighbours do to one of them they do to the others. Decode works on a
  // float16 cache too, in turn, to be compared with.
  void measure(const CallShape& shape, double flops, double bytes, Row* row, const CallShape* f16 = nullptr) {
    const bool decode = bytes > 0;
    double fma_flops = 0;
    std::vector<Seconds> took(static_cast<size_t>(o_.threads));
    std::barrier together(o_.threads);
    std::vector<std::thread> threads;
    threads.reserve(size_t(o_.threads));
    for (int t = 0; t < o_.threads; ++t)
      threads.emplace_back([&, t] {
        HugeMemory& cache = *caches_[size_t(t)];
        fill(cache, shape.kind);
        Workload work(shape, cache);
        work.run();
        std::unique_ptr<Workload> beside;
        if (f16) {
          fill(*f16_caches_[size_t(t)], f16->kind);
          beside = std::make_unique<Workload>(*f16, *f16_caches_[size_t(t)]);
          beside->run();
        }
        std::vector<double> read, run, run_f16, fma;
        auto timed = [&](std::vector<double>* to, const auto& f) {
          together.arrive_and_wait();
          const double start = thread_seconds();
          f();
          to->push_back(thread_seconds() - start);
        };
        static volatile uint64_t keep [[maybe_unused]];
        static float sink[256];
        for (int i = 0; i < o_.rounds; ++i) {
          if (decode) timed(&read, [&] { keep = read_all(cache.data(), cache.size()); });
          timed(&run, [&] { work.run(); });
          if (beside) timed(&run_f16, [&] { beside->run(); });
          timed(&fma, [&] {
            const double f = fma_rounds(1'000'000, &sink[t]);
            if (t == 0) fma_flops = f;
          });
        }
        took[size_t(t)] = {decode ? median(read) : 1, median(run), decode ? median(run_f16) : 1, median(fma)};
      });
    for (auto& t : threads) t.join();
    for (const Seconds& s : took) {
      row->gbs += bytes / 1e9 / s.work;
      row->read_gbs += double(caches_[0]->size()) / 1e9 / s.read;
      row->gflops += flops / 1e9 / s.work;
      row->peak_gflops += fma_flops / 1e9 / s.fma;
      row->tokens += 1 / s.work;
      if (f16) row->f16_tokens += double(f16->past + 1) / s.f16;
    }
  }

  bool write_json() const {
    FILE* f = std::fopen(o_.json.c_str(), "w");
    if (!f) return false;
    char day[16];
    const std::time_t now = std::time(nullptr);
    std::strftime(day, sizeof day, "%Y-%m-%d", std::gmtime(&now));
    std::fprintf(f,
                 "{\"what\": \"bench/attention\", \"when\": \"%s\", \"processor\": \"%s\", \"simd\": \"%s\",\n"
                 " \"threads\": %d, \"cache_mb_a_thread\": %zu, \"rounds\": %d,\n"
                 " \"note\": \"processor time; read and FMA limits measured in turn with each row\",\n \"rows\": [",
                 day, cpu().to_string().c_str(), simd_name(), o_.threads, o_.cache_mb, o_.rounds);
    for (size_t i = 0; i < rows_.size(); ++i) {
      const Row& r = rows_[i];
      std::fprintf(f, "%s\n  {\"row\": \"%s\", ", i ? "," : "", r.name.c_str());
      if (r.gbs > 0) {
        std::fprintf(f, "\"gb_s\": %.2f, \"read_gb_s\": %.2f, \"of_read\": %.3f, \"keys_s\": %.0f, ", r.gbs, r.read_gbs,
                     r.of_read(), r.tokens);
        if (r.of_f16 > 0) std::fprintf(f, "\"of_float16\": %.2f, ", r.of_f16);
      }
      const bool reached = r.gbs > 0 ? r.decode_reaches() : r.prefill_reaches();
      std::fprintf(f, "\"gflop_s\": %.1f, \"fma_gflop_s\": %.1f, \"of_fma\": %.3f, \"reached\": %s}", r.gflops,
                   r.peak_gflops, r.of_fma(), reached ? "true" : "false");
    }
    std::fprintf(f, "\n]}\n");
    return std::fclose(f) == 0;
  }

  Options o_;
  std::vector<std::unique_ptr<HugeMemory>> caches_, f16_caches_;
  std::vector<Row> rows_;
};

int main_(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    const char* value = i + 1 < argc ? argv[i + 1] : "";
    if (arg == "--threads")
      o.threads = std::clamp(std::atoi(value), 1, 256);
    else if (arg == "--cache-mb")
      o.cache_mb = size_t(std::clamp(std::atoi(value), 1, 1 << 16));
    else if (arg == "--rounds")
      o.rounds = std::clamp(std::atoi(value), 1, 1000);
    else if (arg == "--only")
      o.only = value;
    else if (arg == "--json")
      o.json = value;
    else if (arg == "--svg")
      o.svg = value;
    else
      return std::fputs(kUsage, stderr), 2;
    if (++i >= argc) return std::fputs(kUsage, stderr), 2;
  }
  std::printf("%s, %d thread(s)\n", simd_name(), o.threads);
  Bench bench(o);
  for (int dim : {64, 128}) bench.decode(dim);
  for (int dim : {64, 128}) bench.prefill(dim);
  return bench.write() ? 0 : 1;
}

}  // namespace
}  // namespace kvasir::bench

int main(int argc, char** argv) { return kvasir::bench::main_(argc, argv); }
