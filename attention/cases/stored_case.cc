#include "attention/cases/stored_case.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <set>

#include "attention/cases/case_json.h"
#include "attention/cases/json_object.h"
#include "attention/cases/npy.h"
#include "core/cat.h"

namespace kvasir::attention {
namespace {

using kvcache::IndexMode;
using kvcache::QuantKind;

class Parser {
 public:
  explicit Parser(const CaseFiles& files) : files_(files) {}

  Result<Case> parse() {
    auto file = files_.find("case.json");
    if (file == files_.end()) return bad("case.json", "the folder has no case.json");
    CaseHead head;
    KVASIR_TRY(read_case_json(file->second, &head));
    c_ = std::move(head.c);
    quant_bit_ = head.quant_bit, has_scale_dtype_ = head.has_scale_dtype;
    max_seqlen_ = head.max_seqlen, max_kvlen_ = head.max_kvlen;
    KVASIR_TRY(read_arrays());
    KVASIR_TRY(read_inputs());
    KVASIR_TRY(read_cache());
    KVASIR_TRY(read_extras());
    for (const auto& [name, bytes] : files_)
      if (!used_.count(name) && name != "case.json")
        return bad(name, cat(name, " is no tensor that this case can have"));
    return std::move(c_);
  }

 private:
  Attributes& a() { return c_.attributes; }
  bool kvc() const { return c_.op == Op::key_value_cache; }

  Status tensor(const std::string& name, bool required, NpyArray* out, bool* there = nullptr) {
    auto file = files_.find(name + ".npy");
    if (there) *there = file != files_.end();
    if (file == files_.end()) return required ? bad(name, cat(name, ".npy is absent; this case needs it")) : Status();
    used_.insert(name + ".npy");
    KVASIR_ASSIGN(*out, parse_npy(name + ".npy", file->second.data(), file->second.size()));
    return {};
  }

  static Status expect(const std::string& name, const NpyArray& t, const std::vector<int64_t>& shape,
                       std::string_view descr) {
    NpyArray want{std::string(descr), shape, {}};
    if (t.descr != descr) return bad(name, cat(name, " is ", t.descr, "; it must be ", descr));
    if (t.shape != shape)
      return bad(name, cat(name, " has shape ", t.shape_text(), "; it must have ", want.shape_text()));
    return {};
  }

  Status read_int64(const std::string& name, bool required, std::vector<int64_t>* out, std::vector<int64_t>* shape) {
    NpyArray t;
    bool there = false;
    KVASIR_TRY(tensor(name, required, &t, &there));
    if (!there) return {};
    if (t.descr != "<i8") return bad(name, cat(name, " is ", t.descr, "; it must be int64 (<i8)"));
    out->resize(size_t(t.elements()));
    if (!out->empty()) std::memcpy(out->data(), t.data.data(), t.data.size());
    *shape = t.shape;
    return {};
  }

  Status read_starts(const char* name, std::vector<int64_t>* out) {
    std::vector<int64_t> shape;
    KVASIR_TRY(read_int64(name, true, out, &shape));
    if (shape.size() != 1 || out->empty())
      return bad(name, cat(name, " must have shape (B+1,), with at least one element"));
    if ((*out)[0] != 0) return bad(name, cat(name, "[0] is ", (*out)[0], "; it must be 0"));
    for (size_t i = 1; i < out->size(); ++i)
      if ((*out)[i] < (*out)[i - 1])
        return bad(name, cat(name, "[", i, "] is ", (*out)[i], ", below the one before it, ", (*out)[i - 1],
                             "; sequence ", i - 1, " would have a negative length"));
    return {};
  }

