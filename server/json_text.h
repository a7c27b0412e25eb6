// JSON written by hand where a token's price counts: strings escaped, bad UTF-8 replaced.
#pragma once

#include <string>
#include <string_view>

namespace kvasir::server {

void append_json_string(std::string& out, std::string_view text);  // with its quotes

inline std::string json_string(std::string_view text) {
  std::string out;
  append_json_string(out, text);
  return out;
}

}  // namespace kvasir::server
