#include "server/trace_context.h"

#include <algorithm>

namespace kvasir::server {
namespace {

bool is_hex(std::string_view s) {
  return std::all_of(s.begin(), s.end(), [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}
bool all_zero(std::string_view s) { return s.find_first_not_of('0') == s.npos; }

}  // namespace

std::optional<TraceContext> parse_traceparent(std::string_view text) {
  // version(2)-trace(32)-parent(16)-flags(2); versions after 00 may say more behind it.
  constexpr size_t kSize = 55;
  if (text.size() < kSize || text[2] != '-' || text[35] != '-' || text[52] != '-') return std::nullopt;
  std::string_view version = text.substr(0, 2), trace = text.substr(3, 32), parent = text.substr(36, 16),
                   flags = text.substr(53, 2);
  if (!is_hex(version) || !is_hex(trace) || !is_hex(parent) || !is_hex(flags)) return std::nullopt;
  if (version == "ff" || all_zero(trace) || all_zero(parent)) return std::nullopt;
  if (text.size() > kSize && (version == "00" || text[kSize] != '-')) return std::nullopt;
  bool sampled = ((flags[1] <= '9' ? flags[1] - '0' : flags[1] - 'a' + 10) & 1) != 0;
  return TraceContext{std::string(trace), std::string(parent), sampled};
}

}  // namespace kvasir::server
