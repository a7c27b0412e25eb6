// A low-rank adapter (LoRA, rsLoRA, DoRA) as a device holds it: what some of a network's products gain for the rows of
// the sequences that name it (Batch::adapters). It may be used as long as somebody holds it, whatever its name is given
// to meanwhile.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/status.h"

namespace kvasir::model {

class Adapter {
 public:
  virtual ~Adapter() = default;
  virtual int64_t bytes() const = 0;
  virtual int64_t rank() const = 0;  // the largest
  // What one of several ranks that compute together has of it.
  virtual const Adapter& part(int32_t /*rank*/) const { return *this; }
};
using AdapterPtr = std::shared_ptr<const Adapter>;

class SplitAdapter final : public Adapter {
 public:
  explicit SplitAdapter(std::vector<AdapterPtr> parts) : parts_(std::move(parts)) {}
  int64_t bytes() const override {
    int64_t all = 0;
    for (const AdapterPtr& p : parts_) all += p->bytes();
    return all;
  }
  int64_t rank() const override { return parts_[0]->rank(); }
  const Adapter& part(int32_t rank) const override { return *parts_[size_t(rank)]; }

 private:
  const std::vector<AdapterPtr> parts_;  // by rank
};

// f(rank, bytes there is room for) loads what each of so many ranks has.
template <class F>
Result<AdapterPtr> load_parts(int32_t ranks, int64_t room, const F& f) {
  std::vector<AdapterPtr> parts;
  for (int32_t rank = 0; rank < ranks; ++rank) {
    KVASIR_ASSIGN(AdapterPtr part, f(rank, room));
    room -= part->bytes();
    parts.push_back(std::move(part));
  }
  if (ranks == 1) return std::move(parts[0]);
  return AdapterPtr(std::make_shared<SplitAdapter>(std::move(parts)));
}

constexpr int64_t kMostAdapterRank = 256;

}  // namespace kvasir::model
