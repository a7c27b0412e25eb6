// One {"name": ..., "arguments": ...} object, read a character at a time so that the arguments can be sent
// on before they end.
#pragma once

#include <string>

namespace kvasir::text {

class CallReader {
 public:
  enum class State { reading, done, broken };

  State feed(char c);
  State state() const { return state_; }

  const std::string& raw() const { return raw_; }    // all that was fed
  const std::string& name() const { return name_; }  // empty until read
  bool has_arguments() const { return has_arguments_; }
  // Keys seen so far all belong to a call.
  bool plausible() const { return plausible_; }
  // Arguments not taken yet, as JSON text; a whole JSON string of them is taken as its content, at its end.
  std::string take_arguments();

 private:
  enum class At { start, key_or_end, key, colon, value, in_value, comma_or_end };

  void begin_value(char c);
  void value_char(char c);
  void end_value();

  State state_ = State::reading;
  At at_ = At::start;
  std::string raw_, key_, name_, value_, arguments_;
  int depth_ = 0;
  bool in_string_ = false, escaped_ = false, has_arguments_ = false, plausible_ = true;
  bool arguments_are_text_ = false;
};

}  // namespace kvasir::text
