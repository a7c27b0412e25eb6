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

// How deep brackets nest, outside strings; told from the text alone, before anything that visits a value can overflow
// a stack.
int json_depth(std::string_view text);
constexpr int kMostJsonDepth = 64;
size_t json_entries(std::string_view text);  // of a list: how many it has, told the same way

// The parser takes a zero byte, which no JSON has, for the end of its input, and would never see what follows.
inline bool has_zero_byte(std::string_view text) { return text.find('\0') != std::string_view::npos; }

}  // namespace kvasir::server
