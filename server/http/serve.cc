#include "server/http/serve.h"

#include "server/http/api.h"

namespace kvasir::server::http {

Result<std::unique_ptr<HttpServer>> serve_http(Services& services, std::shared_ptr<TlsSource> tls) {
  const ServerOptions& o = services.options();
  HttpServerOptions h;
  h.host = o.host;
  h.port = o.http_port;
  h.threads = o.http_threads;
  h.workers = o.workers;
  h.max_connections = o.max_connections;
  h.max_body = static_cast<size_t>(o.max_body.bytes);
  h.budget = &services.budget();
  h.header_timeout = o.header_timeout;
  h.idle_timeout = o.idle_timeout;
  h.write_timeout = o.write_timeout;
  if (tls) h.tls = [tls] { return tls->current()->context; };
  auto api = std::make_shared<Api>(services);
  return HttpServer::start(h, [api](const HttpRequest& head) { return api->admit(head); });
}

}  // namespace kvasir::server::http
