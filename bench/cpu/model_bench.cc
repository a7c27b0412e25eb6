// Prefill and decode rates of a model on this CPU, beside what its memory and its arithmetic allow.
//   model_bench MODEL [threads] [repeats]      one JSON object on stdout
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "bench/cpu/steps.h"
#include "bench/limits.h"
#include "core/host.h"
#include "core/thread_pool.h"
#include "model/cpu/kernels.h"
#include "model/formats/weight_type.h"
#include "model/formats/weights.h"
#include "model/runner.h"

namespace kvasir::model {
namespace {

using bench::kPage;

constexpr int64_t kLength = 1024;

// One thread is timed by its own CPU clock: on a shared machine that is what the code costs.
bool alone = false;
double now() {
  if (!alone) return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

void add(Batch& b, int64_t sequence, int64_t begin, int64_t count, int32_t token) {
  bench::add(b, sequence, begin, count, kLength, token);
}

double seconds(Runner& runner, const Batch& b) {
  const double begin = now();
  bench::run(runner, b);
  return now() - begin;
}

double decode_seconds(Runner& runner, int batch, int steps) {
  std::vector<double> times;
  for (int i = 0; i < steps; ++i) {
    Batch b;
    for (int s = 0; s < batch; ++s) add(b, s, 8 + i, 1, 100 + s);
    times.push_back(seconds(runner, b));
  }
  return median(times);
}

// Bytes a second that all threads together read, again and again, from huge pages of the size of the weights: what a
// machine's caches keep of them is no memory traffic in decoding either.
double read_bandwidth(int threads, size_t bytes) {
  bytes = std::max(bytes, size_t(64) << 20) & ~size_t(4095);
  auto* p = static_cast<uint8_t*>(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ::madvise(p, bytes, MADV_HUGEPAGE);
  std::memset(p, 1, bytes);
  ThreadPool pool(threads);
  std::atomic<uint64_t> sum = 0;
  std::vector<double> times;
  for (int i = 0; i < 25; ++i) {
    double begin = now();
    pool.run([&](int worker) {
      const size_t part = bytes / size_t(threads);
      sum += bench::read_all(p + part * size_t(worker), part);
    });
    times.push_back(now() - begin);
  }
  ::munmap(p, bytes);
  return double(bytes) / *std::min_element(times.begin(), times.end());
}

// Multiply-adds a second of our own integer kernel on a matrix that stays in the caches.
double kernel_rate(int threads) {
  cpu::Arena arena;
  ThreadPool pool(threads);
  HostTensor t{"w", WeightType::q4_1, 256, 512, nullptr, 256 * 512 / 32 * 20};
  std::vector<uint8_t> bytes(size_t(t.bytes), 7);
  t.data = bytes.data();
  cpu::PackedMatrix m = cpu::pack({&t, 1}, arena, pool);
  std::vector<float> x(size_t(64 * 512), 0.5f), y(size_t(threads) * 64 * 256);
  cpu::QuantRoom room;
  const cpu::Kernels& k = cpu::best_kernels();
  const cpu::QuantRows in = room.rows(64, 512);
  for (int i = 0; i < 64; ++i) k.quantize(x.data() + i * 512, m.packing, in, i);
  std::vector<double> times;
  for (int i = 0; i < 7; ++i) {
    double begin = now();
    pool.run([&](int worker) {
      for (int round = 0; round < 20; ++round)
        k.integer(m, 0, m.groups, in, 0, 64, y.data() + worker * 64 * 256, 256, false);
    });
    times.push_back((now() - begin) / 20);
  }
  return double(threads) * 64 * 256 * 512 / *std::min_element(times.begin(), times.end());
}

int run(int argc, char** argv) {
  if (argc < 2) return std::fprintf(stderr, "usage: model_bench MODEL [threads] [repeats]\n"), 2;
  RunnerOptions o;
  o.model = argv[1], o.device = "cpu";
  o.threads = argc > 2 ? std::atoi(argv[2]) : host_limits().cpus;
  int repeats = argc > 3 ? std::atoi(argv[3]) : 5;
  alone = o.threads == 1;
  o.max_batch = 16, o.max_tokens = 512, o.max_kvlen = kLength, o.page_size = kPage;
  double begin = now();
  auto loaded = load_runner(o);
  if (!loaded.ok()) return std::fprintf(stderr, "%s\n", loaded.status().to_string().c_str()), 1;
  Runner& runner = **loaded;
  CachePages cache = 16 * kLength / kPage;
  cache.states = 16;
  if (!runner.allocate_cache(cache).ok()) return 1;
  {
    Batch b;
    add(b, 0, 0, 1, 100);
    seconds(runner, b);
  }
  double first_token = now() - begin;
  std::vector<double> prefills;
  for (int i = 0; i < repeats; ++i) {
    Batch b;
    add(b, 0, 0, 512, 100);
    prefills.push_back(seconds(runner, b));
  }
  double prefill = 512 / median(prefills), one = 1 / decode_seconds(runner, 1, 24 * repeats);
  double few[4];
  for (int i = 0; i < 4; ++i) few[i] = 1e3 * decode_seconds(runner, i < 3 ? 2 + i : 8, 8 * repeats);
  double sixteen = 16 / decode_seconds(runner, 16, 8 * repeats);
  double peak = double(peak_resident_bytes()) / 1e6;  // before the limits' own buffers
  const ModelInfo& info = runner.info();
  double bandwidth = read_bandwidth(o.threads, size_t(info.weight_bytes)), macs = kernel_rate(o.threads);
  double head = double(info.vocab_size) * info.hidden;  // prefill makes one row of logits
  std::printf(
      "{\"engine\": \"kvasir\", \"isa\": \"%s\", \"threads\": %d, \"prefill512\": %.1f, \"decode1\": %.1f, "
      "\"decode16\": %.1f, \"step_ms\": {\"1\": %.2f, \"2\": %.2f, \"3\": %.2f, \"4\": %.2f, \"8\": %.2f, \"16\": "
      "%.2f}, "
      "\"load_to_first_token_s\": %.3f, \"peak_rss_mb\": %.0f, \"weights_mb\": %.1f, "
      "\"limit_read_gb_s\": %.1f, \"limit_decode1\": %.1f, \"limit_gmac_s\": %.1f, \"limit_prefill512\": %.1f}\n",
      std::string(cpu::best_kernels().name).c_str(), o.threads, prefill, one, sixteen, 1e3 / one, few[0], few[1],
      few[2], few[3], 16e3 / sixteen, first_token, peak, double(info.weight_bytes) / 1e6, bandwidth / 1e9,
      bandwidth / double(info.weight_bytes), macs / 1e9, macs / (double(info.parameters) - head));
  return 0;
}

}  // namespace
}  // namespace kvasir::model

int main(int argc, char** argv) { return kvasir::model::run(argc, argv); }
