// A network on a GPU.
#pragma once

#include <memory>
#include <optional>

#include "model/arch/registry.h"
#include "model/device.h"
#include "model/runner.h"

namespace kvasir::model::cuda {

// What the runner on a GPU adds.
class Replaying {
 public:
  virtual ~Replaying() = default;
  virtual int64_t replays() const = 0;  // steps that were a graph launched before
};

Result<std::unique_ptr<Runner>> make_runner(const ModelConfig& config, std::unique_ptr<Weights> weights,
                                            const RunnerOptions& options, const LoadProgress& progress);

std::optional<GpuMemory> memory_of(int device);

}  // namespace kvasir::model::cuda
