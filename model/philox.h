// Counter-based random numbers (Philox 4x32-10): a pure function of key and counter, so a draw needs no
// state and is the same on every device.
#pragma once

#include <array>
#include <cstdint>

namespace kvasir::model {

constexpr std::array<uint32_t, 4> philox(std::array<uint32_t, 4> c, std::array<uint32_t, 2> k) {
  for (int round = 0; round < 10; ++round) {
    uint64_t a = uint64_t(0xD2511F53) * c[0], b = uint64_t(0xCD9E8D57) * c[2];
    c = {uint32_t(b >> 32) ^ c[1] ^ k[0], uint32_t(b), uint32_t(a >> 32) ^ c[3] ^ k[1], uint32_t(a)};
    k[0] += 0x9E3779B9;
    k[1] += 0xBB67AE85;
  }
  return c;
}

// The `draw`-th number in [0, 1) for one token of one choice of a seeded request.
constexpr double uniform(uint64_t seed, int32_t choice, int64_t position, uint32_t draw) {
  auto r = philox({uint32_t(position), uint32_t(uint64_t(position) >> 32), uint32_t(choice), draw},
                  {uint32_t(seed), uint32_t(seed >> 32)});
  return double((uint64_t(r[0]) << 21) ^ (r[1] >> 11)) * 0x1p-53;
}

}  // namespace kvasir::model
