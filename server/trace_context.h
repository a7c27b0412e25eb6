// W3C's traceparent: which trace a request belongs to, and which span of it asked.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace kvasir::server {

struct TraceContext {
  std::string trace_id;   // 32 hexadecimal digits
  std::string parent_id;  // 16; empty: a trace of our own
  bool sampled = true;
};

// Nothing when the text is not one: then the request is traced as if it had none.
std::optional<TraceContext> parse_traceparent(std::string_view text);

}  // namespace kvasir::server
