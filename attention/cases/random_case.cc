#include "attention/cases/random_case.h"

#include <algorithm>
#include <cmath>

#include "attention/io.h"
#include "attention/rope.h"
#include "attention/rules.h"
#include "core/cat.h"

namespace kvasir::attention {
namespace {

// Nothing may read these: all ones is NaN in every float type.
constexpr uint8_t kPoison = 0xff;
constexpr int64_t kGarbageIndex = -0x5555555555;

struct Builder {
  Dice dice, own;  // its own: what some back ends do not take, so that the rest of a seed's case is the same for all
  CaseOptions options;
  Case c;
  int64_t max_tokens = 0;
  bool odd_pages = false;

  Attributes& a() { return c.attributes; }

  void heads() {
    const int dims[] = {32, 40, 48, 64, 64, 80, 96, 112, 128, 128, 160, 192, 256};
    const int groups[] = {1, 1, 2, 3, 4, 5, 7, 8};
    do a().head_dim = dice.pick(dims);
    while (a().head_dim > options.max_head_dim);
    a().num_kv_heads = int(1 + dice.upto(2));
    a().num_heads = a().num_kv_heads * dice.pick(groups);
  }

  void types() {
    const DType io[] = {DType::f32, DType::f32, DType::f16, DType::bf16};
    a().io = a().out = dice.pick(io);
    kvcache::CacheView& v = c.view;
    v.head_dim = a().head_dim;
    v.kv_heads = a().num_kv_heads;
    v.layers = int(1 + dice.upto(2));
    c.layer = int(dice.upto(v.layers - 1));
    const int kind = int(dice.upto(7));
    if (kind < 4) {
      const DType plain[] = {DType::f32, DType::f16, DType::bf16};
      v.dtype = dice.one_in(2) ? a().io : dice.pick(plain);
    } else if (kind < 6) {
      v.quant = kvcache::QuantKind::group;
      v.dtype = dice.one_in(2) ? DType::i8 : DType::i4;
      v.scale_dtype = dice.one_in(2) ? DType::f16 : DType::f32;
      do v.quant_group = int(8 << dice.upto(4));
      while (a().head_dim % v.quant_group != 0);
      if (options.small_groups && own.one_in(4)) v.quant_group = int(1 << own.upto(2));
    } else {
      v.quant = kvcache::QuantKind::per_tensor;
      v.dtype = dice.one_in(2) ? DType::i8 : DType::f8_e4m3;
      v.k_scale = v.dtype == DType::i8 ? 0.03f : 0.01f;
      v.v_scale = v.dtype == DType::i8 ? 0.025f : 0.02f;
    }
    if (dice.one_in(12)) a().out = DType::f8_e4m3, a().out_scale = 0.01f;
    if (options.fp8_io && v.dtype == DType::f8_e4m3 && dice.one_in(3)) {
      a().io = DType::f8_e4m3;
      a().q_scale = 0.02f;
      a().out = dice.one_in(2) ? DType::f8_e4m3 : DType::bf16;
      a().out_scale = 0.01f;
    }
  }

  void variants() {
    a().is_causal = !dice.one_in(5);
    a().is_alibi = dice.one_in(6);
    if (a().is_alibi && dice.one_in(3))
      for (int h = 0; h < a().num_heads; ++h) a().alibi_slopes.push_back(0.02f * float(h + 1));
    if (options.relative_bias && own.one_in(6)) {
      const int64_t reach = own.one_in(2) ? own.upto(8) : own.upto(200);
      for (int64_t i = a().num_heads * (2 * reach + 1); i > 0; --i) a().relative_bias.push_back(own.normal());
    }
    if (dice.one_in(5)) a().q_scaling = 0.7f;
    if (dice.one_in(5)) a().softcap = 5.0f;
    a().return_lse = dice.one_in(2);
    a().append = !dice.one_in(8);
    if (dice.one_in(3)) {
      a().window = int(1 + dice.upto(dice.one_in(2) ? 20 : 200));
      if (dice.one_in(2)) a().sinks = int(dice.upto(std::min(a().window - 1, 6)));
      if (options.cyclic && dice.one_in(2)) a().cyclic_capacity = a().window + int(dice.upto(40));
    }
    if (dice.one_in(3)) rope();
    if (options.streaming && a().window > 0 && a().rope.style != RopeStyle::none && dice.one_in(2))
      a().streaming_positions = true;
    if (dice.one_in(4)) a().packed_qkv = true;
    if (dice.one_in(4))
      for (int h = 0; h < a().num_heads; ++h) c.sink_logits.push_back(dice.normal());
    if (options.kvc && dice.one_in(10)) key_value_cache();
    if (options.fp8_query && c.view.dtype == DType::f8_e4m3 && c.op != Op::key_value_cache && a().io != DType::f8_e4m3)
      a().fp8_query = own.one_in(2), a().q_scale = a().fp8_query ? 0.02f : 1.0f;
  }

