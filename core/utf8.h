// What a character of UTF-8 is: no longer form of a shorter one, no surrogate, nothing past U+10FFFF.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>

namespace kvasir {

// Bytes of the well-formed character at the start of `s`, which is not empty; 0 when there is none.
inline size_t utf8_length(std::string_view s) {
  auto byte = [&](size_t i) { return static_cast<unsigned char>(s[i]); };
  size_t n = byte(0) < 0x80 ? 1 : byte(0) < 0xc2 ? 0 : byte(0) < 0xe0 ? 2 : byte(0) < 0xf0 ? 3 : byte(0) < 0xf5 ? 4 : 0;
  if (n > s.size()) return 0;
  for (size_t i = 1; i < n; ++i)
    if ((byte(i) & 0xc0) != 0x80) return 0;
  if (n == 3 && ((byte(0) == 0xe0 && byte(1) < 0xa0) || (byte(0) == 0xed && byte(1) >= 0xa0))) return 0;
  if (n == 4 && ((byte(0) == 0xf0 && byte(1) < 0x90) || (byte(0) == 0xf4 && byte(1) >= 0x90))) return 0;
  return n;
}

inline bool is_utf8(std::string_view s) {
  for (size_t n; !s.empty(); s.remove_prefix(n))
    if ((n = utf8_length(s)) == 0) return false;
  return true;
}

// Its characters; a byte that begins none counts as one.
inline size_t utf8_characters(std::string_view s) {
  size_t n = 0;
  for (; !s.empty(); ++n) s.remove_prefix(std::max<size_t>(utf8_length(s), 1));
  return n;
}

// The first `most` of them.
inline std::string_view utf8_prefix(std::string_view s, size_t most) {
  size_t end = 0;
  for (; most > 0 && end < s.size(); --most) end += std::max<size_t>(utf8_length(s.substr(end)), 1);
  return s.substr(0, end);
}

// The same text with each byte that begins no character replaced by U+FFFD.
inline std::string utf8_made_valid(std::string_view s) {
  std::string out;
  for (; !s.empty(); s.remove_prefix(std::max<size_t>(utf8_length(s), 1))) {
    if (const size_t n = utf8_length(s))
      out += s.substr(0, n);
    else
      out += "\xef\xbf\xbd";
  }
  return out;
}

}  // namespace kvasir
