// OpenAI's error body, the one shape of every refusal over HTTP.
#pragma once

#include <string>
#include <string_view>

#include "core/status.h"
#include "server/http/http.h"

namespace kvasir::server::http {

HttpResponse error_response(int status, std::string_view type, std::string_view message, std::string_view param = "");
// Type, param, code and Retry-After from the status. The code is one of OpenAI's words ("model_not_found",
// "context_length_exceeded", "invalid_api_key", "rate_limit_exceeded") or null, never a number: strict clients have
// none.
HttpResponse error_response(const Status& status);
// One of these bodies as llama-server's clients know it: a prompt that is too long has a type of its own, with how
// long it is and how much there is room for.
void say_as_llama(HttpResponse& refusal);
std::string error_json(const Status& status);  // {"error": {...}} as it stands in a body or an event

}  // namespace kvasir::server::http
