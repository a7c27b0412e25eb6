/* The cache-attention operators for other languages and engines, over their own memory: host memory for
 * "reference" and "cpu", device memory for "cuda". docs/attention-ops.md says what they compute. Installed as
 * <kvasir/attention.h>; `pkg-config --cflags --libs kvasir-attention` says how to build with it.
 *
 *   kvasir_attention* op;
 *   if (kvasir_attention_create(&attributes, &limits, "cpu", 2, NULL, &op)) puts(kvasir_attention_error());
 *   kvasir_attention_plan(op, &step);      once a step, host arrays
 *   kvasir_attention_run(op, &tensors);    once a layer
 *   kvasir_attention_destroy(op);
 *
 * Zero-initialize every struct; a zero is each field's default unless it says otherwise. All functions
 * return 0 or the number of a gRPC status code; the words are in kvasir_attention_error(), of this thread. */
#ifndef KVASIR_ATTENTION_C_API_H
#define KVASIR_ATTENTION_C_API_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVASIR_API __attribute__((visibility("default")))

typedef struct kvasir_attention kvasir_attention;

enum { KVASIR_F32, KVASIR_F16, KVASIR_BF16, KVASIR_F8_E4M3, KVASIR_I8, KVASIR_I4 }; /* dtype */
enum { KVASIR_INDEX_OFFSET, KVASIR_INDEX_PAGE_TABLE, KVASIR_INDEX_TOKEN_TABLE };    /* index_mode */
enum { KVASIR_ROPE_NONE, KVASIR_ROPE_NEOX, KVASIR_ROPE_GPTJ };                      /* rope_style */
enum { KVASIR_QUANT_NONE, KVASIR_QUANT_GROUP, KVASIR_QUANT_PER_TENSOR };            /* quant */

typedef struct {
  int32_t num_heads, num_kv_heads, head_dim; /* num_kv_heads 0: num_heads */
  int32_t is_causal, is_alibi, packed_qkv, no_append, return_lse, streaming_positions, batch_invariant;
  const float* alibi_slopes; /* [num_heads] or null */
  float q_scaling;           /* 0: 1 */
  float softcap;
  int32_t window, sinks, cyclic_capacity;
  int32_t rope_style, rotary_dim;
  const float* inv_freq; /* [rotary_dim / 2] */
  float rope_magnitude;  /* 0: 1 */
  int32_t io_dtype, out_dtype;
  float q_scale, out_scale; /* 0: 1 */
  int32_t index_mode, page_size;
  const float* relative_bias; /* [num_heads, 2 * relative_reach + 1] or null */
  int32_t relative_reach;
} kvasir_attention_attributes;

typedef struct {
  int64_t max_batch, max_tokens, max_kvlen, max_pages, cache_tokens;
} kvasir_attention_limits;

typedef struct {
  int64_t batch;
  const int64_t *seqstarts, *kvstarts, *start_pos, *cachestarts;
  int64_t max_pages, decoding_batches, max_seqlen, max_kvlen;
  const int32_t* cache_indirection;
  int32_t beam_width;
} kvasir_attention_step;

typedef struct {
  void *data, *scale;
  int32_t dtype, scale_dtype, quant, quant_group;
  float k_scale, v_scale; /* 0: 1 */
  int64_t max_tokens;
  int32_t layers, layer;          /* layers 0: 1 */
  int32_t revision, cache_layout; /* revision 0: 2 */
} kvasir_attention_cache;

typedef struct {
  const void *query, *key, *value, *qkv_bias, *attn_mask;
  int64_t mask_head_stride, mask_row_stride;
  const float* sink_logits;
  void* output;
  float* lse;
  kvasir_attention_cache cache;
} kvasir_attention_tensors;

typedef struct {
  const void *key, *value;
  void *key_out, *value_out;
  int32_t num_repeat; /* 0: 1 */
  kvasir_attention_cache cache;
} kvasir_kvc_tensors;

/* `threads` work for "reference" and "cpu". `stream` is the cudaStream_t that "cuda" launches on (null: the default
 * one), in whose order plan() and run() happen; with the others it is null, and run() has finished when it returns. */
KVASIR_API int kvasir_attention_create(const kvasir_attention_attributes*, const kvasir_attention_limits*,
                                       const char* backend, int threads, void* stream, kvasir_attention** out);
KVASIR_API void kvasir_attention_destroy(kvasir_attention*);
KVASIR_API int kvasir_attention_plan(kvasir_attention*, const kvasir_attention_step*);
KVASIR_API int kvasir_attention_run(kvasir_attention*, const kvasir_attention_tensors*);
KVASIR_API int kvasir_attention_store_and_gather(kvasir_attention*, const kvasir_kvc_tensors*);
KVASIR_API const char* kvasir_attention_error(void); /* of this thread's last call that failed */

#ifdef __cplusplus
}
#endif
#endif
