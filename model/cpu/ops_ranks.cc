// Where ranks of a model on the host wait for one another: sums of partial results, logits, norms over all heads.
#include "model/cpu/ops.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "model/cpu/elementwise.h"

namespace kvasir::model::cpu {

// A token's row is one rank's, and zeros of the others.
Status CpuOps::embed_own(const Weight& m, float scale, Buffer out) {
  KVASIR_TRY(make_partials(m.cols));
  const Share& own = options_.part.vocab;
  each_row(int64_t(tokens_->size()), m.cols * 8, [&](int64_t t) {
    const int64_t row = (*tokens_)[size_t(t)] - own.first;
    float* to = data(partial()) + t * m.cols;
    if (row >= 0 && row < own.count)
      m.unpack(row, scale, to);
    else
      std::fill_n(to, m.cols, 0.0f);
  });
  return sum_partials(false, out);
}

Status CpuOps::make_partials(int64_t cols) {
  KVASIR_CHECK(partials_[0].id < 0 || partials_[0].cols == cols, "sums of ", cols, " and ", partials_[0].cols,
               " columns");
  for (Buffer& b : partials_)
    if (b.id < 0) {
      KVASIR_ASSIGN(b, make_buffer(cols, false, Shard::whole));
    }
  return {};
}

Status CpuOps::sum_partials(bool add, Buffer out) {
  Link& link = *options_.link;
  const int64_t cols = partial().cols;
  KVASIR_TRY(link.meet(options_.part.rank, data(partial())));
  each_row(rows(out), cols * link.ranks(), [&](int64_t t) {
    thread_local std::vector<float> sum;
    const float* first = link.published_by(0) + t * cols;
    float* to = data(out) + t * out.cols;
    if (add) {
      sum.assign(first, first + cols);
    } else {
      std::copy_n(first, cols, to);
    }
    for (int32_t r = 1; r < link.ranks(); ++r) add_to(add ? sum.data() : to, link.published_by(r) + t * cols, cols);
    if (add) add_to(to, sum.data(), cols);
  });
  turn_ ^= 1;
  return {};
}

Result<Buffer> CpuOps::gather(Buffer logits) {
  if (!options_.link) return logits;
  Link& link = *options_.link;
  const Share& own = options_.part.vocab;
  const bool first = options_.part.first();
  if (first && whole_logits_.id < 0) {
    KVASIR_ASSIGN(whole_logits_, make_buffer(own.all, true, Shard::whole));
  }
  // Who draws has done with those before.
  KVASIR_TRY(link.meet(options_.part.rank, first ? data(whole_logits_) : nullptr));
  float* to = const_cast<float*>(link.published_by(0)) + own.first;
  each_row(logit_rows_, logits.cols,
           [&](int64_t t) { std::copy_n(data(logits) + t * logits.cols, logits.cols, to + t * own.all); });
  KVASIR_TRY(link.meet(options_.part.rank, nullptr));
  return first ? whole_logits_ : logits;
}

namespace {

double squares_of(const float* x, int64_t count) {
  double sums[4] = {};
  for (int64_t i = 0; i < count; ++i) sums[i % 4] += double(x[i]) * double(x[i]);
  return sums[0] + sums[1] + sums[2] + sums[3];
}

}  // namespace

// Each rank has the sums of squares of its own heads, and learns those of the others. What it publishes stays as it is
// until it is here again, when all have passed the barrier of the layer's first sum.
Status CpuOps::qk_norm_over_ranks(Buffer qkv, int64_t q_cols, Vector q, int64_t kv_cols, Vector k, float eps) {
  Link& link = *options_.link;
  const RankPart& part = options_.part;
  squares_.resize(size_t(2 * rows(qkv)));
  each_row(rows(qkv), q_cols + kv_cols, [&](int64_t t) {
    const float* row = data(qkv) + t * qkv.cols;
    squares_[size_t(2 * t)] = float(squares_of(row, q_cols));
    squares_[size_t(2 * t + 1)] = part.counts_keys() ? float(squares_of(row + q_cols, kv_cols)) : 0;
  });
  KVASIR_TRY(link.meet(part.rank, squares_.data()));
  const int64_t head = q_cols / part.heads.count;
  each_row(rows(qkv), q_cols + kv_cols, [&](int64_t t) {
    float* x = data(qkv) + t * qkv.cols;
    for (int of : {0, 1}) {
      float sum = 0;
      for (int32_t r = 0; r < link.ranks(); ++r) sum += link.published_by(r)[2 * t + of];
      const int64_t all = head * (of == 0 ? part.heads.all : part.kv_heads.all), cols = of == 0 ? q_cols : kv_cols;
      const float by = 1 / std::sqrt(sum / float(all) + eps), *w = vector(of == 0 ? q : k);
      for (int64_t i = 0; i < cols; ++i) x[i] *= by * w[i];
      x += cols;
    }
  });
  return {};
}

}  // namespace kvasir::model::cpu
