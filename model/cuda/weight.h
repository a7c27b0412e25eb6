// A matrix as it lies on the device, and how it comes there.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>
#include <string>

#include "attention/cuda/memory.h"
#include "core/status.h"
#include "model/cuda/packing_choice.h"
#include "model/cuda/upload.h"
#include "model/formats/weights.h"

namespace kvasir::model::cuda {

struct Weight {
  Packing packing = Packing::bf16;
  int64_t rows = 0, cols = 0;
  // bf16, fp8: [rows, cols]; mxfp4: as in files; else blocks (packing.h).
  DeviceMemory data;
  DeviceMemory scales;  // fp8: what each row is multiplied by, float32
  float unit = 1;       // packed: what every sum is multiplied by
  int64_t half = 0;     // packed: strips of a gate, which lie in turn with those of what it lets through
  int64_t bytes = 0;
};

// "auto", "bf16" or "fp8", where this device can.
Result<Quantize> parse_quantize(const std::string& word);
bool multiplies_bytes();  // whether this device has E4M3

// As choose_packing() says.
Status load_weight(std::span<const HostTensor> parts, Quantize quantize, Upload& upload, Weight* out);

// The weight as row-major bfloat16: itself, or unpacked into `room`, which is made as large where it is empty.
Result<const void*> as_half(const Weight& weight, DeviceMemory* room, cudaStream_t stream);

}  // namespace kvasir::model::cuda
