// The rules of docs/attention-ops.md that every fused back end needs, in one place and on the host:
// which keys a query sees, which slot a token lives in, what ALiBi's slopes are.
// (The reference spells them out again by itself, key by key, so that a slip here is seen.)
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention/params.h"

namespace kvasir::attention {

// A query sees keys [0, sink_end) and [lo, hi), sink_end <= lo <= hi, nothing else.
struct Visible {
  int64_t sink_end = 0, lo = 0, hi = 0;
};

struct SequenceShape {
  int64_t seqlen = 0, kvlen = 0, start_pos = 0;
  bool decoding = false;  // among the first decoding_batches
};

inline bool is_causal_for(const Attributes& a, const SequenceShape& s) {
  return a.is_causal && s.seqlen > 1 && !s.decoding;
}

inline Visible visible_keys(const Attributes& a, const SequenceShape& s, int64_t i) {
  const int64_t t = s.kvlen - s.seqlen + i;  // the query's own position, bottom-right aligned
  Visible v;
  v.hi = is_causal_for(a, s) || a.is_alibi || a.window > 0 ? std::clamp<int64_t>(t + 1, 0, s.kvlen) : s.kvlen;
  if (a.window > 0) {
    v.lo = std::max<int64_t>(a.sinks, t - (a.window - a.sinks) + 1);
    if (a.streaming_positions) v.lo = std::min(v.lo, s.start_pos);  // dense inside one call
    v.lo = std::clamp<int64_t>(v.lo, 0, v.hi);
    v.sink_end = std::min<int64_t>(a.sinks, v.lo);
    if (v.sink_end == v.lo) v.sink_end = v.lo = 0;  // one range
  }
  return v;
}

// Which slot of its sequence's storage logical token t lives in.
inline int64_t cache_slot(const Attributes& a, int64_t t) {
  if (a.cyclic_capacity == 0 || t < a.sinks) return t;
  return a.sinks + (t - a.sinks) % (a.cyclic_capacity - a.sinks);
}

// A new token is stored unless a later one of the same call takes its slot.
inline bool survives(const Attributes& a, const SequenceShape& s, int64_t t) {
  return a.cyclic_capacity == 0 || t < a.sinks || t + (a.cyclic_capacity - a.sinks) >= s.kvlen;
}

inline std::vector<float> default_alibi_slopes(int heads) {
  std::vector<float> slopes;
  int p = 1;
  while (p * 2 <= heads) p *= 2;
  for (int n = 1; n <= p; ++n) slopes.push_back(float(std::exp2(-8.0 * n / p)));
  for (int n = 1; int(slopes.size()) < heads; n += 2) slopes.push_back(float(std::exp2(-4.0 * n / p)));
  return slopes;
}

}  // namespace kvasir::attention