  void rope() {
    RopeConfig r;
    r.style = dice.one_in(2) ? RopeStyle::neox : RopeStyle::gptj;
    r.rotary_dim = dice.one_in(2) ? a().head_dim : a().head_dim / 2;
    r.scaling = RopeScaling(dice.upto(4));
    r.factor = 4;
    r.original_context = 256;
    r.configured_context = dice.one_in(2) ? 1024 : 256;
    if (r.scaling == RopeScaling::longrope) {
      r.short_factor.assign(size_t(r.rotary_dim / 2), 1.1f);
      r.long_factor.assign(size_t(r.rotary_dim / 2), 2.5f);
    }
    a().rope = rope_frequencies(r).value();
  }

  void key_value_cache() {
    c.op = Op::key_value_cache;
    a().append = true;
    a().packed_qkv = a().is_alibi = a().streaming_positions = a().return_lse = false;
    a().q_scaling = 1.0f, a().softcap = 0.0f;
    a().alibi_slopes.clear();
    a().relative_bias.clear();
    a().window = a().sinks = a().cyclic_capacity = 0;
    a().rope = {};
    c.sink_logits.clear();
    c.num_repeat = int(1 + dice.upto(3));
    if (c.view.dtype == DType::i8 && c.view.quant == kvcache::QuantKind::per_tensor && dice.one_in(2)) {
      a().io = DType::i8;
      a().out = options.int8_out && own.one_in(2) ? DType::i8 : DType::f32;
    }
  }

  int64_t length() {
    const int64_t edge[] = {1, 16, 63, 64, 65, 127, 128, 129, 256};
    if (dice.one_in(3)) return dice.pick(edge) + (dice.one_in(2) ? 0 : dice.upto(2));
    return 1 + dice.upto(dice.one_in(6) ? options.max_kvlen : 150);
  }

  void add(int64_t seqlen, int64_t past) {
    const bool any = !a().append && dice.one_in(2);  // cross attention: any length
    add(seqlen, past, any ? dice.upto(150) : past + seqlen);
  }
  void add(int64_t seqlen, int64_t past, int64_t kvlen) {
    c.seqstarts.push_back(c.seqstarts.back() + seqlen);
    c.kvstarts.push_back(c.kvstarts.back() + kvlen);
    c.start_pos.push_back(past);
    c.max_seqlen = std::max(c.max_seqlen, seqlen);
    c.max_kvlen = std::max(c.max_kvlen, kvlen);
  }

  bool beams() const { return c.beam_width > 0; }

  void sequences() {
    if (options.beams && a().cyclic_capacity == 0 && a().append && c.op == Op::cache_attention && dice.one_in(10)) {
      c.beam_width = int(1 + dice.upto(3));
      const int64_t groups = 1 + dice.upto(1);
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t past = length();
        for (int b = 0; b < c.beam_width; ++b) add(1, past);
      }
      c.decoding_batches = c.batch();
      return;
    }
    const int64_t per_key = int64_t(a().num_heads) * a().head_dim;
    int64_t work = options.max_work;
    auto fits = [&](int64_t seqlen, int64_t past) {
      const int64_t cost = seqlen * (past + seqlen) * per_key / 4;
      if (cost > work) return false;
      work -= cost;
      return true;
    };
    for (int64_t n = dice.upto(3); n > 0; --n) {
      const int64_t past = length() - 1, seqlen = dice.one_in(10) ? 1 + dice.upto(3) : 1;
      if (fits(seqlen, past)) add(seqlen, past), ++c.decoding_batches;
    }
    for (int64_t n = dice.upto(2); n > 0; --n)
      if (int64_t past = length(), seqlen = 2 + dice.upto(6); fits(seqlen, past)) add(seqlen, past);
    for (int64_t n = dice.upto(2); n > 0; --n) {
      const int64_t past = dice.one_in(2) ? 0 : length(), seqlen = dice.one_in(5) ? 0 : length();
      if (fits(seqlen, past)) add(seqlen, past);
    }
    if (c.batch() == 0) add(1, 5);
    if (dice.one_in(6)) c.max_kvlen += dice.upto(9);  // an upper bound is enough
  }

