#include "attention/c_api.h"

#include <exception>
#include <memory>
#include <string>

#include "attention/backend.h"
#include "attention/validate.h"
#include "core/cat.h"

using namespace kvasir;
using namespace kvasir::attention;

struct kvasir_attention {
  Attributes attributes;
  int64_t cache_tokens = 0;
  std::unique_ptr<ThreadPool> pool;
  std::unique_ptr<Attention> op;
};

namespace {

thread_local std::string g_error;

int report(const Status& s) {
  if (s.ok()) return 0;
  g_error = s.message();
  return int(s.code());
}

// No exception crosses the C border.
template <class F>
int guarded(const F& f) {
  try {
    return report(f());
  } catch (const std::exception& e) {
    return report(internal_error(e.what()));
  }
}

Status absent(const char* what) { return invalid_argument(cat(what, " is null")).with_field(what); }
float or_one(float x) { return x == 0 ? 1.0f : x; }

Status to_dtype(const char* field, int32_t value, DType* out) {
  if (value < 0 || value > KVASIR_I4)
    return invalid_argument(cat(field, " is ", value, "; it must be from 0 to ", int(KVASIR_I4))).with_field(field);
  *out = DType(value);
  return {};
}

Status to_enum(const char* field, int32_t value, int32_t last) {
  if (value >= 0 && value <= last) return {};
  return invalid_argument(cat(field, " is ", value, "; it must be from 0 to ", last)).with_field(field);
}

Status to_attributes(const kvasir_attention_attributes& c, Attributes* a) {
  a->num_heads = c.num_heads;
  a->num_kv_heads = c.num_kv_heads == 0 ? c.num_heads : c.num_kv_heads;
  a->head_dim = c.head_dim;
  a->is_causal = c.is_causal;
  a->is_alibi = c.is_alibi;
  a->packed_qkv = c.packed_qkv;
  a->append = !c.no_append;
  a->return_lse = c.return_lse;
  a->streaming_positions = c.streaming_positions;
  a->batch_invariant = c.batch_invariant;
  if (c.alibi_slopes && c.num_heads > 0) a->alibi_slopes.assign(c.alibi_slopes, c.alibi_slopes + c.num_heads);
  if (c.relative_bias && (c.relative_reach < 0 || c.relative_reach > 1 << 24))
    return invalid_argument(cat("relative_reach is ", c.relative_reach, "; it must be from 0 to ", 1 << 24))
        .with_field("relative_reach");
  if (c.relative_bias && c.num_heads > 0 && c.num_heads <= 4096)
    a->relative_bias.assign(c.relative_bias,
                            c.relative_bias + int64_t(c.num_heads) * (2 * int64_t(c.relative_reach) + 1));
  a->q_scaling = or_one(c.q_scaling);
  a->softcap = c.softcap;
  a->window = c.window;
  a->sinks = c.sinks;
  a->cyclic_capacity = c.cyclic_capacity;
  KVASIR_TRY(to_enum("rope_style", c.rope_style, KVASIR_ROPE_GPTJ));
  a->rope.style = RopeStyle(c.rope_style);
  a->rope.rotary_dim = c.rotary_dim;
  a->rope.magnitude = or_one(c.rope_magnitude);
  if (c.rope_style != KVASIR_ROPE_NONE && c.inv_freq && c.rotary_dim > 0)
    a->rope.inv_freq.assign(c.inv_freq, c.inv_freq + c.rotary_dim / 2);
  KVASIR_TRY(to_dtype("io_dtype", c.io_dtype, &a->io));
  KVASIR_TRY(to_dtype("out_dtype", c.out_dtype, &a->out));
  a->q_scale = or_one(c.q_scale);
  a->out_scale = or_one(c.out_scale);
  KVASIR_TRY(to_enum("index_mode", c.index_mode, KVASIR_INDEX_TOKEN_TABLE));
  a->index_mode = kvcache::IndexMode(c.index_mode);
  a->page_size = c.page_size;
  return {};
}

Status to_view(const kvasir_attention& op, const kvasir_attention_cache& c, kvcache::CacheView* v) {
  v->data = c.data;
  v->scale = c.scale;
  KVASIR_TRY(to_dtype("cache dtype", c.dtype, &v->dtype));
  KVASIR_TRY(to_dtype("scale_dtype", c.scale_dtype, &v->scale_dtype));
  KVASIR_TRY(to_enum("quant", c.quant, KVASIR_QUANT_PER_TENSOR));
  v->quant = kvcache::QuantKind(c.quant);
  v->quant_group = c.quant_group;
  v->k_scale = or_one(c.k_scale);
  v->v_scale = or_one(c.v_scale);
  v->max_tokens = c.max_tokens;
  v->layers = c.layers == 0 ? 1 : c.layers;
  v->kv_heads = op.attributes.num_kv_heads;
  v->head_dim = op.attributes.head_dim;
  // Indices were checked against the limit, so a smaller cache would be overrun.
  if (c.max_tokens < op.cache_tokens)
    return invalid_argument(cat("cache holds ", c.max_tokens, " tokens; the operator was made for ", op.cache_tokens))
        .with_field("cache");
  const int revision = c.revision == 0 ? 2 : c.revision;
  KVASIR_ASSIGN(v->strides,
                kvcache::layout_strides(revision, c.cache_layout, c.max_tokens, v->layers, v->kv_heads, v->head_dim));
  if (v->quant == kvcache::QuantKind::group && v->quant_group > 0 && v->head_dim % v->quant_group == 0) {
    KVASIR_ASSIGN(v->scale_strides, kvcache::layout_strides(revision, c.cache_layout, c.max_tokens, v->layers,
                                                            v->kv_heads, v->head_dim / v->quant_group));
  }
  return {};
}

}  // namespace

