#include "model/text/stop_expressions.h"
#include "model/text/stop_scanner.h"
#include "model/text/text.h"
#include "model/text/utf8.h"

namespace kvasir::text {

// Bytes become characters, characters pass the stop strings. What is held back is at most the start of one
// character and the longest tail that a stop string could begin with. The stop that is complete first wins
// (the longer one, if two end together), so how the text was cut into tokens does not matter.
struct Detokenizer::Impl {
  TokenizerPtr tokenizer;
  bool skip_special, include_stop;
  StopScanner stops;
  std::shared_ptr<const StopExpressions> expressions;
  std::unique_ptr<StopExpressions::Scan> scan;  // null: there are none
  std::string bytes;                            // not yet a whole character
  std::string held;                             // may become a stop string
  bool done = false, at_begin = false;

  // Takes up what is new at the end of `held`.
  Piece release(size_t known, bool last) {
    Piece piece;
    size_t used = 0;
    const std::string_view fresh = std::string_view(held).substr(known);
    const std::string* stop = stops.scan(fresh, used);
    std::optional<StopExpressions::Scan::Found> match;
    if (scan) match = scan->push(fresh.substr(0, used));  // up to the stop, or all of it
    if (match && (!stop || match->end < used)) {
      piece.stop = expressions->expression(match->which);
      piece.text = held.substr(0, known + match->end);
    } else if (stop) {
      piece.stop = *stop;
      piece.text = held.substr(0, known + used - (include_stop ? 0 : stop->size()));
    }
    if (match || stop) {
      piece.stopped = done = true;
      held.clear();
      bytes.clear();
      return piece;
    }
    const size_t keep = last ? 0 : stops.may_begin();
    piece.text = held.substr(0, held.size() - keep);
    held.erase(0, held.size() - keep);
    return piece;
  }
};

Detokenizer::Detokenizer(TokenizerPtr tokenizer, bool skip_special, std::vector<std::string> stop_strings,
                         bool include_stop, bool own_text, const std::shared_ptr<const StopExpressions>& expressions)
    : impl_(std::make_unique<Impl>()) {
  impl_->tokenizer = std::move(tokenizer);
  impl_->skip_special = skip_special;
  impl_->include_stop = include_stop;
  impl_->at_begin = own_text;
  impl_->expressions = expressions;
  if (expressions) impl_->scan = std::make_unique<StopExpressions::Scan>(*expressions);
  // What is not UTF-8 could only match inside a character, so it never may.
  std::erase_if(stop_strings, [](const std::string& s) {
    std::string characters;
    append_utf8(s, true, characters);
    return s.empty() || characters != s;
  });
  impl_->stops = StopScanner(std::move(stop_strings));
}
Detokenizer::~Detokenizer() = default;
Detokenizer::Detokenizer(Detokenizer&&) noexcept = default;
Detokenizer& Detokenizer::operator=(Detokenizer&&) noexcept = default;

Detokenizer::Piece Detokenizer::push(int32_t token) {
  Impl& d = *impl_;
  if (d.done || (d.skip_special && d.tokenizer->is_special(token))) return {};
  const std::string added = d.tokenizer->token_bytes(token);
  d.bytes.append(added, d.at_begin && added.starts_with(' ') ? 1 : 0);
  d.at_begin &= added.empty();
  const size_t known = d.held.size(), rest = append_utf8(d.bytes, false, d.held);
  d.bytes.erase(0, d.bytes.size() - rest);
  return d.release(known, false);
}

Detokenizer::Piece Detokenizer::finish() {
  Impl& d = *impl_;
  if (d.done) return {};
  const size_t known = d.held.size();
  append_utf8(d.bytes, true, d.held);
  d.bytes.clear();
  Piece piece = d.release(known, true);
  d.done = true;
  return piece;
}

}  // namespace kvasir::text
