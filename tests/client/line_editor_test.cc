#include "client/line_editor.h"

#include <gtest/gtest.h>

namespace kvasir::client {
namespace {

using Event = LineEditor::Event;

// What is left after `keys`; each Return takes a line, which goes before it in brackets.
std::string typed(LineEditor& e, std::string_view keys) {
  std::string lines;
  for (const char c : keys)
    if (e.feed(c) == Event::line) lines += '[' + e.take() + ']';
  return lines + e.text();
}
std::string typed(std::string_view keys) {
  LineEditor e;
  return typed(e, keys);
}

TEST(LineEditor, KeysEdit) {
  EXPECT_EQ(typed("hello\r"), "[hello]");
  EXPECT_EQ(typed("helo\033[Dl\033[H>\033[F<"), ">hello<");
  EXPECT_EQ(typed("abc\x01X\x05Y\x02\x02Z\x06W"), "XabZcWY");
  EXPECT_EQ(typed("abc\177\x08"), "a");
  EXPECT_EQ(typed("abc\033OD\033[3~"), "ab");
  EXPECT_EQ(typed("one two \x17"), "one ");
  EXPECT_EQ(typed("one two\033[1;5D\x0b"), "one ");
  EXPECT_EQ(typed("one two\033[D\x15"), "o");
  EXPECT_EQ(typed("a\tb\033[99;99~\033[5~c\x07"), "a bc");  // what is not known does nothing
}

TEST(LineEditor, EventsOfControlKeys) {
  LineEditor e;
  EXPECT_EQ(e.feed(0x04), Event::end);
  EXPECT_EQ(e.feed(0x03), Event::interrupt);
  EXPECT_EQ(e.feed(0x1A), Event::suspend);
  EXPECT_EQ(e.feed(0x0C), Event::clear_screen);
  typed(e, "ab\x01");
  EXPECT_EQ(e.feed(0x04), Event::none);  // not empty: it deletes
  EXPECT_EQ(e.text(), "b");
  e.clear();
  EXPECT_TRUE(e.empty());
}

TEST(LineEditor, HistoryComesBackAndTheDraftIsKept) {
  LineEditor e;
  EXPECT_EQ(typed(e, "one\rtwo\rtwo\r \r"), "[one][two][two][ ]");
  EXPECT_EQ(typed(e, "dra\033[A"), "two");
  EXPECT_EQ(typed(e, "\033[A"), "one");
  EXPECT_EQ(typed(e, "\033[A"), "one");
  EXPECT_EQ(typed(e, "!\033[B\033[B"), "dra");
  EXPECT_EQ(typed(e, "\x10\r"), "[two]");
}

TEST(LineEditor, CharactersAreWholeWhateverTheirBytes) {
  EXPECT_EQ(typed("日本語\177"), "日本");
  EXPECT_EQ(typed("e\u0301x\033[D\177"), "x");                               // a mark goes with its letter
  EXPECT_EQ(typed("a\U0001F469\u200D\U0001F469\u200D\U0001F467\177"), "a");  // a family is one
  EXPECT_EQ(typed("\U0001F44D\U0001F3FD\033[D!"), "!\U0001F44D\U0001F3FD");
  EXPECT_EQ(typed("a\xff\xc3(\xa9\xed\xa0\x80\xc0\x80\xf4\x90\x80\x80\xc2\x9b b"), "a( b");  // no characters
}

TEST(LineEditor, APasteIsOneMessage) {
  EXPECT_EQ(typed("a\033[200~one\r\ntwo\nthree\rfour\t\033[31m\x03\033[201~b\r"), "[aone\ntwo\nthree\nfour [31mb]");
  EXPECT_EQ(typed("one\033\rtwo"), "one\ntwo");
  const std::string large(100000, 'x');
  EXPECT_EQ(typed("\033[200~" + large + "\033[201~"), large);
}

TEST(LineEditor, WhatIsDrawnFits) {
  LineEditor e;
  EXPECT_EQ(e.drawn("> ", 80), "> \033[K\r\033[2C");
  typed(e, "ab\033[D");
  EXPECT_EQ(e.drawn("> ", 80), "> ab\033[K\r\033[3C");
  e.clear();
  typed(e, "0123456789abcdef");
  EXPECT_EQ(e.drawn("> ", 13), "> 9abcdef\033[K\r\033[9C");  // of 10 columns, some for what may follow
  typed(e, "\x01");
  EXPECT_EQ(e.drawn("> ", 13), "> 0123456789\033[K\r\033[2C");
  e.clear();
  typed(e, "日本\033\rx");
  EXPECT_EQ(e.drawn("", 80), "日本\u21B5x\033[K\r\033[6C");
  for (const int width : {0, 1, 5, 7}) {
    int columns = 0;
    const std::string row = e.drawn("> ", width);
    EXPECT_NE(row.find('x'), std::string::npos) << width;  // where the cursor stands is seen
    for (size_t i = 2; i < row.find('\033');) {
      const bool wide = static_cast<unsigned char>(row[i]) >= 0xE3;
      columns += wide ? 2 : 1;
      i += static_cast<unsigned char>(row[i]) >= 0xE0 ? 3 : 1;
    }
    EXPECT_LE(columns, std::max(4, width - 3)) << width;
  }
}

}  // namespace
}  // namespace kvasir::client
