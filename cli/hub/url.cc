#include "cli/hub/url.h"

#include <arpa/inet.h>

#include <algorithm>
#include <charconv>

#include "core/cat.h"

namespace kvasir::hub {

bool Url::loopback() const {
  in_addr four{};
  in6_addr six{};
  if (inet_pton(AF_INET, host.c_str(), &four) == 1) return (ntohl(four.s_addr) >> 24) == 127;
  if (inet_pton(AF_INET6, host.c_str(), &six) == 1) return IN6_IS_ADDR_LOOPBACK(&six);
  return host == "localhost";
}

std::string Url::origin() const {
  bool six = host.find(':') != std::string::npos;
  std::string out = cat(tls ? "https://" : "http://", six ? "[" : "", host, six ? "]" : "");
  return port == (tls ? 443 : 80) ? out : cat(out, ':', port);
}

Result<Url> parse_url(std::string_view text) {
  auto bad = [&](const char* why) { return invalid_argument(cat("the address '", text, "' ", why)); };
  Url url;
  if (std::any_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) <= ' ' || c == 127; }))
    return bad("holds a space or a control character");
  if (text.starts_with("https://")) {
    text.remove_prefix(8);
  } else if (text.starts_with("http://")) {
    text.remove_prefix(7), url.tls = false, url.port = 80;
  } else {
    return bad("does not begin with https:// or http://");
  }
  size_t end = std::min(text.find_first_of("/?#"), text.size());
  std::string_view host = text.substr(0, end), rest = text.substr(end);
  rest = rest.substr(0, std::min(rest.find('#'), rest.size()));
  if (host.find('@') != std::string_view::npos) return bad("holds a user name; a token belongs in HF_TOKEN");
  size_t colon = host.rfind(':');
  if (host.starts_with('[')) {
    size_t close = host.find(']');
    if (close == std::string_view::npos) return bad("has no ] after its [");
    url.host = host.substr(1, close - 1);
    colon = close + 1 < host.size() && host[close + 1] == ':' ? close + 1 : std::string_view::npos;
  } else {
    url.host = host.substr(0, colon);
  }
  if (url.host.empty()) return bad("names no host");
  std::transform(url.host.begin(), url.host.end(), url.host.begin(),
                 [](char c) { return c >= 'A' && c <= 'Z' ? char(c + 32) : c; });
  if (colon != std::string_view::npos) {
    std::string_view digits = host.substr(colon + 1);
    auto [last, error] = std::from_chars(digits.data(), digits.data() + digits.size(), url.port);
    if (error != std::errc() || last != digits.data() + digits.size() || url.port < 1 || url.port > 65535)
      return bad("has a port that is not 1 to 65535");
  }
  if (!rest.empty()) url.target = rest.starts_with('/') ? std::string(rest) : cat('/', rest);
  return url;
}

Result<Url> redirected(const Url& from, std::string_view location) {
  Url to = from;
  if (location.starts_with('/') && !location.starts_with("//")) {
    KVASIR_ASSIGN(Url path, parse_url(cat("http://path", location)));
    to.target = path.target;
    return to;
  }
  if (location.starts_with("//")) {
    KVASIR_ASSIGN(to, parse_url(cat(from.tls ? "https:" : "http:", location)));
  } else {
    KVASIR_ASSIGN(to, parse_url(location));
  }
  if (from.tls && !to.tls)
    return failed_precondition(cat(from.origin(), " sends us on to ", to.origin(), ", which is not https; refused"));
  if (!to.tls && !to.loopback())
    return failed_precondition(
        cat(from.origin(), " sends us on to ", to.origin(), ", which is neither https nor this machine; refused"));
  return to;
}

std::string escape_path(std::string_view path) {
  constexpr std::string_view kPlain = "-._~/";
  constexpr char kHex[] = "0123456789ABCDEF";
  std::string out;
  for (char c : path) {
    auto byte = static_cast<unsigned char>(c);
    bool plain = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    if (plain || kPlain.find(c) != std::string_view::npos)
      out += c;
    else
      out += {'%', kHex[byte >> 4], kHex[byte & 15]};
  }
  return out;
}

}  // namespace kvasir::hub
