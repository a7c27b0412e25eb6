#include "server/http/guard.h"

#include <algorithm>

#include "core/cat.h"

namespace kvasir::server::http {
namespace {

std::string lower(std::string_view s) {
  std::string out(s);
  for (char& c : out) c = static_cast<char>(c >= 'A' && c <= 'Z' ? c + 32 : c);
  return out;
}

// "localhost:8000" and "[::1]:8000" without the port.
std::string_view host_name(std::string_view host) {
  if (host.starts_with('[')) return host.substr(0, host.find(']') + 1);
  return host.substr(0, host.find(':'));
}

// "x-stainless-os, authorization": names of headers and nothing else.
bool is_header_list(std::string_view text) {
  return !text.empty() && text.size() <= 2048 && std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_' ||
           c == ',' || c == ' ';
  });
}

// An address cannot be rebound to another one, as a name can.
bool is_address(std::string_view name) {
  return name.starts_with('[') || (!name.empty() && name.find_first_not_of("0123456789.") == std::string_view::npos);
}

}  // namespace

bool Guard::origin_allowed(std::string_view origin, std::string_view host) const {
  size_t scheme = origin.find("://");
  if (scheme != std::string_view::npos && lower(origin.substr(scheme + 3)) == lower(host)) return true;  // its own page
  return std::any_of(options_.cors.begin(), options_.cors.end(),
                     [&](const std::string& o) { return o == "*" || lower(o) == lower(origin); });
}

Status Guard::check(const Request& request) const {
  std::string_view host = request.header("host");
  if (options_.keyless && !host.empty()) {  // HTTP/1.0 needs none, and browsers always send one
    std::string name = lower(host_name(host));
    bool known = name == "localhost" || is_address(name) ||
                 std::any_of(options_.hosts.begin(), options_.hosts.end(),
                             [&](const std::string& h) { return lower(host_name(h)) == name; });
    if (!known)
      return Status(Code::permission_denied, cat("Host '", name.substr(0, 100),
                                                 "' is not a name of this server; name it with --hosts, or use keys"));
  }
  std::string_view origin = request.header("origin");
  if (!origin.empty() && !origin_allowed(origin, host))
    return Status(Code::permission_denied,
                  cat("pages of origin '", origin.substr(0, 100), "' may not call this server; allow it with --cors"));
  if (request.method == "POST") {
    std::string type = lower(request.header("content-type"));
    if (type.substr(0, type.find(';')) != "application/json")
      return invalid_argument(cat("Content-Type is '", type.substr(0, 60), "'; it must be application/json"));
  }
  return {};
}

void Guard::allow(const Request& request, Response& response) const {
  std::string_view origin = request.header("origin");
  if (origin.empty() || !origin_allowed(origin, request.header("host"))) return;
  response.headers.emplace_back("Access-Control-Allow-Origin", std::string(origin));
  response.headers.emplace_back("Access-Control-Expose-Headers", "X-Request-Id, Retry-After");
  response.headers.emplace_back("Vary", "Origin");
}

Response Guard::preflight(const Request& request) const {
  Response r;
  r.status = 204;
  r.content_type.clear();
  allow(request, r);
  if (!r.headers.empty()) {
    r.headers.emplace_back("Access-Control-Allow-Methods", "GET, POST, OPTIONS");
    // Whatever it asks to send: clients add headers of their own (OpenAI's a dozen), and those mean nothing here.
    std::string_view asked = request.header("access-control-request-headers");
    if (!is_header_list(asked)) asked = "authorization, content-type, traceparent, x-request-timeout";
    r.headers.emplace_back("Access-Control-Allow-Headers", std::string(asked));
    r.headers.emplace_back("Access-Control-Max-Age", "600");
  }
  return r;
}

}  // namespace kvasir::server::http