int kvasir_attention_create(const kvasir_attention_attributes* attributes, const kvasir_attention_limits* limits,
                            const char* backend, int threads, void* stream, kvasir_attention** out) {
  return guarded([&]() -> Status {
    if (!attributes) return absent("attributes");
    if (!limits) return absent("limits");
    if (!backend) return absent("backend");
    if (!out) return absent("out");
    if (threads < 1 || threads > 1024)
      return invalid_argument(cat("threads is ", threads, "; it must be from 1 to 1024")).with_field("threads");
    auto made = std::make_unique<kvasir_attention>();
    KVASIR_TRY(to_attributes(*attributes, &made->attributes));
    KVASIR_ASSIGN(const Backend* found, find_backend(backend));
    KVASIR_TRY(found->available());
    if (stream && !found->transfer())
      return invalid_argument(cat("stream is given; ", found->name(), " works on host memory and has none"))
          .with_field("stream");
    made->pool = std::make_unique<ThreadPool>(threads);
    made->cache_tokens = limits->cache_tokens;
    const Limits l{limits->max_batch, limits->max_tokens, limits->max_kvlen, limits->max_pages, limits->cache_tokens};
    KVASIR_ASSIGN(made->op, found->create(made->attributes, l, {made->pool.get(), stream}));
    *out = made.release();
    return {};
  });
}

void kvasir_attention_destroy(kvasir_attention* op) { delete op; }

int kvasir_attention_plan(kvasir_attention* op, const kvasir_attention_step* c) {
  return guarded([&]() -> Status {
    if (!op) return absent("op");
    if (!c) return absent("step");
    Step s;
    s.batch = c->batch;
    s.seqstarts = c->seqstarts;
    s.kvstarts = c->kvstarts;
    s.start_pos = c->start_pos;
    s.cachestarts = c->cachestarts;
    s.max_pages = c->max_pages;
    s.decoding_batches = c->decoding_batches;
    s.max_seqlen = c->max_seqlen;
    s.max_kvlen = c->max_kvlen;
    s.cache_indirection = c->cache_indirection;
    s.beam_width = c->beam_width;
    return op->op->plan(s);
  });
}

int kvasir_attention_run(kvasir_attention* op, const kvasir_attention_tensors* c) {
  return guarded([&]() -> Status {
    if (!op) return absent("op");
    if (!c) return absent("tensors");
    Tensors t;
    t.query = c->query;
    t.key = c->key;
    t.value = c->value;
    t.qkv_bias = c->qkv_bias;
    t.attn_mask = c->attn_mask;
    t.mask_head_stride = c->mask_head_stride;
    t.mask_row_stride = c->mask_row_stride;
    t.sink_logits = c->sink_logits;
    t.output = c->output;
    t.lse = c->lse;
    t.layer = c->cache.layer;
    KVASIR_TRY(to_view(*op, c->cache, &t.cache));
    KVASIR_TRY(validate_tensors(op->attributes, t));
    return op->op->run(t);
  });
}

int kvasir_attention_store_and_gather(kvasir_attention* op, const kvasir_kvc_tensors* c) {
  return guarded([&]() -> Status {
    if (!op) return absent("op");
    if (!c) return absent("tensors");
    KvcTensors t;
    t.key = c->key;
    t.value = c->value;
    t.key_out = c->key_out;
    t.value_out = c->value_out;
    t.num_repeat = c->num_repeat == 0 ? 1 : c->num_repeat;
    t.layer = c->cache.layer;
    KVASIR_TRY(to_view(*op, c->cache, &t.cache));
    KVASIR_TRY(validate_tensors(op->attributes, t));
    return op->op->store_and_gather(t);
  });
}

const char* kvasir_attention_error(void) { return g_error.c_str(); }
