#include "model/text/reasoning_parser.h"

#include <algorithm>

namespace kvasir::text {
namespace {

constexpr std::string_view kBlanks = " \n\r\t";

// In the order of ReasoningFormat.
constexpr ReasoningTags kTags[] = {{"none", "", ""},
                                   {"think", "<think>", "</think>"},
                                   {"seed", "<seed:think>", "</seed:think>"},
                                   {"mistral", "[THINK]", "[/THINK]", true},
                                   {"gemma", "<|channel>thought\n", "<channel|>", true},
                                   {"harmony", "<|channel|>analysis<|message|>", "<|end|>", true},
                                   {"kimi", "<think>", "</think>", true, "<|tool_calls_section_begin|>"}};

// How much of the end of `text` could begin `tag`.
size_t tail_of(std::string_view text, std::string_view tag) {
  if (tag.empty()) return 0;
  for (size_t n = std::min(text.size(), tag.size() - 1); n > 0; --n)
    if (text.ends_with(tag.substr(0, n))) return n;
  return 0;
}

}  // namespace

ReasoningFormat reasoning_format_of(std::string_view chat_template) {
  if (chat_template.find("<|channel|>") != std::string_view::npos &&
      chat_template.find("<|message|>") != std::string_view::npos)
    return ReasoningFormat::harmony;
  const ReasoningTags& kimi = kTags[size_t(ReasoningFormat::kimi)];
  if (chat_template.find(kimi.close) != std::string_view::npos &&
      chat_template.find(kimi.calls) != std::string_view::npos)
    return ReasoningFormat::kimi;
  for (size_t i = 1; i < size_t(ReasoningFormat::harmony); ++i)
    if (chat_template.find(kTags[i].close) != std::string_view::npos) return ReasoningFormat(i);
  return ReasoningFormat::none;
}

const ReasoningTags& reasoning_tags(ReasoningFormat format) { return kTags[size_t(format)]; }

std::optional<ReasoningFormat> reasoning_format_named(std::string_view name) {
  for (size_t i = 0; i < std::size(kTags); ++i)
    if (kTags[i].name == name) return ReasoningFormat(i);
  return std::nullopt;
}

ReasoningParser::ReasoningParser(ReasoningFormat format, bool begun)
    : tags_(reasoning_tags(format)),
      at_(format == ReasoningFormat::none ? At::content
          : begun                         ? At::thoughts
                                          : At::start) {
  if (format == ReasoningFormat::harmony) harmony_.emplace(begun);
}

ReasoningParser::Out ReasoningParser::push(std::string_view text) {
  Out out;
  pending_ += text;
  step(out, false);
  return out;
}

ReasoningParser::Out ReasoningParser::finish() {
  Out out;
  step(out, true);
  return out;
}

void ReasoningParser::step(Out& out, bool last) {
  if (harmony_) {
    harmony_->push(pending_, last, out.reasoning, out.content);
    pending_.clear();
    return;
  }
  if (at_ == At::start) {
    const size_t from = pending_.find_first_not_of(kBlanks);
    const std::string_view rest = from == std::string::npos ? "" : std::string_view(pending_).substr(from);
    if (!last && tags_.open.starts_with(rest)) return;
    if (rest.starts_with(tags_.open)) {
      pending_.erase(0, from + tags_.open.size());
      at_ = At::thoughts;
    } else {
      at_ = At::content;
    }
  }
  if (at_ == At::thoughts) {
    const size_t close = pending_.find(tags_.close);
    const size_t end = std::min(close, tags_.calls.empty() ? std::string::npos : pending_.find(tags_.calls));
    if (end == std::string::npos) {
      const size_t keep = last ? 0 : std::max(tail_of(pending_, tags_.close), tail_of(pending_, tags_.calls));
      out.reasoning += pending_.substr(0, pending_.size() - keep);
      pending_.erase(0, pending_.size() - keep);
      return;
    }
    out.reasoning += pending_.substr(0, end);
    pending_.erase(0, end + (end == close ? tags_.close.size() : 0));
    at_ = At::after;
  }
  if (at_ == At::after) {  // the blank line between thoughts and answer is neither's
    pending_.erase(0, std::min(pending_.find_first_not_of(kBlanks), pending_.size()));
    if (pending_.empty()) return;
    at_ = At::content;
  }
  out.content += pending_;
  pending_.clear();
}

}  // namespace kvasir::text
