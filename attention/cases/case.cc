#include "attention/cases/case.h"

#include "attention/validate.h"

namespace kvasir::attention {

const char* op_name(Op op) {
  switch (op) {
    case Op::attention: return "MultiHeadAttention";
    case Op::cache_attention: return "MultiHeadCacheAttention";
    case Op::key_value_cache: return "KeyValueCache";
  }
  return "?";
}

Step Case::step() const {
  Step s;
  s.batch = batch();
  s.seqstarts = seqstarts.data();
  s.kvstarts = kvstarts.data();
  s.start_pos = start_pos.data();
  static const int64_t nowhere = 0;  // a step of empty sequences has no entry, but must give the array
  s.cachestarts = cachestarts.empty() ? &nowhere : cachestarts.data();
  s.max_pages = max_pages;
  s.decoding_batches = decoding_batches;
  s.max_seqlen = max_seqlen;
  s.max_kvlen = max_kvlen;
  s.cache_indirection = indirection.empty() ? nullptr : indirection.data();
  s.beam_width = beam_width;
  return s;
}

Limits Case::limits() const { return {batch(), tokens(), max_kvlen, max_pages, view.max_tokens}; }

namespace {
template <class T>
T* or_null(std::vector<T>& v) {
  return v.empty() ? nullptr : v.data();
}
kvcache::CacheView view_of(Case& c) {
  kvcache::CacheView v = c.view;
  if (!c.cache.empty()) v.data = c.cache.data();
  if (!c.scale.empty()) v.scale = c.scale.data();
  return v;
}
}  // namespace

Tensors case_tensors(Case& c, CaseOutput* out, uint8_t fill) {
  const Attributes& a = c.attributes;
  // One element more than needed: an empty step still has somewhere to point.
  out->output.assign(size_t(dtype_bytes(a.out, c.tokens() * a.num_heads * a.head_dim)) + 4, fill);
  out->lse.assign(size_t(c.tokens() * a.num_heads) + 1, float(fill));
  Tensors t;
  static const float nothing[4] = {};
  auto input = [](Bytes& b) -> const void* { return b.empty() ? nothing : static_cast<const void*>(b.data()); };
  t.query = input(c.query);
  t.key = input(c.key);
  t.value = input(c.value);
  t.qkv_bias = or_null(c.qkv_bias);
  t.attn_mask = or_null(c.attn_mask);
  t.mask_head_stride = c.mask_head_stride;
  t.mask_row_stride = c.mask_row_stride;
  t.sink_logits = or_null(c.sink_logits);
  t.q_scale = c.attributes.fp8_query ? c.attributes.q_scale : 1.0f;
  t.output = out->output.data();
  t.lse = a.return_lse ? out->lse.data() : nullptr;
  t.cache = view_of(c);
  t.layer = c.layer;
  return t;
}

KvcTensors case_kvc_tensors(Case& c, CaseOutput* out, uint8_t fill) {
  const Attributes& a = c.attributes;
  const int64_t n = c.kvstarts.back() * a.num_kv_heads * c.num_repeat * a.head_dim;
  out->key.assign(size_t(dtype_bytes(a.out, n)) + 4, fill);
  out->value.assign(size_t(dtype_bytes(a.out, n)) + 4, fill);
  KvcTensors t;
  static const float nothing[4] = {};
  t.key = c.key.empty() ? nothing : static_cast<const void*>(c.key.data());
  t.value = c.value.empty() ? nothing : static_cast<const void*>(c.value.data());
  t.key_out = out->key.data();
  t.value_out = out->value.data();
  t.num_repeat = c.num_repeat;
  t.cache = view_of(c);
  t.layer = c.layer;
  return t;
}

namespace {

// Device copies of host memory for the length of one run; what was written comes back in the end.
class Mirror {
 public:
  explicit Mirror(const Transfer* transfer) : transfer_(transfer) {}
  ~Mirror() {
    for (const Copy& c : copies_) transfer_->release(c.device);
  }

  template <class T>
  Status move(T*& pointer, size_t bytes, bool comes_back = false) {
    if (!transfer_ || !pointer) return {};
    KVASIR_ASSIGN(void* device, transfer_->allocate(bytes));
    copies_.push_back({device, comes_back ? const_cast<void*>(static_cast<const void*>(pointer)) : nullptr, bytes});
    KVASIR_TRY(transfer_->to_device(device, pointer, bytes));
    pointer = static_cast<T*>(device);
    return {};
  }
  Status bring_back() const {
    for (const Copy& c : copies_)
      if (c.host) KVASIR_TRY(transfer_->to_host(c.host, c.device, c.bytes));
    return {};
  }

 private:
  struct Copy {
    void* device;
    void* host;
    size_t bytes;
  };
  const Transfer* transfer_;
  std::vector<Copy> copies_;
};

Status move_cache(const Case& c, Mirror& mirror, kvcache::CacheView* view) {
  if (!c.cache.empty()) KVASIR_TRY(mirror.move(view->data, c.cache.size(), true));
  if (!c.scale.empty()) KVASIR_TRY(mirror.move(view->scale, c.scale.size(), true));
  return {};
}

Status run_kvc(Case& c, Attention& attention, const Transfer* transfer, CaseOutput* out) {
  KvcTensors t = case_kvc_tensors(c, out);
  KVASIR_TRY(validate_tensors(c.attributes, t));
  KVASIR_TRY(attention.plan(c.step()));
  Mirror mirror(transfer);
  KVASIR_TRY(mirror.move(t.key, c.key.size()));
  KVASIR_TRY(mirror.move(t.value, c.value.size()));
  KVASIR_TRY(mirror.move(t.key_out, out->key.size(), true));
  KVASIR_TRY(mirror.move(t.value_out, out->value.size(), true));
  KVASIR_TRY(move_cache(c, mirror, &t.cache));
  KVASIR_TRY(attention.store_and_gather(t));
  return mirror.bring_back();
}

}  // namespace

Status run_case(Case& c, const Backend& backend, const DeviceContext& context, CaseOutput* out) {
  KVASIR_TRY(backend.available());
  KVASIR_ASSIGN(auto attention, backend.create(c.attributes, c.limits(), context));
  if (c.op == Op::key_value_cache) return run_kvc(c, *attention, backend.transfer(), out);
  Tensors t = case_tensors(c, out);
  KVASIR_TRY(validate_tensors(c.attributes, t));
  KVASIR_TRY(attention->plan(c.step()));
  Mirror mirror(backend.transfer());
  KVASIR_TRY(mirror.move(t.query, c.query.size()));
  KVASIR_TRY(mirror.move(t.key, c.key.size()));
  KVASIR_TRY(mirror.move(t.value, c.value.size()));
  KVASIR_TRY(mirror.move(t.qkv_bias, c.qkv_bias.size()));
  KVASIR_TRY(mirror.move(t.attn_mask, c.attn_mask.size()));
  KVASIR_TRY(mirror.move(t.sink_logits, c.sink_logits.size() * sizeof(float)));
  KVASIR_TRY(mirror.move(t.output, out->output.size(), true));
  KVASIR_TRY(mirror.move(t.lse, out->lse.size() * sizeof(float), true));
  KVASIR_TRY(move_cache(c, mirror, &t.cache));
  KVASIR_TRY(attention->run(t));
  return mirror.bring_back();
}

}  // namespace kvasir::attention
