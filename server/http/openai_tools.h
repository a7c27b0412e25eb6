// Tool calls in a chat answer: the model's text goes in, content and OpenAI's tool_calls come out.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "model/text/tool_parser.h"

namespace kvasir::server::http {

// How the calls of a request are found. A forced call is the bare JSON the grammar allows, so what stands
// before it in the Hermes form is put there and the same parser reads it; what would stand after it says nothing that
// is not known, and an answer may be cut anywhere.
struct ToolShape {
  text::ToolFormat format = text::ToolFormat::none;
  std::string before;
  bool one = false;     // parallel_tool_calls: false
  bool says_so = true;  // finish_reason "tool_calls"; a call by name ends with "stop", as OpenAI has it
};

ToolShape free_tools(text::ToolFormat format);
ToolShape required_tool();
ToolShape named_tool(std::string_view name);

class ToolReader {
 public:
  ToolReader(const ToolShape& shape, std::string id_prefix);

  struct Out {
    std::string content;
    std::string deltas;  // elements of "tool_calls" of a delta, separated by commas; may be empty
  };
  Out push(std::string_view text);
  Out finish();
  bool called() const { return !calls_.empty(); }
  std::string calls_json() const;  // the whole "tool_calls" list, with its brackets

 private:
  struct Call {
    std::string name, arguments;
  };
  Out take(text::ToolParser::Out out);
  std::string id(size_t index) const;

  ToolShape shape_;
  std::string id_prefix_;
  text::ToolParser parser_;
  std::vector<Call> calls_;
};

}  // namespace kvasir::server::http
