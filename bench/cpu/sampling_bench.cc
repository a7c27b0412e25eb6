// What drawing tokens costs beside the step it ends, and beside reading the logits once.
//   sampling_bench MODEL [threads]      one JSON object a line on stdout: batch and kind of drawing
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "core/host.h"
#include "model/draws.h"
#include "model/runner.h"

namespace kvasir::model {
namespace {

constexpr int64_t kPage = 16, kLength = 256;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

// Sequences of `length` tokens that each draw one.
Batch decode(int64_t batch, int64_t length) {
  Batch b;
  b.seqstarts = {0}, b.kvstarts = {0};
  b.max_pages = kLength / kPage;
  for (int64_t s = 0; s < batch; ++s) {
    b.tokens.push_back(int32_t(100 + s));
    b.positions.push_back(int32_t(length));
    b.seqstarts.push_back(s + 1);
    b.kvstarts.push_back(b.kvstarts.back() + length + 1);
    b.start_pos.push_back(length);
    for (int64_t p = 0; p < b.max_pages; ++p) b.cachestarts.push_back(s * kLength + p * kPage);
    b.logit_rows.push_back(int32_t(s));
  }
  b.decoding_batches = batch, b.max_seqlen = 1, b.max_kvlen = length + 1;
  return b;
}

struct Kind {
  const char* name;
  SamplingParams params;
};
std::vector<Kind> kinds() {
  std::vector<Kind> out(9);
  out[0] = {"greedy", {}};
  out[0].params.temperature = 0;
  out[1].name = "temperature";
  out[2].name = "top_k 40";
  out[2].params.top_k = 40;
  out[3].name = "top_p 0.9";
  out[3].params.top_p = 0.9f;
  out[4].name = "top_k 40, top_p 0.9, temperature 0.7";
  out[4].params.top_k = 40, out[4].params.top_p = 0.9f, out[4].params.temperature = 0.7f;
  out[5].name = "min_p 0.05";
  out[5].params.min_p = 0.05f;
  out[6].name = "penalties, temperature";
  out[6].params.repetition_penalty = 1.1f, out[6].params.frequency_penalty = 0.2f;
  out[7].name = "greedy, 5 log-probabilities";
  out[7].params.temperature = 0, out[7].params.logprobs = 5;
  out[8].name = "top_p 0.95, temperature 2";  // thousands of tokens
  out[8].params.top_p = 0.95f, out[8].params.temperature = 2;
  return out;
}

// A few likely tokens over a floor of noise, as language has it.
std::vector<float> made_up_logits(int64_t rows, int32_t vocab) {
  std::mt19937 random(7);
  std::normal_distribution<float> noise(0, 1.5f);
  std::vector<float> out(size_t(rows) * size_t(vocab));
  for (float& f : out) f = noise(random);
  for (int64_t r = 0; r < rows; ++r)
    for (int k = 1; k <= 200; ++k)
      out[size_t(r) * size_t(vocab) + random() % size_t(vocab)] = 14.0f - 1.2f * std::log(float(k));
  return out;
}

int run(int argc, char** argv) {
  if (argc < 2) return std::fprintf(stderr, "usage: sampling_bench MODEL [threads]\n"), 2;
  RunnerOptions o;
  o.model = argv[1];
  o.threads = argc > 2 ? std::atoi(argv[2]) : host_limits().cpus;
  o.max_batch = 64, o.max_tokens = 64, o.max_kvlen = kLength, o.page_size = kPage;
  auto loaded = load_runner(o);
  if (!loaded.ok()) return std::fprintf(stderr, "%s\n", loaded.status().to_string().c_str()), 1;
  Runner& runner = **loaded;
  if (!runner.allocate_cache(64 * kLength / kPage).ok()) return 1;
  const int32_t vocab = runner.info().vocab_size;
  ThreadPool pool(o.threads);
  Draws draws(vocab, o.threads);
  std::vector<int32_t> before(200);
  for (size_t i = 0; i < before.size(); ++i) before[i] = int32_t(i * 97) % vocab;
  for (int64_t batch : {16, 64}) {
    const Batch b = decode(batch, kLength - 1);
    const std::vector<float> logits = made_up_logits(batch, vocab);
    std::vector<float> work = logits;
    std::vector<double> step_times, read_times;
    SamplingParams greedy;
    greedy.temperature = 0;
    std::vector<SampleRow> rows(size_t(batch), SampleRow{.params = &greedy});
    for (int i = 0; i < 12; ++i) {
      double begin = now();
      if (!runner.launch(b, rows).ok() || !runner.wait().ok()) return 1;
      step_times.push_back(now() - begin);
      begin = now();
      std::vector<float> sums(size_t(o.threads) * 16);
      pool.for_each(batch, 1, [&](int64_t r, int worker) {
        const float* row = work.data() + r * vocab;
        float s[16] = {};
        for (int32_t t = 0; t + 16 <= vocab; t += 16)
          for (int k = 0; k < 16; ++k) s[k] += row[t + k];
        for (int k = 0; k < 16; ++k) sums[size_t(worker) * 16 + size_t(k)] += s[k];
      });
      read_times.push_back(now() - begin);
    }
    const double step = median(step_times), limit = median(read_times);
    for (const Kind& kind : kinds()) {
      std::vector<double> times;
      for (int i = 0; i < 12; ++i) {
        work = logits;
        for (size_t r = 0; r < rows.size(); ++r)
          rows[r] = {.params = &kind.params, .position = int64_t(i * 64 + int(r)), .prompt = before, .output = before};
        if (!draws.begin(b, rows).ok()) return 1;
        pool.begin_step();
        const double begin = now();
        (void)draws.draw(pool, work.data(), vocab, batch);  // fails with a device alone
        times.push_back(now() - begin);
        pool.end_step();
        draws.end();
        draws.take();
      }
      std::printf(
          "{\"batch\": %d, \"threads\": %d, \"kind\": \"%s\", \"draw_ms\": %.3f, \"limit_read_once_ms\": %.3f, "
          "\"step_ms\": %.2f, \"share_of_step\": %.4f}\n",
          int(batch), o.threads, kind.name, 1e3 * median(times), 1e3 * limit, 1e3 * step, median(times) / step);
    }
  }
  return 0;
}

}  // namespace
}  // namespace kvasir::model

int main(int argc, char** argv) { return kvasir::model::run(argc, argv); }
