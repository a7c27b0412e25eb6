// cat("head_dim is ", d, "; it must be at most ", 256): the one way messages are put together.
#pragma once

#include <charconv>
#include <concepts>
#include <string>
#include <string_view>

namespace kvasir {

inline void cat_one(std::string& out, std::string_view s) { out += s; }
inline void cat_one(std::string& out, const char* s) { out += s; }
inline void cat_one(std::string& out, char c) { out += c; }
inline void cat_one(std::string& out, bool b) { out += b ? "true" : "false"; }
template <class T>
requires(std::integral<T> || std::floating_point<T>) void cat_one(std::string& out, T value) {
  char buffer[64];
  auto [end, error] = std::to_chars(buffer, buffer + sizeof buffer, value);
  out.append(buffer, end);
}

template <class... Args>
std::string cat(const Args&... args) {
  std::string out;
  (cat_one(out, args), ...);
  return out;
}

}  // namespace kvasir
