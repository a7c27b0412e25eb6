#include "server/http/api.h"

#include <algorithm>
#include <new>

#include "core/cat.h"
#include "core/log.h"
#include "server/http/error_body.h"
#include "server/http/page.h"
#include "server/json_text.h"

namespace kvasir::server::http {

// Who may call a path: nobody is asked for a key where `open`.
struct Api::Route {
  const char* method;
  const char* path;
  bool open;
  Role role;
  Reply (Api::*handler)(const Request&, const Caller&);
};

const std::vector<Api::Route>& Api::routes() {
  static const std::vector<Route> routes = {
      {"GET", "/", true, Role::user, &Api::page},
      {"GET", "/health", true, Role::user, &Api::health},
      {"GET", "/ready", true, Role::user, &Api::ready},
      {"GET", "/metrics", false, Role::metrics, &Api::metrics},
      {"GET", "/stats", false, Role::metrics, &Api::stats},
      {"GET", "/v1/models", false, Role::user, &Api::models},
      {"POST", "/v1/chat/completions", false, Role::user, &Api::chat},
      {"POST", "/v1/completions", false, Role::user, &Api::completions},
      {"POST", "/v1/embeddings", false, Role::user, &Api::embeddings},
      {"POST", "/tokenize", false, Role::user, &Api::tokenize},
      {"POST", "/detokenize", false, Role::user, &Api::detokenize},
      {"POST", "/drain", false, Role::admin, &Api::drain},
  };
  return routes;
}

Api::Api(Services& services)
    : services_(services), guard_({!services.has_keys(), services.options().hosts, services.options().cors}) {}

Reply Api::handle(const Request& request) {
  if (Status s = guard_.check(request); !s.ok()) return error_response(s);
  if (request.method == "OPTIONS") return guard_.preflight(request);
  Reply reply = route(request);
  if (auto* whole = std::get_if<Response>(&reply)) guard_.allow(request, *whole);
  return reply;
}

Reply Api::route(const Request& request) {
  std::string allowed;
  for (const Route& r : routes()) {
    bool model_by_name = std::string_view(r.path) == "/v1/models" && request.path.starts_with("/v1/models/");
    if (request.path != r.path && !model_by_name) continue;
    if (request.method != r.method && !(request.method == "HEAD" && std::string_view(r.method) == "GET")) {
      allowed = r.method;
      continue;
    }
    Caller caller;
    if (!r.open) {
      auto found = services_.authenticate(request.header("authorization"));
      if (!found.ok()) return error_response(found.status());
      if (Status s = found->require(r.role, r.path); !s.ok()) return error_response(s);
      caller = *std::move(found);
    }
    try {
      return (this->*r.handler)(request, caller);
    } catch (const std::bad_alloc&) {  // memory that cannot be had ends a request, not the server
      return error_response(
          resource_exhausted("there is no memory left for this request; send less, or try again later"));
    }
  }
  if (!allowed.empty()) {
    Response refused = error_response(405, "invalid_request_error",
                                      cat(request.path, " takes ", allowed, ", not ", request.method.substr(0, 20)));
    refused.headers.emplace_back("Allow", allowed);
    return refused;
  }
  std::string known;
  for (const Route& r : routes()) known += cat(known.empty() ? "" : ", ", r.path);
  return error_response(404, "not_found_error",
                        cat("there is nothing at ", request.path.substr(0, 100), "; this server has ", known));
}

Reply Api::page(const Request&, const Caller&) {
  Response r;
  r.content_type = "text/html; charset=utf-8";
  r.headers = {{"Content-Security-Policy",
                "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
                "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"},
               {"X-Content-Type-Options", "nosniff"},
               {"Referrer-Policy", "no-referrer"},
               {"Cache-Control", "no-cache"}};
  r.body = kPage;
  return r;
}

Reply Api::health(const Request&, const Caller&) {
  Health h = services_.health();
  Response r;
  r.status = h.live ? 200 : 503;
  r.body = cat("{\"status\":\"", state_name(h.state), "\",\"message\":", json_string(h.message), "}");
  return r;
}

Reply Api::ready(const Request&, const Caller&) {
  Health h = services_.health();
  Response r;
  r.status = h.ready ? 200 : 503;
  r.body = cat("{\"ready\":", h.ready, ",\"status\":\"", state_name(h.state), "\",\"message\":", json_string(h.message),
               "}");
  return r;
}

// What SIGTERM does: running requests finish, new ones are refused, the process ends.
Reply Api::drain(const Request&, const Caller& caller) {
  if (!services_.options().on_drain)
    return error_response(Status(Code::unimplemented, "this server is not drained from outside"));
  log_info("asked to drain", {{"tenant", caller.tenant}, {"key", caller.key_id}});
  services_.options().on_drain();
  Response r;
  r.status = 202;
  r.body = "{\"status\":\"draining\"}";
  return r;
}

Reply Api::embeddings(const Request&, const Caller&) {
  return error_response(Status(Code::unimplemented, "embeddings are not served; this model generates text"));
}

}  // namespace kvasir::server::http
