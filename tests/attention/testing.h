// What the named tests share: small cases, run on a back end by name, with a way to see the weights.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <set>

#include "attention/cases/compare.h"
#include "attention/cases/random_case.h"
#include "attention/held_step.h"
#include "kvcache/quant.h"

namespace kvasir::attention::testing {

inline CaseShape small(int heads = 4, int kv_heads = 2, int head_dim = 32) {
  CaseShape s;
  s.attributes.num_heads = heads;
  s.attributes.num_kv_heads = kv_heads;
  s.attributes.head_dim = head_dim;
  s.attributes.return_lse = true;
  return s;
}

struct Outcome {
  Status status;
  Case after;
  CaseOutput out;
  const float* row(int64_t token, int64_t head) const {
    const Attributes& a = after.attributes;
    return reinterpret_cast<const float*>(out.output.data()) + (token * a.num_heads + head) * a.head_dim;
  }
  float lse(int64_t token, int64_t head) const { return out.lse[size_t(token * after.attributes.num_heads + head)]; }
};

inline Outcome run_on(std::string_view backend, const Case& c, int threads = 2) {
  Outcome o{{}, c, {}};
  ThreadPool pool(threads);
  o.status = run_case(o.after, **find_backend(backend), {&pool, nullptr}, &o.out);
  return o;
}

// cpu runs it and agrees with the reference.
inline Outcome checked(const Case& c) {
  Outcome o = run_on("cpu", c);
  EXPECT_TRUE(o.status.ok()) << o.status.to_string();
  if (o.status.ok()) {
    EXPECT_EQ(compare_with_reference(c, o.after, o.out), "") << describe(c);
  }
  return o;
}

inline float* floats(Bytes& b) { return reinterpret_cast<float*>(b.data()); }
inline bool same_bytes(const CaseOutput& x, const CaseOutput& y) {
  return x.output == y.output && std::memcmp(x.lse.data(), y.lse.data(), x.lse.size() * 4) == 0;
}

// f32 cases with kvlen <= head_dim: queries become 0, so that all visible keys weigh the same, and the
// value of key j the j-th unit vector, so that the output is the weights.
inline void reveal_weights(Case& c, bool zero_queries = true) {
  const Attributes& a = c.attributes;
  HeldStep held;
  held.assign(a, c.step());
  kvcache::CacheView v = c.view;
  v.data = c.cache.data();
  if (zero_queries) std::memset(c.query.data(), 0, c.query.size());
  std::vector<float> unit(size_t(a.head_dim));
  for (int64_t b = 0; b < c.batch(); ++b) {
    const SequenceShape s = held.shape(b);
    for (int64_t t = 0; t < s.kvlen; ++t)
      for (int h = 0; h < a.num_kv_heads; ++h) {
        std::fill(unit.begin(), unit.end(), 0.0f);
        unit[size_t(t)] = 1.0f;
        if (a.append && t >= s.start_pos)
          std::memcpy(floats(c.value) + ((c.seqstarts[size_t(b)] + t - s.start_pos) * a.num_kv_heads + h) * a.head_dim,
                      unit.data(), unit.size() * 4);
        else if (held.physical(b, cache_slot(a, t)) >= 0)
          kvcache::store_row(v, held.physical(b, cache_slot(a, t)), c.layer, h, true, unit.data());
      }
  }
}

inline std::set<int> seen(const Outcome& o, int64_t token, int64_t head) {
  std::set<int> keys;
  for (int d = 0; d < o.after.attributes.head_dim; ++d)
    if (o.row(token, head)[d] != 0) keys.insert(d);
  return keys;
}
inline std::set<int> range(int begin, int end) {
  std::set<int> keys;
  for (int j = begin; j < end; ++j) keys.insert(j);
  return keys;
}

// Each test runs on every host back end.
class OnBackend : public ::testing::TestWithParam<const char*> {
 protected:
  Outcome run(const Case& c) { return run_on(GetParam(), c); }
};
#define KVASIR_ON_BACKENDS(Suite) \
  INSTANTIATE_TEST_SUITE_P(, Suite, ::testing::Values("reference", "cpu"), [](const auto& i) { return i.param; })

}  // namespace kvasir::attention::testing
