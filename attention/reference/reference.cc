#include "attention/reference/reference.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "attention/held_step.h"
#include "attention/io.h"
#include "attention/validate.h"
#include "kvcache/form.h"

namespace kvasir::attention {
namespace {

using Numbers = std::vector<double>;

class Reference final : public Attention {
 public:
  Reference(Attributes a, Limits limits) : a_(std::move(a)), limits_(limits) {
    if (a_.alibi_slopes.empty()) a_.alibi_slopes = default_alibi_slopes(a_.num_heads);
  }

  Status plan(const Step& step) override {
    KVASIR_TRY(validate_step(a_, limits_, step));
    held_.assign(a_, step);
    return {};
  }

  Status run(const Tensors& t) override {
    t_ = &t;
    // A cyclic cache is read as it was before this call; any other is read after all of its writes.
    const bool write_first = a_.cyclic_capacity == 0;
    if (a_.append && write_first) append();
    for (int64_t b = 0; b < held_.step.batch; ++b)
      for (int64_t i = 0; i < held_.shape(b).seqlen; ++i)
        for (int h = 0; h < a_.num_heads; ++h) attend(b, i, h);
    if (a_.append && !write_first) append();
    return {};
  }

  Status store_and_gather(const KvcTensors& k) override {
    if (a_.window > 0)
      return failed_precondition("KeyValueCache gives back every token; it has no meaning with a window");
    if (a_.append) store_plain(k);
    if (!k.key_out) return {};
    std::vector<float> row(size_t(a_.head_dim));
    for (int64_t b = 0; b < held_.step.batch; ++b)
      for (int64_t t = 0; t < held_.shape(b).kvlen; ++t)
        for (int h = 0; h < a_.num_kv_heads; ++h)
          for (bool value : {false, true}) {
            kvcache::load_row(k.cache, held_.physical(b, t), k.layer, h, value, row.data());
            for (int r = 0; r < k.num_repeat; ++r) {
              int64_t out = (held_.step.kvstarts[b] + t) * a_.num_kv_heads * k.num_repeat + h * k.num_repeat + r;
              void* to = value ? k.value_out : k.key_out;
              if (a_.out == DType::i8)  // as they are stored
                std::memcpy(static_cast<uint8_t*>(to) + out * a_.head_dim,
                            static_cast<const uint8_t*>(k.cache.data) +
                                kvcache::row_element(k.cache.strides, held_.physical(b, t), k.layer, h, value),
                            size_t(a_.head_dim));
              else
                write_elements(row.data(), a_.out, out * a_.head_dim, a_.head_dim, a_.out_scale, to);
            }
          }
    return {};
  }

 private:
  // ---- inputs ------------------------------------------------------------------------------------

  // Element-wise: converted, bias added, rotated (q and k) at `position`.
  Numbers input(InputPart part, int64_t token, int64_t head, int64_t position, bool rotate) const {
    // Without a bias nothing is added: -0 stays -0, as a copy of the cache's bytes must.
    std::vector<float> x(size_t(a_.head_dim)), bias(size_t(a_.head_dim), -0.0f);
    read_elements(part_tensor(a_, *t_, part), a_.io, part_element(a_, part, token, head), a_.head_dim,
                  part_scale(a_, *t_, part), x.data());
    if (t_->qkv_bias)
      read_elements(t_->qkv_bias, a_.io, part_head(a_, part, head) * a_.head_dim, a_.head_dim, 1.0f, bias.data());
    Numbers row(x.size());
    for (size_t d = 0; d < row.size(); ++d) row[d] = double(x[d]) + double(bias[d]);
    if (rotate) rope(row, position);
    return row;
  }

  void rope(Numbers& x, int64_t position) const {
    const int half = a_.rope.rotary_dim / 2;
    for (int i = 0; i < half; ++i) {
      int first = a_.rope.style == RopeStyle::neox ? i : 2 * i;
      int second = a_.rope.style == RopeStyle::neox ? i + half : 2 * i + 1;
      double angle = double(position) * double(a_.rope.inv_freq[size_t(i)]);
      double c = std::cos(angle) * double(a_.rope.magnitude), s = std::sin(angle) * double(a_.rope.magnitude);
      double x0 = x[size_t(first)], x1 = x[size_t(second)];
      x[size_t(first)] = x0 * c - x1 * s;
      x[size_t(second)] = x1 * c + x0 * s;
    }
  }

