#include "model/device.h"

#include <algorithm>
#include <charconv>

#include "core/cat.h"

namespace kvasir::model {

Result<DeviceChoice> parse_device(std::string_view word) {
  using Kind = DeviceChoice::Kind;
  if (word == "auto" || word.empty()) return DeviceChoice{};
  if (word == "cpu") return DeviceChoice{.kind = Kind::cpu};
  DeviceChoice out{.kind = Kind::cuda};
  if (word == "cuda") return out;
  auto refuse = [&](std::string_view why) {
    return invalid_argument(cat("device is ", word, "; ", why)).with_field("device");
  };
  constexpr std::string_view kPrefix = "cuda:";
  if (!word.starts_with(kPrefix)) return refuse("it must be auto, cpu, cuda, or cuda with GPUs: cuda:1, cuda:0,1");
  const char *at = word.data() + kPrefix.size(), *const end = word.data() + word.size();
  while (true) {
    int gpu = -1;
    const auto [next, error] = std::from_chars(at, end, gpu);
    if (error != std::errc() || gpu < 0 || (next != end && *next != ','))
      return refuse("GPUs are numbers from 0 on with commas between them: cuda:0,1");
    if (std::find(out.gpus.begin(), out.gpus.end(), gpu) != out.gpus.end())
      return refuse(cat("GPU ", gpu, " is named twice"));
    out.gpus.push_back(gpu);
    if (next == end) return out;
    at = next + 1;
  }
}

}  // namespace kvasir::model
