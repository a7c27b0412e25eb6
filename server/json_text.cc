#include "server/json_text.h"

#include <algorithm>

#include "core/utf8.h"

namespace kvasir::server {

namespace {

// Calls see(c) for what stands outside strings.
template <class See>
void outside_strings(std::string_view text, See see) {
  bool quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted) {
      if (c == '\\')
        ++i;
      else if (c == '"')
        quoted = false;
    } else {
      quoted = c == '"';
      see(c);
    }
  }
}

bool opens(char c) { return c == '{' || c == '['; }
bool closes(char c) { return c == '}' || c == ']'; }

}  // namespace

int json_depth(std::string_view text) {
  int depth = 0, deepest = 0;
  outside_strings(text, [&](char c) {
    if (opens(c)) deepest = std::max(deepest, ++depth);
    if (closes(c)) --depth;
  });
  return deepest;
}

size_t json_entries(std::string_view text) {
  int depth = 0;
  size_t commas = 0;
  bool some = false;
  outside_strings(text, [&](char c) {
    if (depth == 1 && c == ',') ++commas;
    if (depth >= 1 && !closes(c) && c != ' ' && c != '\n' && c != '\r' && c != '\t') some = true;
    if (opens(c)) ++depth;
    if (closes(c)) --depth;
  });
  return some ? commas + 1 : 0;
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
    } else if (size_t n = utf8_length(text.substr(i))) {
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
