// Tool calls that some families write as a block of their own syntax between two tags: read whole when the block ends,
// into names and JSON arguments.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvasir::text {

struct WrittenCall {
  std::string name, arguments;  // JSON text of an object
};
using WrittenCalls = std::optional<std::vector<WrittenCall>>;  // nothing: it is no call

// What a schema says is a string, by tool and parameter: text even where it looks like a number, in syntaxes that quote
// nothing.
using TextParameters = std::set<std::pair<std::string, std::string>>;

// <function=NAME><parameter=KEY>VALUE</parameter>...</function>
WrittenCalls read_xml_calls(std::string_view block, const TextParameters& texts);
// NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...
WrittenCalls read_glm_calls(std::string_view block, const TextParameters& texts);
// [{"name": ..., "arguments": {...}}, ...], or NAME[ARGS]{...}
WrittenCalls read_mistral_calls(std::string_view block, const TextParameters&);
// Such a list alone or one such object, perhaps with <|/tool_call|> behind it
WrittenCalls read_list_calls(std::string_view block, const TextParameters&);
// Such a list behind its bracket
WrittenCalls read_functools_calls(std::string_view block, const TextParameters&);
// <|tool_call_begin|>function<|tool_sep|>NAME, then JSON in a fence or bare, <|tool_call_end|>, with the family's bars
WrittenCalls read_deepseek_calls(std::string_view block, const TextParameters&);
// NAME(KEY=VALUE, ...), ...] with Python's literals
WrittenCalls read_pythonic_calls(std::string_view block, const TextParameters&);
// NAME(KEY=VALUE, ...) on a line each
WrittenCalls read_olmo_calls(std::string_view block, const TextParameters&);
// <invoke name="NAME"><parameter name="KEY">VALUE</parameter>...</invoke>
WrittenCalls read_minimax_calls(std::string_view block, const TextParameters& texts);
// <|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>{...}<|tool_call_end|>
WrittenCalls read_kimi_calls(std::string_view block, const TextParameters&);
// call:NAME{KEY:VALUE,...}, strings between <|"|>
WrittenCalls read_gemma_calls(std::string_view block, const TextParameters&);

// How a family writes them. `close` empty: the block ends with the answer, or where the next one opens (which it does
// only once where `only_first`).
struct BlockForm {
  std::string_view open, close;
  bool only_first;  // opens at the beginning of the answer alone
  WrittenCalls (*read)(std::string_view block, const TextParameters& texts);
};

// Finds them in an answer that streams. What only looks like a block comes out as content, unchanged.
class BlockParser {
 public:
  BlockParser(const BlockForm& form, TextParameters texts) : form_(form), texts_(std::move(texts)) {}

  struct Out {
    std::string content;
    std::vector<WrittenCall> calls;
  };
  Out push(std::string_view text);
  Out finish();

 private:
  void step(Out& out, bool last);
  bool step_inside(Out& out);
  bool step_outside(Out& out, bool last);
  void end_block(std::string_view block, bool closed, Out& out);

  const BlockForm form_;
  const TextParameters texts_;
  std::string pending_;  // not yet decided on
  std::string blanks_;   // in front of a block, in case it is none
  size_t searched_ = 0;  // of pending_, for the end of a block
  bool inside_ = false, begun_ = false, called_ = false;
};

}  // namespace kvasir::text
