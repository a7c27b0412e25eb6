// OpenAI's error body, the one shape of every refusal over HTTP.
#pragma once

#include <string>
#include <string_view>

#include "core/status.h"
#include "server/http/http.h"

namespace kvasir::server::http {

Response error_response(int status, std::string_view type, std::string_view message, std::string_view param = "");
Response error_response(const Status& status);  // code, type, param and Retry-After from the status
// {"error": {...}} as it stands in a body or an event.
std::string error_json(int status, std::string_view type, std::string_view message, std::string_view param);
std::string error_json(const Status& status);

}  // namespace kvasir::server::http
