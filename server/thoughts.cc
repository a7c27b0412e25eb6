#include "server/thoughts.h"

#include <algorithm>
#include <span>
#include <string_view>

#include "core/cat.h"
#include "server/parameters.h"

namespace kvasir::server {

text::ReasoningFormat reasoning_format(const ServerOptions& options, const engine::Engine& engine) {
  const auto chat_template = engine.chat_template();
  if (!chat_template) return text::ReasoningFormat::none;
  return text::reasoning_format_named(options.reasoning_parser)
      .value_or(text::reasoning_format_of(chat_template->source()));
}

bool ends_in_thoughts(const std::vector<int32_t>& prompt, text::ReasoningFormat format,
                      const text::Tokenizer& tokenizer) {
  constexpr size_t kTail = 16;  // tokens: the tag and a line break
  const auto tail = tokenizer.decode(std::span(prompt).last(std::min(kTail, prompt.size())), false);
  if (!tail.ok()) return false;
  const size_t end = tail->find_last_not_of(" \n\r\t");
  return end != std::string::npos &&
         std::string_view(*tail).substr(0, end + 1).ends_with(text::reasoning_tags(format).open);
}

bool can_limit_thoughts(text::ReasoningFormat format) {
  return format != text::ReasoningFormat::none && format != text::ReasoningFormat::harmony;
}

Status limit_thoughts(const ServerOptions& options, const engine::Engine& engine, GenerateInput& input) {
  engine::Request& r = input.request;
  const int64_t tokens = r.thinking_budget.value_or(options.thinking_token_budget);
  if (tokens < 0 || (r.beams && !r.thinking_budget)) return {};
  const text::ReasoningFormat format = reasoning_format(options, engine);
  if (!can_limit_thoughts(format)) {
    if (!r.thinking_budget) return {};
    const char* name = name_of(input, parameter("thinking_token_budget"));
    return invalid_argument(cat(name, " is ", tokens,
                                format == text::ReasoningFormat::none
                                    ? ", and this model's template has no thoughts to count; leave it out"
                                    : ", and this model thinks in messages of their own, which are not counted; use "
                                      "reasoning_effort, or max_tokens"))
        .with_field(name);
  }
  using Kind = text::GrammarSpec::Kind;
  if (r.grammar.kind != Kind::none && r.grammar.kind != Kind::tool_calls) return {};  // its text has no thoughts
  const text::ReasoningTags& tags = text::reasoning_tags(format);
  engine::ThoughtLimit limit{tokens, std::string(tags.open), {std::string(tags.close)}};
  if (!tags.calls.empty()) limit.ends.emplace_back(tags.calls);
  limit.begun = ends_in_thoughts(r.prompt, format, *engine.tokenizer());
  KVASIR_ASSIGN(limit.closing, engine.tokenizer()->encode(tags.close, false, true));
  r.thoughts = std::move(limit);
  return {};
}

}  // namespace kvasir::server
