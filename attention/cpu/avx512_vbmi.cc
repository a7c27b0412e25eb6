// The AVX-512 kernels where bytes and bit fields can be moved anywhere in a vector too (Ice Lake and later, Zen 4).
#define KVASIR_VBMI 1
#include "attention/cpu/avx512.cc"
