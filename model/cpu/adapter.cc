#include "model/cpu/adapter.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/cat.h"
#include "core/check.h"
#include "core/dtype.h"

namespace kvasir::model::cpu {
namespace {

int64_t padded(int64_t n) { return (n + kGroup - 1) / kGroup * kGroup; }
int64_t factor_bytes(int64_t depth, int64_t outputs, bool half) { return depth * padded(outputs) * (half ? 2 : 4); }

void put(uint8_t* bytes, const Factor& f, int64_t d, int64_t output, float value) {
  const int64_t at = (output / kGroup * f.depth + d) * kGroup + output % kGroup;
  if (f.half) {
    const uint16_t h = f32_to_bf16(value);
    std::memcpy(bytes + 2 * at, &h, 2);
  } else {
    std::memcpy(bytes + 4 * at, &value, 4);
  }
}

void row_at(const HostTensor& t, int64_t row, float* out) {
  dequantize(t.type, t.data + row * t.row_bytes(), t.cols, out);
}

// Magnitude over length, of one of DoRA's rows: that of the weight's row and what is added to it.
float stretch(std::vector<float>& weight_row, const std::vector<std::vector<float>>& a, const std::vector<float>& b,
              float scale, float magnitude) {
  for (size_t r = 0; r < a.size(); ++r) {
    const float by = scale * b[r];
    for (size_t i = 0; i < weight_row.size(); ++i) weight_row[i] += by * a[r][i];
  }
  double sum = 0;
  for (float f : weight_row) sum += double(f) * double(f);
  return sum > 0 ? float(double(magnitude) / std::sqrt(sum)) : 0;
}

}  // namespace

void CpuAdapter::Unmap::operator()(uint8_t* p) const { ::munmap(p, bytes); }

Result<std::shared_ptr<const CpuAdapter>> CpuAdapter::make(std::span<const LowRank> changes, bool precise, int64_t room,
                                                           const RowOf& row_of) {
  auto out = std::make_shared<CpuAdapter>();
  const bool half = !precise;
  int64_t factors = 0;
  for (const LowRank& c : changes) {
    factors += factor_bytes(c.a.cols, c.a.rows, half) + factor_bytes(c.a.rows, c.b.rows, half);
    out->bytes_ += int64_t(c.magnitude.size()) * 4;
    out->rank_ = std::max(out->rank_, c.a.rows);
    const auto id = size_t(c.weight.id);
    if (out->by_matrix_.size() <= id) out->by_matrix_.resize(id + 1);
  }
  out->bytes_ += factors;
  if (out->bytes_ > room)
    return resource_exhausted(cat("the adapter takes ", out->bytes_, " bytes, and there is room for ", room,
                                  ": unload another, or serve with more lora_memory"));
  void* mapped = ::mmap(nullptr, size_t(factors), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return resource_exhausted(cat("no memory for an adapter of ", factors, " bytes"));
  out->memory_ = {static_cast<uint8_t*>(mapped), Unmap{size_t(factors)}};
  ::madvise(mapped, size_t(factors), MADV_HUGEPAGE);
  uint8_t* next = out->memory_.get();
  auto take = [&](int64_t depth, int64_t outputs) {
    const Factor f{next, half, depth, padded(outputs)};
    next += factor_bytes(depth, outputs, half);
    return f;
  };
  for (const LowRank& c : changes) {
    Part& p = out->by_matrix_[size_t(c.weight.id)].emplace_back();
    const int64_t rank = c.a.rows, inputs = c.a.cols;
    p.first = c.first, p.rows = c.b.rows;
    uint8_t* const bytes_of_a = next;
    p.a = take(inputs, rank);
    uint8_t* const bytes_of_b = next;
    p.b = take(rank, p.rows);
    std::vector<std::vector<float>> a(static_cast<size_t>(rank));
    for (int64_t r = 0; r < rank; ++r) {
      a[size_t(r)].resize(size_t(inputs));
      row_at(c.a, r, a[size_t(r)].data());
      for (int64_t i = 0; i < inputs; ++i) put(bytes_of_a, p.a, i, r, a[size_t(r)][size_t(i)]);
    }
    std::vector<float> b(static_cast<size_t>(rank)), weight_row(c.magnitude.empty() ? 0 : size_t(inputs));
    for (int64_t o = 0; o < p.rows; ++o) {
      row_at(c.b, o, b.data());
      float factor = 1;
      if (!c.magnitude.empty()) {
        row_of(c.weight, c.first + o, weight_row.data());
        factor = stretch(weight_row, a, b, c.scale, c.magnitude[size_t(o)]);
        p.factors.push_back(factor);
      }
      for (int64_t r = 0; r < rank; ++r) put(bytes_of_b, p.b, r, o, factor * c.scale * b[size_t(r)]);
    }
  }
  return std::shared_ptr<const CpuAdapter>(std::move(out));
}

// ---- a step's rows

void AdapterRows::begin(const Batch& batch, int32_t rank) {
  used_ = 0;
  for (size_t s = 0; s < batch.adapters.size(); ++s) {
    if (!batch.adapters[s]) continue;
    const auto* adapter = static_cast<const CpuAdapter*>(&batch.adapters[s]->part(rank));
    size_t i = 0;
    while (i < used_ && rows_[i].adapter != adapter) ++i;
    if (i == used_) {
      if (++used_ > rows_.size()) rows_.emplace_back();
      rows_[i].adapter = adapter, rows_[i].rows.clear();
    }
    for (int64_t t = batch.seqstarts[s]; t < batch.seqstarts[s + 1]; ++t) rows_[i].rows.push_back(int32_t(t));
  }
}

const ProductAdapters* AdapterRows::reduce(Matrix weight, const float* x, int64_t x_stride, const Kernels& kernels,
                                           ThreadPool& pool) {
  if (used_ == 0) return nullptr;
  auto& groups = product_.groups_;
  groups.clear();
  size_t need = 0;
  for (size_t i = 0; i < used_; ++i) {
    ProductAdapters::Group g{rows_[i].rows, rows_[i].adapter->parts(weight), nullptr, 0};
    if (g.parts.empty()) continue;
    for (const CpuAdapter::Part& p : g.parts) g.width += p.a.outputs;
    need += g.rows.size() * size_t(g.width);
    groups.push_back(g);
  }
  if (groups.empty()) return nullptr;
  reduced_.assign(need, 0.0f);
  struct Task {
    const CpuAdapter::Part* part;
    const int32_t* row;
    int rows;
    float* to;
    int64_t width;
  };
  std::vector<Task> tasks;
  float* at = reduced_.data();
  for (ProductAdapters::Group& g : groups) {
    g.reduced = at;
    for (size_t r = 0; r < g.rows.size(); r += 2) {
      float* to = at + int64_t(r) * g.width;
      for (const CpuAdapter::Part& p : g.parts) {
        tasks.push_back({&p, &g.rows[r], int(std::min<size_t>(2, g.rows.size() - r)), to, g.width});
        to += p.a.outputs;
      }
    }
    at += int64_t(g.rows.size()) * g.width;
  }
  auto run = [&](int64_t i, int) {
    const Task& t = tasks[size_t(i)];
    const float* from[2] = {x + int64_t(t.row[0]) * x_stride, x + int64_t(t.row[t.rows - 1]) * x_stride};
    float* to[2] = {t.to, t.to + t.width};
    kernels.low_rank(t.part->a, 0, t.part->a.outputs, from, t.rows, to);
  };
  if (pool.threads() == 1 || tasks.size() == 1)
    for (int64_t i = 0; i < std::ssize(tasks); ++i) run(i, 0);
  else
    pool.for_each_near(std::ssize(tasks), run);
  return &product_;
}

// ---- a product's piece

template <class F>
void ProductAdapters::each(int64_t first, int64_t count, int64_t column, int64_t columns, const F& f) const {
  for (const Group& g : groups_) {
    const auto begin = std::lower_bound(g.rows.begin(), g.rows.end(), first);
    const auto end = std::lower_bound(begin, g.rows.end(), first + count);
    if (begin == end) continue;
    const float* reduced = g.reduced + (begin - g.rows.begin()) * g.width;
    for (const CpuAdapter::Part& p : g.parts) {
      const int64_t from = std::max(column, p.first), to = std::min(column + columns, p.first + p.rows);
      if (from < to) f(std::span<const int32_t>(begin, end), p, reduced, g.width, from, to);
      reduced += p.a.outputs;
    }
  }
}

void ProductAdapters::take_out(int64_t first, int64_t count, int64_t column, int64_t columns, float* y,
                               int64_t y_stride, std::vector<float>& saved) const {
  each(first, count, column, columns,
       [&](std::span<const int32_t> rows, const CpuAdapter::Part& p, const float*, int64_t, int64_t from, int64_t to) {
         if (p.factors.empty()) return;
         for (int32_t row : rows) {
           float* at = y + (row - first) * y_stride - column;
           saved.insert(saved.end(), at + from, at + to);
           std::fill(at + from, at + to, 0.0f);
         }
       });
}

void ProductAdapters::put_back(int64_t first, int64_t count, int64_t column, int64_t columns, float* y,
                               int64_t y_stride, const std::vector<float>& saved) const {
  const float* back = saved.data();
  each(first, count, column, columns,
       [&](std::span<const int32_t> rows, const CpuAdapter::Part& p, const float*, int64_t, int64_t from, int64_t to) {
         if (p.factors.empty()) return;
         for (int32_t row : rows)
           for (float* at = y + (row - first) * y_stride - column + from;
                at < y + (row - first) * y_stride - column + to;)
             *at++ += *back++;
       });
}

void ProductAdapters::apply(const Kernels& kernels, int64_t first, int64_t count, int64_t column, int64_t columns,
                            float* y, int64_t y_stride) const {
  each(first, count, column, columns,
       [&](std::span<const int32_t> rows, const CpuAdapter::Part& p, const float* reduced, int64_t width, int64_t from,
           int64_t to) {
         for (size_t i = 0; i < rows.size(); i += 2) {
           const int pair = int(std::min<size_t>(2, rows.size() - i));
           const float* x[2] = {reduced + int64_t(i) * width, reduced + int64_t(i + size_t(pair) - 1) * width};
           float* out[2] = {y + (rows[i] - first) * y_stride + from - column,
                            y + (rows[i + size_t(pair) - 1] - first) * y_stride + from - column};
           for (int t = 0; t < pair && !p.factors.empty(); ++t)
             for (int64_t c = from; c < to; ++c) out[t][c - from] *= p.factors[size_t(c - p.first)];
           kernels.low_rank(p.b, from - p.first, to - from, x, pair, out);
         }
       });
}

}  // namespace kvasir::model::cpu