  bool roped() const { return a_.rope.style != RopeStyle::none; }

  // ---- the cache ---------------------------------------------------------------------------------

  std::vector<float> new_token(int64_t b, int64_t t, int64_t head, bool value) const {
    const int64_t start = held_.step.start_pos[b];
    Numbers row = input(value ? InputPart::value : InputPart::key, held_.step.seqstarts[b] + (t - start), head, t,
                        !value && roped() && !a_.streaming_positions);
    return {row.begin(), row.end()};
  }

  void append() {
    for (int64_t b = 0; b < held_.step.batch; ++b) {
      SequenceShape s = held_.shape(b);
      for (int64_t t = s.start_pos; t < s.kvlen; ++t) {
        bool overwritten = false;  // by a later token of this very call
        for (int64_t later = t + 1; later < s.kvlen; ++later) overwritten |= cache_slot(a_, later) == cache_slot(a_, t);
        if (overwritten) continue;
        for (int h = 0; h < a_.num_kv_heads; ++h)
          for (bool value : {false, true}) {
            if (value && kvcache::keys_alone(t_->cache)) continue;
            kvcache::store_row(t_->cache, held_.physical(b, cache_slot(a_, t)), t_->layer, h, value,
                               new_token(b, t, h, value).data());
          }
      }
    }
  }

  // What reading token t gives: from the cache, or (cyclic) what the cache would make of a new token.
  Numbers stored(int64_t b, int64_t t, int64_t head, bool value) const {
    std::vector<float> row(size_t(a_.head_dim));
    if (a_.append && a_.cyclic_capacity > 0 && t >= held_.step.start_pos[b]) {
      kvcache::CacheView one = t_->cache;
      std::vector<uint8_t> data(size_t(a_.head_dim) * 4), scale(size_t(a_.head_dim) * 4);
      one.data = data.data(), one.scale = scale.data();
      one.k_scale = value ? one.v_scale : one.k_scale;
      kvcache::store_row(one, 0, 0, 0, false, new_token(b, t, head, value).data());
      kvcache::load_row(one, 0, 0, 0, false, row.data());
    } else {
      kvcache::load_row(t_->cache, held_.physical(held_.owner(b, t), cache_slot(a_, t)), t_->layer, head, value,
                        row.data());
    }
    return {row.begin(), row.end()};
  }

  // Already quantized keys and values (int8 input, quant_bit 0) are stored as they are.
  void store_plain(const KvcTensors& k) {
    std::vector<float> row(size_t(a_.head_dim));
    for (int64_t b = 0; b < held_.step.batch; ++b) {
      SequenceShape s = held_.shape(b);
      for (int64_t t = s.start_pos; t < s.kvlen; ++t)
        for (int h = 0; h < a_.num_kv_heads; ++h)
          for (bool value : {false, true}) {
            if (value && kvcache::keys_alone(k.cache)) continue;
            int64_t token = held_.step.seqstarts[b] + t - s.start_pos;
            const void* from = value ? k.value : k.key;
            int64_t element = (token * a_.num_kv_heads + h) * a_.head_dim;
            if (a_.io == DType::i8) {
              std::memcpy(static_cast<uint8_t*>(k.cache.data) +
                              kvcache::row_element(k.cache.strides, held_.physical(b, t), k.layer, h, value),
                          static_cast<const uint8_t*>(from) + element, size_t(a_.head_dim));
              continue;
            }
            read_elements(from, a_.io, element, a_.head_dim, value ? k.cache.v_scale : k.cache.k_scale, row.data());
            kvcache::store_row(k.cache, held_.physical(b, t), k.layer, h, value, row.data());
          }
    }
  }

  // ---- attention ---------------------------------------------------------------------------------

  bool sees(const SequenceShape& s, int64_t i, int64_t j) const {
    const int64_t t = s.kvlen - s.seqlen + i;  // the query's own position, bottom-right aligned
    if (a_.is_causal && s.seqlen > 1 && !s.decoding && j > t) return false;
    if (a_.is_alibi && j > t) return false;
    if (a_.window > 0) {
      bool sink = j < a_.sinks, inside = j >= std::max<int64_t>(a_.sinks, t - (a_.window - a_.sinks) + 1);
      bool own_call = a_.streaming_positions && j >= s.start_pos;
      if (j > t || !(sink || inside || own_call)) return false;
    }
    return true;
  }

