#include "kvcache/form.h"

#include <algorithm>
#include <cmath>

#include "core/cat.h"

namespace kvasir::kvcache {
namespace {

Status bad(const char* field, std::string message) { return invalid_argument(std::move(message)).with_field(field); }

constexpr int32_t kGroups[] = {128, 64, 32, 16, 8, 4, 2, 1};

// "1, 2, 4 or 8": the groups that divide a head.
std::string groups_of(int32_t head_dim) {
  std::vector<int32_t> all;
  for (int32_t g : kGroups)
    if (head_dim % g == 0) all.insert(all.begin(), g);
  std::string out;
  for (size_t i = 0; i < all.size(); ++i) out += cat(i == 0 ? "" : i + 1 < all.size() ? ", " : " or ", all[i]);
  return out;
}

Status read_group(const FormWish& wish, int32_t head_dim, CacheForm* form) {
  const char* name = form->dtype == DType::i8 ? "int8" : form->dtype == DType::i4 ? "int4" : "";
  if (*name == 0) {
    if (wish.group <= 0) return {};
    return bad("kv_group",
               cat("kv_group is ", wish.group, " and kv_dtype ", wish.dtype,
                   "; only int8 and int4 have a scale for each group: leave kv_group out, or take one of those"));
  }
  const std::string works = groups_of(head_dim);
  if (wish.group == 0 && form->dtype == DType::i4)
    return bad("kv_group", cat("kv_group is 0 and kv_dtype int4, which needs a scale for each group of ", works,
                               " elements; one scale for all is for int8 and fp8"));
  if (wish.group == 0) return {};
  if (wish.group < 0) {  // smaller groups than 8 take more memory than they save, so they are asked for by name
    const int32_t most = form->dtype == DType::i8 ? 64 : 32;
    const auto* group =
        std::find_if(std::begin(kGroups), std::end(kGroups), [&](int32_t g) { return g <= most && head_dim % g == 0; });
    if (*group < 8)
      return bad("kv_group", cat("kv_dtype is ", name, " and the model's heads have ", head_dim,
                                 " elements, which groups of 8 to 128 do not divide; take fp8, or int8 with kv_group ",
                                 "0, or a kv_group of ", works));
    form->quant_group = *group;
    return {};
  }
  if (std::find(std::begin(kGroups), std::end(kGroups), wish.group) == std::end(kGroups) || head_dim % wish.group != 0)
    return bad("kv_group",
               cat("kv_group is ", wish.group, "; with ", name, " and this model's heads of ", head_dim,
                   " elements it must be ", works, form->dtype == DType::i8 ? ", or 0 for one scale for all" : ""));
  form->quant_group = wish.group;
  return {};
}

Status read_scales(const FormWish& wish, CacheForm* form) {
  if (wish.scale_dtype == "float32") form->scale_dtype = DType::f32;
  if (wish.scale_dtype != "auto" && wish.scale_dtype != "float32" && wish.scale_dtype != "float16")
    return bad("kv_scale_dtype", cat("kv_scale_dtype is ", wish.scale_dtype, "; it must be auto, float32 or float16"));
  if (wish.scale_dtype != "auto" && form->quant_group == 0)
    return bad("kv_scale_dtype", cat("kv_scale_dtype is ", wish.scale_dtype,
                                     " and the cache has no scales by group; it is for int8 and int4 with a kv_group"));
  for (auto [field, scale] : {std::pair{"kv_k_scale", wish.k_scale}, {"kv_v_scale", wish.v_scale}}) {
    if (!std::isfinite(scale) || scale < 0)
      return bad(field, cat(field, " is ", scale, "; it must be finite and above 0, or 0 for the checkpoint's"));
    if (scale > 0 && form->quant() != QuantKind::per_tensor)
      return bad(field, cat(field, " is ", scale, "; one scale for all is for fp8, and int8 with kv_group 0"));
  }
  return {};
}

// A layout's dimension of keys and values is 1 instead of 2: what is outside of it lies half as far apart.
Strides without_values(const Strides& s) {
  auto closer = [&](int64_t stride) { return stride > s.kv ? stride / 2 : stride; };
  return {closer(s.token), closer(s.layer), 0, closer(s.head)};
}

}  // namespace

const std::vector<std::string> kLayoutNames = {"auto", "0", "1", "2", "3", "lht2d", "2lhtd"};

int64_t CacheForm::row_bytes(int64_t head_dim) const {
  return dtype_bytes(dtype, head_dim) + (quant_group > 0 ? dtype_bytes(scale_dtype, head_dim / quant_group) : 0);
}

std::string CacheForm::to_string() const {
  const char* name = dtype == DType::f8_e4m3 ? "fp8" : dtype_name(dtype);
  if (quant_group > 0) return cat(name, ", a ", dtype_name(scale_dtype), " scale for each ", quant_group);
  return quant() == QuantKind::per_tensor ? cat(name, ", one scale for all") : name;
}

Result<CacheForm> cache_form(const FormWish& wish, int32_t head_dim, DType otherwise) {
  CacheForm form;
  form.dtype = otherwise;
  if (wish.dtype != "auto" && (!parse_dtype(wish.dtype, &form.dtype) || form.dtype == DType::i32 ||
                               form.dtype == DType::i64 || form.dtype == DType::u8))
    return bad("kv_dtype",
               cat("kv_dtype is ", wish.dtype, "; it must be auto, float32, float16, bfloat16, fp8, int8 or int4"));
  KVASIR_TRY(read_group(wish, head_dim, &form));
  KVASIR_TRY(read_scales(wish, &form));
  if (form.dtype == DType::i4 && head_dim % 2 != 0)
    return bad("kv_dtype", cat("kv_dtype is int4, which packs two elements a byte, and heads have ", head_dim));
  auto layout = std::find(kLayoutNames.begin(), kLayoutNames.end(), wish.layout);
  if (layout == kLayoutNames.end())
    return bad("kv_layout", cat("kv_layout is ", wish.layout, "; it must be auto, 0, 1, 2, 3, lht2d or 2lhtd"));
  const auto at = int32_t(layout - kLayoutNames.begin());
  if (at > 0) form.revision = at > 4 ? 1 : 2, form.layout = at > 4 ? at - 3 : at - 1;
  return form;
}

Result<CacheView> view_of(const CacheForm& form, int64_t tokens, int32_t layers, int32_t kv_heads, int32_t head_dim,
                          bool values) {
  CacheView v;
  v.dtype = form.dtype, v.scale_dtype = form.scale_dtype;
  v.quant = form.quant(), v.quant_group = form.quant_group;
  v.max_tokens = tokens, v.layers = layers, v.kv_heads = kv_heads, v.head_dim = head_dim;
  KVASIR_ASSIGN(v.strides, layout_strides(form.revision, form.layout, tokens, layers, kv_heads, head_dim));
  if (form.quant_group > 0) {
    const int64_t scales = head_dim / form.quant_group;
    KVASIR_ASSIGN(v.scale_strides, layout_strides(form.revision, form.layout, tokens, layers, kv_heads, scales));
  }
  if (!values) v.strides = without_values(v.strides), v.scale_strides = without_values(v.scale_strides);
  return v;
}

// Each layout's dimensions are those before the tokens (the stretches), the tokens, and those after them.
std::array<Plane, 2> planes_of(const CacheView& v) {
  auto plane = [&](DType type, const Strides& s, int64_t row) {
    return Plane{(keys_alone(v) ? 1 : 2) * int64_t(v.layers) * v.kv_heads * row / s.token,
                 dtype_bytes(type, v.max_tokens * s.token), dtype_bytes(type, s.token)};
  };
  std::array<Plane, 2> planes{plane(v.dtype, v.strides, v.head_dim), Plane{}};
  if (v.quant == QuantKind::group) planes[1] = plane(v.scale_dtype, v.scale_strides, v.head_dim / v.quant_group);
  return planes;
}

}  // namespace kvasir::kvcache
