#include "core/check.h"

#include <cstdio>
#include <cstdlib>

namespace kvasir {

void check_failed(const char* file, int line, const char* condition, const std::string& message) {
  std::fprintf(stderr, "kvasir: broken invariant at %s:%d: %s%s%s\n", file, line, condition,
               message.empty() ? "" : ": ", message.c_str());
  std::fflush(stderr);
  std::abort();
}

}  // namespace kvasir