  Status read_arrays() {
    KVASIR_TRY(read_starts("seqstarts", &c_.seqstarts));
    KVASIR_TRY(read_starts("kvstarts", &c_.kvstarts));
    const int64_t B = int64_t(c_.seqstarts.size()) - 1;
    if (int64_t(c_.kvstarts.size()) != B + 1)
      return bad("kvstarts",
                 cat("kvstarts has ", c_.kvstarts.size(), " elements; it must have as many as seqstarts, ", B + 1));
    for (int64_t b = 0; b < B; ++b) {
      c_.max_seqlen = std::max(c_.max_seqlen, c_.seqstarts[size_t(b) + 1] - c_.seqstarts[size_t(b)]);
      c_.max_kvlen = std::max(c_.max_kvlen, c_.kvstarts[size_t(b) + 1] - c_.kvstarts[size_t(b)]);
    }
    if (max_seqlen_ >= 0) c_.max_seqlen = max_seqlen_;
    if (max_kvlen_ >= 0) c_.max_kvlen = max_kvlen_;

    std::vector<int64_t> shape;
    KVASIR_TRY(read_int64("start_pos", c_.op != Op::attention, &c_.start_pos, &shape));
    if (c_.op == Op::attention && c_.start_pos.empty())
      for (int64_t b = 0; b < B; ++b)
        c_.start_pos.push_back(std::max<int64_t>(0, (c_.kvstarts[size_t(b) + 1] - c_.kvstarts[size_t(b)]) -
                                                        (c_.seqstarts[size_t(b) + 1] - c_.seqstarts[size_t(b)])));
    else if (shape != std::vector<int64_t>{B})
      return bad("start_pos",
                 cat("start_pos has ", c_.start_pos.size(), " elements; it must have one a sequence, ", B));
    if (c_.op == Op::attention) return {};

    KVASIR_TRY(read_int64("cachestarts", true, &c_.cachestarts, &shape));
    if (a().index_mode == IndexMode::page_table) {
      if (shape.size() != 2 || shape[0] != B)
        return bad("cachestarts", cat("cachestarts must have shape (", B, ", pages) in a page table"));
      c_.max_pages = shape[1];
    } else {
      const int64_t want = a().index_mode == IndexMode::offset ? B : c_.kvstarts.back();
      if (shape != std::vector<int64_t>{want})
        return bad("cachestarts", cat("cachestarts has ", c_.cachestarts.size(), " elements in ", shape.size(),
                                      " dimensions; it must have shape (", want, ",)"));
    }
    return {};
  }

  Status input(const char* name, std::vector<int64_t> shape, Bytes* out) {
    NpyArray t;
    KVASIR_TRY(tensor(name, true, &t));
    KVASIR_TRY(expect(name, t, shape, descr_of(a().io)));
    *out = std::move(t.data);
    return {};
  }

  Status read_inputs() {
    const int64_t T = c_.tokens(), Hq = a().num_heads, Hkv = a().num_kv_heads, D = a().head_dim;
    if (kvc()) {
      // Quantized already: int8 keys into an int8 cache, with quant_bit 0.
      NpyArray key;
      KVASIR_TRY(tensor("current_key", true, &key));
      if (key.descr == "|i1" && c_.view.dtype == DType::i8 && quant_bit_ == 0) a().io = DType::i8;
    } else if (!a().packed_qkv) {
      KVASIR_TRY(input("query", {T, Hq, D}, &c_.query));
    }
    if (a().packed_qkv) {
      KVASIR_TRY(input("qkv", {T, (Hq + 2 * Hkv) * D}, &c_.query));
      NpyArray bias;
      bool there = false;
      KVASIR_TRY(tensor("qkv_bias", false, &bias, &there));
      if (there) KVASIR_TRY(expect("qkv_bias", bias, {(Hq + 2 * Hkv) * D}, descr_of(a().io)));
      c_.qkv_bias = std::move(bias.data);
      return {};
    }
    if (!a().append && c_.op != Op::attention) return {};
    const int64_t tokens = c_.op == Op::attention ? c_.kvstarts.back() : T;
    KVASIR_TRY(input("current_key", {tokens, Hkv, D}, &c_.key));
    return input("current_value", {tokens, Hkv, D}, &c_.value);
  }

  // Where MaxT stands in the published shape, which is otherwise known.
  std::vector<int64_t> cache_shape(int64_t tokens, int64_t row) const {
    const int64_t L = c_.view.layers, H = c_.attributes.num_kv_heads;
    if (c_.revision == 1 && c_.layout == 2) return {L, H, tokens, 2, row};
    if (c_.revision == 1 && c_.layout == 3) return {2, L, H, tokens, row};
    if (c_.layout == 0) return {tokens, L, 2, H, row};
    if (c_.layout == 1) return {L, tokens, 2, H, row};
    if (c_.layout == 2) return {L, 2, tokens, H, row};
    return {L, 2, H, tokens, row};
  }

