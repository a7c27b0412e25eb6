// Model output on a terminal: text only. Control characters (escape sequences could rewrite the screen,
// the title, even the clipboard) are dropped; what a UTF-8 character needs to be whole is kept back.
#pragma once

#include <string>
#include <string_view>

namespace kvasir::client {

class TerminalText {
 public:
  // What may be written now.
  std::string clean(std::string_view piece) {
    std::string out;
    for (char c : piece) {
      auto byte = static_cast<unsigned char>(c);
      if (after_c2_) {
        after_c2_ = false;
        if (byte >= 0x80 && byte <= 0x9f) continue;  // U+0080 to U+009F: control characters too
        out += '\xc2';
      }
      if (byte == 0xc2) {
        after_c2_ = true;
      } else if (byte >= 0x20 ? byte != 0x7f : byte == '\n' || byte == '\t') {
        out += c;
      }
    }
    return out;
  }

 private:
  bool after_c2_ = false;
};

}  // namespace kvasir::client
