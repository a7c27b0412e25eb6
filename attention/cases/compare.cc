#include "attention/cases/compare.h"

#include <cmath>

#include "attention/held_step.h"
#include "attention/io.h"
#include "attention/reference/reference.h"
#include "core/cat.h"

namespace kvasir::attention {
namespace {

std::vector<float> as_floats(const Bytes& bytes, DType type, int64_t n, float scale) {
  std::vector<float> x(static_cast<size_t>(n));
  if (n > 0) read_elements(bytes.data(), type, 0, n, scale, x.data());
  return x;
}

bool inexact_keys(const Case& c) { return c.attributes.rope.style != RopeStyle::none || !c.qkv_bias.empty(); }

std::string first_difference(const char* name, const Bytes& want, const Bytes& got) {
  for (size_t i = 0; i < want.size(); ++i)
    if (want[i] != got[i])
      return cat(name, " byte ", i, " of ", want.size(), " is ", int(got[i]), ", the reference has ", int(want[i]));
  return {};
}

kvcache::CacheView view_over(const Case& c) {
  kvcache::CacheView v = c.view;
  v.data = const_cast<uint8_t*>(c.cache.data());
  v.scale = const_cast<uint8_t*>(c.scale.data());
  return v;
}

// Half of nothing for plain types: one unit in the last place; a step of the quantization otherwise.
double step_of(const kvcache::CacheView& v, bool value, double a, double b, double absmax) {
  const double m = std::max(std::fabs(a), std::fabs(b));
  if (v.quant == kvcache::QuantKind::group) return 1.01 * absmax / kvcache::quant_max(v.dtype) + 1e-5;
  if (v.quant == kvcache::QuantKind::per_tensor)
    return v.dtype == DType::i8 ? 1.01 * double(value ? v.v_scale : v.k_scale)
                                : m * 0.13 + 0.003 * double(value ? v.v_scale : v.k_scale);
  // float32: rotated in float32 against float64, so an absolute error of the pair's size
  return v.dtype == DType::f32 ? absmax * 4e-7 : v.dtype == DType::f16 ? m * 0x1p-10 + 0x1p-23 : m * 0x1p-7 + 1e-7;
}

// With rope or bias the two backs ends round differently before they quantize: rows that were written
// may differ by a step; all other bytes may not differ at all.
std::string compare_written(const Case& want, const Case& got) {
  const Attributes& a = want.attributes;
  HeldStep held;
  held.assign(a, want.step());
  Case masked_want = want, masked_got = got;
  kvcache::CacheView vw = view_over(want), vg = view_over(got), mw = view_over(masked_want), mg = view_over(masked_got);
  std::vector<float> x(size_t(a.head_dim)), y(size_t(a.head_dim)), zero(size_t(a.head_dim), 0.0f);
  for (int64_t b = 0; b < held.step.batch; ++b) {
    const SequenceShape s = held.shape(b);
    for (int64_t t = s.start_pos; t < s.kvlen; ++t) {
      if (!survives(a, s, t)) continue;
      const int64_t at = held.physical(b, cache_slot(a, t));
      for (int h = 0; h < a.num_kv_heads; ++h)
        for (bool value : {false, true}) {
          kvcache::load_row(vw, at, want.layer, h, value, x.data());
          kvcache::load_row(vg, at, want.layer, h, value, y.data());
          double absmax = 0;
          for (float f : x) absmax = std::max(absmax, std::fabs(double(f)));
          for (int d = 0; d < a.head_dim; ++d) {
            const double u = x[size_t(d)], v = y[size_t(d)];
            if (!(std::fabs(u - v) <= step_of(vw, value, u, v, absmax)))
              return cat("cached ", value ? "value" : "key", " of sequence ", b, " token ", t, " head ", h, " element ",
                         d, " is ", v, ", the reference has ", u);
          }
          kvcache::store_row(mw, at, want.layer, h, value, zero.data());
          kvcache::store_row(mg, at, want.layer, h, value, zero.data());
        }
    }
  }
  std::string wrong = first_difference("untouched cache", masked_want.cache, masked_got.cache);
  return wrong.empty() ? first_difference("untouched scale", masked_want.scale, masked_got.scale) : wrong;
}

std::string compare_rows(const char* name, const std::vector<float>& want, const std::vector<float>& got, int64_t width,
                         double r, double floor) {
  for (size_t row = 0; row * size_t(width) < want.size(); ++row) {
    double error = 0, norm = 0;
    for (int64_t d = 0; d < width; ++d) {
      const double w = want[row * size_t(width) + size_t(d)], g = got[row * size_t(width) + size_t(d)];
      error += (w - g) * (w - g);
      norm += w * w;
    }
    // Written so that a NaN on either side is a failure.
    if (!(std::sqrt(error) <= r * std::sqrt(norm) + floor))
      return cat(name, " row ", row, ": error ", std::sqrt(error), " of norm ", std::sqrt(norm), " is above ", r);
  }
  return {};
}

}  // namespace

double row_tolerance(DType out) {
  switch (out) {
    case DType::f32: return 2e-5;
    case DType::f16: return 1e-3;
    case DType::bf16: return 8e-3;
    default: return 6e-2;
  }
}

std::string compare_with_reference(const Case& before, const Case& after, const CaseOutput& got, double widen,
                                   double lse_slack) {
  const Attributes& a = before.attributes;
  Case want = before;
  CaseOutput expected;
  if (Status s = run_case(want, reference_backend(), {}, &expected); !s.ok())
    return cat("the reference refused the case: ", s.to_string());

  std::string wrong;
  if (!a.append || !inexact_keys(before) || before.op == Op::key_value_cache) {
    wrong = first_difference("cache", want.cache, after.cache);
    if (wrong.empty()) wrong = first_difference("scale", want.scale, after.scale);
  } else {
    wrong = compare_written(want, after);
  }
  if (!wrong.empty()) return wrong;

  if (before.op == Op::key_value_cache) {
    wrong = first_difference("key", expected.key, got.key);
    return wrong.empty() ? first_difference("value", expected.value, got.value) : wrong;
  }

  double r = row_tolerance(a.out);
  bool steps_apart = false;  // keys and values that nobody can see may be a step of their type away
  if (a.append && inexact_keys(before)) {
    if (a.cyclic_capacity == 0) {  // the same keys and values: those the back end stored
      Case over = after;
      over.attributes.append = false;
      if (Status s = run_case(over, reference_backend(), {}, &expected); !s.ok()) return s.to_string();
    } else if (before.view.quant != kvcache::QuantKind::none) {
      r = std::max(r, 6e-2), steps_apart = true;
    } else if (before.view.dtype != DType::f32) {
      const double step = before.view.dtype == DType::f16 ? 1e-3 : 8e-3;
      steps_apart = step > r, r = std::max(r, step);
    }
  }
  const int64_t rows = before.tokens() * a.num_heads, n = rows * a.head_dim;
  r *= widen;
  // A query's element that is rotated a little otherwise may become its neighbour in E4M3.
  if (a.fp8_query && inexact_keys(before)) r = std::max(r, row_tolerance(DType::f8_e4m3)), steps_apart = true;
  // FP8 has an absolute step near zero; everything else is relative to the row.
  const double floor = a.out == DType::f8_e4m3 ? 0x1p-10 * double(a.out_scale) * std::sqrt(double(a.head_dim)) : 0.0;
  wrong = compare_rows("attn_output", as_floats(expected.output, a.out, n, a.out_scale),
                       as_floats(got.output, a.out, n, a.out_scale), a.head_dim, r, floor);
  if (!wrong.empty() || !a.return_lse) return wrong;
  for (int64_t i = 0; i < rows; ++i) {
    const double w = expected.lse[size_t(i)], g = got.lse[size_t(i)];
    if (w == g) continue;
    if (!(std::fabs(w - g) <= 2e-5 * (1 + std::fabs(w)) + (steps_apart ? 0.05 : 0.0) + lse_slack))
      return cat("lse row ", i, " is ", g, ", the reference has ", w);
  }
  return {};
}

}  // namespace kvasir::attention
