#include "server/http/error_body.h"

#include <nlohmann/json.hpp>

#include "server/generate.h"

namespace kvasir::server::http {
namespace {

constexpr const char* kTooLong = "context_length_exceeded";

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

// What programs look at, in OpenAI's words; the others of them have none.
std::string_view error_code(const Status& status) {
  switch (status.code()) {
    case Code::unauthenticated: return "invalid_api_key";
    case Code::resource_exhausted: return "rate_limit_exceeded";
    case Code::not_found:
    case Code::invalid_argument:
      if (status.field() == "model") return "model_not_found";
      return over_context(status) ? kTooLong : "";
    default: return "";
  }
}

std::string error_text(std::string_view type, std::string_view message, std::string_view param, std::string_view code) {
  auto or_null = [](std::string_view text) {
    return text.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(text);
  };
  nlohmann::ordered_json error{
      {"message", message}, {"type", type}, {"param", or_null(param)}, {"code", or_null(code)}};
  return nlohmann::ordered_json{{"error", error}}.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace

std::string error_json(const Status& status) {
  return error_text(error_type(http_status(status.code())), status.message(), status.field(), error_code(status));
}

HttpResponse error_response(int status, std::string_view type, std::string_view message, std::string_view param) {
  HttpResponse r;
  r.status = status;
  r.body = error_text(type, message, param, "");
  return r;
}

HttpResponse error_response(const Status& status) {
  HttpResponse r;
  r.status = http_status(status.code());
  r.body = error_json(status);
  if (auto wait = status.retry_after())
    r.headers.emplace_back("Retry-After", std::to_string((wait->count() + 999) / 1000));
  if (r.status == 401) r.headers.emplace_back("WWW-Authenticate", "Bearer");
  return r;
}

void say_as_llama(HttpResponse& refusal) {
  auto body = nlohmann::ordered_json::parse(refusal.body, nullptr, false);
  if (!body.is_object() || !body.contains("error") || body["error"].value("code", nlohmann::ordered_json()) != kTooLong)
    return;
  auto& error = body["error"];
  const std::string message = error["message"];
  const ContextUse use = context_use(message);
  error["type"] = "exceed_context_size_error";
  error["message"] = "the request exceeds the available context size: " + message;
  if (use.prompt > 0) error["n_prompt_tokens"] = use.prompt;
  error["n_ctx"] = use.context;
  refusal.body = body.dump();
}

}  // namespace kvasir::server::http
