#include "model/config.h"
#include "model/formats/gguf_model.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  auto gguf = kvasir::model::Gguf::parse("fuzz", {data, size});
  if (!gguf.ok()) return 0;
  (void)kvasir::model::gguf_vocab(**gguf);
  (void)kvasir::model::config_from_gguf(**gguf);
  float out[256];
  for (auto& t : (*gguf)->tensors())
    if (t.dims[0] <= 256) kvasir::model::dequantize(t.type, t.data, t.dims[0], out);
  return 0;
}
