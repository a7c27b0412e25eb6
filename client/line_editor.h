// One line of input, edited: what keys make of it, and how it is drawn. It reads and writes nothing itself, so that
// it can be tested without a terminal.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kvasir::client {

// Columns a character takes on a terminal: 0 for what joins the one before, 2 for wide ones.
int columns_of(char32_t c);

class LineEditor {
 public:
  enum class Event : uint8_t { none, line, interrupt, end, suspend, clear_screen };

  // Takes the next byte of what was typed or pasted. After `line`, take() has it.
  Event feed(char byte);
  // The line, which becomes history; the editor is empty again.
  std::string take();
  void clear();
  const std::string& text() const { return text_; }
  bool empty() const { return text_.empty(); }
  // The row to show after "\r": prompt and as much of the text around the cursor as `width` columns hold, then back to
  // where the cursor stands. A line break in the text is shown as a sign of its own.
  std::string drawn(std::string_view prompt, int width) const;

 private:
  enum class In : uint8_t { text, escape, sequence, single_shift, paste };

  Event key(unsigned char c);
  Event character(unsigned char c);
  Event sequence(char last);
  void insert(std::string_view piece);
  void erase(size_t from, size_t to);
  void recall(int step);
  size_t before(size_t at) const;  // the character that ends at `at` with what joins it
  size_t after(size_t at) const;
  size_t word_before(size_t at) const;

  std::string text_, draft_;
  size_t cursor_ = 0;
  std::vector<std::string> history_;
  size_t recalled_ = 0;  // history_.size(): none, the draft
  In in_ = In::text;
  std::string partial_;  // of a UTF-8 character, a sequence, or the end of a paste
  bool after_return_ = false;
};

}  // namespace kvasir::client
