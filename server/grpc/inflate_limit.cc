#include "server/grpc/inflate_limit.h"

#include <zlib.h>

#include <atomic>
#include <cstdint>

namespace {
std::atomic<size_t> g_limit{0};
}

namespace kvasir::server::rpc {

bool inflate_is_limited() {
#ifdef KVASIR_WRAP_INFLATE
  return true;
#else
  return false;
#endif
}

void limit_inflated(size_t bytes) {
  size_t now = g_limit.load();
  while (bytes > now && !g_limit.compare_exchange_weak(now, bytes)) {
  }
}

}  // namespace kvasir::server::rpc

#ifdef KVASIR_WRAP_INFLATE
// --wrap makes these names.
// NOLINTBEGIN(bugprone-reserved-identifier)
extern "C" int __real_inflate(z_stream* stream, int flush);
extern "C" int __wrap_inflate(z_stream* stream, int flush);
extern "C" int __wrap_inflate(z_stream* stream, int flush) {
  size_t limit = g_limit.load(std::memory_order_relaxed);
  if (limit == 0 || stream->total_out <= limit) return __real_inflate(stream, flush);
  stream->next_in += stream->avail_in;  // the rest is taken and thrown away
  stream->avail_in = 0;
  return Z_STREAM_END;
}
// NOLINTEND(bugprone-reserved-identifier)
#endif