  SequenceShape shape(int64_t b) const {
    return {c.seqstarts[size_t(b) + 1] - c.seqstarts[size_t(b)], c.kvstarts[size_t(b) + 1] - c.kvstarts[size_t(b)],
            c.start_pos[size_t(b)], b < c.decoding_batches};
  }

  // Slots that a sequence may touch: everything before `first` (but for sinks) gets a garbage index.
  int64_t slots(int64_t b) {
    const int64_t n = shape(b).kvlen;
    return a().cyclic_capacity > 0 ? std::min<int64_t>(n, a().cyclic_capacity) : n;
  }
  bool needed(int64_t b, int64_t slot) {
    const SequenceShape s = shape(b);
    if (a().cyclic_capacity > 0 || s.seqlen == 0) return true;
    const Visible v = visible_keys(a(), s, 0);
    return slot < v.sink_end || slot >= v.lo;
  }

  // Units (tokens, pages or whole sequences) in a random order with holes between them.
  std::vector<int64_t> shuffled(int64_t n) {
    std::vector<int64_t> order(static_cast<size_t>(n + 1 + dice.upto(3)));
    for (size_t i = 0; i < order.size(); ++i) order[i] = int64_t(i);
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[size_t(dice.upto(int64_t(i) - 1))]);
    return order;
  }

  void storage() {
    a().index_mode = kvcache::IndexMode(dice.upto(2));
    a().page_size = int(1 << dice.upto(8));
    odd_pages = options.any_pages && own.one_in(3);
    if (odd_pages) a().page_size = int(1 + own.upto(own.one_in(4) ? 1000 : 70));
    c.revision = dice.one_in(3) ? 1 : 2;
    c.layout = int(dice.upto(3));
  }

  void place() {
    if (a().index_mode == kvcache::IndexMode::offset) {
      int64_t at = dice.upto(5);
      for (int64_t b = 0; b < c.batch(); ++b) c.cachestarts.push_back(at), at += slots(b) + dice.upto(3);
      max_tokens = at + 1;
    } else if (a().index_mode == kvcache::IndexMode::token_table) {
      std::vector<int64_t> order = shuffled(c.kvstarts.back());
      max_tokens = int64_t(order.size());
      for (int64_t b = 0, next = 0; b < c.batch(); ++b)
        for (int64_t t = 0; t < shape(b).kvlen; ++t)
          c.cachestarts.push_back(t < slots(b) && needed(b, t) ? order[size_t(next++)] : kGarbageIndex);
    } else {
      int64_t pages = 0;
      for (int64_t b = 0; b < c.batch(); ++b) {
        const int64_t n = (slots(b) + a().page_size - 1) / a().page_size;
        pages += n;
        c.max_pages = std::max(c.max_pages, n);
      }
      if (dice.one_in(2)) c.max_pages += dice.upto(3);
      std::vector<int64_t> order = shuffled(pages);
      const int64_t shift = odd_pages ? own.upto(a().page_size) : 0;  // pages begin anywhere
      max_tokens = int64_t(order.size()) * a().page_size + shift;
      for (int64_t b = 0, next = 0; b < c.batch(); ++b)
        for (int64_t p = 0; p < c.max_pages; ++p) {
          bool used = false;
          for (int64_t t = p * a().page_size; t < std::min(slots(b), (p + 1) * a().page_size); ++t)
            used |= needed(b, t);
          c.cachestarts.push_back(used ? order[size_t(next++)] * a().page_size + shift : kGarbageIndex);
        }
    }
  }

