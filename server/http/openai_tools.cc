#include "server/http/openai_tools.h"

#include "core/cat.h"
#include "server/json_text.h"

namespace kvasir::server::http {

ToolShape free_tools(text::ToolFormat format) {
  ToolShape s;
  s.format = format == text::ToolFormat::none ? text::ToolFormat::hermes : format;
  return s;
}

ToolShape required_tool() {
  ToolShape s;
  s.format = text::ToolFormat::hermes;
  s.before = "<tool_call>";
  s.one = true;
  return s;
}

ToolShape named_tool(std::string_view name) {
  ToolShape s = required_tool();
  s.before += cat("{\"name\":", json_string(name), ",\"arguments\":");
  s.says_so = false;
  return s;
}

ToolReader::ToolReader(const ToolShape& shape, std::string id_prefix)
    : shape_(shape), id_prefix_(std::move(id_prefix)), parser_(shape.format) {
  if (!shape_.before.empty()) parser_.push(shape_.before);
}

std::string ToolReader::id(size_t index) const { return cat("call_", id_prefix_, "_", index); }

ToolReader::Out ToolReader::push(std::string_view text) { return take(parser_.push(text)); }

ToolReader::Out ToolReader::finish() { return take(parser_.finish()); }

ToolReader::Out ToolReader::take(text::ToolParser::Out parsed) {
  Out out;
  out.content = std::move(parsed.content);
  // Cut before there was a call, the model's text is content: without what was put before it.
  if (!shape_.before.empty() && out.content.starts_with(shape_.before)) out.content.erase(0, shape_.before.size());
  for (const auto& delta : parsed.calls) {
    if (shape_.one && delta.index > 0) continue;
    auto index = static_cast<size_t>(delta.index);
    if (!out.deltas.empty()) out.deltas += ',';
    out.deltas += cat("{\"index\":", delta.index);
    if (index >= calls_.size()) {
      calls_.resize(index + 1);
      calls_[index].name = delta.name;
      out.deltas += cat(",\"id\":", json_string(id(index)),
                        ",\"type\":\"function\",\"function\":{\"name\":", json_string(delta.name),
                        ",\"arguments\":", json_string(delta.arguments), "}}");
    } else {
      out.deltas += cat(",\"function\":{\"arguments\":", json_string(delta.arguments), "}}");
    }
    calls_[index].arguments += delta.arguments;
  }
  return out;
}

std::string ToolReader::calls_json() const {
  std::string out = "[";
  for (size_t i = 0; i < calls_.size(); ++i) {
    if (i > 0) out += ',';
    out += cat("{\"id\":", json_string(id(i)),
               ",\"type\":\"function\",\"function\":{\"name\":", json_string(calls_[i].name),
               ",\"arguments\":", json_string(calls_[i].arguments), "}}");
  }
  return out + "]";
}

}  // namespace kvasir::server::http
