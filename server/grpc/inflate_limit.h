// gRPC inflates a compressed message whole before it looks at its size: 8 MiB of gzip may be 8 GiB. The
// linker sends its calls of zlib's inflate() through here (--wrap), where a message that has grown past the
// limit grows no further; gRPC then finds it too large and answers RESOURCE_EXHAUSTED. Where gRPC is a
// shared library and its calls cannot be caught, compression is turned off.
#pragma once

#include <cstddef>

namespace kvasir::server::rpc {

// Whether compressed messages are safe to take in this build.
bool inflate_is_limited();
// The largest of all limits asked for holds: it is one function for the process.
void limit_inflated(size_t bytes);

}  // namespace kvasir::server::rpc
