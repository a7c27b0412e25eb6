// What a decode step takes with each type of cache, by turns: 8 sequences deep in their contexts, where reading the
// cache is most of a step.
//   cache_bench MODEL [threads] [rounds] [context]      a table, and one JSON object at its end
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "bench/cpu/steps.h"
#include "core/host.h"

namespace kvasir::model {
namespace {

using bench::kPage;
using bench::pages;

constexpr int kSequences = 8, kSteps = 12, kChunk = 512, kToken = 5;

struct Form {
  const char* name;
  const char* dtype;
  int group;
};
constexpr Form kForms[] = {{"float16", "float16", -1}, {"bfloat16", "bfloat16", -1}, {"fp8", "fp8", -1},
                           {"int8 of 64", "int8", 64}, {"int8 of 8", "int8", 8},     {"int4 of 32", "int4", 32}};

double seconds(Runner& runner, const Batch& b) {
  const auto begin = std::chrono::steady_clock::now();
  bench::run(runner, b);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Sequence 0 is computed, the others get copies of its pages: as many bytes to read, an eighth of the prompts.
void fill(Runner& runner, int64_t context, int64_t room) {
  for (int64_t at = 0; at < context; at += kChunk) {
    Batch b;
    bench::add(b, 0, at, std::min<int64_t>(kChunk, context - at), room, kToken);
    seconds(runner, b);
  }
}

void copy_to_all(Batch& b, int64_t context) {
  for (int s = 1; s < kSequences; ++s)
    for (int64_t p = 0; p < pages(context); ++p)
      b.copies.push_back({.from = int32_t(p), .to = int32_t(s * b.max_pages + p), .tokens = kPage});
}

struct Measured {
  double ms = 0;
  int64_t token_bytes = 0;
};

Measured measure(RunnerOptions o, const Form& form, int64_t context) {
  const int64_t room = context + kSteps + 1;
  o.kv.dtype = form.dtype, o.kv.group = form.group;
  o.max_batch = kSequences, o.max_tokens = kChunk, o.max_kvlen = room, o.page_size = kPage;
  auto loaded = load_runner(o);
  CachePages cache = kSequences * pages(room);
  cache.states = kSequences;
  Status s = loaded.ok() ? (*loaded)->allocate_cache(cache) : loaded.status();
  if (!s.ok()) std::fprintf(stderr, "%s\n", s.to_string().c_str()), std::exit(1);
  Runner& runner = **loaded;
  fill(runner, context, room);
  std::vector<double> times;
  for (int step = 0; step <= kSteps; ++step) {
    Batch b;
    for (int q = 0; q < kSequences; ++q) bench::add(b, q, context + step, 1, room, kToken);
    if (step == 0) copy_to_all(b, context);
    const double took = seconds(runner, b);
    if (step > 0) times.push_back(took);
  }
  std::sort(times.begin(), times.end());
  return {1e3 * times[times.size() / 2], runner.info().kv_bytes_per_token};
}

int run(int argc, char** argv) {
  if (argc < 2) return std::fprintf(stderr, "usage: cache_bench MODEL [threads] [rounds] [context]\n"), 2;
  RunnerOptions o;
  o.model = argv[1], o.device = "cpu";
  o.threads = argc > 2 ? std::atoi(argv[2]) : host_limits().cpus;
  const int rounds = argc > 3 ? std::atoi(argv[3]) : 3;
  const int64_t context = argc > 4 ? std::atoll(argv[4]) : 4096;
  std::vector<double> ms[std::size(kForms)];
  int64_t bytes[std::size(kForms)] = {};
  for (int r = 0; r < rounds; ++r)
    for (size_t f = 0; f < std::size(kForms); ++f) {
      const Measured m = measure(o, kForms[f], context);
      ms[f].push_back(m.ms), bytes[f] = m.token_bytes;
    }
  std::string json;
  std::printf("%s, %d threads, %d sequences at %lld tokens, ms a step (median of %d rounds by turns)\n", argv[1],
              o.threads, kSequences, static_cast<long long>(context), rounds);
  for (auto& of : ms) std::sort(of.begin(), of.end());
  for (size_t f = 0; f < std::size(kForms); ++f) {
    const double mid = ms[f][ms[f].size() / 2], plain = ms[0][ms[0].size() / 2];
    std::printf("%-11s %8.2f   %.2f times float16's speed, %lld bytes a token (%.3f)\n", kForms[f].name, mid,
                plain / mid, static_cast<long long>(bytes[f]), double(bytes[f]) / double(bytes[0]));
    json += (f ? ", " : "") + std::string("\"") + kForms[f].name + "\": {\"ms\": " + std::to_string(mid) +
            ", \"token_bytes\": " + std::to_string(bytes[f]) + "}";
  }
  std::printf("{\"model\": \"%s\", \"threads\": %d, \"context\": %lld, \"caches\": {%s}}\n", argv[1], o.threads,
              static_cast<long long>(context), json.c_str());
  return 0;
}

}  // namespace
}  // namespace kvasir::model

int main(int argc, char** argv) { return kvasir::model::run(argc, argv); }
