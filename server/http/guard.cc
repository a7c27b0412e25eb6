#include "server/http/guard.h"

#include <arpa/inet.h>

#include <algorithm>

#include "core/cat.h"

namespace kvasir::server::http {
namespace {

std::string lower(std::string_view s) {
  std::string out(s);
  for (char& c : out) c = static_cast<char>(c >= 'A' && c <= 'Z' ? c + 32 : c);
  return out;
}

bool is_address(int family, std::string_view text) {
  in6_addr out;  // room for either
  return inet_pton(family, std::string(text).c_str(), &out) == 1;
}

struct Host {
  std::string name;      // in lower case
  bool address = false;  // which cannot be rebound to another one, as a name can
};

// "localhost:8000", "127.0.0.1" or "[::1]:8000"; nothing when it is none of these: no name of a machine holds a bracket
// or an '@', and what reads such a host otherwise would take it for another's.
std::optional<Host> parse_host(std::string_view text) {
  Host host;
  const bool bracket = text.starts_with('[');
  size_t end = bracket ? text.find(']') : text.find(':');
  if (bracket && end == std::string_view::npos) return std::nullopt;
  const std::string_view name = bracket ? text.substr(1, end - 1) : text.substr(0, end);
  std::string_view rest = end == std::string_view::npos ? std::string_view() : text.substr(end + (bracket ? 1 : 0));
  if (!rest.empty() && (rest[0] != ':' || rest.size() > 6 || rest.find_first_not_of("0123456789", 1) != rest.npos))
    return std::nullopt;
  host.name = lower(name);
  if (bracket) {
    host.address = is_address(AF_INET6, name);
    if (!host.address) return std::nullopt;
    host.name = cat('[', host.name, ']');
    return host;
  }
  static constexpr std::string_view kLetters = "abcdefghijklmnopqrstuvwxyz0123456789.-_";
  if (name.empty() || name.size() > 255 || host.name.find_first_not_of(kLetters) != std::string::npos)
    return std::nullopt;
  host.address = is_address(AF_INET, name);
  return host;
}

// Of a page that this machine itself serves, on whatever port.
bool is_local(std::string_view origin) {
  const size_t scheme = origin.find("://");
  if (scheme == std::string_view::npos || (origin.substr(0, scheme) != "http" && origin.substr(0, scheme) != "https"))
    return false;
  const std::optional<Host> host = parse_host(origin.substr(scheme + 3));
  return host && (host->name == "localhost" || host->name == "127.0.0.1" || host->name == "[::1]");
}

// "x-stainless-os, authorization": names of headers and nothing else.
bool is_header_list(std::string_view text) {
  return !text.empty() && text.size() <= 2048 && std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_' ||
           c == ',' || c == ' ';
  });
}

}  // namespace

bool Guard::origin_allowed(std::string_view origin, std::string_view host) const {
  size_t scheme = origin.find("://");
  if (scheme != std::string_view::npos && lower(origin.substr(scheme + 3)) == lower(host)) return true;  // its own page
  return std::any_of(options_.cors.begin(), options_.cors.end(), [&](const std::string& o) {
    return o == "*" || lower(o) == lower(origin) || (o == "localhost" && is_local(origin));
  });
}

Status Guard::check(const HttpRequest& request) const {
  std::string_view host = request.header("host");
  if (!host.empty()) {  // HTTP/1.0 needs none, and browsers always send one
    const std::optional<Host> asked = parse_host(host);
    if (!asked)
      return invalid_argument(cat("Host is '", host.substr(0, 100), "'; it must be a name or an address, and a port"));
    auto is_name = [&](const std::string& h) {
      const std::optional<Host> own = parse_host(h);
      return own && own->name == asked->name;
    };
    const bool known = asked->name == "localhost" || asked->address ||
                       std::any_of(options_.hosts.begin(), options_.hosts.end(), is_name);
    if (options_.keyless && !known)
      return Status(Code::permission_denied, cat("Host '", asked->name.substr(0, 100),
                                                 "' is not a name of this server; name it with --hosts, or use keys"));
  }
  std::string_view origin = request.header("origin");
  const bool asks_first = request.method == "OPTIONS";  // and is told by what the answer has no word of
  if (!asks_first && !origin.empty() && !origin_allowed(origin, host))
    return Status(Code::permission_denied,
                  cat("pages of origin '", origin.substr(0, 100), "' may not call this server; allow it with --cors"));
  if (request.method == "POST") {
    std::string type = lower(request.header("content-type"));
    // A page can send a body without a type anywhere, but not without its origin; clients (LiteLLM's of Ollama) have
    // none.
    const bool unsaid = type.empty() && origin.empty();
    if (!unsaid && type.substr(0, type.find(';')) != "application/json")
      return invalid_argument(cat("Content-Type is '", type.substr(0, 60), "'; it must be application/json"));
  }
  return {};
}

void Guard::allow(const HttpRequest& request, HttpResponse& response) const {
  std::string_view origin = request.header("origin");
  if (origin.empty() || !origin_allowed(origin, request.header("host"))) return;
  response.headers.emplace_back("Access-Control-Allow-Origin", std::string(origin));
  if (options_.credentials) response.headers.emplace_back("Access-Control-Allow-Credentials", "true");
  response.headers.emplace_back("Access-Control-Expose-Headers", "X-Request-Id, Retry-After");
  response.headers.emplace_back("Vary", "Origin");
}

HttpResponse Guard::preflight(const HttpRequest& request) const {
  HttpResponse r;
  r.content_type.clear();
  allow(request, r);
  if (!r.headers.empty()) {
    r.headers.emplace_back("Access-Control-Allow-Methods", "GET, POST, DELETE, OPTIONS");
    // Whatever it asks to send: clients add headers of their own (OpenAI's a dozen), and those mean nothing here.
    std::string_view asked = request.header("access-control-request-headers");
    if (!is_header_list(asked)) asked = "authorization, content-type, traceparent, x-request-timeout";
    r.headers.emplace_back("Access-Control-Allow-Headers", std::string(asked));
    r.headers.emplace_back("Access-Control-Max-Age", "600");
  }
  return r;
}

}  // namespace kvasir::server::http