  void make_cache() {
    kvcache::CacheView& v = c.view;
    v.max_tokens = max_tokens;
    v.strides = kvcache::layout_strides(c.revision, c.layout, max_tokens, v.layers, v.kv_heads, v.head_dim).value();
    c.cache.assign(size_t(dtype_bytes(v.dtype, 2 * max_tokens * v.layers * v.kv_heads * v.head_dim)), kPoison);
    if (v.quant == kvcache::QuantKind::group) {
      const int groups = v.head_dim / v.quant_group;
      v.scale_strides = kvcache::layout_strides(c.revision, c.layout, max_tokens, v.layers, v.kv_heads, groups).value();
      c.scale.assign(size_t(dtype_bytes(v.scale_dtype, 2 * max_tokens * v.layers * v.kv_heads * groups)), kPoison);
    }
    kvcache::CacheView data = v;
    data.data = c.cache.data();
    data.scale = c.scale.data();
    const kvcache::CacheIndex index{a().index_mode, a().page_size, c.cachestarts.data(), c.max_pages};
    std::vector<float> row(size_t(v.head_dim));
    for (int64_t b = 0; b < c.batch(); ++b) {
      const SequenceShape s = shape(b);
      const int64_t stored = a().append ? s.start_pos : s.kvlen;
      for (int64_t t = 0; t < stored; ++t) {
        if (!needed(b, t)) continue;
        for (int h = 0; h < v.kv_heads; ++h)
          for (bool value : {false, true}) {
            for (float& x : row) x = dice.normal();
            kvcache::store_row(data, kvcache::physical_token(index, c.kvstarts.data(), b, cache_slot(a(), t)), c.layer,
                               h, value, row.data());
          }
      }
    }
  }

  Bytes random_tensor(int64_t n, DType type, float scale) {
    std::vector<float> x(static_cast<size_t>(n));
    for (float& f : x) f = dice.normal();
    Bytes bytes(size_t(dtype_bytes(type, n)));
    if (type == DType::i8)
      for (int64_t i = 0; i < n; ++i)
        bytes[size_t(i)] = uint8_t(int8_t(std::clamp(x[size_t(i)] * 40, -128.0f, 127.0f)));
    else
      write_elements(x.data(), type, 0, n, scale, bytes.data());
    return bytes;
  }

  void inputs() {
    const int64_t T = c.tokens(), D = a().head_dim, packed = a().num_heads + 2 * a().num_kv_heads;
    if (a().packed_qkv) {
      c.query = random_tensor(T * packed * D, a().io, a().q_scale);
      if (dice.one_in(2) && a().io != DType::f8_e4m3) c.qkv_bias = random_tensor(packed * D, a().io, 1.0f);
    } else {
      c.query = random_tensor(T * a().num_heads * D, a().io, a().q_scale);
      c.key = random_tensor(T * a().num_kv_heads * D, a().io, c.view.k_scale);
      c.value = random_tensor(T * a().num_kv_heads * D, a().io, c.view.v_scale);
    }
    if (beams()) {
      c.indirection.resize(size_t(c.batch() * c.max_kvlen));
      for (int32_t& beam : c.indirection) beam = int32_t(dice.upto(c.beam_width - 1));
    }
  }

  void extras() {
    if (options.masks && a().io != DType::f8_e4m3 && a().io != DType::i8 && dice.one_in(5)) mask();
    if (!a().packed_qkv && a().io == DType::f32 && dice.one_in(2)) dominant_keys();
  }

  void mask() {
    const int64_t T = c.tokens(), columns = c.kvstarts.back() + dice.upto(5);
    const int heads = dice.one_in(2) ? a().num_heads : 1;
    c.mask_row_stride = std::max<int64_t>(columns, 1);
    c.mask_head_stride = heads > 1 ? T * c.mask_row_stride : 0;
    std::vector<float> m(size_t(heads * T * c.mask_row_stride));
    for (int64_t row = 0; row < heads * T; ++row) {
      const bool all = dice.one_in(8);
      for (int64_t j = 0; j < c.mask_row_stride; ++j)
        m[size_t(row * c.mask_row_stride + j)] = all || dice.one_in(6) ? -INFINITY : 0.5f * dice.normal();
    }
    c.attn_mask.resize(size_t(dtype_bytes(a().io, int64_t(m.size()))));
    if (!m.empty()) write_elements(m.data(), a().io, 0, int64_t(m.size()), 1.0f, c.attn_mask.data());
  }

