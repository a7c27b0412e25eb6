#include "model/text/tool_parser.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "model/text/block_calls.h"
#include "model/text/call_reader.h"

namespace kvasir::text {
namespace {

constexpr std::string_view kOpen = "<tool_call>", kClose = "</tool_call>", kPythonTag = "<|python_tag|>";
constexpr std::string_view kMistral = "[TOOL_CALLS]", kDeepseekOpen = "<｜tool▁calls▁begin｜>",
                           kDeepseekClose = "<｜tool▁calls▁end｜>", kSeedOpen = "<seed:tool_call>",
                           kSeedClose = "</seed:tool_call>", kList = "<|tool_call|>", kGemmaOpen = "<|tool_call>",
                           kGemmaClose = "<tool_call|>", kKimiOpen = "<|tool_calls_section_begin|>",
                           kKimiClose = "<|tool_calls_section_end|>", kMinimaxOpen = "<minimax:tool_call>",
                           kMinimaxClose = "</minimax:tool_call>", kOlmoOpen = "<function_calls>",
                           kOlmoClose = "</function_calls>", kFunctools = "functools[";

// How much of the end of `text` could begin `tag`.
size_t tail_of(std::string_view text, std::string_view tag) {
  for (size_t n = std::min(text.size(), tag.size() - 1); n > 0; --n) {
    if (text.substr(text.size() - n) == tag.substr(0, n)) return n;
  }
  return 0;
}

// How much of the first `size` bytes is left without the blanks at their end.
size_t without_blanks(std::string_view text, size_t size) {
  return text.substr(0, size).find_last_not_of(" \n\r\t") + 1;
}

constexpr std::pair<std::string_view, ToolFormat> kNames[] = {
    {"hermes", ToolFormat::hermes},     {"llama3", ToolFormat::llama3},      {"xml", ToolFormat::xml},
    {"glm", ToolFormat::glm},           {"mistral", ToolFormat::mistral},    {"deepseek", ToolFormat::deepseek},
    {"pythonic", ToolFormat::pythonic}, {"seed", ToolFormat::seed},          {"list", ToolFormat::list},
    {"gemma", ToolFormat::gemma},       {"kimi", ToolFormat::kimi},          {"minimax", ToolFormat::minimax},
    {"olmo", ToolFormat::olmo},         {"functools", ToolFormat::functools}};

// Of those that are blocks.
std::optional<BlockForm> block_form(ToolFormat format) {
  switch (format) {
    case ToolFormat::xml: return BlockForm{kOpen, kClose, false, read_xml_calls};
    case ToolFormat::seed: return BlockForm{kSeedOpen, kSeedClose, false, read_xml_calls};
    case ToolFormat::list: return BlockForm{kList, "", false, read_list_calls};
    case ToolFormat::functools: return BlockForm{kFunctools, "", false, read_functools_calls};
    case ToolFormat::glm: return BlockForm{kOpen, kClose, false, read_glm_calls};
    case ToolFormat::mistral: return BlockForm{kMistral, "", false, read_mistral_calls};
    case ToolFormat::deepseek: return BlockForm{kDeepseekOpen, kDeepseekClose, false, read_deepseek_calls};
    case ToolFormat::gemma: return BlockForm{kGemmaOpen, kGemmaClose, false, read_gemma_calls};
    case ToolFormat::kimi: return BlockForm{kKimiOpen, kKimiClose, false, read_kimi_calls};
    case ToolFormat::minimax: return BlockForm{kMinimaxOpen, kMinimaxClose, false, read_minimax_calls};
    case ToolFormat::olmo: return BlockForm{kOlmoOpen, kOlmoClose, false, read_olmo_calls};
    case ToolFormat::pythonic: return BlockForm{"[", "", true, read_pythonic_calls};
    default: return std::nullopt;
  }
}

}  // namespace

std::optional<ToolFormat> tool_format_named(std::string_view name) {
  for (const auto& [known, format] : kNames)
    if (known == name) return format;
  return std::nullopt;
}

bool tags_are_special(ToolFormat format) {
  switch (format) {
    case ToolFormat::mistral:
    case ToolFormat::list:
    case ToolFormat::gemma:
    case ToolFormat::kimi:
    case ToolFormat::minimax: return true;
    default: return false;
  }
}

std::string_view name_of(ToolFormat format) {
  for (const auto& [name, known] : kNames)
    if (known == format) return name;
  return "none";
}

ToolFormat tool_format_of(std::string_view chat_template) {
  auto has = [&](std::string_view text) { return chat_template.find(text) != std::string_view::npos; };
  if (has("<function=") && has(kOpen)) return ToolFormat::xml;
  if (has(kKimiOpen)) return ToolFormat::kimi;
  if (has(kMinimaxOpen)) return ToolFormat::minimax;
  if (has(kGemmaOpen)) return ToolFormat::gemma;
  if (has(kSeedOpen)) return ToolFormat::seed;
  if (has(kOlmoOpen)) return ToolFormat::olmo;
  if (has(kFunctools)) return ToolFormat::functools;
  if (has("<arg_key>")) return ToolFormat::glm;
  if (has(kDeepseekOpen)) return ToolFormat::deepseek;
  if (has(kMistral)) return ToolFormat::mistral;
  if (has(kOpen)) return ToolFormat::hermes;
  if (has(kList)) return ToolFormat::list;
  if (has("[func_name1(")) return ToolFormat::pythonic;
  if ((has("<|start_header_id|>") && has("\"parameters\"")) || has(kPythonTag)) return ToolFormat::llama3;
  return ToolFormat::none;
}

struct ToolParser::Impl {
  enum class At {
    lead,     // nothing but blanks so far (llama3: a call may begin)
    content,  // text
    call,     // inside an object
    after,    // behind an object: blanks, the closing tag, the next call
  };

