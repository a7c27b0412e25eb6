// Agents begin their instructions with a line that is another one in each call; in a prompt it would spoil every prefix
// behind it, and it tells the model nothing.
#pragma once

#include <string>

namespace kvasir::server::http {

inline std::string without_changing_line(std::string instructions) {
  if (!instructions.starts_with("x-anthropic-billing-header")) return instructions;
  const size_t end = instructions.find('\n');
  instructions.erase(0, end == std::string::npos ? end : end + 1);
  return instructions;
}

}  // namespace kvasir::server::http
