// The peer's rates by its own C interface, in the same loops as model_bench: one JSON object on stdout.
//   llamacpp_peer MODEL [threads] [repeats]
//   llamacpp_peer --quantize-q4_0 MODEL OUT      its own requantization
//   llamacpp_peer --embed MODEL THREADS TEXTS TOKENS    texts a second to vectors (the mean), 16 at once
// Built by cpu_vs_llamacpp against a llama.cpp outside this repository.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <vector>

#include "ggml-backend.h"
#include "llama.h"

namespace {

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

void add(llama_batch& b, llama_token token, int pos, int seq, bool logits) {
  int i = b.n_tokens++;
  b.token[i] = token, b.pos[i] = pos, b.n_seq_id[i] = 1, b.seq_id[i][0] = seq, b.logits[i] = logits;
}

double seconds(llama_context* c, llama_batch b) {
  double begin = now();
  if (llama_decode(c, b) != 0) std::exit(1);
  llama_synchronize(c);
  return now() - begin;
}

double decode_rate(llama_context* c, llama_batch b, int batch, int steps) {
  llama_memory_clear(llama_get_memory(c), true);
  b.n_tokens = 0;
  for (int s = 0; s < batch; ++s)
    for (int i = 0; i < 8; ++i) add(b, 100 + i, i, s, false);
  seconds(c, b);
  std::vector<double> times;
  for (int i = 0; i < steps; ++i) {
    b.n_tokens = 0;
    for (int s = 0; s < batch; ++s) add(b, 100 + s, 8 + i, s, true);
    times.push_back(seconds(c, b));
  }
  return batch / median(times);
}

// Random texts of one length, as many in each call as fill its batch.
int embed(const char* path, int threads, int texts, int tokens) {
  constexpr int kAtOnce = 16;
  llama_model* model = llama_model_load_from_file(path, llama_model_default_params());
  if (!model) return 1;
  llama_context_params p = llama_context_default_params();
  p.n_ctx = p.n_batch = p.n_ubatch = uint32_t(kAtOnce * tokens), p.n_seq_max = kAtOnce;
  p.n_threads = p.n_threads_batch = threads;
  p.embeddings = true, p.pooling_type = LLAMA_POOLING_TYPE_MEAN;
  llama_context* c = llama_init_from_model(model, p);
  if (!c) return 1;
  llama_batch b = llama_batch_init(kAtOnce * tokens, 0, 1);
  std::vector<double> times;
  for (int done = -kAtOnce; done < texts; done += kAtOnce) {  // the first call reads what is mapped
    llama_memory_clear(llama_get_memory(c), true);
    b.n_tokens = 0;
    for (int s = 0; s < kAtOnce; ++s)
      for (int t = 0; t < tokens; ++t) add(b, 100 + ((done + s + kAtOnce) * 7919 + t * 37) % 40000, t, s, true);
    double took = seconds(c, b);
    if (llama_get_embeddings_seq(c, 0) == nullptr) return 1;
    if (done >= 0) times.push_back(took);
  }
  double all = 0;
  for (double t : times) all += t;
  std::printf("{\"engine\": \"llama.cpp\", \"threads\": %d, \"texts_per_second\": %.2f}\n", threads,
              double(times.size() * kAtOnce) / all);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  llama_backend_init();
  ggml_backend_load_all();  // of shared libraries: the kernels of this processor, beside this program
  if (argc == 4 && !std::strcmp(argv[1], "--quantize-q4_0")) {
    llama_model_quantize_params p = llama_model_quantize_default_params();
    p.ftype = LLAMA_FTYPE_MOSTLY_Q4_0;
    p.allow_requantize = true;
    return int(llama_model_quantize(argv[2], argv[3], &p));
  }
  if (argc == 6 && !std::strcmp(argv[1], "--embed"))
    return embed(argv[2], std::atoi(argv[3]), std::atoi(argv[4]), std::atoi(argv[5]));
  if (argc < 2) return 2;
  int threads = argc > 2 ? std::atoi(argv[2]) : 2, repeats = argc > 3 ? std::atoi(argv[3]) : 5;
  alone = threads == 1;
  llama_model* model = llama_model_load_from_file(argv[1], llama_model_default_params());
  if (!model) return 1;
  llama_context_params p = llama_context_default_params();
  p.n_ctx = 16 * 1024, p.n_batch = 512, p.n_ubatch = 512, p.n_seq_max = 16;
  p.n_threads = p.n_threads_batch = threads;
  llama_context* c = llama_init_from_model(model, p);
  if (!c) return 1;
  llama_batch b = llama_batch_init(512, 0, 1);
  std::vector<double> prefills;
  for (int i = 0; i < repeats; ++i) {
    llama_memory_clear(llama_get_memory(c), true);
    b.n_tokens = 0;
    for (int t = 0; t < 512; ++t) add(b, 100 + (t * 37) % 1000, t, 0, t == 511);
    prefills.push_back(seconds(c, b));
  }
  double one = decode_rate(c, b, 1, 24 * repeats), sixteen = decode_rate(c, b, 16, 8 * repeats);
  std::printf(
      "{\"engine\": \"llama.cpp\", \"threads\": %d, \"prefill512\": %.1f, \"decode1\": %.1f, \"decode16\": %.1f}\n",
      threads, 512 / median(prefills), one, sixteen);
}
