#include "core/status.h"

namespace kvasir {

const char* code_name(Code code) {
  switch (code) {
    case Code::ok: return "OK";
    case Code::cancelled: return "CANCELLED";
    case Code::unknown: return "UNKNOWN";
    case Code::invalid_argument: return "INVALID_ARGUMENT";
    case Code::deadline_exceeded: return "DEADLINE_EXCEEDED";
    case Code::not_found: return "NOT_FOUND";
    case Code::already_exists: return "ALREADY_EXISTS";
    case Code::permission_denied: return "PERMISSION_DENIED";
    case Code::resource_exhausted: return "RESOURCE_EXHAUSTED";
    case Code::failed_precondition: return "FAILED_PRECONDITION";
    case Code::aborted: return "ABORTED";
    case Code::out_of_range: return "OUT_OF_RANGE";
    case Code::unimplemented: return "UNIMPLEMENTED";
    case Code::internal: return "INTERNAL";
    case Code::unavailable: return "UNAVAILABLE";
    case Code::data_loss: return "DATA_LOSS";
    case Code::unauthenticated: return "UNAUTHENTICATED";
  }
  return "UNKNOWN";
}

int http_status(Code code) {
  switch (code) {
    case Code::ok: return 200;
    case Code::cancelled: return 499;
    case Code::invalid_argument:
    case Code::failed_precondition:
    case Code::out_of_range: return 400;
    case Code::unauthenticated: return 401;
    case Code::permission_denied: return 403;
    case Code::not_found: return 404;
    case Code::already_exists:
    case Code::aborted: return 409;
    case Code::resource_exhausted: return 429;
    case Code::unimplemented: return 501;
    case Code::unavailable: return 503;
    case Code::deadline_exceeded: return 504;
    case Code::unknown:
    case Code::internal:
    case Code::data_loss: return 500;
  }
  return 500;
}

std::string Status::to_string() const {
  if (ok()) return "OK";
  return std::string(code_name(code_)) + ": " + message_;
}

}  // namespace kvasir
