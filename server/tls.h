// The TLS files both ports use, looked at before they are trusted: a wrong path or a key that is another
// certificate's is said at the start, not at the first handshake.
#pragma once

#include "core/status.h"
#include "server/options.h"

namespace kvasir::server {

Status check_tls_files(const ServerOptions& options);

}  // namespace kvasir::server
