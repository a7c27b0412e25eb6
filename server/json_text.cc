#include "server/json_text.h"

#include <algorithm>

namespace kvasir::server {
namespace {

// Length of the valid UTF-8 sequence at s[i], 0 if there is none.
size_t sequence_length(std::string_view s, size_t i) {
  auto byte = [&](size_t k) -> unsigned { return k < s.size() ? static_cast<unsigned char>(s[k]) : 0u; };
  auto follows = [&](size_t k) { return (byte(k) & 0xc0) == 0x80; };
  unsigned c = byte(i);
  if (c < 0x80) return 1;
  if (c >= 0xc2 && c <= 0xdf) return follows(i + 1) ? 2 : 0;
  if (c >= 0xe0 && c <= 0xef) {
    if (c == 0xe0 && byte(i + 1) < 0xa0) return 0;  // overlong
    if (c == 0xed && byte(i + 1) > 0x9f) return 0;  // surrogate
    return follows(i + 1) && follows(i + 2) ? 3 : 0;
  }
  if (c >= 0xf0 && c <= 0xf4) {
    if (c == 0xf0 && byte(i + 1) < 0x90) return 0;
    if (c == 0xf4 && byte(i + 1) > 0x8f) return 0;
    return follows(i + 1) && follows(i + 2) && follows(i + 3) ? 4 : 0;
  }
  return 0;
}

}  // namespace

int json_depth(std::string_view text) {
  int depth = 0, deepest = 0;
  bool quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    char c = text[i];
    if (quoted) {
      if (c == '\\')
        ++i;
      else if (c == '"')
        quoted = false;
    } else if (c == '"') {
      quoted = true;
    } else if (c == '{' || c == '[') {
      deepest = std::max(deepest, ++depth);
    } else if (c == '}' || c == ']') {
      --depth;
    }
  }
  return deepest;
}

void append_json_string(std::string& out, std::string_view text) {
  static constexpr char hex[] = "0123456789abcdef";
  out.reserve(out.size() + text.size() + 2);
  out += '"';
  for (size_t i = 0; i < text.size();) {
    unsigned char c = static_cast<unsigned char>(text[i]);
    if (c >= 0x20 && c < 0x80 && c != '"' && c != '\\') {
      out += text[i++];
      continue;
    }
    switch (c) {
      case '"':
        out += "\\\"";
        ++i;
        continue;
      case '\\':
        out += "\\\\";
        ++i;
        continue;
      case '\n':
        out += "\\n";
        ++i;
        continue;
      case '\r':
        out += "\\r";
        ++i;
        continue;
      case '\t':
        out += "\\t";
        ++i;
        continue;
    }
    if (c < 0x20) {
      out += "\\u00";
      out += hex[c >> 4];
      out += hex[c & 15];
      ++i;
    } else if (size_t n = sequence_length(text, i)) {
      out.append(text, i, n);
      i += n;
    } else {
      out += "\xef\xbf\xbd";  // U+FFFD
      ++i;
    }
  }
  out += '"';
}

}  // namespace kvasir::server
