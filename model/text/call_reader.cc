#include "model/text/call_reader.h"

#include <nlohmann/json.hpp>

namespace kvasir::text {
namespace {

bool is_space(char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }

// A JSON string literal's content; empty if it is none.
std::string literal(const std::string& quoted) {
  const auto v = nlohmann::json::parse(quoted, nullptr, false);
  return v.is_string() ? v.get<std::string>() : std::string();
}

bool names_arguments(const std::string& key) { return key == "arguments" || key == "parameters"; }

}  // namespace

CallReader::State CallReader::feed(char c) {
  if (state_ != State::reading) return state_;
  raw_.push_back(c);
  if (at_ == At::key || at_ == At::in_value) {
    value_char(c);
    return state_;
  }
  if (is_space(c)) return state_;
  switch (at_) {
    case At::start:
      if (c != '{') return state_ = State::broken;
      at_ = At::key_or_end;
      break;
    case At::key_or_end:
      if (c == '}') return state_ = State::done;
      if (c != '"') return state_ = State::broken;
      at_ = At::key;
      key_ = c;
      in_string_ = true;
      break;
    case At::colon:
      if (c != ':') return state_ = State::broken;
      at_ = At::value;
      break;
    case At::value: begin_value(c); break;
    case At::comma_or_end:
      if (c == '}') return state_ = State::done;
      if (c != ',') return state_ = State::broken;
      at_ = At::key_or_end;
      break;
    case At::key:
    case At::in_value: break;
  }
  return state_;
}

void CallReader::begin_value(char c) {
  if (c == ',' || c == '}' || c == ']' || c == ':') {
    state_ = State::broken;
    return;
  }
  value_.clear();
  depth_ = 0;
  at_ = At::in_value;
  if (names_arguments(key_)) {
    has_arguments_ = true;
    arguments_are_text_ = c == '"';
  }
  value_char(c);
}

void CallReader::value_char(char c) {
  std::string& text = at_ == At::key ? key_ : value_;
  const bool streams = at_ == At::in_value && names_arguments(key_) && !arguments_are_text_;
  if (in_string_) {
    text.push_back(c);
    if (streams) arguments_.push_back(c);
    if (escaped_) {
      escaped_ = false;
    } else if (c == '\\') {
      escaped_ = true;
    } else if (c == '"') {
      in_string_ = false;
      if (at_ == At::key) {
        key_ = literal(key_);
        plausible_ = plausible_ && (key_ == "name" || key_ == "type" || key_ == "id" || names_arguments(key_));
        at_ = At::colon;
      } else if (depth_ == 0) {
        end_value();
      }
    }
    return;
  }
  if (depth_ == 0 && !text.empty() && (is_space(c) || c == ',' || c == '}' || c == ']')) {
    end_value();  // a number or a word ended before this character
    if (state_ != State::reading || is_space(c)) return;
    if (c == '}') {
      state_ = State::done;
    } else if (c == ',') {
      at_ = At::key_or_end;
    } else {
      state_ = State::broken;
    }
    return;
  }
  text.push_back(c);
  if (streams) arguments_.push_back(c);
  if (c == '"') {
    in_string_ = true;
  } else if (c == '{' || c == '[') {
    ++depth_;
  } else if ((c == '}' || c == ']') && --depth_ == 0) {
    end_value();
  }
}

void CallReader::end_value() {
  at_ = At::comma_or_end;
  if (key_ == "name") {
    name_ = literal(value_);
    if (name_.empty()) state_ = State::broken;
  } else if (names_arguments(key_) && arguments_are_text_) {
    arguments_ += literal(value_);
  }
}

std::string CallReader::take_arguments() { return std::exchange(arguments_, {}); }

}  // namespace kvasir::text
