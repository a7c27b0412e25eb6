#include "attention/cases/case_json.h"

#include "attention/cases/json_object.h"
#include "attention/rope.h"
#include "core/log.h"

namespace kvasir::attention {
namespace {

using kvcache::IndexMode;

// Only what belongs to the type: the rest would be read and do nothing.
Status read_scaling(const json& j, RopeConfig* r) {
  Object s("rope.scaling", j);
  KVASIR_TRY(s.is_object());
  std::string type = "default";
  KVASIR_TRY(s.get("type", &type));
  KVASIR_ASSIGN(r->scaling, parse_rope_scaling(type));
  const RopeScaling t = r->scaling;
  if (t != RopeScaling::none) KVASIR_TRY(s.get("factor", &r->factor));
  if (t == RopeScaling::llama3 || t == RopeScaling::yarn || t == RopeScaling::longrope)
    KVASIR_TRY(s.get("original_max_position_embeddings", &r->original_context));
  if (t == RopeScaling::llama3) {
    KVASIR_TRY(s.get("low_freq_factor", &r->low_freq_factor));
    KVASIR_TRY(s.get("high_freq_factor", &r->high_freq_factor));
  }
  if (t == RopeScaling::yarn) {
    KVASIR_TRY(s.get("beta_fast", &r->beta_fast));
    KVASIR_TRY(s.get("beta_slow", &r->beta_slow));
    KVASIR_TRY(s.get("mscale", &r->mscale));
    KVASIR_TRY(s.get("mscale_all_dim", &r->mscale_all_dim));
  }
  if (t == RopeScaling::longrope) {
    KVASIR_TRY(s.get("max_position_embeddings", &r->configured_context));
    KVASIR_TRY(s.get("short_factor", &r->short_factor));
    KVASIR_TRY(s.get("long_factor", &r->long_factor));
  }
  if (t == RopeScaling::yarn || t == RopeScaling::longrope) KVASIR_TRY(s.get("attention_factor", &r->attention_factor));
  return s.nothing_else();
}

Status read_rope(const json& j, Rope* rope) {
  Object o("rope", j);
  KVASIR_TRY(o.is_object());
  RopeConfig r;
  std::string style = "neox";
  KVASIR_TRY(o.get("style", &style));
  if (style != "neox" && style != "gptj")
    return bad("style", cat("rope.style is '", style, "'; it must be neox or gptj"));
  r.style = style == "neox" ? RopeStyle::neox : RopeStyle::gptj;
  KVASIR_TRY(o.get("rotary_dim", &r.rotary_dim));
  KVASIR_TRY(o.get("base", &r.base));
  const json* scaling = o.find("scaling");
  if (scaling) KVASIR_TRY(read_scaling(*scaling, &r));
  // A table of frequencies may stand for the rule that made it.
  std::vector<float> table;
  float magnitude = 1.0f;
  KVASIR_TRY(o.get("inv_freq", &table));
  KVASIR_TRY(o.get("magnitude", &magnitude));
  KVASIR_TRY(o.nothing_else());
  if (!table.empty() && (scaling || o.find("base")))
    return bad("inv_freq", "rope has both inv_freq and the rule that makes it (base, scaling); it must have one");
  if (table.empty() && o.find("magnitude"))
    return bad("magnitude", "rope.magnitude goes with rope.inv_freq; a scaling rule brings its own");
  if (!table.empty()) {
    *rope = Rope{r.style, r.rotary_dim, std::move(table), magnitude};
    return {};
  }
  if (r.rotary_dim > 65536)
    return bad("rotary_dim", cat("rope.rotary_dim is ", r.rotary_dim, "; it is at most head_dim"));
  KVASIR_ASSIGN(*rope, rope_frequencies(r));
  return {};
}

// An attribute that this operator or these types have no use for must say nothing: it is never just ignored.
Status refuse_unused(const CaseHead& head, Object& o) {
  const Case& c = head.c;
  const Attributes& a = c.attributes;
  const bool kvc = c.op == Op::key_value_cache, alone = c.op == Op::attention;
  const kvcache::CacheView plain;
  struct Unused {
    const char* name;
    bool says_something;
    const char* why;
  };
  const bool per_tensor = alone ? a.io == DType::f8_e4m3
                                : head.quant_bit == 0 && (c.view.dtype == DType::i8 || c.view.dtype == DType::f8_e4m3);
  const char *no_attention = "KeyValueCache attends to nothing", *no_cache = "MultiHeadAttention has no cache",
             *not_fp8 = "only a float8_e4m3 tensor has it";
  const Unused all[] = {
      {"is_causal", kvc && o.find("is_causal"), no_attention},
      {"is_alibi", kvc && a.is_alibi, no_attention},
      {"q_scaling", kvc && a.q_scaling != 1.0f, no_attention},
      {"softcap", kvc && a.softcap != 0.0f, no_attention},
      {"window", kvc && a.window != 0, no_attention},
      {"return_lse", kvc && a.return_lse, no_attention},
      {"packed_qkv", (kvc || alone) && a.packed_qkv, "only MultiHeadCacheAttention takes it"},
      {"rope", kvc && a.rope.style != RopeStyle::none, "KeyValueCache stores keys as they come"},
      {"rope", alone && a.rope.style != RopeStyle::none, "MultiHeadAttention takes keys as they are"},
      {"num_repeat", !kvc && c.num_repeat != 1, "only KeyValueCache repeats heads"},
      {"num_layer", alone && c.view.layers != plain.layers, no_cache},
      {"layer_idx", alone && c.layer != 0, no_cache},
      {"quant_bit", alone && head.quant_bit != 0, no_cache},
      {"cache_mode", alone && head.cache_mode != 0, no_cache},
      {"cache_layout", alone && c.layout != 0, no_cache},
      {"cache_dtype", alone && c.view.dtype != a.io, no_cache},
      {"cyclic_capacity", alone && a.cyclic_capacity != 0, no_cache},
      {"k_scale", !per_tensor && c.view.k_scale != 1.0f, "only a cache of 8 bits with one scale per tensor has it"},
      {"v_scale", !per_tensor && c.view.v_scale != 1.0f, "only a cache of 8 bits with one scale per tensor has it"},
      {"fp8_query", kvc && a.fp8_query, no_attention},
      {"q_scale", a.io != DType::f8_e4m3 && !a.fp8_query && a.q_scale != 1.0f, not_fp8},
      {"out_scale", a.out != DType::f8_e4m3 && a.out_scale != 1.0f, not_fp8},
  };
  for (const Unused& u : all)
    if (u.says_something) return bad(u.name, cat(u.name, " means nothing in this case: ", u.why, "; leave it out"));
  const DType stored = head.quant_bit == 8 ? DType::i8 : DType::i4;
  if (head.quant_bit != 0 && c.view.dtype != stored)
    return bad("cache_dtype", cat("cache_dtype is ", dtype_name(c.view.dtype), "; with quant_bit ", head.quant_bit,
                                  " it must be ", dtype_name(stored)));
  return {};
}

Status read_attributes(const json& j, CaseHead* head) {
  Case& c = head->c;
  Attributes& a = c.attributes;
  Object o("attributes", j);
  KVASIR_TRY(o.is_object());
  KVASIR_TRY(o.get("num_heads", &a.num_heads));
  KVASIR_TRY(o.get("num_kv_heads", &a.num_kv_heads));
  if (a.num_kv_heads == 0) a.num_kv_heads = a.num_heads;
  KVASIR_TRY(o.get("head_dim", &a.head_dim));
  if (a.head_dim < 1 || a.head_dim > 576)
    return bad("head_dim", cat("head_dim is ", a.head_dim, "; it must be from 1 to 576"));
  if (a.num_kv_heads < 1 || a.num_kv_heads > 4096 || a.num_heads > 4096)
    return bad("num_heads", cat("num_heads is ", a.num_heads, " and num_kv_heads ", a.num_kv_heads,
                                "; both must be from 1 to 4096"));
  if (c.op == Op::key_value_cache && a.num_heads == 0) a.num_heads = a.num_kv_heads;
  // validate() asks this too, and only after the inputs' shapes have been held against it.
  if (a.num_heads < 1) return bad("num_heads", cat("num_heads is ", a.num_heads, "; it must be from 1 to 4096"));
  if (a.num_heads % a.num_kv_heads != 0)
    return bad("num_kv_heads", cat("num_kv_heads is ", a.num_kv_heads, "; it must be at least 1 and divide num_heads, ",
                                   "which is ", a.num_heads));
  if (c.op != Op::key_value_cache && !o.find("is_causal")) return bad("is_causal", "attributes has no is_causal");
  KVASIR_TRY(o.get("is_causal", &a.is_causal));
  KVASIR_TRY(o.get("is_alibi", &a.is_alibi));
  KVASIR_TRY(o.get("num_layer", &c.view.layers));
  KVASIR_TRY(o.get("layer_idx", &c.layer));
  KVASIR_TRY(o.get("quant_bit", &head->quant_bit));
  if (head->quant_bit != 0 && head->quant_bit != 4 && head->quant_bit != 8)
    return bad("quant_bit", cat("quant_bit is ", head->quant_bit, "; it must be 0, 4 or 8"));
  c.view.quant_group = 8;
  KVASIR_TRY(o.get("quant_group", &c.view.quant_group));
  KVASIR_TRY(o.get("cache_mode", &head->cache_mode));
  if (head->cache_mode != 0 && head->cache_mode != 1)
    return bad("cache_mode", cat("cache_mode is ", head->cache_mode, "; it must be 0 or 1"));
  a.index_mode = head->cache_mode == 0 ? IndexMode::offset
                 : c.revision == 1     ? IndexMode::token_table
                                       : IndexMode::page_table;
  KVASIR_TRY(o.get("cache_layout", &c.layout));
  a.page_size = 128;
  KVASIR_TRY(o.get("page_size", &a.page_size));
  KVASIR_TRY(o.get("num_repeat", &c.num_repeat));
  if (c.num_repeat < 1 || c.num_repeat > 4096)
    return bad("num_repeat", cat("num_repeat is ", c.num_repeat, "; it must be from 1 to 4096"));
  c.view.dtype = head->quant_bit == 8 ? DType::i8 : head->quant_bit == 4 ? DType::i4 : a.io;
  KVASIR_TRY(o.get_dtype("cache_dtype", &c.view.dtype));
  head->has_scale_dtype = o.find("scale_dtype") != nullptr;
  KVASIR_TRY(o.get_dtype("scale_dtype", &c.view.scale_dtype));
  KVASIR_TRY(o.get("k_scale", &c.view.k_scale));
  KVASIR_TRY(o.get("v_scale", &c.view.v_scale));
  KVASIR_TRY(o.get("q_scale", &a.q_scale));
  KVASIR_TRY(o.get("fp8_query", &a.fp8_query));
  KVASIR_TRY(o.get("q_scaling", &a.q_scaling));
  KVASIR_TRY(o.get("softcap", &a.softcap));
  KVASIR_TRY(o.get("window", &a.window));
  KVASIR_TRY(o.get("cyclic_capacity", &a.cyclic_capacity));
  KVASIR_TRY(o.get("sinks", &a.sinks));
  KVASIR_TRY(o.get("streaming_positions", &a.streaming_positions));
  KVASIR_TRY(o.get("packed_qkv", &a.packed_qkv));
  KVASIR_TRY(o.get("append", &a.append));
  KVASIR_TRY(o.get("return_lse", &a.return_lse));
  KVASIR_TRY(o.get_dtype("out_dtype", &a.out));
  KVASIR_TRY(o.get("out_scale", &a.out_scale));
  if (const json* rope = o.find("rope")) KVASIR_TRY(read_rope(*rope, &a.rope));
  KVASIR_TRY(o.nothing_else());
  return refuse_unused(*head, o);
}

Status read_root(const json& root, CaseHead* head) {
  Case& c = head->c;
  Attributes& a = c.attributes;
  Object o("case.json", root);
  KVASIR_TRY(o.is_object());
  std::string op;
  KVASIR_TRY(o.get("op", &op));
  if (op.starts_with("dynamic_batching.")) op = op.substr(17);
  bool known = false;
  for (Op candidate : {Op::attention, Op::cache_attention, Op::key_value_cache})
    if (op == op_name(candidate)) c.op = candidate, known = true;
  if (!known)
    return bad("op", cat("op is '", op, "'; it must be KeyValueCache, MultiHeadAttention or MultiHeadCacheAttention"));
  KVASIR_TRY(o.get("revision", &c.revision));
  if (c.revision != 1 && c.revision != 2)
    return bad("revision", cat("revision is ", c.revision, "; it must be 1 or 2"));
  KVASIR_TRY(o.get_dtype("io_dtype", &a.io));
  const json* attributes = o.find("attributes");
  if (!attributes) return bad("attributes", "case.json has no attributes");
  KVASIR_TRY(read_attributes(*attributes, head));
  if (const json* scalars = o.find("scalars")) {
    Object s("scalars", *scalars);
    KVASIR_TRY(s.is_object());
    KVASIR_TRY(s.get("decoding_batches", &c.decoding_batches));
    for (auto [name, value] : {std::pair("max_seqlen", &head->max_seqlen), std::pair("max_kvlen", &head->max_kvlen)}) {
      KVASIR_TRY(s.get(name, value));
      if (s.find(name) && (*value < 0 || *value > INT32_MAX))
        return bad(name, cat(name, " is ", *value, "; it must be from 0 to ", INT32_MAX));
    }
    KVASIR_TRY(s.nothing_else());
  }
  return o.nothing_else();
}

}  // namespace

Status read_case_json(const Bytes& text, CaseHead* head) {
  json root;
  // Of a key that stands twice one value would be ignored.
  std::vector<std::set<std::string>> keys;
  std::string twice;
  auto watch = [&](int, json::parse_event_t event, json& value) {
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key && !keys.back().insert(value.get<std::string>()).second)
      twice = value.get<std::string>();
    return true;
  };
  try {
    root = json::parse(text.begin(), text.end(), watch);
    if (!twice.empty())
      return bad(twice, cat("case.json: '", log_escape(twice), "' stands twice in one object; leave one out"));
  } catch (const json::exception& e) {
    return bad("case.json", cat("case.json: ", log_escape(e.what())));
  }
  return read_root(root, head);
}

}  // namespace kvasir::attention
