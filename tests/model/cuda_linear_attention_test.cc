// Linear attention on the GPU against its definition in float64: sequences in any pieces and company, states that are
// copied, and slots that were another's.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "core/dtype.h"
#include "model/cuda/linear_layers.h"
#include "tests/model/cuda_case.h"

namespace kvasir::model {
namespace {

using attention::cuda::DeviceMemory;
using CudaLinearAttention = NeedsDevice;
using Floats = std::vector<float>;

std::mt19937 random_bits(5);

Floats some(int64_t n, float scale, float shift = 0) {
  std::normal_distribution<float> normal;
  Floats v(static_cast<size_t>(n));
  for (float& f : v) f = shift + scale * normal(random_bits);
  return v;
}

double silu(double x) { return x / (1 + std::exp(-x)); }

// A layer, on the host.
struct Reference {
  LinearConfig c;
  Floats conv, decay, bias, norm;
  float eps = 1e-6f;

  explicit Reference(const LinearConfig& config)
      : c(config),
        conv(some(c.taps * c.channels(), 0.5f)),
        decay(some(c.value_heads, 0.7f, -1)),
        bias(some(c.value_heads, 0.5f)),
        norm(some(c.value_dim, 0.2f, 1)) {}

  int64_t in_cols() const { return c.channels() + c.values(); }

  std::vector<double> convolved(const Floats& in, int64_t t) const {
    std::vector<double> out(static_cast<size_t>(c.channels()));
    for (int64_t i = 0; i < c.channels(); ++i) {
      double sum = 0;
      for (int64_t j = 0; j < c.taps; ++j)
        if (const int64_t from = t - (c.taps - 1) + j; from >= 0)
          sum += double(conv[size_t(i * c.taps + j)]) * double(in[size_t(from * in_cols() + i)]);
      out[size_t(i)] = silu(sum);
    }
    for (int64_t head = 0; head < 2 * c.key_heads; ++head) {
      double* x = out.data() + head * c.key_dim;
      double squares = 1e-6;
      for (int64_t i = 0; i < c.key_dim; ++i) squares += x[i] * x[i];
      const double by = (head < c.key_heads ? 1 / std::sqrt(double(c.key_dim)) : 1) / std::sqrt(squares);
      for (int64_t i = 0; i < c.key_dim; ++i) x[i] *= by;
    }
    for (double& x : out) x = double(bf16_to_f32(f32_to_bf16(float(x))));
    return out;
  }

  // Of all rows of a sequence.
  std::vector<double> operator()(const Floats& in, const Floats& betas) const {
    const int64_t rows = std::ssize(in) / in_cols(), with = c.value_heads / c.key_heads;
    std::vector<double> out(static_cast<size_t>(rows * c.values()));
    std::vector<double> states(static_cast<size_t>(c.values() * c.key_dim));
    for (int64_t t = 0; t < rows; ++t) {
      const std::vector<double> x = convolved(in, t);
      for (int64_t h = 0; h < c.value_heads; ++h) {
        const int64_t key_head = c.tiled ? h % c.key_heads : h / with;
        const double *q = x.data() + key_head * c.key_dim, *k = q + c.keys(),
                     *v = x.data() + 2 * c.keys() + h * c.value_dim;
        const double beta = 1 / (1 + std::exp(-double(betas[size_t(t * 2 * c.value_heads + h)])));
        const double alpha = double(betas[size_t((t * 2 + 1) * c.value_heads + h)]) + double(bias[size_t(h)]);
        const double fade = std::exp(-std::exp(double(decay[size_t(h)])) * std::log1p(std::exp(alpha)));
        double* o = out.data() + t * c.values() + h * c.value_dim;
        double squares = 0;
        for (int64_t col = 0; col < c.value_dim; ++col) {
          double* s = states.data() + (h * c.value_dim + col) * c.key_dim;
          double had = 0;
          for (int64_t j = 0; j < c.key_dim; ++j) s[j] *= fade, had += s[j] * k[j];
          for (int64_t j = 0; j < c.key_dim; ++j) s[j] += k[j] * beta * (v[col] - had), o[col] += s[j] * q[j];
          squares += o[col] * o[col];
        }
        const double by = 1 / std::sqrt(squares / double(c.value_dim) + double(eps));
        for (int64_t col = 0; col < c.value_dim; ++col)
          o[col] *= by * double(norm[size_t(col)]) *
                    silu(double(in[size_t(t * in_cols() + c.channels() + h * c.value_dim + col)]));
      }
    }
    return out;
  }
};

struct Sequence {
  Floats in, betas;
  std::vector<double> want;
};

struct Piece {
  int32_t slot;
  const Sequence* of;
  int64_t begin, count;
};

class Device {
 public:
  Device(const std::vector<Reference>& layers, int64_t max_tokens, int64_t slots)
      : reference_(layers), layers_(max_tokens, nullptr) {
    for (const Reference& r : layers) {
      DeltaRule rule;
      rule.config = r.c, rule.log_decay = true, rule.eps = r.eps;
      const auto id = layers_.add(rule, on_device(r.conv), on_device(r.decay), on_device(r.bias), on_device(r.norm));
      EXPECT_TRUE(id.ok()) << id.status().message();
    }
    EXPECT_TRUE(layers_.set_slots(slots).ok());
  }
  void copy(int32_t from, int32_t to) { EXPECT_TRUE(layers_.copy(from, to).ok()); }

