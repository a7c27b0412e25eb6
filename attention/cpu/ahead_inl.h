// Asking for cache lines of the next tile (kernels.h). Included inside an anonymous namespace.

// The next row of the pieces, but for a line that was asked for just now; false: there is none.
inline bool next_row(Ahead& ahead) {
  do {
    if (ahead.now.rows == 0) {
      if (ahead.next == ahead.last) {
        ahead.each = 0;
        return false;
      }
      ahead.now = *ahead.next++;
    }
    const uint8_t* line = ahead.now.at - reinterpret_cast<uintptr_t>(ahead.now.at) % 64;
    ahead.line = line + 64 == ahead.line ? ahead.line : line;
    ahead.end = ahead.now.at + ahead.now.bytes;
    ahead.now.at += ahead.now.step;
    --ahead.now.rows;
  } while (ahead.line >= ahead.end);
  return true;
}
// Calls nothing, so that a loop that calls it keeps its vectors in registers.
__attribute__((noinline)) void fetch_apart(Ahead& ahead) {
  const uint8_t* line = ahead.line;
  if (__builtin_expect(line + 64 * ahead.each <= ahead.end, 1)) {
    ahead.line = line + 64 * ahead.each;
    for (; line != ahead.line; line += 64)
      __builtin_prefetch(line, 0, 2);  // as far as L2: L1 has too few waiting places
    return;
  }
  for (int i = 0; i < ahead.each; ++i) {
    if (ahead.line >= ahead.end && !next_row(ahead)) return;
    __builtin_prefetch(ahead.line, 0, 2);
    ahead.line += 64;
  }
}
__attribute__((always_inline)) inline void fetch(Ahead& ahead) {
  const uint8_t* line = ahead.line;
  if (__builtin_expect(line + 64 * ahead.each > ahead.end, 0)) return fetch_apart(ahead);
  ahead.line = line + 64 * ahead.each;
  for (; line != ahead.line; line += 64) __builtin_prefetch(line, 0, 2);
}
