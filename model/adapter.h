// A low-rank adapter (LoRA, rsLoRA, DoRA) as a device holds it: what some of a network's products gain for the rows of
// the sequences that name it (Batch::adapters). It may be used as long as somebody holds it, whatever its name is given
// to meanwhile.
#pragma once

#include <cstdint>
#include <memory>

namespace kvasir::model {

class Adapter {
 public:
  virtual ~Adapter() = default;
  virtual int64_t bytes() const = 0;
  virtual int64_t rank() const = 0;  // the largest
};
using AdapterPtr = std::shared_ptr<const Adapter>;

constexpr int64_t kMostAdapterRank = 256;

}  // namespace kvasir::model
