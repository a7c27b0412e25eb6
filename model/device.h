// What `device` says: auto, cpu, cuda, or cuda with the numbers of its GPUs (cuda:1, cuda:0,1).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"

namespace kvasir::model {

struct DeviceChoice {
  enum class Kind { automatic, cpu, cuda };
  Kind kind = Kind::automatic;
  std::vector<int> gpus;  // one a rank; empty: the first ones
};

Result<DeviceChoice> parse_device(std::string_view word);

struct GpuMemory {
  std::string name;
  int64_t total = 0, free = 0;  // bytes
};

}  // namespace kvasir::model