  ToolFormat format;
  std::optional<BlockParser> blocks;
  At at = At::lead;
  std::string pending;  // not yet decided on
  std::string before;   // blanks and tags in front of a call, in case it is none
  std::optional<CallReader> reader;
  bool announced = false;
  int count = 0;

  Out of_blocks(BlockParser::Out read) {
    Out out;
    out.content = std::move(read.content);
    for (WrittenCall& call : read.calls)
      out.calls.push_back({count++, std::move(call.name), std::move(call.arguments)});
    return out;
  }

  void begin_call() {
    reader.emplace();
    announced = false;
    at = At::call;
  }

  // Sends what the reader has; a call is announced once its name is known and its arguments began.
  void send_call(Out& out) {
    if (!announced) {
      if (reader->name().empty() || !reader->has_arguments()) return;
      announced = true;
      out.calls.push_back({count++, reader->name(), reader->take_arguments()});
      return;
    }
    std::string arguments = reader->take_arguments();
    if (arguments.empty()) return;
    const int index = count - 1;
    if (!out.calls.empty() && out.calls.back().index == index) {
      out.calls.back().arguments += arguments;
    } else {
      out.calls.push_back({index, "", std::move(arguments)});
    }
  }

  // It was no call after all.
  void give_up(Out& out) {
    if (!announced) out.content += before + reader->raw();
    reader.reset();
    before.clear();
    at = At::content;
  }

  // Reads from `text` and returns how much of it is used.
  size_t read_call(std::string_view text, Out& out) {
    for (size_t i = 0; i < text.size(); ++i) {
      const CallReader::State state = reader->feed(text[i]);
      const bool other_json = format == ToolFormat::llama3 && !announced && !reader->plausible();
      if (state == CallReader::State::broken || other_json) {
        send_call(out);
        give_up(out);
        return i + 1;
      }
      if (state == CallReader::State::done) {
        send_call(out);
        if (!announced) {
          if (format == ToolFormat::llama3 || reader->name().empty()) {
            give_up(out);
            return i + 1;
          }
          out.calls.push_back({count++, reader->name(), "{}"});  // a tool without arguments
        }
        reader.reset();
        before.clear();
        at = At::after;
        return i + 1;
      }
    }
    send_call(out);
    return text.size();
  }

