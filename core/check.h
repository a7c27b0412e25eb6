// A broken invariant is a crash: KVASIR_CHECK(free + used == total, "free ", free, " used ", used).
// It stays on in release builds; it never judges what a client sent (that is core/status.h).
#pragma once

#include <string>

#include "core/cat.h"

namespace kvasir {

[[noreturn]] void check_failed(const char* file, int line, const char* condition, const std::string& message);

#define KVASIR_CHECK(condition, ...)                                                      \
  do {                                                                                    \
    if (__builtin_expect(!(condition), 0))                                                \
      ::kvasir::check_failed(__FILE__, __LINE__, #condition, ::kvasir::cat(__VA_ARGS__)); \
  } while (0)

}  // namespace kvasir
