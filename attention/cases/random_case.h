// Random cases that cover every attribute of docs/attention-ops.md, from a seed alone.
#pragma once

#include "attention/cases/case.h"

namespace kvasir::attention {

// A small counter-based generator: the same numbers with every compiler and library.
class Dice {
 public:
  explicit Dice(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 0x1234567) {}
  uint64_t bits();
  int64_t upto(int64_t n) { return n <= 0 ? 0 : int64_t(bits() % uint64_t(n + 1)); }  // [0, n]
  bool one_in(int n) { return bits() % uint64_t(n) == 0; }
  float normal();  // near enough: the sum of four uniforms
  template <class T, size_t N>
  T pick(const T (&list)[N]) {
    return list[bits() % N];
  }

 private:
  uint64_t state_;
};

// What a back end under test can do; everything is on unless it says otherwise.
struct CaseOptions {
  int64_t max_kvlen = 700;       // longest sequence, now and then
  int64_t max_work = 1'500'000;  // query rows x keys x head_dim, about
  int32_t max_head_dim = 256;
  bool any_pages = true;     // sizes of no power of two and above 256, pages that begin anywhere
  bool small_groups = true;  // of 1, 2 and 4 elements
  bool relative_bias = true;
  bool int8_out = true;  // KeyValueCache gives int8 back as it is
  bool beams = true, cyclic = true, streaming = true, fp8_io = true, fp8_query = true, kvc = true, masks = true;
};

Case random_case(uint64_t seed, const CaseOptions& options = {});
// Given attributes and sequences, random contents: what a named test starts from. Indices that must not
// be read are garbage, memory that must not be read is NaN.
struct CaseShape {
  Attributes attributes;
  kvcache::CacheView cache;  // dtype, quant, scales, layers; the rest is filled in
  int32_t layer = 0;
  int revision = 2, layout = 3;
  struct Sequence {
    int64_t past = 0, fresh = 0;
    int64_t kvlen = -1;  // append false only; -1: past + fresh
  };
  std::vector<Sequence> sequences;
  int64_t decoding_batches = 0;
  int32_t beam_width = 0;
};
Case make_case(const CaseShape& shape, uint64_t seed = 1);

std::string describe(const Case& c);  // one line: what a failure message needs

}  // namespace kvasir::attention
