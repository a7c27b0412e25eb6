// The HTTP port over the server's services.
#pragma once

#include <memory>

#include "server/http/http_server.h"
#include "server/services.h"

namespace kvasir::server::http {

Result<std::unique_ptr<HttpServer>> serve_http(Services& services);

}  // namespace kvasir::server::http
