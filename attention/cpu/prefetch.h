// Prefetching cache lines (kernels.h).
#pragma once

#include "attention/cpu/kernels.h"

namespace kvasir::attention::cpu {
namespace {

// The next row of the pieces, but for a line that was prefetched just now; false: there is none.
inline bool next_row(LineWalk& walk) {
  do {
    while (walk.row.rows == 0) {
      if (walk.next == walk.last) {
        if (walk.then == walk.then_last) return false;
        walk.next = walk.then, walk.last = walk.then_last;
        walk.then = walk.then_last;
      }
      walk.row = *walk.next++;
    }
    const uint8_t* line = walk.row.at - reinterpret_cast<uintptr_t>(walk.row.at) % 64;
    walk.line = line + 64 == walk.line ? walk.line : line;
    walk.end = walk.row.at + walk.row.bytes;
    walk.row.at += walk.row.step;
    --walk.row.rows;
  } while (walk.line >= walk.end);
  return true;
}

// Over a burst of lines, of which the first few are prefetched: into L1 (level 3) or no further than L2 (level 2).
template <int kLevel, int kLines>
__attribute__((always_inline)) inline void walk_on(LineWalk& walk) {
  const uint8_t* line = walk.line;
  if (__builtin_expect(line + 64 * kBurst <= walk.end, 1)) {
    for (int i = 0; i < kLines; ++i) __builtin_prefetch(line + 64 * i, 0, kLevel);
    walk.line = line + 64 * kBurst;
    return;
  }
  for (int i = 0; i < kBurst; ++i) {
    if (walk.line >= walk.end && !next_row(walk)) return;
    if (i < kLines) __builtin_prefetch(walk.line, 0, kLevel);
    walk.line += 64;
  }
}

// Calls nothing, so that a loop that calls it keeps its vectors in registers.
__attribute__((noinline)) void prefetch_due(Prefetcher& ahead) {
  for (; ahead.due >= 0; ahead.due -= ahead.stops) {
    walk_on<2, kBurst>(ahead.next);
    if (ahead.reach >= Reach::later) walk_on<2, 1>(ahead.later);
    if (ahead.reach >= Reach::all) walk_on<3, kBurst>(ahead.soon);
  }
}
__attribute__((always_inline)) inline void prefetch(Prefetcher& ahead) {
  ahead.due += ahead.bursts;
  if (__builtin_expect(ahead.due >= 0, 0)) prefetch_due(ahead);
}

}  // namespace
}  // namespace kvasir::attention::cpu
