// The terminal a conversation is typed into: lines with editing and history where it can, plain ones where it cannot.
#pragma once

#include <string>
#include <string_view>

#include "client/line_editor.h"

namespace kvasir::cli {

class ChatTerminal {
 public:
  // To be made before any other thread is: the signal of a new window size is taken here alone.
  ChatTerminal();
  ~ChatTerminal();
  ChatTerminal(const ChatTerminal&) = delete;
  ChatTerminal& operator=(const ChatTerminal&) = delete;

  enum class Read { line, interrupt, end };
  Read read(std::string_view prompt, std::string& line);
  // What is said about answers, fainter where the terminal and its user (NO_COLOR) have it so.
  void note(std::string_view text) const;
  // As it was found, from any thread, before the process ends in another way than by returning.
  static void restore();

 private:
  Read edit(std::string_view prompt, std::string& line);
  Read plain(std::string_view prompt, std::string& line);
  void draw(std::string_view prompt) const;
  void finish(std::string_view prompt) const;

  bool edits_ = false, styles_ = false;
  int resized_ = -1;     // a descriptor that tells of a new window size
  std::string pending_;  // typed, not yet looked at
  client::LineEditor editor_;
};

}  // namespace kvasir::cli
