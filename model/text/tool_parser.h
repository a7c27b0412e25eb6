// Tool calls in a model's text, found while it streams. These ways of writing them are known:
//   hermes    <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number, text around them (Qwen, Hermes)
//   llama3    the whole answer is {"name": ..., "parameters": {...}}, several with ';' between
//   xml       <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call> (Qwen3-Coder)
//   seed      the same between <seed:tool_call> tags (Seed-OSS)
//   glm       <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>
//   mistral   [TOOL_CALLS] and a list of objects, or NAME[ARGS]{...}
//   list      <|tool_call|> and a list of objects, or one object (Granite 3, Phi 4 mini)
//   functools functools[...], a list of objects (Firefunction 2)
//   deepseek  calls between its tags, with JSON in a fence or bare
//   gemma     <|tool_call>call:NAME{KEY:VALUE}<tool_call|>, strings between <|"|> (Gemma 4)
//   kimi      <|tool_calls_section_begin|> and calls with their numbers and JSON between tags of their own (Kimi K2)
//   minimax   <minimax:tool_call><invoke name="NAME"> with <parameter name="KEY">VALUE</parameter> (MiniMax M2)
//   pythonic  the whole answer is [NAME(KEY=VALUE), ...] (Llama 3.2 and 4)
//   olmo      <function_calls> and such calls, each on a line of its own (Olmo 3)
// Arguments of the first two are sent on as they come; the others' come with the end of their block (block_calls.h).
// What only looks like a call (no name, no end, other JSON) comes out as content, unchanged.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model/text/block_calls.h"
#include "model/text/text.h"

namespace kvasir::text {

enum class ToolFormat {
  none,
  hermes,
  llama3,
  xml,
  seed,
  glm,
  mistral,
  list,
  functools,
  deepseek,
  pythonic,
  gemma,
  kimi,
  minimax,
  olmo
};

// By the names above; nothing: there is none such.
std::optional<ToolFormat> tool_format_named(std::string_view name);
// Its tags are special tokens, which an answer must then show.
bool tags_are_special(ToolFormat format);
std::string_view name_of(ToolFormat format);

// Which one a chat template teaches its model.
ToolFormat tool_format_of(std::string_view chat_template);

struct CallableTool {
  std::string name, parameters_json;  // a JSON schema
};

// Whether a grammar can constrain calls of these tools to their schemas. Where the syntax is not JSON it cannot, if
// arguments are no plain list of parameters; in Gemma's, nor if a value is one that only JSON can write.
bool can_hold(ToolFormat format, std::span<const CallableTool> tools);
// Parameters that such a grammar has written as bare text where the syntax quotes nothing; others are JSON there.
TextParameters bare_texts(std::span<const CallableTool> tools);

enum class HowMany { any, some, one };

// What the parser of `format` takes for a call is then one of `tools`, with arguments of its schema. With `any` calls
// what it takes for text stays free, or is JSON of `answer_schema` where one is given; else the answer is calls alone.
GrammarSpec calls_grammar(ToolFormat format, std::span<const CallableTool> tools, std::string_view answer_schema = "",
                          HowMany how_many = HowMany::any);

class ToolParser {
 public:
  explicit ToolParser(ToolFormat format, TextParameters texts = {});
  ~ToolParser();
  ToolParser(ToolParser&&) noexcept;
  ToolParser& operator=(ToolParser&&) noexcept;

  struct CallDelta {
    int index = 0;
    std::string name;       // whole, in the first delta of a call; empty after
    std::string arguments;  // the next piece of the arguments' JSON text
  };
  struct Out {
    std::string content;
    std::vector<CallDelta> calls;
  };
  Out push(std::string_view text);
  Out finish();
  int calls() const;  // begun so far

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvasir::text
