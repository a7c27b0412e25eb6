// Products of the host's operations, and the gates that follow some of them.
#include "model/cpu/ops.h"

#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "model/cpu/elementwise.h"

namespace kvasir::model::cpu {

namespace {
// Rows of a product done together: their activations stay in the second-level cache.
constexpr int64_t kRowBytes = 5 << 18;
// Rows that are worth unpacking weights for once more.
constexpr int64_t kRowsApart = 256;

using GateKernel = void (*)(const float* gate, const float* up, int64_t n, float* out);
// Null: a plain loop over activation_of() does it.
GateKernel gate_kernel(const Kernels& kernels, Activation activation) {
  if (activation == Activation::silu) return kernels.silu;
  return activation == Activation::gelu_tanh ? kernels.gelu : nullptr;
}
}  // namespace

const float* CpuOps::padded_rows(const Weight& m, const float* x, int64_t rows) {
  if (m.padded_cols() == m.cols) return x;
  padded_.assign(size_t(rows * m.padded_cols()), 0.0f);
  for (int64_t t = 0; t < rows; ++t)
    std::memcpy(padded_.data() + t * m.padded_cols(), x + t * m.cols, size_t(m.cols) * sizeof(float));
  return padded_.data();
}

CpuOps::Input CpuOps::input_of(Buffer in, Matrix weight) {
  const Weight& m = matrices_[size_t(weight.id)];
  KVASIR_CHECK(in.cols == m.cols, "rows of ", in.cols, " by a matrix ", m.cols, " wide");
  Input out{m, rows(in), padded_rows(m, data(in), rows(in)), {}, vector(biases_[size_t(weight.id)])};
  const int64_t cols = m.padded_cols();
  for (size_t i = 0; i < m.runs.size(); ++i)
    if (of_integers(m.runs[i])) out.quants[i] = quants_[i].rows(out.rows, cols);
  each_row((out.rows + 1) / 2, 2 * cols, [&](int64_t pair) {
    for (int64_t t = 2 * pair; t < std::min(out.rows, 2 * pair + 2); ++t) out.quantize(kernels_, out.x + t * cols, t);
  });
  out.adapters = adapter_rows_.reduce(weight, out.x, m.padded_cols(), kernels_, pool_);
  return out;
}

void CpuOps::Input::product(const Kernels& kernels, int64_t first, int64_t count, int64_t group, int64_t groups,
                            bool add, float* y, int64_t y_stride) const {
  auto base = [&] {
    int64_t begin = 0;  // of the run
    for (size_t i = 0; i < m.runs.size(); begin += m.runs[i++].groups) {
      const PackedMatrix& run = m.runs[i];
      const int64_t from = std::max(group, begin), some = std::min(group + groups, begin + run.groups) - from;
      if (some <= 0) continue;
      float* to = y + (from - group) * kGroup;
      if (quants[i].q)
        kernels.integer(run, from - begin, some, quants[i], first, count, to, y_stride, add);
      else
        kernels.floating(run, from - begin, some, x + first * run.padded_cols(), run.padded_cols(), count, to, y_stride,
                         add);
    }
  };
  const int64_t cols = std::min(m.rows - group * kGroup, groups * kGroup);
  if (adapters)
    adapters->around(kernels, first, count, group * kGroup, cols, add, y, y_stride, base);
  else
    base();
  if (!bias) return;
  for (int64_t t = 0; t < count; ++t) add_to(y + t * y_stride, bias + group * kGroup, cols);
}

template <class F>
void CpuOps::each_piece(const Input& in, int64_t groups, int64_t most_groups, const F& f) {
  int64_t row_bytes = in.m.padded_cols() * (in.floats() ? 4 : 3);
  const int64_t threads = pool_.threads(), most = std::max<int64_t>(32, kRowBytes / row_bytes / 32 * 32);
  // Workers have rows of their own where there are enough, each_row()'s: what one has written another reads slowly.
  int64_t spans = std::max((in.rows + most - 1) / most, std::min(threads, in.rows / kRowsApart));
  if (spans > threads) spans = (spans + threads - 1) / threads * threads;
  const int64_t span = (in.rows + 32 * spans - 1) / (32 * spans) * 32;
  spans = (in.rows + span - 1) / span;
  // As many pieces for each worker, and none larger than another by more than a group; of few rows not many, since
  // kernels begin each by waiting for its first weights, unless a group takes longer than that wait: who has a
  // neighbour on its core is then helped by the others. One or two rows take as long as reading the weights: a worker
  // reads its own at one go, but for an eighth that others may take.
  const int64_t smallest = in.rows > 8 && kernels_.slow_groups ? 2 : 8;
  const int64_t each = in.rows > 16 ? 4 : std::clamp<int64_t>(groups / (smallest * threads), 1, 32 / smallest);
  const int64_t least = std::max((groups + most_groups - 1) / most_groups, each * threads);
  const bool reading = in.rows <= 2;
  const int64_t parts = reading ? 2 * threads : std::min(groups, (least + threads - 1) / threads * threads);
  auto bound = [&](int64_t part) {
    return reading ? groups * (part / 2 * 8 + part % 2 * 7) / (8 * threads) : groups * part / parts;
  };
  pool_.for_each_near(spans * parts, [&](int64_t i, int worker) {
    const int64_t first = i / parts * span, part = i % parts;
    const int64_t group = bound(part), end = bound(part + 1);
    if (end > group) f(first, std::min(span, in.rows - first), group, end - group, worker);
  });
}

Status CpuOps::linear(Buffer in, Matrix weight, bool add, Buffer out) {
  const Weight& m = matrices_[size_t(weight.id)];
  KVASIR_CHECK(out.cols == m.rows, m.rows, " columns into ", out.cols);
  const bool sum = summed(weight);
  const Buffer to = sum ? partial() : out;
  Input input = input_of(in, weight);
  each_piece(input, m.groups, 16, [&](int64_t first, int64_t count, int64_t group, int64_t groups, int) {
    input.product(kernels_, first, count, group, groups, add && !sum, data(to) + first * to.cols + group * kGroup,
                  to.cols);
  });
  return sum ? sum_partials(add, out) : Status();
}

// A piece's gates, and what they are to open, stay in the second-level cache instead of going through the buffer.
Status CpuOps::linear_glu(Buffer in, Matrix weight, Activation activation, Buffer between, Buffer out) {
  const Weight& m = matrices_[size_t(weight.id)];
  KVASIR_CHECK(2 * out.cols == m.rows, m.rows, " columns in halves into ", out.cols);
  auto f = gate_kernel(kernels_, activation);
  if (out.cols % kGroup != 0 || !f) return Ops::linear_glu(in, weight, activation, between, out);
  constexpr int64_t kRows = 512;  // weights are unpacked for each so many
  Input input = input_of(in, weight);
  int64_t half = m.groups / 2;
  gates_.resize(size_t(pool_.threads()));
  each_piece(input, half, input.rows > 16 ? 4 : 16,
             [&](int64_t first, int64_t count, int64_t group, int64_t groups, int worker) {
               int64_t cols = groups * kGroup;
               std::vector<float>& room = gates_[size_t(worker)];
               room.resize(std::max(room.size(), size_t(std::min(count, kRows) * 2 * cols)));
               for (int64_t end = first + count; first < end; first += kRows) {
                 int64_t n = std::min(kRows, end - first);
                 input.product(kernels_, first, n, group, groups, false, room.data(), 2 * cols);
                 input.product(kernels_, first, n, half + group, groups, false, room.data() + cols, 2 * cols);
                 float* to = data(out) + first * out.cols + group * kGroup;
                 for (int64_t t = 0; t < n; ++t) {
                   const float* gate = room.data() + t * 2 * cols;
                   f(gate, gate + cols, cols, to + t * out.cols);
                 }
               }
             });
  return {};
}

void CpuOps::glu_row(Activation activation, const float* gate, const float* up, int64_t n, float* out) const {
  if (auto f = gate_kernel(kernels_, activation)) return f(gate, up, n, out);
  for (int64_t i = 0; i < n; ++i) out[i] = activation_of(activation, gate[i]) * up[i];
}

Status CpuOps::glu(Activation activation, Buffer in, Buffer out) {
  each_row(rows(in), out.cols * 4, [&](int64_t t) {
    const float* gate = data(in) + t * in.cols;
    glu_row(activation, gate, gate + out.cols, out.cols, data(out) + t * out.cols);
  });
  return {};
}

Status CpuOps::activate(Activation activation, Buffer in, Buffer out) {
  each_row(rows(in), out.cols * 8, [&](int64_t t) {
    const float* from = data(in) + t * in.cols;
    float* to = data(out) + t * out.cols;
    for (int64_t i = 0; i < out.cols; ++i) to[i] = activation_of(activation, from[i]);
  });
  return {};
}

}  // namespace kvasir::model::cpu