  // The last query of a sequence looks almost wholly at one new key, near an edge of tiles and pages.
  void dominant_keys() {
    const int64_t D = a().head_dim;
    auto* q = reinterpret_cast<float*>(c.query.data());
    auto* k = reinterpret_cast<float*>(c.key.data());
    for (int64_t b = 0; b < c.batch(); ++b) {
      const SequenceShape s = shape(b);
      if (s.seqlen == 0) continue;
      const int64_t edge[] = {0, 63, 64, 127, 128, s.seqlen - 1, s.seqlen / 2};
      const int64_t i = std::clamp<int64_t>(dice.pick(edge) - s.start_pos, 0, s.seqlen - 1);
      const float* from = q + (c.seqstarts[size_t(b) + 1] - 1) * a().num_heads * D;
      float* to = k + (c.seqstarts[size_t(b)] + i) * a().num_kv_heads * D;
      for (int64_t d = 0; d < D; ++d) to[d] = 2.5f * from[d];
    }
  }
};

}  // namespace

uint64_t Dice::bits() {
  uint64_t z = state_ += 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

float Dice::normal() {
  const uint64_t b = bits();
  const int64_t sum = int64_t(b & 0xffff) + int64_t(b >> 16 & 0xffff) + int64_t(b >> 32 & 0xffff) + int64_t(b >> 48);
  return float(sum - 2 * 65535) * (1.0f / 37837.0f);
}

Case random_case(uint64_t seed, const CaseOptions& options) {
  Builder b{Dice(seed), Dice(seed + 0x51ed270b), options, {}};
  b.heads();
  b.types();
  b.variants();
  b.storage();
  b.sequences();
  b.place();
  b.make_cache();
  b.inputs();
  b.extras();
  return std::move(b.c);
}

Case make_case(const CaseShape& shape, uint64_t seed) {
  Builder b{Dice(seed), Dice(seed), {}, {}};
  b.a() = shape.attributes;
  b.c.view = shape.cache;
  b.c.view.head_dim = shape.attributes.head_dim;
  b.c.view.kv_heads = shape.attributes.num_kv_heads;
  b.c.layer = shape.layer;
  b.c.beam_width = shape.beam_width;
  b.c.decoding_batches = shape.decoding_batches;
  b.c.revision = shape.revision;
  b.c.layout = shape.layout;
  for (const CaseShape::Sequence& s : shape.sequences) b.add(s.fresh, s.past, s.kvlen < 0 ? s.past + s.fresh : s.kvlen);
  b.place();
  b.make_cache();
  b.inputs();
  return std::move(b.c);
}

std::string describe(const Case& c) {
  const Attributes& a = c.attributes;
  std::string s = cat(op_name(c.op), " Hq ", a.num_heads, " Hkv ", a.num_kv_heads, " D ", a.head_dim, " io ",
                      dtype_name(a.io), " out ", dtype_name(a.out), " cache ", dtype_name(c.view.dtype));
  if (c.view.quant == kvcache::QuantKind::group) s += cat("/", c.view.quant_group, " ", dtype_name(c.view.scale_dtype));
  s += cat(" mode ", int(a.index_mode), " page ", a.page_size, " causal ", a.is_causal, " alibi ", a.is_alibi,
           " relative ", a.relative_bias.size(), " softcap ", a.softcap, " window ", a.window, " sinks ", a.sinks,
           " cyclic ", a.cyclic_capacity, " streaming ", a.streaming_positions, " rope ", int(a.rope.style), "/",
           a.rope.rotary_dim, " packed ", a.packed_qkv, " bias ", !c.qkv_bias.empty(), " append ", a.append, " mask ",
           c.mask_row_stride, "/", c.mask_head_stride, " sinklogits ", !c.sink_logits.empty(), " beams ", c.beam_width,
           " decodes ", c.decoding_batches, " [");
  for (int64_t b = 0; b < c.batch(); ++b)
    s += cat(b ? " " : "", c.start_pos[size_t(b)], "+", c.seqstarts[size_t(b) + 1] - c.seqstarts[size_t(b)], "/",
             c.kvstarts[size_t(b) + 1] - c.kvstarts[size_t(b)]);
  return s + "]";
}

}  // namespace kvasir::attention
