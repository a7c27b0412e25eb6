// An answer's text as it comes, told apart: what the model thinks, what it says, which tools it calls. Each protocol
// writes these its own way.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "model/text/reasoning_parser.h"
#include "model/text/tool_parser.h"

namespace kvasir::server::http {

// How the parts of an answer are found. A call by name is the bare JSON the grammar allows, so what stands before it in
// the Hermes form is put there and the same parser reads it; what would stand after it says nothing that is not known,
// and an answer may be cut anywhere.
struct AnswerShape {
  text::ToolFormat tools = text::ToolFormat::none;
  text::TextParameters texts;  // of the tools
  std::string before;
  bool one = false;         // parallel tool calls are off
  bool only_calls = false;  // a call was asked for: what is left of one that was cut is no text
  bool says_so = true;      // OpenAI's finish_reason is "tool_calls"; a call by name ends with "stop" there
  text::ReasoningFormat reasoning = text::ReasoningFormat::none;
  bool thinks_at_once = false;  // the prompt ends inside the thoughts
};

// How many of `tokens` were thoughts, which is known by their share of the text alone.
int64_t reasoning_tokens(int64_t tokens, size_t thought_bytes, size_t said_bytes);

class AnswerReader {
 public:
  explicit AnswerReader(const AnswerShape& shape);

  struct CallPiece {
    int index = 0;
    bool begins = false;  // the name is known, and arguments follow
    std::string name, arguments;
  };
  struct Out {
    std::string reasoning, content;
    std::vector<CallPiece> calls;
    bool empty() const { return reasoning.empty() && content.empty() && calls.empty(); }
  };
  Out push(std::string_view text);
  Out finish();

  struct Call {
    std::string name, arguments;
  };
  const std::vector<Call>& calls() const { return calls_; }  // so far

 private:
  void take(text::ToolParser::Out parsed, Out& out);

  AnswerShape shape_;
  text::ReasoningParser reasoning_;
  text::ToolParser tools_;
  std::vector<Call> calls_;
};

}  // namespace kvasir::server::http
