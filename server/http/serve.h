// The HTTP port over the server's services.
#pragma once

#include <memory>

#include "server/http/http_server.h"
#include "server/services.h"
#include "server/tls.h"

namespace kvasir::server::http {

Result<std::unique_ptr<HttpServer>> serve_http(Services& services, std::shared_ptr<TlsSource> tls);  // no `tls`: plain

}  // namespace kvasir::server::http
