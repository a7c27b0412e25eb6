#include "server/http/error_body.h"

#include <nlohmann/json.hpp>

namespace kvasir::server::http {
namespace {

const char* error_type(int status) {
  switch (status) {
    case 401: return "authentication_error";
    case 403: return "permission_error";
    case 404: return "not_found_error";
    case 429: return "rate_limit_error";
    case 499: return "cancelled";
    case 503: return "service_unavailable";
    case 504: return "timeout";
  }
  return status < 500 ? "invalid_request_error" : "server_error";
}

}  // namespace

std::string error_json(int status, std::string_view type, std::string_view message, std::string_view param) {
  nlohmann::ordered_json error;
  error["message"] = message;
  error["type"] = type;
  error["param"] = param.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(param);
  error["code"] = status;
  return nlohmann::ordered_json{{"error", error}}.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string error_json(const Status& status) {
  int http = http_status(status.code());
  return error_json(http, error_type(http), status.message(), status.field());
}

Response error_response(int status, std::string_view type, std::string_view message, std::string_view param) {
  Response r;
  r.status = status;
  r.body = error_json(status, type, message, param);
  return r;
}

Response error_response(const Status& status) {
  Response r;
  r.status = http_status(status.code());
  r.body = error_json(status);
  if (auto wait = status.retry_after())
    r.headers.emplace_back("Retry-After", std::to_string((wait->count() + 999) / 1000));
  if (r.status == 401) r.headers.emplace_back("WWW-Authenticate", "Bearer");
  return r;
}

}  // namespace kvasir::server::http