  // Each of these is a step over `pending`; false when it must wait for more.
  bool step_in_lead(Out& out, bool last) {
    const size_t from = pending.find_first_not_of(" \n\r\t");
    if (from == std::string::npos) return false;
    const std::string_view rest = std::string_view(pending).substr(from);
    if (format == ToolFormat::llama3) {
      if (rest.starts_with(kPythonTag)) {
        before.append(pending, 0, from + kPythonTag.size());
        pending.erase(0, from + kPythonTag.size());
        return true;
      }
      if (!last && kPythonTag.starts_with(rest)) return false;
      if (rest[0] == '{') {
        before.append(pending, 0, from);
        pending.erase(0, from);
        begin_call();
        return true;
      }
    } else if (rest.starts_with(kOpen)) {
      before.append(pending, 0, from + kOpen.size());
      pending.erase(0, from + kOpen.size());
      begin_call();
      return true;
    } else if (!last && kOpen.starts_with(rest)) {
      return false;
    }
    out.content += std::exchange(before, {});
    at = At::content;
    return true;
  }

  bool step_in_content(Out& out, bool last) {
    if (format == ToolFormat::hermes) {
      const size_t found = pending.find(kOpen);
      if (found != std::string::npos) {
        const size_t text = without_blanks(pending, found);  // those before a call are nobody's
        out.content.append(pending, 0, text);
        before.assign(pending, text, found - text) += kOpen;
        pending.erase(0, found + kOpen.size());
        begin_call();
        return true;
      }
    }
    const bool waits = !last && format == ToolFormat::hermes;
    const size_t keep = waits ? pending.size() - without_blanks(pending, pending.size() - tail_of(pending, kOpen)) : 0;
    out.content.append(pending, 0, pending.size() - keep);
    pending.erase(0, pending.size() - keep);
    return false;
  }

  bool step_after_call(bool last) {
    const size_t from = pending.find_first_not_of(" \n\r\t");
    if (from == std::string::npos) return false;
    const std::string_view rest = std::string_view(pending).substr(from);
    if (format == ToolFormat::hermes) {
      if (rest.starts_with(kClose)) {
        pending.erase(0, from + kClose.size());
        at = At::lead;
        return true;
      }
      if (!last && kClose.starts_with(rest)) return false;
      at = At::lead;  // the closing tag was forgotten
      return true;
    }
    if (rest[0] == ';') {
      pending.erase(0, from + 1);
      at = At::lead;
      return true;
    }
    at = At::content;
    return true;
  }

  bool step(Out& out, bool last) {
    switch (at) {
      case At::lead: return step_in_lead(out, last);
      case At::content: return step_in_content(out, last);
      case At::call:
        if (pending.empty()) return false;
        pending.erase(0, read_call(pending, out));
        return true;
      case At::after: return step_after_call(last);
    }
    return false;
  }
};

ToolParser::ToolParser(ToolFormat format, TextParameters texts) : impl_(std::make_unique<Impl>()) {
  impl_->format = format;
  if (auto form = block_form(format)) impl_->blocks.emplace(*form, std::move(texts));
}
ToolParser::~ToolParser() = default;
ToolParser::ToolParser(ToolParser&&) noexcept = default;
ToolParser& ToolParser::operator=(ToolParser&&) noexcept = default;

ToolParser::Out ToolParser::push(std::string_view text) {
  Out out;
  if (impl_->format == ToolFormat::none) {
    out.content = text;
    return out;
  }
  if (impl_->blocks) return impl_->of_blocks(impl_->blocks->push(text));
  impl_->pending += text;
  while (impl_->step(out, false)) {
  }
  return out;
}

ToolParser::Out ToolParser::finish() {
  Out out;
  Impl& p = *impl_;
  if (p.blocks) return p.of_blocks(p.blocks->finish());
  while (p.step(out, true)) {
  }
  if (p.at == Impl::At::call) p.give_up(out);
  // Blanks at the very end of an answer that had calls say nothing.
  if (p.at == Impl::At::lead && p.count == 0) out.content += p.before + p.pending;
  p.pending.clear();
  return out;
}

int ToolParser::calls() const { return impl_->count; }

}  // namespace kvasir::text
