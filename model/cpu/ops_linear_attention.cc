// Linear attention by the gated delta rule. One piece of work is a key head of a sequence with the value heads that go
// with it, from the convolution to the gated norm: nothing of it is another's, so all pieces run at once, and the rows
// of each one after another, in whatever chunks they come.
#include <sys/mman.h>

#include <algorithm>
#include <cmath>

#include "core/cat.h"
#include "core/check.h"
#include "model/cpu/ops.h"

namespace kvasir::model::cpu {
namespace {

constexpr int64_t kRows = 32;  // done together: their queries and keys stay in the cache
constexpr int kMostTaps = 16;

float squares(const float* x, int64_t n) {
  float lanes[16] = {};
  for (int64_t i = 0; i < n; i += 16)
    for (int j = 0; j < 16; ++j) lanes[j] += x[i + j] * x[i + j];
  for (int step = 8; step > 0; step /= 2)
    for (int j = 0; j < step; ++j) lanes[j] += lanes[j + step];
  return lanes[0];
}

// To length `length`.
void normalize(float* x, int64_t n, float length) {
  const float by = length / std::sqrt(squares(x, n) + 1e-6f);
  for (int64_t i = 0; i < n; ++i) x[i] *= by;
}

float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

}  // namespace

Result<int32_t> CpuOps::add_delta_rule(const DeltaRule& rule) {
  const LinearConfig& c = rule.config;
  LinearLayer& layer = linear_.emplace_back();
  layer.config = c, layer.norm = rule.norm, layer.eps = rule.eps;
  layer.conv.resize(size_t(c.taps * c.channels()));
  const float *conv = vector(rule.conv), *decay = vector(rule.decay), *bias = vector(rule.decay_bias);
  for (int64_t i = 0; i < c.channels(); ++i)
    for (int64_t j = 0; j < c.taps; ++j) layer.conv[size_t(j * c.channels() + i)] = conv[i * c.taps + j];
  layer.bias.assign(bias, bias + c.value_heads);
  for (int32_t h = 0; h < c.value_heads; ++h) layer.decay.push_back(rule.log_decay ? std::exp(decay[h]) : -decay[h]);
  layer.at = slot_floats_;
  slot_floats_ += c.state_floats();
  return int32_t(linear_.size() - 1);
}

Status CpuOps::set_states(int64_t slots) {
  if (slots < 1) return internal_error("a model with states is given no room for any");
  const size_t bytes = size_t(slots * slot_floats_) * sizeof(float);
  // Mapped, so that slots nobody has used yet take no memory.
  void* p = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return resource_exhausted(cat("no memory for ", bytes, " bytes of states"));
  slots_ = std::unique_ptr<float, Unmap>(static_cast<float*>(p), Unmap{bytes});
  return {};
}

void CpuOps::copy_state(int32_t from, int32_t to) {
  std::copy_n(slots_.get() + from * slot_floats_, slot_floats_, slots_.get() + to * slot_floats_);
}

Status CpuOps::sigmoid_gates(Buffer in_out, Buffer gate) {
  KVASIR_CHECK(in_out.cols == gate.cols, in_out.cols, " columns and ", gate.cols, " gates");
  each_row(rows(in_out), in_out.cols * 8, [&](int64_t t) {
    thread_local std::vector<float> e;
    e.resize(size_t(gate.cols));
    kernels_.exponentials(data(gate) + t * gate.cols, gate.cols, 0, -1, e.data());
    float* x = data(in_out) + t * in_out.cols;
    for (int64_t i = 0; i < in_out.cols; ++i) x[i] /= 1 + e[size_t(i)];
  });
  return {};
}

struct CpuOps::LinearRows {
  const float *in, *betas;
  float* out;
  int64_t in_cols, beta_cols, out_cols;
};

Status CpuOps::delta_rule(int32_t rule, Buffer in, Buffer betas, Buffer out) {
  const LinearLayer& layer = linear_[size_t(rule)];
  const LinearConfig& c = layer.config;
  KVASIR_CHECK(in.cols == c.channels() + c.values() && betas.cols == 2 * c.value_heads && out.cols == c.values(),
               in.cols, ", ", betas.cols, " and ", out.cols, " columns for a layer of ", c.channels(), " channels");
  if (std::ssize(batch_->states) != batch_->size())
    return internal_error(cat("a step of ", batch_->size(), " sequences says the states of ", batch_->states.size()));
  const LinearRows rows{data(in), data(betas), data(out), in.cols, betas.cols, out.cols};
  pool_.for_each(batch_->size() * c.key_heads, 1,
                 [&](int64_t piece, int) { run_key_head(layer, rows, piece / c.key_heads, piece % c.key_heads); });
  return {};
}

void CpuOps::run_key_head(const LinearLayer& layer, const LinearRows& rows, int64_t sequence, int64_t head) {
  const LinearConfig& c = layer.config;
  const int64_t first = batch_->seqstarts[size_t(sequence)], count = batch_->seqstarts[size_t(sequence) + 1] - first,
                before = c.taps - 1;
  float* tail = slots_.get() + batch_->states[size_t(sequence)] * slot_floats_ + layer.at;  // [taps - 1, channels]
  float* states = tail + before * c.channels();  // [value heads, key_dim, value_dim]
  const int64_t each = c.key_dim * int64_t(c.value_dim), with = c.value_heads / c.key_heads;
  auto value_head = [&](int64_t i) { return c.tiled ? i * c.key_heads + head : head * with + i; };
  struct Stretch {  // of the channels
    int64_t first, count;
  };
  const Stretch q{head * c.key_dim, c.key_dim}, k{c.keys() + head * c.key_dim, c.key_dim};
  auto v = [&](int64_t i) { return Stretch{2 * c.keys() + value_head(i) * c.value_dim, c.value_dim}; };
  auto each_stretch = [&](const auto& f) {
    f(q), f(k);
    for (int64_t i = 0; i < with; ++i) f(v(i));
  };
  // Of row t of the sequence in this step; before its first one they are in the tail.
  auto channels = [&](int64_t t) {
    return t < 0 ? tail + (before + t) * c.channels() : rows.in + (first + t) * rows.in_cols;
  };
  if (batch_->start_pos[size_t(sequence)] == 0) {
    each_stretch([&](const Stretch& s) {
      for (int64_t j = 0; j < before; ++j) std::fill_n(tail + j * c.channels() + s.first, s.count, 0.0f);
    });
    for (int64_t i = 0; i < with; ++i) std::fill_n(states + value_head(i) * each, each, 0.0f);
  }
  auto convolve = [&](int64_t t, const Stretch& s, float* to) {
    const float* x[kMostTaps];
    for (int64_t j = 0; j < c.taps; ++j) x[j] = channels(t - before + j) + s.first;
    kernels_.short_convolution(x, layer.conv.data() + s.first, c.channels(), c.taps, s.count, to);
  };
  thread_local std::vector<float> room;
  room.resize(size_t(kRows * (2 * c.key_dim + c.value_dim + 2)));
  float *queries = room.data(), *keys = queries + kRows * c.key_dim, *values = keys + kRows * c.key_dim,
        *decay = values + kRows * c.value_dim, *beta = decay + kRows;
  for (int64_t begin = 0; begin < count; begin += kRows) {
    const int64_t n = std::min(kRows, count - begin);
    for (int64_t t = 0; t < n; ++t) {
      convolve(begin + t, q, queries + t * c.key_dim);
      normalize(queries + t * c.key_dim, c.key_dim, 1 / std::sqrt(float(c.key_dim)));
      convolve(begin + t, k, keys + t * c.key_dim);
      normalize(keys + t * c.key_dim, c.key_dim, 1);
    }
    for (int64_t i = 0; i < with; ++i) {
      const int64_t h = value_head(i);
      for (int64_t t = 0; t < n; ++t) {
        convolve(begin + t, v(i), values + t * c.value_dim);
        const float* b = rows.betas + (first + begin + t) * rows.beta_cols;
        beta[t] = 1 / (1 + std::exp(-b[h]));
        decay[t] = std::exp(-layer.decay[size_t(h)] * softplus(b[c.value_heads + h] + layer.bias[size_t(h)]));
      }
      float* out = rows.out + (first + begin) * rows.out_cols + h * c.value_dim;
      kernels_.delta_rule(
          {n, c.key_dim, c.value_dim, queries, keys, values, decay, beta, states + h * each, out, rows.out_cols});
      for (int64_t t = 0; t < n; ++t) {
        float* x = out + t * rows.out_cols;
        const float* gate = rows.in + (first + begin + t) * rows.in_cols + c.channels() + h * c.value_dim;
        kernels_.norm(x, vector(layer.norm), c.value_dim, layer.eps, false, x);
        kernels_.silu(gate, x, c.value_dim, x);
      }
    }
  }
  each_stretch([&](const Stretch& s) {
    for (int64_t j = 0; j < before; ++j)
      std::copy_n(channels(count - before + j) + s.first, s.count, tail + j * c.channels() + s.first);
  });
}

}  // namespace kvasir::model::cpu
