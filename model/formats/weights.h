// Where a network's weights come from: a GGUF file, safetensors, or a seed. Names are GGUF's
// ("blk.0.attn_q.weight") whatever the source calls them; rows are output features.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"
#include "model/formats/weight_type.h"

namespace kvasir::model {

// Weights that are a function of a seed (dummy models): `stream` sets tensors apart, `spread` is how far they reach.
struct Seeded {
  uint64_t seed = 0, stream = 0;
  float spread = 0;
  // Of a part: where it begins in the whole, whose rows are `whole_cols` long (0: it is the whole).
  int64_t row = 0, col = 0, whole_cols = 0;
};

struct HostTensor {
  std::string name;
  WeightType type = WeightType::f32;
  int64_t rows = 1, cols = 0;     // a vector has one row
  const uint8_t* data = nullptr;  // rows lie densely, each type_info(type)->bytes * cols / block
  int64_t bytes = 0;
  std::optional<Seeded> seeded;  // then there is no data: a device makes it (Weights::leave_seeded)
  int64_t group = 0;             // of INT4: so many elements of a row have the same scale, if that is known
  // Of F8_E4M3 (Weights::leave_bytes): one for each row, or for each 128 elements of it.
  std::vector<float> row_scales;
  std::shared_ptr<const uint8_t[]> owned = nullptr;  // what `data` is in where it is not the source's own

  int64_t row_bytes() const { return bytes / rows; }
  int64_t scales_a_row() const { return std::ssize(row_scales) / rows; }
};

class Weights {
 public:
  virtual ~Weights() = default;
  virtual bool has(std::string_view name) const = 0;
  // The tensor, checked to have this shape. Its data is good until release() or the source's end.
  virtual Result<HostTensor> get(std::string_view name, int64_t rows, int64_t cols) = 0;
  virtual void release(const HostTensor& tensor) = 0;
  // Names of tensors that nobody has asked for, but for those that say nothing (the masks and frequencies of some
  // files).
  virtual std::vector<std::string> unread() const { return {}; }
  // A device that makes seeded matrices itself asks for no data of them.
  virtual void leave_seeded() {}
  // A device that reads E4M3 is given it with its scales, and NVFP4 in blocks; everybody else bfloat16 and float16.
  virtual void leave_bytes() {}
  virtual int64_t parameters() const = 0;
  virtual int64_t bytes() const = 0;
  virtual std::vector<HostTensor> tensors() const = 0;  // what the source holds, in its order and by its names
};

}  // namespace kvasir::model
