// Looks for stop strings in text that comes piece by piece: each byte costs a few comparisons a string, whatever the
// strings and the text are (Knuth, Morris, Pratt).
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvasir::text {

class StopScanner {
 public:
  explicit StopScanner(std::vector<std::string> stops = {}) {
    for (std::string& stop : stops) patterns_.emplace_back(std::move(stop));
  }

  // The stop that is complete first, and of those that end together the longest; null: none. `used` are the bytes of
  // `text` up to its end.
  const std::string* scan(std::string_view text, size_t& used) {
    for (used = 0; used < text.size();) {
      const char c = text[used++];
      const std::string* found = nullptr;
      for (Pattern& p : patterns_)
        if (p.push(c) && (found == nullptr || p.text.size() > found->size())) found = &p.text;
      if (found) return found;
    }
    return nullptr;
  }

  // So many of the last bytes may be the start of a stop.
  size_t may_begin() const {
    size_t longest = 0;
    for (const Pattern& p : patterns_) longest = std::max<size_t>(longest, p.matched);
    return longest;
  }

 private:
  struct Pattern {
    explicit Pattern(std::string stop) : text(std::move(stop)), shorter(text.size()) {
      for (size_t i = 1, n = 0; i < text.size(); shorter[i++] = static_cast<uint32_t>(n)) {
        while (n > 0 && text[i] != text[n]) n = shorter[n - 1];
        n += text[i] == text[n];
      }
    }
    // True when the whole of it has just come.
    bool push(char c) {
      while (matched > 0 && (matched == text.size() || text[matched] != c)) matched = shorter[matched - 1];
      matched += text[matched] == c;
      return matched == text.size();
    }
    std::string text;
    std::vector<uint32_t> shorter;  // for each length: the longest of its starts that is also its end
    size_t matched = 0;
  };
  std::vector<Pattern> patterns_;
};

}  // namespace kvasir::text