  // One layer's outputs are not the next one's inputs: each has its own sequences. `padded`: rows of a step of decodes.
  void step(const std::vector<Piece>& pieces, int64_t padded, double* worst) {
    Batch b;
    b.seqstarts = {0};
    for (const Piece& p : pieces) {
      b.seqstarts.push_back(b.seqstarts.back() + p.count);
      b.start_pos.push_back(p.begin);
      b.states.push_back(p.slot);
    }
    const int64_t own = b.seqstarts.back(), rows = std::max(own, padded);
    const Status begun = layers_.begin(b, rows, turn_ ^= 1);
    ASSERT_TRUE(begun.ok()) << begun.message();
    for (size_t id = 0; id < reference_.size(); ++id) {
      const Reference& r = reference_[id];
      Floats in, betas;
      for (const Piece& p : pieces) {
        const Sequence& s = p.of[id];
        in.insert(in.end(), s.in.begin() + p.begin * r.in_cols(), s.in.begin() + (p.begin + p.count) * r.in_cols());
        const int64_t each = 2 * r.c.value_heads;
        betas.insert(betas.end(), s.betas.begin() + p.begin * each, s.betas.begin() + (p.begin + p.count) * each);
      }
      in.resize(size_t(rows * r.in_cols()), NAN), betas.resize(size_t(rows * 2 * r.c.value_heads), NAN);
      DeviceMemory from, by, out;
      std::vector<uint16_t> got(size_t(rows * r.c.values()), 0x7fff);
      ASSERT_TRUE(from.upload(in.data(), in.size() * 4).ok() && by.upload(betas.data(), betas.size() * 4).ok());
      ASSERT_TRUE(out.upload(got.data(), got.size() * 2).ok());
      const Status ran = layers_.run(int32_t(id), from.as<float>(), by.as<float>(), out.get());
      ASSERT_TRUE(ran.ok()) << ran.message();
      ASSERT_EQ(cudaMemcpy(got.data(), out.get(), got.size() * 2, cudaMemcpyDeviceToHost), cudaSuccess)
          << cudaGetErrorString(cudaGetLastError());
      size_t at = 0;
      for (const Piece& p : pieces)
        for (int64_t i = 0; i < p.count * r.c.values(); ++i, ++at) {
          const double want = p.of[id].want[size_t(p.begin * r.c.values() + i)];
          const double off = std::fabs(double(bf16_to_f32(got[at])) - want) / (0.1 + std::fabs(want));
          if (!(off <= 0.02))
            FAIL() << "layer " << id << ", slot " << p.slot << ", row " << p.begin + i / r.c.values() << ", column "
                   << i % r.c.values() << ": " << bf16_to_f32(got[at]) << ", not " << want;
          *worst = std::max(*worst, off);
        }
      for (; at < got.size(); ++at) ASSERT_EQ(got[at], 0) << "nobody's";
    }
  }

