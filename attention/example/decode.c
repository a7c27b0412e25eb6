/* A prompt of four tokens, then one more, through the installed operators: each new token's keys and values go into a
 * paged cache and its queries attend to all before them. Checked against the formula.
 *
 *   cc decode.c $(pkg-config --cflags --libs kvasir-attention) -lm -o decode && ./decode */
#include <kvasir/attention.h>
#include <math.h>
#include <stdio.h>

enum { HEADS = 2, KV_HEADS = 1, DIM = 8, PAGE = 4, PAGES = 2, TOKENS = PAGE * PAGES, PROMPT = 4 };

static float query[TOKENS][HEADS][DIM], key[TOKENS][KV_HEADS][DIM], value[TOKENS][KV_HEADS][DIM];
static float cache[TOKENS * 2 * KV_HEADS * DIM], output[TOKENS][HEADS][DIM];

static int failed(const char* what) {
  fprintf(stderr, "%s: %s\n", what, kvasir_attention_error());
  return 1;
}

/* Tokens [from, to): one step of one sequence. */
static int step(kvasir_attention* op, int from, int to) {
  const int64_t seqstarts[] = {0, to - from}, kvstarts[] = {0, to}, start_pos[] = {from};
  const int64_t cachestarts[PAGES] = {PAGE, 0}; /* the second page first: entries are token indices */
  kvasir_attention_step s = {0};
  s.batch = 1, s.seqstarts = seqstarts, s.kvstarts = kvstarts, s.start_pos = start_pos, s.cachestarts = cachestarts;
  s.max_pages = PAGES, s.decoding_batches = to - from == 1, s.max_seqlen = to - from, s.max_kvlen = to;
  if (kvasir_attention_plan(op, &s)) return failed("plan");
  kvasir_attention_tensors t = {0};
  t.query = query[from], t.key = key[from], t.value = value[from], t.output = output[from];
  t.cache.data = cache, t.cache.dtype = KVASIR_F32, t.cache.max_tokens = TOKENS;
  return kvasir_attention_run(op, &t) ? failed("run") : 0;
}

static double expected(int token, int head, int d) {
  double weights = 0, sum = 0;
  for (int j = 0; j <= token; ++j) {
    double score = 0;
    for (int i = 0; i < DIM; ++i) score += query[token][head][i] * key[j][0][i];
    const double weight = exp(score / sqrt(DIM));
    weights += weight, sum += weight * value[j][0][d];
  }
  return sum / weights;
}

int main(void) {
  for (int t = 0; t < TOKENS; ++t)
    for (int d = 0; d < DIM; ++d) {
      for (int h = 0; h < HEADS; ++h) query[t][h][d] = sinf((float)(3 * t + 5 * h + d));
      key[t][0][d] = cosf((float)(2 * t + d)), value[t][0][d] = sinf((float)(t - 2 * d));
    }
  kvasir_attention_attributes attributes = {0};
  attributes.num_heads = HEADS, attributes.num_kv_heads = KV_HEADS, attributes.head_dim = DIM, attributes.is_causal = 1;
  attributes.index_mode = KVASIR_INDEX_PAGE_TABLE, attributes.page_size = PAGE;
  const kvasir_attention_limits limits = {
      .max_batch = 1, .max_tokens = PROMPT, .max_kvlen = TOKENS, .max_pages = PAGES, .cache_tokens = TOKENS};
  kvasir_attention* op;
  /* "cuda" takes device memory in place of these arrays, and a cudaStream_t in place of NULL. */
  if (kvasir_attention_create(&attributes, &limits, "cpu", 1, NULL, &op)) return failed("create");
  if (step(op, 0, PROMPT) || step(op, PROMPT, PROMPT + 1)) return 1;
  kvasir_attention_destroy(op);
  double worst = 0;
  for (int t = 0; t <= PROMPT; ++t)
    for (int h = 0; h < HEADS; ++h)
      for (int d = 0; d < DIM; ++d) worst = fmax(worst, fabs(output[t][h][d] - expected(t, h, d)));
  printf("%d tokens, at most %.1e off\n", PROMPT + 1, worst);
  return worst > 1e-5;
}
