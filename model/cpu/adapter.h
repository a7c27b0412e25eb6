// Adapters on the host, and the rows of a step that have one: grouped by adapter, each product by a weight that theirs
// change gains its two thin products where its own result is still in the cache.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "core/thread_pool.h"
#include "model/adapter.h"
#include "model/batch.h"
#include "model/cpu/kernels.h"
#include "model/ops.h"

namespace kvasir::model::cpu {

class CpuAdapter final : public Adapter {
 public:
  // Of rows [first, first + rows) of a weight.
  struct Part {
    int64_t first = 0, rows = 0;
    Factor a, b;                 // of inputs to ranks, and on to rows: b holds the scale, and of DoRA the factors
    std::vector<float> factors;  // DoRA: of the weight's own product; empty: 1
  };
  using RowOf = std::function<void(Matrix weight, int64_t row, float* out)>;  // a weight's, as the device has it

  // bfloat16 factors unless `precise`.
  static Result<std::shared_ptr<const CpuAdapter>> make(std::span<const LowRank> changes, bool precise, int64_t room,
                                                        const RowOf& row_of);
  int64_t bytes() const override { return bytes_; }
  int64_t rank() const override { return rank_; }
  std::span<const Part> parts(Matrix weight) const {
    return size_t(weight.id) < by_matrix_.size() ? std::span<const Part>(by_matrix_[size_t(weight.id)])
                                                 : std::span<const Part>();
  }

 private:
  struct Unmap {
    size_t bytes;
    void operator()(uint8_t* p) const;
  };
  std::unique_ptr<uint8_t, Unmap> memory_{nullptr,
                                          Unmap{0}};  // of all factors, on large pages where the system gives them
  std::vector<std::vector<Part>> by_matrix_;
  int64_t bytes_ = 0, rank_ = 0;
};

// Of one product: what the first factors have made of its inputs.
class ProductAdapters {
 public:
  bool any() const { return !groups_.empty(); }
  // Runs `base`, which puts (or adds) rows [first, first + count) and columns [column, column + columns) of the product
  // into y, and adds there what adapters do.
  template <class F>
  void around(const Kernels& kernels, int64_t first, int64_t count, int64_t column, int64_t columns, bool add, float* y,
              int64_t y_stride, const F& base) const {
    thread_local std::vector<float> saved;
    saved.clear();
    if (add) take_out(first, count, column, columns, y, y_stride, saved);
    base();
    apply(kernels, first, count, column, columns, y, y_stride);
    if (!saved.empty()) put_back(first, count, column, columns, y, y_stride, saved);
  }

 private:
  friend class AdapterRows;
  struct Group {
    std::span<const int32_t> rows;  // ascending
    std::span<const CpuAdapter::Part> parts;
    const float* reduced;  // [rows, width]: each part's x A, one after another
    int64_t width;
  };
  // f(row of the product, its place in the group, part, its place in `reduced`, first and last column) for what of
  // groups lies inside.
  template <class F>
  void each(int64_t first, int64_t count, int64_t column, int64_t columns, const F& f) const;
  // DoRA stretches a product by factors, so what it is added to must not be there meanwhile.
  void take_out(int64_t first, int64_t count, int64_t column, int64_t columns, float* y, int64_t y_stride,
                std::vector<float>& saved) const;
  void put_back(int64_t first, int64_t count, int64_t column, int64_t columns, float* y, int64_t y_stride,
                const std::vector<float>& saved) const;
  void apply(const Kernels& kernels, int64_t first, int64_t count, int64_t column, int64_t columns, float* y,
             int64_t y_stride) const;

  std::vector<Group> groups_;
};

class AdapterRows {
 public:
  void begin(const Batch& batch, int32_t rank);
  // Null where no row's adapter changes this weight. Good until the next call.
  const ProductAdapters* reduce(Matrix weight, const float* x, int64_t x_stride, const Kernels& kernels,
                                ThreadPool& pool);

 private:
  struct Rows {
    const CpuAdapter* adapter;
    std::vector<int32_t> rows;
  };
  std::vector<Rows> rows_;  // only the first `used_`: the others keep their memory
  size_t used_ = 0;
  ProductAdapters product_;
  std::vector<float> reduced_;
};

}  // namespace kvasir::model::cpu
