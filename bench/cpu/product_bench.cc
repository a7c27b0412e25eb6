// What a product of 16 rows by 16 outputs by 32 inputs takes, by kernels, weights and rows; and how free the matrix
// unit is meanwhile, which a neighbour on the same core shares.
//   product_bench [inputs] [kernels] [outputs] [type]
// Floats (BF16, F8_E4M3) only where they are named.
// One line for each, or for those kernels and that type; one thread, medians of 15 rounds, weights and rows in the
// caches unless there are outputs for more (256).
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "bench/limits.h"
#include "core/cpu.h"
#include "core/dtype.h"
#include "model/cpu/kernels.h"
#include "model/formats/weight_type.h"
#include "model/formats/weights.h"

namespace kvasir::model::cpu {
namespace {

constexpr int kRounds = 15;

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

// Cycles a second of this core, by a chain of multiplications of three cycles each (x86) or as many elsewhere.
double clock_rate() {
  constexpr int64_t kSteps = 300000;
  uint64_t x = 3;
  const double begin = bench::thread_seconds();
  for (int64_t i = 0; i < kSteps; ++i) {
    x *= x;
    asm volatile("" : "+r"(x));
  }
  return 3 * kSteps / (bench::thread_seconds() - begin);
}

struct Took {
  double ns, cycles;
};
// Of one of `each` that f does, f being run for about a millisecond a round.
template <class F>
Took time_of(double each, const F& f) {
  f();
  double begin = bench::thread_seconds();
  f();
  const int repeats = std::max(1, int(1e-3 / std::max(1e-7, bench::thread_seconds() - begin)));
  std::vector<double> ns, cycles;
  for (int round = 0; round < kRounds; ++round) {
    const double before = clock_rate();
    begin = bench::thread_seconds();
    for (int i = 0; i < repeats; ++i) f();
    const double seconds = (bench::thread_seconds() - begin) / repeats / each;
    ns.push_back(1e9 * seconds), cycles.push_back(seconds * 0.5 * (before + clock_rate()));
  }
  return {median(ns), median(cycles)};
}

#if defined(__x86_64__)
// Four products of 16 by 16 by 64 bytes that wait for nothing: 64 cycles where the unit is ours alone.
void matrix_unit() {
  if (!kvasir::cpu().amx_int8 || !enable_amx()) return;
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } tiles;
  asm volatile("ldtilecfg %0" ::"m"(tiles));
  for (int round = 0; round < 3; ++round) {
    const Took took = time_of(1000, [] {
      for (int i = 0; i < 1000; ++i)
        asm volatile(
            "tdpbssd %tmm6, %tmm4, %tmm0\n tdpbssd %tmm6, %tmm5, %tmm1\n"
            "tdpbsud %tmm7, %tmm4, %tmm2\n tdpbsud %tmm7, %tmm5, %tmm3");
    });
    std::printf("matrix unit, four products of 64 inputs  %6.1f ns %6.1f cycles\n", took.ns, took.cycles);
  }
  asm volatile("tilerelease");
}
#else
void matrix_unit() {}
#endif

// Bytes of a tensor whose scales are ordinary numbers.
std::vector<uint8_t> random_tensor(WeightType type, int64_t elements) {
  std::mt19937 random(1);
  std::uniform_real_distribution<float> scale(0.001f, 0.1f);
  const TypeInfo& info = *type_info(type);
  std::vector<uint8_t> bytes(size_t(elements / info.block * info.bytes));
  for (uint8_t& b : bytes) b = uint8_t(random());
  if (!info.quantized) {  // no numbers that are none
    for (uint8_t& b : bytes) b &= 0xbf;
    return bytes;
  }
  const bool two = type == WeightType::q4_1 || type == WeightType::q2_k || type == WeightType::q4_k ||
                   type == WeightType::q5_k || type == WeightType::q5_1;
  const size_t first = type == WeightType::q2_k   ? 80
                       : type == WeightType::q3_k ? 108
                       : type == WeightType::q6_k ? 208
                                                  : 0;
  for (size_t at = 0; at < bytes.size(); at += size_t(info.bytes))
    for (size_t s = 0; s < (two ? 2u : 1u); ++s) {
      const uint16_t half = f32_to_f16(scale(random));
      if (type == WeightType::mxfp4)
        bytes[at] = uint8_t(118 + half % 6);
      else
        std::memcpy(bytes.data() + at + first + 2 * s, &half, 2);
    }
  return bytes;
}

void products(WeightType type, int64_t inputs, int64_t outputs, std::string_view only) {
  const std::vector<uint8_t> bytes = random_tensor(type, outputs * inputs);
  const HostTensor t{"w", type, outputs, inputs, bytes.data(), int64_t(bytes.size())};
  ThreadPool pool(1);
  Arena arena;
  const PackedMatrix m = pack({&t, 1}, arena, pool);
  for (const Kernels* k : runnable_kernels()) {
    if (!only.empty() && k->name != only) continue;
    for (int64_t rows : {1, 2, 3, 4, 8, 16, 224}) {
      std::vector<float> x(size_t(rows * inputs)), y(size_t(rows * outputs));
      std::mt19937 random(2);
      std::normal_distribution<float> normal;
      for (float& v : x) v = normal(random);
      QuantRoom room;
      const QuantRows in = room.rows(rows, m.padded_cols());
      const bool floats = !packing_info(m.packing).quantized;
      for (int64_t r = 0; r < rows && !floats; ++r) k->quantize(x.data() + r * inputs, m.packing, in, r);
      const int64_t tiles = (rows + 15) / 16;
      const double each = double(tiles * m.groups * m.blocks);
      const Took took = time_of(each, [&] {
        if (floats)
          k->floating(m, 0, m.groups, x.data(), inputs, rows, y.data(), outputs, false);
        else
          k->integer(m, 0, m.groups, in, 0, rows, y.data(), outputs, false);
      });
      std::printf("%s  %-12s %4ld rows  %7.1f ns %7.1f cycles\n", std::string(type_info(type)->name).c_str(),
                  std::string(k->name).c_str(), long(rows), took.ns, took.cycles);
    }
  }
}

int main(int argc, char** argv) {
  const int64_t inputs = argc > 1 ? std::atoll(argv[1]) : 576;
  const int64_t outputs = argc > 3 ? std::atoll(argv[3]) : 256;
  if (argc > 5 || inputs < 32 || inputs % 32 != 0 || outputs < 16) {
    std::fprintf(stderr,
                 "usage: product_bench [inputs, a multiple of 32; 576] [kernels, as amx; '' for all] [outputs; 256] "
                 "[type, as Q4_K]\n");
    return 2;
  }
  const std::string_view only = argc > 4 ? argv[4] : "";
  matrix_unit();
  for (WeightType type : {WeightType::bf16, WeightType::f8_e4m3})
    if (type_info(type)->name == only) products(type, inputs, outputs, argc > 2 ? argv[2] : "");
  for (WeightType type : {WeightType::q4_1, WeightType::q4_0, WeightType::q8_0, WeightType::q2_k, WeightType::q3_k,
                          WeightType::q4_k, WeightType::q5_0, WeightType::q5_k, WeightType::q6_k, WeightType::iq4_nl,
                          WeightType::iq4_xs, WeightType::mxfp4})
    if ((only.empty() || type_info(type)->name == only) && inputs % type_info(type)->block == 0)
      products(type, inputs, outputs, argc > 2 ? argv[2] : "");
  matrix_unit();
  return 0;
}

}  // namespace
}  // namespace kvasir::model::cpu

int main(int argc, char** argv) { return kvasir::model::cpu::main(argc, argv); }