 private:
  const float* on_device(const Floats& v) {
    DeviceMemory& m = *memory_.emplace_back(std::make_unique<DeviceMemory>());
    EXPECT_TRUE(m.upload(v.data(), v.size() * 4).ok());
    return m.as<float>();
  }
  const std::vector<Reference>& reference_;
  std::vector<std::unique_ptr<DeviceMemory>> memory_;
  cuda::LinearLayers layers_;
  int turn_ = 0;
};

// By layer.
std::vector<Sequence> sequence(const std::vector<Reference>& layers, int64_t rows) {
  std::vector<Sequence> out;
  for (const Reference& r : layers) {
    Sequence& s = out.emplace_back();
    s.in = some(rows * r.in_cols(), 1), s.betas = some(rows * 2 * r.c.value_heads, 1);
    s.want = r(s.in, s.betas);
  }
  return out;
}

LinearConfig config(int32_t key_heads, int32_t value_heads, int32_t key_dim, int32_t value_dim, bool tiled = false) {
  return {.taps = 4,
          .key_heads = key_heads,
          .value_heads = value_heads,
          .key_dim = key_dim,
          .value_dim = value_dim,
          .tiled = tiled};
}

TEST_F(CudaLinearAttention, IsItsDefinitionInAnyPiecesAndCompany) {
  for (const std::vector<LinearConfig>& configs : {std::vector{config(2, 4, 128, 128), config(2, 4, 128, 128, true)},
                                                   std::vector{config(2, 6, 16, 16, true), config(1, 1, 32, 48)},
                                                   std::vector{config(3, 3, 64, 80), config(1, 4, 96, 32)}}) {
    std::vector<Reference> layers(configs.begin(), configs.end());
    Device device(layers, 256, 8);
    double worst = 0;
    // Alone, whole; then the same slot again, one by one.
    const auto alone = sequence(layers, 37);
    device.step({{2, alone.data(), 0, 37}}, 0, &worst);
    for (int64_t t = 0; t < 6; ++t) device.step({{2, alone.data(), t, 1}}, t < 3 ? 1 : 4, &worst);
    device.step({{2, alone.data(), 6, 31}}, 0, &worst);
    // Six at once, in pieces of any length.
    std::vector<std::vector<Sequence>> six;
    std::vector<int64_t> at(6, 0), length = {1, 2, 5, 40, 90, 33};
    for (int64_t n : length) six.push_back(sequence(layers, n));
    for (int round = 0; round < 60; ++round) {
      std::vector<Piece> pieces;
      const bool decodes = round % 3 == 2;
      for (size_t i = 0; i < six.size(); ++i) {
        const int64_t left = length[i] - at[i];
        const int64_t n = std::min<int64_t>(left, decodes ? 1 : int64_t(random_bits() % 20));
        if (n == 0) continue;
        pieces.push_back({int32_t(5 - i), six[i].data(), at[i], n});
        at[i] += n;
      }
      if (!pieces.empty()) device.step(pieces, decodes ? 8 : 0, &worst);
      if (HasFatalFailure()) return;
    }
    EXPECT_EQ(at, length);
    printf("heads of %d and %d: worst difference %.5f of a bfloat16's size\n", configs[0].key_dim, configs[0].value_dim,
           worst);
  }
}

// Two go on from the same state, which a third slot keeps.
TEST_F(CudaLinearAttention, CopiesOfAStateGoOnByThemselves) {
  std::vector<Reference> layers{Reference(config(2, 4, 128, 128)), Reference(config(2, 2, 16, 32))};
  Device device(layers, 64, 3);
  double worst = 0;
  const auto first = sequence(layers, 30);
  auto second = sequence(layers, 30);
  for (size_t l = 0; l < layers.size(); ++l) {
    const Reference& r = layers[l];
    std::copy_n(first[l].in.begin(), 13 * r.in_cols(), second[l].in.begin());
    std::copy_n(first[l].betas.begin(), 13 * 2 * r.c.value_heads, second[l].betas.begin());
    second[l].want = r(second[l].in, second[l].betas);
  }
  device.step({{0, first.data(), 0, 13}}, 0, &worst);
  device.copy(0, 1);
  device.copy(0, 2);
  device.step({{0, first.data(), 13, 9}}, 0, &worst);
  device.step({{1, second.data(), 13, 17}, {0, first.data(), 22, 8}}, 0, &worst);
  device.step({{2, first.data(), 13, 1}}, 0, &worst);
  device.copy(2, 1);
  device.step({{1, first.data(), 14, 1}, {2, first.data(), 14, 1}}, 2, &worst);
  EXPECT_LT(worst, 0.02);
}

TEST_F(CudaLinearAttention, WhatTheKernelsAreNotMadeForIsRefusedByName) {
  cuda::LinearLayers layers(16, nullptr);
  auto refusal = [&](const LinearConfig& c) {
    DeltaRule rule;
    rule.config = c;
    return layers.add(rule, nullptr, nullptr, nullptr, nullptr).status().message();
  };
  LinearConfig c = config(2, 4, 256, 128);
  EXPECT_NE(refusal(c).find("linear_key_head_dim is 256"), std::string::npos);
  c = config(2, 4, 128, 144);
  EXPECT_NE(refusal(c).find("linear_value_head_dim is 144"), std::string::npos);
  c = config(2, 4, 128, 128), c.taps = 5;
  EXPECT_NE(refusal(c).find("linear_conv_kernel_dim is 5"), std::string::npos);
}

}  // namespace
}  // namespace kvasir::model
