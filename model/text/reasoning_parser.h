// Splits what a model thinks from what it says, a piece at a time: "<think>...</think>" before the answer, or in a
// family's own tags, or all that gpt-oss writes (harmony.h).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "model/text/harmony.h"

namespace kvasir::text {

enum class ReasoningFormat : uint8_t { none, think, seed, mistral, gemma, harmony, kimi };

struct ReasoningTags {
  std::string_view name, open, close;
  bool special = false;      // they are special tokens, which an answer must then show
  std::string_view calls{};  // what a model may begin its calls with while it thinks: the thoughts end there, too
};
const ReasoningTags& reasoning_tags(ReasoningFormat format);
// By its name; nothing: there is none such.
std::optional<ReasoningFormat> reasoning_format_named(std::string_view name);

// What a chat template's models write: found from the tags that the template names.
ReasoningFormat reasoning_format_of(std::string_view chat_template);

class ReasoningParser {
 public:
  // `begun`: the prompt ends inside the thoughts, as templates do that open the tag themselves.
  ReasoningParser(ReasoningFormat format, bool begun);

  struct Out {
    std::string reasoning, content;
  };
  Out push(std::string_view text);
  Out finish();  // what was held back

 private:
  enum class At { start, thoughts, after, content };
  void step(Out& out, bool last);

  ReasoningTags tags_;
  std::optional<HarmonyParser> harmony_;
  At at_;
  std::string pending_;
};

}  // namespace kvasir::text
