// What --help and --print-config say: both are the option table, written out.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "core/config.h"

namespace kvasir {
namespace {

// Words of `text` in lines that end before `width`, each after the first indented by `indent`.
std::string wrap(const std::string& text, size_t indent, size_t width) {
  std::string out;
  size_t column = indent;
  for (size_t at = 0; at < text.size();) {
    size_t end = std::min(text.find(' ', at), text.size());
    if (column + (end - at) >= width && column > indent) {
      out += "\n" + std::string(indent, ' ');
      column = indent;
    } else if (column > indent) {
      out += ' ', ++column;
    }
    out.append(text, at, end - at);
    column += end - at;
    at = end + 1;
  }
  return out;
}

std::string json_string(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace

std::string Options::help_text(int width) const {
  std::string usage = cat("Usage: ", command_);
  bool any_flag = false;
  for (const auto& o : options_)
    if (o->positional_)
      usage += cat(" [", o->flag(), o->is_list() ? "...]" : "]");
    else
      any_flag = true;
  if (any_flag) usage += " [options]";
  std::string out = wrap(summary_, 0, size_t(width)) + "\n\n" + usage + "\n";
  if (!examples_.empty()) out += "\nExamples:\n";
  for (const auto& [line, what] : examples_) out += cat("  ", line, "\n      ", wrap(what, 6, size_t(width)), "\n");

  std::vector<std::string> sections;
  for (const auto& o : options_)
    if (std::find(sections.begin(), sections.end(), o->section_) == sections.end()) sections.push_back(o->section_);
  for (const std::string& section : sections) {
    out += "\n" + section + ":\n";
    for (const auto& o : options_) {
      if (o->section_ != section) continue;
      std::string hint = o->positional_ ? "" : o->type_hint(), about = o->help_, notes;
      auto note = [&](const std::string& n) { notes += (notes.empty() ? "" : "; ") + n; };
      if (o->is_list() && !o->positional_) note("may be given more than once");
      if (std::isfinite(o->low_) && std::isfinite(o->high_))
        note(cat("from ", o->limit_text(o->low_), " to ", o->limit_text(o->high_)));
      else if (std::isfinite(o->low_) && o->low_ != 0)
        note(cat("at least ", o->limit_text(o->low_)));
      if (!o->default_.empty() && !o->is_bool() && !o->secret_) note("default " + o->default_);
      if (o->is_bool() && o->default_ == "true")
        note(cat("on by default; --no-", o->flag().substr(2), " turns it off"));
      if (!notes.empty()) about += cat(" (", notes, ")");
      out += cat("  ", o->flag(), hint.empty() ? "" : " ", hint, "\n      ", wrap(about, 6, size_t(width)), "\n");
    }
  }
  out += "  --help\n      print this\n";
  if (has_file_)
    out +=
        "\nEach option is also a key of the JSON file (--http-port is \"http_port\") and an environment\n"
        "variable (KVASIR_HTTP_PORT). A flag wins over the environment, that over the file.\n";
  return out;
}

std::string Options::print_config() const {
  std::string out = "{\n", section;
  for (const auto& o : options_) {
    if (o->only_flag_ || o->name_ == "config") continue;
    if (o->section_ != section) {
      out += cat(section.empty() ? "" : "\n", "  // ", o->section_, "\n");
      section = o->section_;
    }
    std::string value;
    const bool hidden = o->secret_ && !o->value().empty();
    if (o->is_list() && !hidden) {
      for (const std::string& each : *std::get<std::vector<std::string>*>(o->target_))
        value += (value.empty() ? "" : ", ") + json_string(each);
      value = "[" + value + "]";
    } else if (std::holds_alternative<std::string*>(o->target_) || std::holds_alternative<ByteSize*>(o->target_) ||
               std::holds_alternative<Option::Millis*>(o->target_)) {
      value = json_string(o->value());
    } else {
      value = o->value();
    }
    // A hidden value is a comment, so that the output read back does not set it to something else.
    out += hidden ? cat("  // ", json_string(o->name_), ": set, not shown (", o->source_, ")\n")
                  : cat("  ", json_string(o->name_), ": ", value, ",  // ", o->source_, "\n");
  }
  // JSON has no trailing comma: drop the last one, which stands before its comment.
  size_t comma = out.rfind(",  // ");
  if (comma != std::string::npos) out.replace(comma, 1, "");
  return out + "}\n";
}

}  // namespace kvasir
