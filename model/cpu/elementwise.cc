#include "model/cpu/elementwise.h"

#include <cmath>

namespace kvasir::model::cpu {

void layer_norm(const float* in, const float* weight, const float* bias, int64_t cols, float eps, float* out) {
  double sum = 0, squares = 0;
  for (int64_t i = 0; i < cols; ++i) sum += double(in[i]);
  const double mean = sum / double(cols);
  for (int64_t i = 0; i < cols; ++i) squares += (double(in[i]) - mean) * (double(in[i]) - mean);
  const auto scale = float(1 / std::sqrt(squares / double(cols) + double(eps)));
  const auto middle = float(mean);
  for (int64_t i = 0; i < cols; ++i) out[i] = (in[i] - middle) * scale * weight[i] + (bias ? bias[i] : 0.0f);
}

float activation_of(Activation activation, float x) {
  switch (activation) {
    case Activation::silu: return x / (1 + std::exp(-x));
    case Activation::gelu_tanh: return 0.5f * x * (1 + std::tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
    case Activation::gelu: return 0.5f * x * (1 + std::erf(x * 0.7071067812f));
    case Activation::relu: return x > 0 ? x : 0.0f;
    case Activation::relu_squared: return x > 0 ? x * x : 0.0f;
    case Activation::tanh: return std::tanh(x);
  }
  return x;
}

void clamped_glu(const float* gate, const float* up, int64_t n, float limit, float slope, float* out) {
  for (int64_t i = 0; i < n; ++i) {
    const float g = gate[i] > limit ? limit : gate[i], u = up[i] > limit ? limit : up[i] < -limit ? -limit : up[i];
    out[i] = (u + 1) * g / (1 + std::exp(-slope * g));
  }
}

void softcap(float* x, int64_t cols, float cap) {
  for (int64_t i = 0; i < cols; ++i) x[i] = cap * std::tanh(x[i] / cap);
}

void add_to(float* x, const float* bias, int64_t cols) {
  for (int64_t i = 0; i < cols; ++i) x[i] += bias[i];
}

float position_scale(int64_t position, float slope, int64_t unit) {
  const int64_t units = position / unit;  // whole ones
  return 1 + slope * std::log(float(1 + units));
}

}  // namespace kvasir::model::cpu
