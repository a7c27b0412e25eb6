// Tool calls in a model's text, found while it streams. Two ways of writing them are known:
//   hermes  <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number, text around them
//   llama3  the whole answer is {"name": ..., "parameters": {...}}, several with ';' between
// What only looks like a call (no name, no end, other JSON) comes out as content, unchanged.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model/text/text.h"

namespace kvasir::text {

enum class ToolFormat { none, hermes, llama3 };

// Which one a chat template teaches its model.
ToolFormat tool_format_of(std::string_view chat_template);

struct CallableTool {
  std::string name, parameters_json;  // a JSON schema
};

enum class HowMany { any, some, one };

// What the parser of `format` takes for a call is then one of `tools`, with arguments of its schema. With `any` calls
// what it takes for text stays free, or is JSON of `answer_schema` where one is given; else the answer is calls alone.
GrammarSpec calls_grammar(ToolFormat format, std::span<const CallableTool> tools, std::string_view answer_schema = "",
                          HowMany how_many = HowMany::any);

class ToolParser {
 public:
  explicit ToolParser(ToolFormat format);
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
