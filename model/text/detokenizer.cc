#include <algorithm>

#include "model/text/text.h"
#include "model/text/utf8.h"

namespace kvasir::text {

// Bytes become characters, characters pass the stop strings. What is held back is at most the start of one
// character and the longest tail that a stop string could begin with. The stop that is complete first wins
// (the longer one, if two end together), so how the text was cut into tokens does not matter.
struct Detokenizer::Impl {
  TokenizerPtr tokenizer;
  bool skip_special, include_stop;
  std::vector<std::string> stops;
  std::string bytes;  // not yet a whole character
  std::string held;   // may become a stop string
  bool done = false;

  struct Match {
    size_t begin = std::string::npos, end = std::string::npos;
    const std::string* stop = nullptr;
  };

  Match first_stop() const {
    Match best;
    for (const std::string& stop : stops) {
      const size_t at = held.find(stop);
      if (at == std::string::npos) continue;
      const size_t end = at + stop.size();
      if (end < best.end || (end == best.end && at < best.begin)) best = {at, end, &stop};
    }
    return best;
  }

  size_t tail_that_may_stop() const {
    size_t longest = 0;
    for (const std::string& stop : stops) {
      for (size_t n = std::min(stop.size() - 1, held.size()); n > longest; --n) {
        if (held.compare(held.size() - n, n, stop, 0, n) == 0) longest = n;
      }
    }
    return longest;
  }

  Piece release(bool last) {
    Piece piece;
    if (const Match m = first_stop(); m.stop) {
      piece.stopped = done = true;
      piece.stop = *m.stop;
      piece.text = held.substr(0, include_stop ? m.end : m.begin);
      held.clear();
      bytes.clear();
      return piece;
    }
    const size_t keep = last ? 0 : tail_that_may_stop();
    piece.text = held.substr(0, held.size() - keep);
    held.erase(0, held.size() - keep);
    return piece;
  }
};

Detokenizer::Detokenizer(TokenizerPtr tokenizer, bool skip_special, std::vector<std::string> stop_strings,
                         bool include_stop)
    : impl_(std::make_unique<Impl>()) {
  impl_->tokenizer = std::move(tokenizer);
  impl_->skip_special = skip_special;
  impl_->include_stop = include_stop;
  // What is not UTF-8 could only match inside a character, so it never may.
  std::erase_if(stop_strings, [](const std::string& s) {
    std::string characters;
    append_utf8(s, true, characters);
    return s.empty() || characters != s;
  });
  impl_->stops = std::move(stop_strings);
}
Detokenizer::~Detokenizer() = default;
Detokenizer::Detokenizer(Detokenizer&&) noexcept = default;
Detokenizer& Detokenizer::operator=(Detokenizer&&) noexcept = default;

Detokenizer::Piece Detokenizer::push(int32_t token) {
  Impl& d = *impl_;
  if (d.done || (d.skip_special && d.tokenizer->is_special(token))) return {};
  d.bytes += d.tokenizer->token_bytes(token);
  std::string& out = d.held;
  const size_t rest = append_utf8(d.bytes, false, out);
  d.bytes.erase(0, d.bytes.size() - rest);
  return d.release(false);
}

Detokenizer::Piece Detokenizer::finish() {
  Impl& d = *impl_;
  if (d.done) return {};
  append_utf8(d.bytes, true, d.held);
  d.bytes.clear();
  Piece piece = d.release(true);
  d.done = true;
  return piece;
}

}  // namespace kvasir::text
