#include "server/http/serve.h"

#include "server/http/api.h"
#include "server/http/tls.h"

namespace kvasir::server::http {

Result<std::unique_ptr<HttpServer>> serve_http(Services& services) {
  const ServerOptions& o = services.options();
  HttpServerOptions h;
  h.host = o.host;
  h.port = o.http_port;
  h.threads = o.http_threads;
  h.workers = o.workers;
  h.max_connections = o.max_connections;
  h.max_body = static_cast<size_t>(o.max_body.bytes);
  h.header_timeout = o.header_timeout;
  h.idle_timeout = o.idle_timeout;
  h.write_timeout = o.write_timeout;
  if (!o.tls_cert.empty()) {
    KVASIR_ASSIGN(std::shared_ptr<TlsFiles> tls, TlsFiles::open(o.tls_cert, o.tls_key, o.tls_client_ca));
    h.tls = [tls] { return tls->current(); };
  }
  auto api = std::make_shared<Api>(services);
  return HttpServer::start(h, [api](const Request& request) { return api->handle(request); });
}

}  // namespace kvasir::server::http
