// The cache-attention operator as plain data (docs/attention-ops.md says what it computes).
//   Attributes  what never changes for a group of layers      -> Backend::create
//   Step        host arrays that describe one packed step     -> Attention::plan, once a step
//   Tensors     the pointers of one layer                     -> Attention::run, once a layer
#pragma once

#include <cstdint>
#include <vector>

#include "core/dtype.h"
#include "kvcache/view.h"

namespace kvasir::attention {

enum class RopeStyle : uint8_t { none, neox, gptj };

// Frequencies are made once on the host (attention/rope.h); scaling variants differ only here.
struct Rope {
  RopeStyle style = RopeStyle::none;
  int32_t rotary_dim = 0;
  std::vector<float> inv_freq;  // rotary_dim / 2
  float magnitude = 1.0f;       // cos and sin are multiplied by it (YaRN, LongRoPE)
};

struct Attributes {
  int32_t num_heads = 0;
  int32_t num_kv_heads = 0;  // never 0 here: the boundary has put num_heads for 0
  int32_t head_dim = 0;
  bool is_causal = true;
  bool is_alibi = false;
  std::vector<float> alibi_slopes;  // by global head; empty: the rule of the spec
  // [Hq, 2 * reach + 1], empty: none. Added to a score by how far its key stands behind the query (T5), -reach to
  // reach; keys further away have what the last have.
  std::vector<float> relative_bias;
  float q_scaling = 1.0f;            // scores are divided by q_scaling * sqrt(head_dim)
  float softcap = 0.0f;              // 0: none
  int32_t window = 0;                // 0: none; the query at t sees [t-window+1, t]
  int32_t sinks = 0;                 // counted inside window
  int32_t cyclic_capacity = 0;       // 0: none; token t lives at slot t % capacity
  bool streaming_positions = false;  // StreamingLLM: keys cached un-rotated, rank positions
  Rope rope;
  bool packed_qkv = false;  // query is [T, (Hq+2*Hkv)*D]; key and value pointers are ignored
  bool append = true;       // false: attend over what is stored, no current K/V
  bool return_lse = false;
  bool batch_invariant = false;  // CUDA: fixed tiles and split points (CPU always is)
  DType io =
      DType::f32;        // query, key, value (int8: KVC only); f8_e4m3 is read as q * q_scale, k * k_scale, v * v_scale
  float q_scale = 1.0f;  // io f8_e4m3 only; k_scale and v_scale are the cache's
  // Queries become E4M3 in units of Tensors::q_scale once they have their bias and are rotated, whoever reads them:
  // beside an FP8 cache all that scores are made of is E4M3 then, and prompts are multiplied as that (CUDA).
  bool fp8_query = false;
  DType out = DType::f32;  // may be f8_e4m3 with out_scale, or (KVC only) int8 for what an int8 cache holds
  float out_scale = 1.0f;
  // The first so many columns of results are read by nobody: a back end may leave them as they are. Latent attention's,
  // where they would be the rotated part of keys.
  int32_t unread_columns = 0;
  kvcache::IndexMode index_mode = kvcache::IndexMode::page_table;
  int32_t page_size = 16;  // page_table only; 1 to kvcache::kMostPageTokens, and a page begins anywhere
};

// One packed step; every array is on the host and outlives plan() only.
struct Step {
  int64_t batch = 0;                     // B
  const int64_t* seqstarts = nullptr;    // [B+1]
  const int64_t* kvstarts = nullptr;     // [B+1]
  const int64_t* start_pos = nullptr;    // [B]
  const int64_t* cachestarts = nullptr;  // by index_mode
  int64_t max_pages = 0;                 // row length of cachestarts, page_table only
  int64_t decoding_batches = 0;
  int64_t max_seqlen = 0, max_kvlen = 0;
  // Beam search: index [groups, beam_width, max_kvlen]; sequence b is beam b % beam_width of group b / beam_width.
  const int32_t* cache_indirection = nullptr;
  int32_t beam_width = 0;
  // Cascade: sequences that share their first `shared_len` tokens name the same group; empty: none.
  const int32_t* shared_group = nullptr;  // [B], -1: none
  const int64_t* shared_len = nullptr;    // [groups]
};

// One layer's memory: host pointers for CPU back ends, device pointers for CUDA.
struct Tensors {
  const void* query = nullptr;  // [T, Hq, D], or packed QKV
  const void* key = nullptr;    // [T, Hkv, D]
  const void* value = nullptr;
  const void* qkv_bias = nullptr;   // [(Hq+2*Hkv)*D] of io dtype, packed_qkv only
  const void* attn_mask = nullptr;  // additive, of io dtype
  int64_t mask_head_stride = 0;     // 0: one mask for all heads
  int64_t mask_row_stride = 0;
  float q_scale = 1.0f;                // with Attributes::fp8_query
  const float* sink_logits = nullptr;  // [Hq]
  void* output = nullptr;              // [T, Hq, D] of out dtype
  float* lse = nullptr;                // [T, Hq]: log of the softmax's denominator, sink logit included;
                                       // -inf for a row with every key masked, whatever the sink
  kvcache::CacheView cache;
  int32_t layer = 0;
};

// KVC (section 4): store, then give back everything each sequence has, dequantized and repeated.
struct KvcTensors {
  const void* key = nullptr;  // [T, Hkv, D] of io dtype ; io int8: quantized already, the bytes are stored as they are
  const void* value = nullptr;
  void* key_out = nullptr;  // [kvstarts[B], Hkv*num_repeat, D] of out dtype ; both null: nothing is given back
  void* value_out = nullptr;
  int32_t num_repeat = 1;
  kvcache::CacheView cache;
  int32_t layer = 0;
};

}  // namespace kvasir::attention
