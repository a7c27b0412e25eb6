#include "model/config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string_view text(reinterpret_cast<const char*>(data), size);
  auto json = kvasir::model::config_from_json(text, "fuzz");
  if (json.ok() && !json->validate().ok()) __builtin_trap();
  auto mistral = kvasir::model::config_from_mistral(text, "fuzz");
  if (mistral.ok() && !mistral->validate().ok()) __builtin_trap();
  auto dummy = kvasir::model::config_from_dummy(text);
  if (dummy.ok() && !dummy->validate().ok()) __builtin_trap();
  return 0;
}
