#include "model/text/block_calls.h"

#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>

#include "core/cat.h"
#include "core/utf8.h"

namespace kvasir::text {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kBlanks = " \n\r\t";

std::string_view trimmed(std::string_view text) {
  const size_t from = text.find_first_not_of(kBlanks);
  if (from == std::string_view::npos) return {};
  return text.substr(from, text.find_last_not_of(kBlanks) + 1 - from);
}

bool is_name(std::string_view name) {
  return !name.empty() && name.size() <= 256 && name.find_first_of(" \n\r\t\"<>{}()[]") == std::string_view::npos;
}

// Discarded also where it nests so deep that printing it could overflow a stack, and where it has a zero byte, which
// the library takes for the end.
Json parsed(std::string_view text) {
  constexpr int kMostDepth = 64;
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '\0') return Json(Json::value_t::discarded);
    if (c == '"') in_string = !in_string;
    if (in_string) {
      i += c == '\\';
      continue;
    }
    depth += c == '[' || c == '{';
    depth -= c == ']' || c == '}';
    if (depth > kMostDepth) return Json(Json::value_t::discarded);
  }
  return Json::parse(text, nullptr, false);
}

std::string dumped(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

// A value without quotes: JSON, or one of Python's words, where it is some and no text is wanted.
Json value_of(std::string_view text, bool wants_text) {
  if (wants_text) return std::string(text);
  if (text == "True" || text == "False") return text == "True";
  if (text == "None") return nullptr;
  Json value = parsed(text);
  return value.is_discarded() ? Json(std::string(text)) : value;
}

// What stands between two tags, from `at` on, which moves behind it.
std::optional<std::string_view> between(std::string_view text, size_t& at, std::string_view open,
                                        std::string_view close) {
  const size_t from = text.find(open, at);
  if (from == std::string_view::npos) return std::nullopt;
  const size_t end = text.find(close, from + open.size());
  if (end == std::string_view::npos) return std::nullopt;
  at = end + close.size();
  return text.substr(from + open.size(), end - from - open.size());
}

std::optional<WrittenCall> call_of(const Json& json) {
  if (!json.is_object() || !json.contains("name") || !json["name"].is_string()) return std::nullopt;
  const Json arguments = json.value("arguments", json.value("parameters", Json::object()));
  if (!arguments.is_object()) return std::nullopt;
  return WrittenCall{json["name"], dumped(arguments)};
}

// Python's literals, and calls of them. A reader of untrusted text: bounded in depth, and it says no.
class Python {
 public:
  explicit Python(std::string_view text) : text_(text) {}

  // Behind the bracket of a list.
  WrittenCalls calls() {
    std::vector<WrittenCall> out;
    do {
      if (skip() == ']' && !out.empty()) break;  // a comma before the end
      auto one = call();
      if (!one) return std::nullopt;
      out.push_back(*std::move(one));
    } while (take(','));
    if (!take(']') || skip() != '\0') return std::nullopt;
    return out;
  }
  // One behind the other.
  WrittenCalls lines() {
    std::vector<WrittenCall> out;
    do {
      auto one = call();
      if (!one) return std::nullopt;
      out.push_back(*std::move(one));
    } while (skip() != '\0');
    return out;
  }

 private:
  static constexpr int kMostDepth = 32;

  std::optional<WrittenCall> call() {
    const std::string name = word();
    Json arguments = Json::object();
    if (!is_name(name) || !take('(')) return std::nullopt;
    while (skip() != ')') {
      const std::string key = word();
      if (key.empty() || !take('=')) return std::nullopt;
      auto v = value(0);
      if (!v) return std::nullopt;
      arguments[key] = *std::move(v);
      if (!take(',')) break;
    }
    if (!take(')')) return std::nullopt;
    return WrittenCall{name, dumped(arguments)};
  }

  char skip() {
    while (at_ < text_.size() && kBlanks.find(text_[at_]) != std::string_view::npos) ++at_;
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  bool take(char c) {
    if (skip() != c) return false;
    ++at_;
    return true;
  }
  std::string word() {
    skip();
    const size_t from = at_;
    auto in_word = [](char c) {
      return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '.' || c == '-';
    };
    while (at_ < text_.size() && in_word(text_[at_])) ++at_;
    return std::string(text_.substr(from, at_ - from));
  }
  std::optional<Json> value(int depth) {
    if (depth > kMostDepth) return std::nullopt;
    const char c = skip();
    if (c == '"' || c == '\'') return string(c);
    if (c == '[' || c == '(') return list(c == '[' ? ']' : ')', depth);
    if (c == '{') return object(depth);
    size_t end = text_.find_first_of(",)]} \n\r\t", at_);
    if (end == std::string_view::npos) end = text_.size();
    const std::string_view bare = text_.substr(at_, end - at_);
    at_ = end;
    if (bare == "True" || bare == "true") return Json(true);
    if (bare == "False" || bare == "false") return Json(false);
    if (bare == "None" || bare == "null") return Json(nullptr);
    Json number = parsed(bare);
    return number.is_number() ? std::optional<Json>(number) : std::nullopt;
  }
  std::optional<Json> string(char quote) {
    std::string out;
    for (++at_; at_ < text_.size() && text_[at_] != quote; ++at_) {
      char c = text_[at_];
      if (c == '\\' && at_ + 1 < text_.size()) {
        if (text_[at_ + 1] == 'u' && unicode(out)) continue;
        const size_t which = std::string_view("ntrbf\\/'\"").find(text_[at_ + 1]);
        if (which != std::string_view::npos)
          c = "\n\t\r\b\f\\/'\""[which], ++at_;  // others stay as they are, as in Python
      }
      out += c;
    }
    if (!take(quote)) return std::nullopt;
    return Json(std::move(out));
  }
  // \uXXXX, two of them where they are one character; at_ is then at its last.
  bool unicode(std::string& out) {
    for (size_t n : {size_t(12), size_t(6)}) {
      const std::string_view escape = text_.substr(at_, n);
      if (escape.size() < n || (n == 12 && escape.substr(6, 2) != "\\u")) continue;
      const Json one = Json::parse(cat('"', escape, '"'), nullptr, false);  // JSON has the same
      if (!one.is_string() || (n == 12 && utf8_characters(one.get_ref<const std::string&>()) != 1)) continue;
      out += one.get_ref<const std::string&>();
      at_ += n - 1;
      return true;
    }
    return false;
  }
  std::optional<Json> list(char close, int depth) {
    Json out = Json::array();
    ++at_;
    while (skip() != close) {
      auto v = value(depth + 1);
      if (!v) return std::nullopt;
      out.push_back(*std::move(v));
      if (!take(',')) break;
    }
    if (!take(close)) return std::nullopt;
    return out;
  }
  std::optional<Json> object(int depth) {
    Json out = Json::object();
    ++at_;
    while (skip() != '}') {
      auto key = value(depth + 1);
      if (!key || !key->is_string() || !take(':')) return std::nullopt;
      auto v = value(depth + 1);
      if (!v) return std::nullopt;
      out[key->get<std::string>()] = *std::move(v);
      if (!take(',')) break;
    }
    if (!take('}')) return std::nullopt;
    return out;
  }

  std::string_view text_;
  size_t at_ = 0;
};

// Calls and their parameters as elements that carry a name.
struct NamedElements {
  std::string_view function, parameter;  // as they begin, up to the name
  std::string_view name_end, function_end, parameter_end;
  bool own_lines;  // a value stands on lines of its own
};

WrittenCalls read_elements(std::string_view block, const TextParameters& texts, const NamedElements& tags) {
  std::vector<WrittenCall> out;
  for (size_t at = 0; auto function = between(block, at, tags.function, tags.function_end);) {
    const size_t name_end = function->find(tags.name_end);
    if (name_end == std::string_view::npos || !is_name(function->substr(0, name_end))) return std::nullopt;
    const std::string name(function->substr(0, name_end));
    Json arguments = Json::object();
    for (size_t p = name_end; auto parameter = between(*function, p, tags.parameter, tags.parameter_end);) {
      const size_t key_end = parameter->find(tags.name_end);
      if (key_end == std::string_view::npos || !is_name(parameter->substr(0, key_end))) return std::nullopt;
      std::string_view value = parameter->substr(key_end + tags.name_end.size());
      if (tags.own_lines && value.starts_with('\n')) value.remove_prefix(1);
      if (tags.own_lines && value.ends_with('\n')) value.remove_suffix(1);
      const std::string key(parameter->substr(0, key_end));
      arguments[key] = value_of(value, texts.count({name, key}) > 0);
    }
    out.push_back({name, dumped(arguments)});
  }
  return out.empty() ? WrittenCalls() : out;
}

}  // namespace

WrittenCalls read_xml_calls(std::string_view block, const TextParameters& texts) {
  return read_elements(block, texts, {"<function=", "<parameter=", ">", "</function>", "</parameter>", true});
}

WrittenCalls read_minimax_calls(std::string_view block, const TextParameters& texts) {
  return read_elements(block, texts,
                       {"<invoke name=\"", "<parameter name=\"", "\">", "</invoke>", "</parameter>", false});
}

WrittenCalls read_kimi_calls(std::string_view block, const TextParameters&) {
  constexpr std::string_view kFunctions = "functions.", kBegin = "<|tool_call_begin|>", kEnd = "<|tool_call_end|>",
                             kArguments = "<|tool_call_argument_begin|>";
  std::vector<WrittenCall> out;
  for (size_t at = 0; auto call = between(block, at, kBegin, kEnd);) {
    const size_t id_end = call->find(kArguments);
    if (id_end == std::string_view::npos) return std::nullopt;
    std::string_view name = trimmed(call->substr(0, id_end));
    if (name.starts_with(kFunctions)) name.remove_prefix(kFunctions.size());
    name = name.substr(0, name.rfind(':'));
    const Json arguments = parsed(trimmed(call->substr(id_end + kArguments.size())));
    if (!is_name(name) || !arguments.is_object()) return std::nullopt;
    out.push_back({std::string(name), dumped(arguments)});
  }
  return out.empty() ? WrittenCalls() : out;
}

WrittenCalls read_glm_calls(std::string_view block, const TextParameters& texts) {
  const std::string name(trimmed(block.substr(0, block.find("<arg_key>"))));
  if (!is_name(name)) return std::nullopt;
  Json arguments = Json::object();
  for (size_t at = 0; auto key = between(block, at, "<arg_key>", "</arg_key>");) {
    auto value = between(block, at, "<arg_value>", "</arg_value>");
    if (!value) return std::nullopt;
    const std::string k(trimmed(*key));
    arguments[k] = value_of(*value, texts.count({name, k}) > 0);
  }
  return std::vector<WrittenCall>{{name, dumped(arguments)}};
}

WrittenCalls read_mistral_calls(std::string_view block, const TextParameters&) {
  block = trimmed(block);
  if (block.starts_with('[')) {
    const Json list = parsed(block);
    if (!list.is_array() || list.empty()) return std::nullopt;
    std::vector<WrittenCall> out;
    for (const Json& one : list) {
      auto call = call_of(one);
      if (!call) return std::nullopt;
      out.push_back(*std::move(call));
    }
    return out;
  }
  const size_t brace = block.find('{');
  if (brace == std::string_view::npos) return std::nullopt;
  std::string_view name = trimmed(block.substr(0, block.find_first_of("[{")));
  const Json arguments = parsed(block.substr(brace));
  if (!is_name(name) || !arguments.is_object()) return std::nullopt;
  return std::vector<WrittenCall>{{std::string(name), dumped(arguments)}};
}

WrittenCalls read_list_calls(std::string_view block, const TextParameters& texts) {
  constexpr std::string_view kEnd = "<|/tool_call|>";
  block = trimmed(block);
  if (block.ends_with(kEnd)) block = trimmed(block.substr(0, block.size() - kEnd.size()));
  if (block.starts_with('[')) return read_mistral_calls(block, texts);
  auto call = call_of(parsed(block));
  return call ? WrittenCalls({*std::move(call)}) : WrittenCalls();
}

WrittenCalls read_functools_calls(std::string_view block, const TextParameters& texts) {
  return read_mistral_calls(cat('[', block), texts);
}

WrittenCalls read_deepseek_calls(std::string_view block, const TextParameters&) {
  constexpr std::string_view kBegin = "<｜tool▁call▁begin｜>", kSep = "<｜tool▁sep｜>", kEnd = "<｜tool▁call▁end｜>";
  std::vector<WrittenCall> out;
  for (size_t at = 0; auto call = between(block, at, kBegin, kEnd);) {
    const size_t sep = call->find(kSep);
    if (sep == std::string_view::npos) return std::nullopt;
    // "function" SEP NAME, a line break and JSON in a fence; or NAME SEP JSON.
    std::string_view first = trimmed(call->substr(0, sep)), rest = call->substr(sep + kSep.size());
    const size_t from = rest.find('{'), to = rest.rfind('}');
    if (from == std::string_view::npos || to == std::string_view::npos || to < from) return std::nullopt;
    std::string_view before = rest.substr(0, from);
    if (const size_t fence = before.find("```"); fence != std::string_view::npos) before = before.substr(0, fence);
    const std::string_view name = trimmed(before).empty() ? first : trimmed(before);
    const Json arguments = parsed(rest.substr(from, to + 1 - from));
    if (!is_name(name) || !arguments.is_object()) return std::nullopt;
    out.push_back({std::string(name), dumped(arguments)});
  }
  return out.empty() ? WrittenCalls() : out;
}

WrittenCalls read_pythonic_calls(std::string_view block, const TextParameters&) { return Python(block).calls(); }

WrittenCalls read_olmo_calls(std::string_view block, const TextParameters&) { return Python(block).lines(); }

BlockParser::Out BlockParser::push(std::string_view text) {
  Out out;
  pending_ += text;
  step(out, false);
  return out;
}

BlockParser::Out BlockParser::finish() {
  Out out;
  step(out, true);
  return out;
}

void BlockParser::end_block(std::string_view block, bool closed, Out& out) {
  if (WrittenCalls calls = form_.read(block, texts_)) {
    for (WrittenCall& call : *calls) out.calls.push_back(std::move(call));
    called_ = true;
  } else {
    out.content.append(blanks_).append(form_.open).append(block);
    if (closed) out.content += form_.close;
  }
  blanks_.clear();
}

// One step in a block; false when it must wait for more.
bool BlockParser::step_inside(Out& out) {
  if (form_.close.empty() && form_.only_first) return false;  // as long as the answer
  // Without a tag of its own a block ends where the next one begins.
  const std::string_view ends = form_.close.empty() ? form_.open : form_.close;
  const size_t end = pending_.find(ends, searched_);
  if (end == std::string::npos) {
    searched_ = pending_.size() - std::min(pending_.size(), ends.size() - 1);
    return false;
  }
  end_block(std::string_view(pending_).substr(0, end), !form_.close.empty(), out);
  pending_.erase(0, end + ends.size());
  searched_ = 0;
  inside_ = form_.close.empty();
  return true;
}

// One step outside; false when what is left must wait, or is all said.
bool BlockParser::step_outside(Out& out, bool last) {
  const size_t text = std::min(pending_.find_first_not_of(kBlanks), pending_.size());
  const bool nobodys = !begun_ || called_;  // blanks before and between calls; those before text are its own
  if (nobodys && text == pending_.size()) {
    if (last && called_) pending_.clear();
    if (!last) return false;
  }
  const bool may = !form_.only_first || !begun_;
  const size_t open = may ? pending_.find(form_.open) : std::string::npos;
  if (open != std::string::npos && (!form_.only_first || open == text)) {
    const size_t said = std::string_view(pending_).substr(0, open).find_last_not_of(kBlanks) + 1;
    out.content.append(pending_, 0, said);
    blanks_.append(pending_, said, open - said);  // those before a call are nobody's
    pending_.erase(0, open + form_.open.size());
    inside_ = begun_ = true;
    return true;
  }
  size_t keep = 0;
  if (may && !last)
    for (size_t n = std::min(pending_.size(), form_.open.size() - 1); n > 0 && keep == 0; --n)
      if (std::string_view(pending_).ends_with(form_.open.substr(0, n))) keep = n;
  if (may && !last)  // blanks, and what may open a block
    keep = pending_.size() - std::string_view(pending_).substr(0, pending_.size() - keep).find_last_not_of(kBlanks) - 1;
  if (pending_.size() > keep) begun_ = true, called_ = false;
  out.content.append(pending_, 0, pending_.size() - keep);
  pending_.erase(0, pending_.size() - keep);
  return false;
}

void BlockParser::step(Out& out, bool last) {
  while (inside_ ? step_inside(out) : step_outside(out, last)) {
  }
  if (!last || !inside_) return;
  if (form_.close.empty())
    end_block(pending_, false, out);
  else
    out.content.append(blanks_).append(form_.open).append(pending_);
  pending_.clear();
  inside_ = false;
}

}  // namespace kvasir::text
