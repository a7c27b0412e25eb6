// Every kernel beside the plain one, without a test library: what is built for another processor and run under an
// emulator. The bits are to be the same.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>

#include "core/dtype.h"
#include "model/cpu/kernels.h"

using namespace kvasir;
using namespace kvasir::model;
using namespace kvasir::model::cpu;

namespace {

std::mt19937 randoms(1);
int failures = 0, comparisons = 0;

void same(const std::vector<float>& got, const std::vector<float>& want, std::string_view kernels,
          std::string_view what) {
  ++comparisons;
  if (std::memcmp(got.data(), want.data(), want.size() * sizeof(float)) == 0) return;
  ++failures;
  std::printf("%.*s: %.*s differs\n", int(kernels.size()), kernels.data(), int(what.size()), what.data());
}

// Random bytes, with every float16 among them small enough that sums are finite.
std::vector<uint8_t> random_tensor(const TypeInfo& info, int64_t elements) {
  std::vector<uint8_t> bytes(size_t(elements / info.block * info.bytes));
  for (uint8_t& b : bytes) b = uint8_t(randoms() & 0x3b);
  return bytes;
}

std::vector<float> product(const Kernels& k, const PackedMatrix& m, const std::vector<float>& x, int64_t tokens,
                           bool integers) {
  std::vector<float> y(size_t(tokens * m.rows), 1.0f);
  if (!integers) {
    k.floating(m, 0, m.groups, x.data(), m.padded_cols(), tokens, y.data(), m.rows, true);
    return y;
  }
  QuantRoom room;
  QuantRows in = room.rows(tokens, m.padded_cols());
  for (int64_t t = 0; t < tokens; ++t) k.quantize(x.data() + t * in.cols, m.packing, in, t);
  k.integer(m, 0, m.groups, in, 0, tokens, y.data(), m.rows, true);
  return y;
}

std::vector<float> rows_of(const Kernels& k, const std::vector<float>& x) {
  const int64_t n = int64_t(x.size()) / 2;
  std::vector<float> out(size_t(6 * n + 1 + (2 * n + kSumBlock - 1) / kSumBlock));
  k.norm(x.data(), x.data() + n, n, 1e-5f, false, out.data());
  k.norm(x.data(), x.data() + n, n, 1e-5f, true, out.data());
  k.silu(x.data(), x.data() + n, n, out.data() + n);
  k.gelu(x.data(), x.data() + n, n, out.data() + 2 * n);
  k.exponentials(x.data(), 2 * n, 1.0f, 3.0f, out.data() + 3 * n);
  out[size_t(6 * n)] = k.greatest(x.data(), 2 * n);
  k.exponential_sums(x.data(), 2 * n, 1.0f, 3.0f, &out[size_t(6 * n + 1)]);
  return out;
}

}  // namespace

int main() {
  std::normal_distribution<float> normal;
  ThreadPool pool(1);
  for (WeightType type :
       {WeightType::f32, WeightType::f16, WeightType::bf16, WeightType::q4_0, WeightType::q4_1, WeightType::q5_0,
        WeightType::q5_1, WeightType::q8_0, WeightType::q2_k, WeightType::q3_k, WeightType::q4_k, WeightType::q5_k,
        WeightType::q6_k, WeightType::iq4_nl, WeightType::iq4_xs, WeightType::mxfp4}) {
    const TypeInfo& info = *type_info(type);
    const int64_t rows = 37, cols = 768, tokens = 7;
    Arena arena;
    std::vector<uint8_t> bytes = random_tensor(info, rows * cols);
    const HostTensor t{"w", type, rows, cols, bytes.data(), int64_t(bytes.size())};
    const PackedMatrix m = pack({&t, 1}, arena, pool);
    std::vector<float> x(size_t(tokens * cols));
    for (float& f : x) f = normal(randoms);
    for (const Kernels* k : runnable_kernels()) {
      same(product(*k, m, x, tokens, false), product(kKernelsPortable, m, x, tokens, false), k->name, info.name);
      if (packing_info(m.packing).quantized)
        same(product(*k, m, x, tokens, true), product(kKernelsPortable, m, x, tokens, true), k->name, info.name);
    }
  }
  std::vector<float> x(2 * 131);
  for (float& f : x) f = 5 * normal(randoms);
  for (const Kernels* k : runnable_kernels()) same(rows_of(*k, x), rows_of(kKernelsPortable, x), k->name, "rows");
  std::printf("%s first of %zu kinds of kernels, %d comparisons, %d different\n",
              std::string(runnable_kernels().front()->name).c_str(), runnable_kernels().size(), comparisons, failures);
  return failures != 0 || runnable_kernels().size() != 3;
}
