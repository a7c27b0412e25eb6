#include "server/http/answer_reader.h"

#include <cmath>

#include "core/cat.h"

namespace kvasir::server::http {

int64_t reasoning_tokens(int64_t tokens, size_t thought_bytes, size_t said_bytes) {
  if (thought_bytes == 0) return 0;
  return std::llround(double(tokens) * double(thought_bytes) / double(thought_bytes + said_bytes));
}

AnswerReader::AnswerReader(const AnswerShape& shape)
    : shape_(shape), reasoning_(shape.reasoning, shape.thinks_at_once), tools_(shape.tools, shape.texts) {
  if (!shape_.before.empty()) tools_.push(shape_.before);
}

AnswerReader::Out AnswerReader::push(std::string_view text) {
  Out out;
  text::ReasoningParser::Out split = reasoning_.push(text);
  out.reasoning = std::move(split.reasoning);
  take(tools_.push(split.content), out);
  return out;
}

AnswerReader::Out AnswerReader::finish() {
  Out out;
  text::ReasoningParser::Out split = reasoning_.finish();
  out.reasoning = std::move(split.reasoning);
  take(tools_.push(split.content), out);
  take(tools_.finish(), out);
  return out;
}

void AnswerReader::take(text::ToolParser::Out parsed, Out& out) {
  if (!shape_.only_calls) out.content += parsed.content;
  for (auto& delta : parsed.calls) {
    if (shape_.one && delta.index > 0) continue;
    const auto index = static_cast<size_t>(delta.index);
    const bool begins = index >= calls_.size();
    if (begins) calls_.resize(index + 1);
    if (begins) calls_[index].name = delta.name;
    calls_[index].arguments += delta.arguments;
    out.calls.push_back({delta.index, begins, delta.name, std::move(delta.arguments)});
  }
}

}  // namespace kvasir::server::http