  Status read_cache() {
    kvcache::CacheView& v = c_.view;
    v.head_dim = a().head_dim;
    v.kv_heads = a().num_kv_heads;
    if (c_.op == Op::attention) return packed_keys();
    if (c_.layout < 0 || c_.layout > 3)
      return bad("cache_layout", cat("cache_layout is ", c_.layout, "; it must be 0, 1, 2 or 3"));
    if (v.layers < 1) return bad("num_layer", cat("num_layer is ", v.layers, "; it must be at least 1"));
    v.quant = quant_bit_ != 0                                     ? QuantKind::group
              : v.dtype == DType::i8 || v.dtype == DType::f8_e4m3 ? QuantKind::per_tensor
                                                                  : QuantKind::none;
    if (v.dtype == DType::i4 && a().head_dim % 2 != 0)
      return bad("head_dim", cat("head_dim is ", a().head_dim, "; an int4 cache needs it even"));
    NpyArray t;
    KVASIR_TRY(tensor("cache", true, &t));
    const int64_t row = v.dtype == DType::i4 ? a().head_dim / 2 : a().head_dim;
    const std::vector<int64_t> marked = cache_shape(-1, row);
    if (t.shape.size() == marked.size())
      for (size_t i = 0; i < marked.size(); ++i)
        if (marked[i] == -1) v.max_tokens = t.shape[i];
    KVASIR_TRY(expect("cache", t, cache_shape(v.max_tokens, row), descr_of(v.dtype)));
    KVASIR_ASSIGN(v.strides,
                  kvcache::layout_strides(c_.revision, c_.layout, v.max_tokens, v.layers, v.kv_heads, a().head_dim));
    c_.cache = std::move(t.data);
    if (v.quant != QuantKind::group) return {};
    return read_scale();
  }

  Status read_scale() {
    kvcache::CacheView& v = c_.view;
    if (v.quant_group < 1 || !std::has_single_bit(uint32_t(v.quant_group)) || v.head_dim % v.quant_group != 0)
      return bad("quant_group", cat("quant_group is ", v.quant_group, "; it must be a power of two that divides ",
                                    "head_dim, which is ", v.head_dim));
    NpyArray t;
    KVASIR_TRY(tensor("scale", true, &t));
    const DType type = t.descr == "<f2" ? DType::f16 : DType::f32;
    if (has_scale_dtype_ && type != v.scale_dtype)
      return bad("scale", cat("scale is ", t.descr, "; scale_dtype says ", dtype_name(v.scale_dtype)));
    v.scale_dtype = type;
    const int64_t groups = v.head_dim / v.quant_group;
    KVASIR_TRY(expect("scale", t, cache_shape(v.max_tokens, groups), descr_of(type)));
    KVASIR_ASSIGN(v.scale_strides,
                  kvcache::layout_strides(c_.revision, c_.layout, v.max_tokens, v.layers, v.kv_heads, groups));
    c_.scale = std::move(t.data);
    return {};
  }

  // MultiHeadAttention alone: its packed keys and values are a cache of one layer that is only read.
  Status packed_keys() {
    kvcache::CacheView& v = c_.view;
    const int64_t tokens = std::max<int64_t>(c_.kvstarts.back(), 1);
    a().append = false;
    a().index_mode = IndexMode::offset;
    c_.cachestarts.assign(c_.kvstarts.begin(), c_.kvstarts.end() - 1);
    v.dtype = a().io;
    v.quant = a().io == DType::f8_e4m3 ? QuantKind::per_tensor : QuantKind::none;
    v.layers = 1, c_.layer = 0;
    v.max_tokens = tokens;
    KVASIR_ASSIGN(v.strides, kvcache::layout_strides(2, 2, tokens, 1, v.kv_heads, v.head_dim));
    c_.revision = 2, c_.layout = 2;
    const size_t half = size_t(dtype_bytes(a().io, tokens * v.kv_heads * v.head_dim));
    c_.cache = std::move(c_.key);
    c_.cache.resize(half);
    c_.value.resize(half);
    c_.cache.insert(c_.cache.end(), c_.value.begin(), c_.value.end());
    c_.key.clear(), c_.value.clear();
    return {};
  }

  Status floats(const char* name, int64_t n, std::vector<float>* out) {
    NpyArray t;
    bool there = false;
    KVASIR_TRY(tensor(name, false, &t, &there));
    if (!there) return {};
    KVASIR_TRY(expect(name, t, {n}, "<f4"));
    out->resize(size_t(n));
    std::memcpy(out->data(), t.data.data(), t.data.size());
    for (size_t i = 0; i < out->size(); ++i)
      if (std::isnan((*out)[i])) return bad(name, cat(name, "[", i, "] is NaN"));
    return {};
  }

