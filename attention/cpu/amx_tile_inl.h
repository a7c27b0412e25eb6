// Tile registers of the matrix unit, and its instructions. Included by amx.cc only.

constexpr int kUnit = 1024;  // bytes of a register

// The compiler does not know what these read: fence() stands between the stores and them.
template <int kTmm>
inline void tile_load(const uint8_t* p) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(int64_t(64)), "i"(kTmm));
}
inline void fence() { asm volatile("" ::: "memory"); }
template <int kTmm>
inline void tile_store(float* p) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(int64_t(64)), "i"(kTmm) : "memory");
}
template <int kTmm>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTmm));
}
template <int kSum, int kA, int kB>
inline void tile_product() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kA), "i"(kB));
}
template <int N>
struct Number {
  static constexpr int value = N;
};
// f for those in [from, to) of the two sums under way.
template <class F>
[[gnu::always_inline]] inline void each_sum(int from, int to, const F& f) {
  if (from <= 0 && 0 < to) f(Number<0>{});
  if (from <= 1 && 1 < to) f(Number<1>{});
}

void configure() {
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  const Config config;
  asm volatile("ldtilecfg %0" ::"m"(config));
}
void release() { asm volatile("tilerelease"); }
