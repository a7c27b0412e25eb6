// Where a fuzzer starts from: its seeds are made here and not stored. The first folder named on the command line is
// filled with them when it is empty.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

// gRPC and protobuf come without instrumentation, so what they put into a container looks wrong to the checker of
// containers, and what they keep to the end looks lost.
extern "C" inline const char* __asan_default_options() { return "detect_container_overflow=0"; }

namespace kvasir {

inline void write_seeds(int argc, char** argv, const std::vector<std::string>& seeds) {
  for (int i = 1; i < argc; ++i) {
    if (argv[i][0] == '-' || !std::filesystem::is_directory(argv[i])) continue;
    if (!std::filesystem::is_empty(argv[i])) return;
    for (size_t k = 0; k < seeds.size(); ++k)
      std::ofstream(std::string(argv[i]) + "/seed-" + std::to_string(k), std::ios::binary) << seeds[k];
    return;
  }
}

}  // namespace kvasir
