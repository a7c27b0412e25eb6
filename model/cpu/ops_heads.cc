// Products that each head has of its own: what one row is multiplied by lies in as many small matrices.
#include <cstring>

#include "core/check.h"
#include "model/cpu/ops.h"

namespace kvasir::model::cpu {
namespace {
constexpr int64_t kTall = 16;        // kernels may write so many rows of integers together
constexpr int64_t kRows = 128;       // of a piece: what they leave stays in the second-level cache
constexpr int64_t kMostGroups = 16;  // likewise
}  // namespace

Status CpuOps::linear_heads(Buffer in, Pieces from, const HeadMatrices& of, Buffer out, Pieces to) {
  const std::vector<Matrix>& weights = of.matrices;
  const auto heads = std::ssize(weights);
  const int64_t rows = this->rows(in), own = weights[0].cols;
  if (rows == 0) return {};
  KVASIR_CHECK(from.first + (heads - 1) * from.step + own <= in.cols, own, " columns a head of ", in.cols);
  KVASIR_CHECK(to.first + (heads - 1) * to.step + weights[0].rows <= out.cols, weights[0].rows, " columns a head into ",
               out.cols);
  const int64_t cols = matrices_[size_t(weights[0].id)].padded_cols(), tall = (rows + kTall - 1) / kTall * kTall;
  const int64_t lines = (cols + 63) / 64 * 2;  // of a row in QuantRoom
  std::vector<Input> inputs;
  inputs.reserve(size_t(heads));
  bool floats = false;
  for (int64_t h = 0; h < heads; ++h) {
    const Weight& m = matrices_[size_t(weights[size_t(h)].id)];
    KVASIR_CHECK(m.cols == own && m.rows == weights[0].rows, "heads' weights of different shapes");
    Input& i = inputs.emplace_back(Input{m, rows, nullptr, {}, vector(biases_[size_t(weights[size_t(h)].id)])});
    for (size_t run = 0; run < m.runs.size(); ++run) {
      if (!of_integers(m.runs[run])) continue;
      const QuantRows all = quants_[run].rows(heads * tall, cols);
      i.quants[run] = {all.q + h * tall * lines * 64,
                       all.d + h * tall,
                       all.sums + 2 * h * tall * lines,
                       all.offsets + 8 * h * tall * lines,
                       all.planes + 8 * h * tall * lines,
                       cols,
                       rows};
    }
    floats |= i.floats();
  }
  // Each head's columns on their own, and padded; rows in pairs, as quantize() wants them.
  const bool copied = floats || cols != own;
  if (copied) padded_.resize(std::max(padded_.size(), size_t(heads * rows * cols)));
  const int64_t pairs = (rows + 1) / 2;
  each_row(heads * pairs, 2 * cols, [&](int64_t i) {
    const int64_t h = i / pairs, first = i % pairs * 2;
    for (int64_t t = first; t < std::min(rows, first + 2); ++t) {
      const float* row = data(in) + t * in.cols + from.first + h * from.step;
      if (copied) {
        float* at = padded_.data() + (h * rows + t) * cols;
        std::memcpy(at, row, size_t(own) * sizeof(float));
        std::fill(at + own, at + cols, 0.0f);
        row = at;
      }
      inputs[size_t(h)].quantize(kernels_, row, t);
    }
  });
  for (int64_t h = 0; h < heads && copied; ++h) inputs[size_t(h)].x = padded_.data() + h * rows * cols;
  const int64_t groups = inputs[0].m.groups, parts = (groups + kMostGroups - 1) / kMostGroups,
                spans = (rows + kRows - 1) / kRows;
  pool_.for_each_near(heads * spans * parts, [&](int64_t i, int) {
    const int64_t h = i / (spans * parts), span = i / parts % spans, part = i % parts;
    const int64_t group = groups * part / parts, end = groups * (part + 1) / parts, first = span * kRows;
    float* y = data(out) + first * out.cols + to.first + h * to.step + group * kGroup;
    inputs[size_t(h)].product(kernels_, first, std::min(kRows, rows - first), group, end - group, false, y, out.cols);
  });
  return {};
}

Status CpuOps::copy_pieces(Buffer in, Pieces from, Buffer out, Pieces to, int64_t cols, int64_t count) {
  KVASIR_CHECK(from.first + (count - 1) * from.step + cols <= in.cols, cols, " columns of ", in.cols);
  KVASIR_CHECK(to.first + (count - 1) * to.step + cols <= out.cols, cols, " columns into ", out.cols);
  each_row(rows(in), count * cols, [&](int64_t t) {
    const float* x = data(in) + t * in.cols + from.first;
    float* y = data(out) + t * out.cols + to.first;
    for (int64_t i = 0; i < count; ++i) std::copy_n(x + i * from.step, cols, y + i * to.step);
  });
  return {};
}

}  // namespace kvasir::model::cpu