  double mask(int64_t b, int64_t i, int64_t j, int64_t head) const {
    if (!t_->attn_mask) return 0;
    float m;
    read_elements(
        t_->attn_mask, a_.io,
        head * t_->mask_head_stride + (held_.step.seqstarts[b] + i) * t_->mask_row_stride + held_.step.kvstarts[b] + j,
        1, 1.0f, &m);
    return double(m);
  }

  double relative_bias(int64_t head, int64_t distance) const {
    if (a_.relative_bias.empty()) return 0;
    const int64_t each = int64_t(a_.relative_bias.size()) / a_.num_heads, reach = each / 2;
    return double(a_.relative_bias[size_t(head * each + reach + std::clamp(distance, -reach, reach))]);
  }

  void attend(int64_t b, int64_t i, int64_t h) {
    const SequenceShape s = held_.shape(b);
    const int64_t token = held_.step.seqstarts[b] + i, own = s.kvlen - s.seqlen + i;
    const int64_t kv_head = h / (a_.num_heads / a_.num_kv_heads);
    std::vector<int64_t> keys;
    for (int64_t j = 0; j < s.kvlen; ++j)
      if (sees(s, i, j)) keys.push_back(j);

    // StreamingLLM: positions are ranks among the visible keys, and the query is the last of them.
    int64_t position = a_.streaming_positions ? int64_t(keys.size()) - 1 : s.start_pos + i;
    Numbers q = input(InputPart::query, token, h, position, roped());
    if (a_.fp8_query)
      for (double& x : q) x = double(as_fp8(float(x), t_->q_scale));

    Numbers score;
    for (size_t rank = 0; rank < keys.size(); ++rank) {
      const int64_t j = keys[rank];
      Numbers k = stored(b, j, kv_head, false);
      if (a_.streaming_positions) rope(k, int64_t(rank));
      double x = 0;
      for (size_t d = 0; d < q.size(); ++d) x += q[d] * k[d];
      x /= double(a_.q_scaling) * std::sqrt(double(a_.head_dim));
      if (a_.softcap > 0) x = double(a_.softcap) * std::tanh(x / double(a_.softcap));
      if (a_.is_alibi) x += double(a_.alibi_slopes[size_t(h)]) * double(j - own);
      score.push_back(x + relative_bias(h, j - own) + mask(b, i, j, h));
    }

    const double none = -std::numeric_limits<double>::infinity();
    double top = none;
    for (double x : score) top = std::max(top, x);
    Numbers out(size_t(a_.head_dim), 0.0);
    double lse = none;
    if (top > none) {
      if (t_->sink_logits) top = std::max(top, double(t_->sink_logits[h]));
      double denominator = t_->sink_logits ? std::exp(double(t_->sink_logits[h]) - top) : 0.0;
      for (double& x : score) denominator += x = std::exp(x - top);
      for (size_t n = 0; n < keys.size(); ++n) {
        if (score[n] == 0) continue;
        Numbers v = stored(b, keys[n], kv_head, true);
        for (size_t d = 0; d < out.size(); ++d) out[d] += score[n] / denominator * v[d];
      }
      lse = top + std::log(denominator);
    }
    std::vector<float> rounded(out.begin(), out.end());
    write_elements(rounded.data(), a_.out, (token * a_.num_heads + h) * a_.head_dim, a_.head_dim, a_.out_scale,
                   t_->output);
    if (a_.return_lse) t_->lse[token * a_.num_heads + h] = float(lse);
  }

  Attributes a_;
  Limits limits_;
  HeldStep held_;
  const Tensors* t_ = nullptr;  // of the run in progress
};

class ReferenceBackend final : public Backend {
 public:
  std::string_view name() const override { return "reference"; }
  Status available() const override { return {}; }
  Result<std::unique_ptr<Attention>> create(const Attributes& a, const Limits& limits,
                                            const DeviceContext&) const override {
    KVASIR_TRY(validate_attributes(a, limits));
    return std::unique_ptr<Attention>(std::make_unique<Reference>(a, limits));
  }
};

}  // namespace

const Backend& reference_backend() {
  static const ReferenceBackend backend;
  return backend;
}

}  // namespace kvasir::attention
