// The messages that gpt-oss writes one after the other (harmony), told apart as they stream: what stands in the channel
// "analysis" is thought; a message to functions.NAME is a call, put into the Hermes form, which ToolParser reads; the
// rest is said. Its tags are special tokens, shown.
#pragma once

#include <string>
#include <string_view>

namespace kvasir::text {

class HarmonyParser {
 public:
  // `thinking`: the prompt ends in a message of the channel "analysis".
  explicit HarmonyParser(bool thinking) : at_(thinking ? At::thoughts : At::start) {}

  // What is decided of `text` so far goes to one or the other; with `last`, all of it.
  void push(std::string_view text, bool last, std::string& reasoning, std::string& content);

 private:
  enum class At { start, header, thoughts, said, call };
  bool step(bool last, std::string& reasoning, std::string& content);
  void read_header(std::string_view header, std::string& content);

  At at_;
  std::string pending_;  // not yet decided on
};

}  // namespace kvasir::text
