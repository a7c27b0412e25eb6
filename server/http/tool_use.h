// The tools of a request, whatever its protocol: which grammar constrains its calls, and how they will be found in
// the answer.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "model/text/text.h"
#include "server/http/answer_reader.h"
#include "server/http/fields.h"
#include "server/services.h"

namespace kvasir::server::http {

enum class ToolChoice : uint8_t { none, automatic, required, named };

struct ToolUse {
  nlohmann::ordered_json tools;  // OpenAI's functions: those that may be called; null: none
  ToolChoice choice = ToolChoice::none;
  std::string name;  // named
  bool one = false;  // no two calls in one answer
};

// A choice needs tools, and the one it names is among them; else `tool_choice` fails.
void check_tool_choice(Fields& fields, const ToolUse& use);

// A schema in which what is not listed is not there: an object that says nothing of `additionalProperties` has none.
nlohmann::ordered_json closed_schema(nlohmann::ordered_json schema);

// How the answer is to be read. The request's grammar becomes the call's where one was asked for, and with a strict
// tool that the model may call, a call's or what it was; calls whose tags are special tokens show these.
AnswerShape prepare_tools(const Services& services, const ToolUse& use, engine::Request& request);

// As the operator says, or as the template has it.
text::ReasoningFormat reasoning_format(const Services& services);

// Before a request is submitted: thoughts between special tokens are found only where these are shown.
void show_reasoning(const Services& services, engine::Request& request);

// Adds what the model's template says of thoughts; `prompt` and `grammar` as they were submitted.
void prepare_reasoning(const Services& services, const std::vector<int32_t>& prompt, const text::GrammarSpec& grammar,
                       AnswerShape& shape);

}  // namespace kvasir::server::http
