#include "model/formats/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  kvasir::model::SafeTensors tensors;
  if (!kvasir::model::parse_safetensors("fuzz", {data, size}, 0, &tensors).ok()) return 0;
  for (auto& [name, t] : tensors)
    if (t.data < data || t.data + t.bytes > data + size) __builtin_trap();
  return 0;
}
