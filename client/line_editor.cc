#include "client/line_editor.h"

#include <algorithm>
#include <array>
#include <utility>

namespace kvasir::client {
namespace {

constexpr size_t kMostHistory = 500;
constexpr std::string_view kPasteEnds = "\033[201~";

struct CodePoints {
  char32_t first, last;
};
// Marks that are drawn over the character before, and joiners.
constexpr std::array<CodePoints, 15> kJoining = {{{0x0300, 0x036F},
                                                  {0x0483, 0x0489},
                                                  {0x0591, 0x05BD},
                                                  {0x0610, 0x061A},
                                                  {0x064B, 0x065F},
                                                  {0x0900, 0x0902},
                                                  {0x093C, 0x093C},
                                                  {0x0E31, 0x0E31},
                                                  {0x0E34, 0x0E3A},
                                                  {0x1AB0, 0x1AFF},
                                                  {0x200B, 0x200F},
                                                  {0x20D0, 0x20FF},
                                                  {0xFE00, 0xFE0F},
                                                  {0x1F3FB, 0x1F3FF},
                                                  {0xE0100, 0xE01EF}}};
constexpr std::array<CodePoints, 11> kWide = {{{0x1100, 0x115F},
                                               {0x2E80, 0x303E},
                                               {0x3041, 0xA4CF},
                                               {0xA960, 0xA97F},
                                               {0xAC00, 0xD7A3},
                                               {0xF900, 0xFAFF},
                                               {0xFE30, 0xFE6F},
                                               {0xFF00, 0xFF60},
                                               {0xFFE0, 0xFFE6},
                                               {0x1F300, 0x1FAFF},
                                               {0x20000, 0x3FFFD}}};

template <size_t n>
bool within(const std::array<CodePoints, n>& ranges, char32_t c) {
  return std::any_of(ranges.begin(), ranges.end(), [c](CodePoints r) { return c >= r.first && c <= r.last; });
}

size_t length_of(unsigned char first) { return first < 0x80 ? 1 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4; }

// The character at `at` of valid UTF-8.
char32_t decode(std::string_view text, size_t at) {
  const auto first = static_cast<unsigned char>(text[at]);
  const size_t n = length_of(first);
  char32_t c = n == 1 ? first : first & (0xFF >> (n + 1));
  for (size_t i = 1; i < n && at + i < text.size(); ++i) c = c << 6 | (static_cast<unsigned char>(text[at + i]) & 0x3F);
  return c;
}

bool continues(char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; }

// Over-long forms, surrogates and what is above Unicode's end are no characters either.
bool whole(std::string_view text) {
  const char32_t c = decode(text, 0);
  const size_t n = text.size();
  return n == 1 || (c >= (n == 2 ? 0x80u : n == 3 ? 0x800u : 0x10000u) && c <= 0x10FFFF && (c < 0xD800 || c > 0xDFFF));
}

constexpr char32_t kJoiner = 0x200D;

}  // namespace

int columns_of(char32_t c) { return within(kJoining, c) ? 0 : within(kWide, c) ? 2 : 1; }

LineEditor::Event LineEditor::feed(char byte) {
  const auto c = static_cast<unsigned char>(byte);
  switch (in_) {
    case In::text: return key(c);
    case In::escape:
      in_ = byte == '[' ? In::sequence : byte == 'O' ? In::single_shift : In::text;
      partial_.clear();
      if (byte == '\r' || byte == '\n') insert("\n");  // Alt and Return: a line break
      return Event::none;
    case In::single_shift: in_ = In::text; return sequence(byte);
    case In::sequence:
      if (c >= 0x40 && c <= 0x7E) {
        in_ = In::text;
        return sequence(byte);
      }
      if (partial_.size() < 16) partial_ += byte;
      return Event::none;
    case In::paste: {
      partial_ += byte;
      if (!partial_.ends_with(kPasteEnds)) return Event::none;
      partial_.resize(partial_.size() - kPasteEnds.size());
      const std::string pasted = std::exchange(partial_, {});
      in_ = In::text;
      for (const char p : pasted)
        if (p == '\r' || p == '\n') {
          if (p == '\r' || !after_return_) insert("\n");
          after_return_ = p == '\r';
        } else {
          after_return_ = false;
          character(static_cast<unsigned char>(p == '\t' ? ' ' : p));
        }
      after_return_ = false;
      return Event::none;
    }
  }
  return Event::none;
}

LineEditor::Event LineEditor::key(unsigned char c) {
  switch (c) {
    case '\r':
    case '\n': return Event::line;
    case 0x1B: in_ = In::escape; return Event::none;
    case 0x03: return Event::interrupt;
    case 0x04:
      if (text_.empty()) return Event::end;
      erase(cursor_, after(cursor_));
      return Event::none;
    case 0x1A: return Event::suspend;
    case 0x0C: return Event::clear_screen;
    case 0x08:
    case 0x7F: erase(before(cursor_), cursor_); return Event::none;
    case 0x01: cursor_ = 0; return Event::none;
    case 0x05: cursor_ = text_.size(); return Event::none;
    case 0x02: cursor_ = before(cursor_); return Event::none;
    case 0x06: cursor_ = after(cursor_); return Event::none;
    case 0x0B: erase(cursor_, text_.size()); return Event::none;
    case 0x15: erase(0, cursor_); return Event::none;
    case 0x17: erase(word_before(cursor_), cursor_); return Event::none;
    case 0x10: recall(-1); return Event::none;
    case 0x0E: recall(1); return Event::none;
    case '\t': insert(" "); return Event::none;
    default: return character(c);
  }
}

// Bytes that make no character are dropped.
LineEditor::Event LineEditor::character(unsigned char c) {
  if (c < 0x80) {
    partial_.clear();
    if (c >= 0x20 && c != 0x7F) insert(std::string_view(reinterpret_cast<const char*>(&c), 1));
    return Event::none;
  }
  if (!continues(char(c))) {
    partial_.clear();
    if (c >= 0xC2 && c <= 0xF4) partial_ += char(c);
    return Event::none;
  }
  if (partial_.empty()) return Event::none;
  partial_ += char(c);
  if (partial_.size() < length_of(static_cast<unsigned char>(partial_[0]))) return Event::none;
  const std::string one = std::exchange(partial_, {});
  if (whole(one) && decode(one, 0) > 0x9F) insert(one);  // U+0080 to U+009F are control characters
  return Event::none;
}

LineEditor::Event LineEditor::sequence(char last) {
  const std::string parameters = std::exchange(partial_, {});
  const bool by_word = parameters == "1;5" || parameters == "1;3";
  switch (last) {
    case 'A': recall(-1); break;
    case 'B': recall(1); break;
    case 'C':
      cursor_ = after(cursor_);
      while (by_word && cursor_ < text_.size() && text_[cursor_] != ' ') cursor_ = after(cursor_);
      break;
    case 'D': cursor_ = by_word ? word_before(cursor_) : before(cursor_); break;
    case 'H': cursor_ = 0; break;
    case 'F': cursor_ = text_.size(); break;
    case '~':
      if (parameters == "200") in_ = In::paste;
      if (parameters == "1" || parameters == "7") cursor_ = 0;
      if (parameters == "4" || parameters == "8") cursor_ = text_.size();
      if (parameters == "3") erase(cursor_, after(cursor_));
      break;
    default: break;
  }
  return Event::none;
}

std::string LineEditor::take() {
  std::string line = std::exchange(text_, {});
  if (line.find_first_not_of(" \n") != std::string::npos && (history_.empty() || history_.back() != line)) {
    history_.push_back(line);
    if (history_.size() > kMostHistory) history_.erase(history_.begin());
  }
  clear();
  return line;
}

void LineEditor::clear() {
  text_.clear();
  draft_.clear();
  partial_.clear();
  in_ = In::text;
  cursor_ = 0;
  recalled_ = history_.size();
}

void LineEditor::insert(std::string_view piece) {
  text_.insert(cursor_, piece);
  cursor_ += piece.size();
}

void LineEditor::erase(size_t from, size_t to) {
  text_.erase(from, to - from);
  cursor_ = from;
}

void LineEditor::recall(int step) {
  if ((step < 0 && recalled_ == 0) || (step > 0 && recalled_ == history_.size())) return;
  if (recalled_ == history_.size()) draft_ = text_;
  recalled_ = step < 0 ? recalled_ - 1 : recalled_ + 1;
  text_ = recalled_ == history_.size() ? draft_ : history_[recalled_];
  cursor_ = text_.size();
}

size_t LineEditor::before(size_t at) const {
  bool joined = true;
  while (at > 0 && joined) {
    do --at;
    while (at > 0 && continues(text_[at]));
    size_t previous = at;
    while (previous > 0 && continues(text_[--previous])) {
    }
    joined = columns_of(decode(text_, at)) == 0 || (at > 0 && decode(text_, previous) == kJoiner);
  }
  return at;
}

size_t LineEditor::after(size_t at) const {
  bool joined = true;
  while (at < text_.size() && joined) {
    const bool joins_next = decode(text_, at) == kJoiner;
    at = std::min(text_.size(), at + length_of(static_cast<unsigned char>(text_[at])));
    joined = at < text_.size() && (joins_next || columns_of(decode(text_, at)) == 0);
  }
  return at;
}

size_t LineEditor::word_before(size_t at) const {
  while (at > 0 && (text_[at - 1] == ' ' || text_[at - 1] == '\n')) --at;
  while (at > 0 && text_[at - 1] != ' ' && text_[at - 1] != '\n') --at;
  return at;
}

std::string LineEditor::drawn(std::string_view prompt, int width) const {
  struct Cell {
    size_t from, to;
    int columns;
  };
  std::vector<Cell> cells;
  size_t at_cursor = 0;
  for (size_t at = 0; at < text_.size();) {
    if (at < cursor_) at_cursor = cells.size() + 1;
    const size_t next = after(at);
    cells.push_back({at, next, text_[at] == '\n' ? 1 : std::max(1, columns_of(decode(text_, at)))});
    at = next;
  }
  // The last column stays free: a terminal would wrap there.
  const int room = std::max(4, width - int(prompt.size()) - 1);
  size_t first = at_cursor;
  int left = 0;
  while (first > 0 && left + cells[first - 1].columns <= room) left += cells[--first].columns;
  if (first > 0)  // some of what follows is seen, too
    while (first < at_cursor && left > room * 3 / 4) left -= cells[first++].columns;
  std::string out(prompt);
  int shown = 0;
  for (size_t i = first; i < cells.size() && shown + cells[i].columns <= room; ++i) {
    out += text_[cells[i].from] == '\n' ? "\u21B5" : text_.substr(cells[i].from, cells[i].to - cells[i].from);
    shown += cells[i].columns;
  }
  out += "\033[K\r";
  const int column = int(prompt.size()) + left;
  if (column > 0) out += "\033[" + std::to_string(column) + "C";
  return out;
}

}  // namespace kvasir::client