  Status read_extras() {
    if (kvc()) return {};
    KVASIR_TRY(floats("sink_logits", a().num_heads, &c_.sink_logits));
    KVASIR_TRY(floats("alibi_slopes", a().num_heads, &a().alibi_slopes));
    if (!a().alibi_slopes.empty() && !a().is_alibi)
      return bad("alibi_slopes", "alibi_slopes.npy is given and is_alibi is false; leave it out or set is_alibi");
    KVASIR_TRY(read_relative_bias());
    KVASIR_TRY(read_mask());
    NpyArray t;
    bool there = false;
    KVASIR_TRY(tensor("cache_indirection", false, &t, &there));
    if (!there) return {};
    if ((t.descr != "<i4" && t.descr != "<i8") || t.shape.size() != 3 || t.shape[2] < c_.max_kvlen || t.shape[1] < 1 ||
        t.shape[1] > c_.batch() || t.shape[0] * t.shape[1] != c_.batch())
      return bad("cache_indirection",
                 cat("cache_indirection is ", t.descr, " of ", t.shape_text(), "; it must be int32 ",
                     "or int64 of (groups, beam_width, at least max_kvlen) with groups x beam_width = ", c_.batch(),
                     " sequences and max_kvlen = ", c_.max_kvlen));
    c_.beam_width = int32_t(t.shape[1]);
    // Like a mask's, its last dimension may be the longest that the caller ever needs.
    for (int64_t i = 0; i < t.elements(); ++i) {
      if (i % t.shape[2] >= c_.max_kvlen) continue;
      int64_t beam = 0;
      if (t.descr == "<i4") {
        int32_t narrow;
        std::memcpy(&narrow, t.data.data() + i * 4, 4);
        beam = narrow;
      } else {
        std::memcpy(&beam, t.data.data() + i * 8, 8);
      }
      c_.indirection.push_back(beam < -1 || beam > INT32_MAX ? -1 : int32_t(beam));
    }
    return {};
  }

  Status read_relative_bias() {
    NpyArray t;
    bool there = false;
    KVASIR_TRY(tensor("relative_bias", false, &t, &there));
    if (!there) return {};
    if (t.descr != "<f4" || t.shape.size() != 2 || t.shape[0] != a().num_heads || t.shape[1] % 2 != 1)
      return bad("relative_bias", cat("relative_bias is ", t.descr, " of ", t.shape_text(), "; it must be float32 of (",
                                      a().num_heads, " heads, 2 * reach + 1 distances)"));
    a().relative_bias.resize(size_t(t.elements()));
    std::memcpy(a().relative_bias.data(), t.data.data(), t.data.size());
    return {};
  }

  Status read_mask() {
    NpyArray t;
    bool there = false;
    KVASIR_TRY(tensor("attn_mask", false, &t, &there));
    if (!there || t.elements() == 0) return {};  // an empty tensor means none
    const int64_t T = c_.tokens(), columns = c_.kvstarts.back();
    const size_t rank = t.shape.size();
    const bool fits = (rank == 2 || rank == 3) && t.shape[rank - 2] == T && t.shape[rank - 1] >= columns &&
                      (rank == 2 || t.shape[0] == a().num_heads);
    if (!fits || t.descr != descr_of(a().io))
      return bad("attn_mask",
                 cat("attn_mask is ", t.descr, " of ", t.shape_text(), "; it must be ", descr_of(a().io), " of (", T,
                     ", at least ", columns, "), or of that with ", a().num_heads, " heads in front"));
    c_.mask_row_stride = t.shape[rank - 1];
    c_.mask_head_stride = rank == 3 ? T * c_.mask_row_stride : 0;
    c_.attn_mask = std::move(t.data);
    return {};
  }

  const CaseFiles& files_;
  std::set<std::string> used_;
  Case c_;
  int quant_bit_ = 0;
  bool has_scale_dtype_ = false;
  int64_t max_seqlen_ = -1, max_kvlen_ = -1;
};

}  // namespace

Result<Case> parse_case(const CaseFiles& files) { return Parser(files).parse(); }

}  // namespace kvasir::attention
