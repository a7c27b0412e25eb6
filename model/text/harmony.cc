#include "model/text/harmony.h"

#include <nlohmann/json.hpp>

namespace kvasir::text {
namespace {

constexpr std::string_view kChannel = "<|channel|>", kStart = "<|start|>", kMessage = "<|message|>";
constexpr std::string_view kBegins[] = {kChannel, kStart, " to="};  // a message's header
constexpr std::string_view kEnds[] = {"<|end|>", "<|call|>", "<|return|>", kStart, kChannel};

// The word behind `mark` in a header: "functions.f" of " to=functions.f<|channel|>commentary".
std::string_view word_behind(std::string_view header, std::string_view mark) {
  const size_t at = header.find(mark);
  if (at == std::string_view::npos) return {};
  header.remove_prefix(at + mark.size());
  return header.substr(0, header.find_first_of(" <"));
}

}  // namespace

void HarmonyParser::push(std::string_view text, bool last, std::string& reasoning, std::string& content) {
  pending_ += text;
  while (step(last, reasoning, content)) {
  }
}

void HarmonyParser::read_header(std::string_view header, std::string& content) {
  constexpr std::string_view kFunctions = "functions.";
  const std::string_view to = word_behind(header, "to="), channel = word_behind(header, kChannel);
  if (to.starts_with(kFunctions)) {
    const std::string name(to.substr(kFunctions.size()));
    content += "<tool_call>{\"name\":";
    content += nlohmann::json(name).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    content += ",\"arguments\":";
    at_ = At::call;
  } else {
    at_ = channel == "analysis" || !to.empty() ? At::thoughts : At::said;
  }
}

// False when it must wait for more.
bool HarmonyParser::step(bool last, std::string& reasoning, std::string& content) {
  if (pending_.empty()) return false;
  if (at_ == At::start) {
    for (std::string_view begin : kBegins) {
      if (std::string_view(pending_).starts_with(begin)) return at_ = At::header, true;
      if (!last && begin.starts_with(pending_)) return false;
    }
    return at_ = At::said, true;  // no header: a text as any other
  }
  if (at_ == At::header) {
    const size_t end = pending_.find(kMessage);
    if (end == std::string::npos) {
      if (last) pending_.clear();  // a header alone says nothing
      return false;
    }
    read_header(std::string_view(pending_).substr(0, end), content);
    pending_.erase(0, end + kMessage.size());
    return true;
  }
  std::string& body = at_ == At::thoughts ? reasoning : content;
  for (size_t at = 0; (at = pending_.find("<|", at)) != std::string::npos; at += 2) {
    const std::string_view rest = std::string_view(pending_).substr(at);
    for (std::string_view end : kEnds) {
      if (rest.starts_with(end)) {
        body.append(pending_, 0, at);
        if (at_ == At::call) content += "}</tool_call>";
        pending_.erase(0, at + (end == kStart || end == kChannel ? 0 : end.size()));
        at_ = At::start;
        return true;
      }
      if (last || !end.starts_with(rest)) continue;
      body.append(pending_, 0, at);
      pending_.erase(0, at);
      return false;
    }
  }
  const size_t keep = !last && pending_.ends_with('<') ? 1 : 0;
  body.append(pending_, 0, pending_.size() - keep);
  pending_.erase(0, pending_.size() - keep);
  return false;
}

}  // namespace kvasir::text
