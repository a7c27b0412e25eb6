// What llama.cpp makes of a model: its weights dequantized to float32 by it, then its float32 forward.
//   llamacpp_logits MODEL.gguf SCRATCH.gguf TOKEN...     the logits of every position, a line each
// Built by make_outside.py against the llama.cpp that bench/peers builds.
#include <cstdio>
#include <cstdlib>

#include "llama.h"

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  llama_backend_init();
  llama_model_quantize_params q = llama_model_quantize_default_params();
  q.ftype = LLAMA_FTYPE_ALL_F32, q.allow_requantize = true, q.nthread = 1;
  if (llama_model_quantize(argv[1], argv[2], &q) != 0) return std::fprintf(stderr, "cannot dequantize\n"), 1;
  llama_model* model = llama_model_load_from_file(argv[2], llama_model_default_params());
  if (!model) return std::fprintf(stderr, "cannot load\n"), 1;
  int n = argc - 3;
  llama_context_params p = llama_context_default_params();
  p.n_ctx = p.n_batch = p.n_ubatch = 256, p.n_threads = p.n_threads_batch = 1;
  p.type_k = p.type_v = GGML_TYPE_F32, p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
  llama_context* c = llama_init_from_model(model, p);
  if (!c) return std::fprintf(stderr, "cannot make a context\n"), 1;
  llama_batch b = llama_batch_init(n, 0, 1);
  for (int i = 0; i < n; ++i)
    b.token[i] = std::atoi(argv[3 + i]), b.pos[i] = i, b.n_seq_id[i] = 1, b.seq_id[i][0] = 0, b.logits[i] = 1;
  b.n_tokens = n;
  if (llama_decode(c, b) != 0) return std::fprintf(stderr, "cannot decode\n"), 1;
  int vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
  for (int i = 0; i < n; ++i) {
    const float* row = llama_get_logits_ith(c, i);
    for (int t = 0; t < vocab; ++t) std::printf("%.6f%c", double(row[t]), t + 1 < vocab ? ' ' : '\n');
  }
}
