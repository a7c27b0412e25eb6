// Where options come from: file, environment, flags; and the refusal of whatever is not one.
#include "core/config.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <sstream>

extern char** environ;

namespace kvasir {
namespace {

// Edits (insert, delete, replace, swap neighbours) between two short words.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> before(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  std::iota(last.begin(), last.end(), size_t(0));
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) row[j] = std::min(row[j], before[j - 2] + 1);
    }
    before = last, last = row;
  }
  return last[b.size()];
}

constexpr size_t kMaxFile = 1 << 20;

}  // namespace

std::string nearest_name(std::string_view word, std::span<const std::string> candidates) {
  if (word.size() > 64) return "";
  std::string best;
  size_t best_distance = std::max<size_t>(2, word.size() / 3) + 1;
  for (const std::string& c : candidates) {
    size_t d = edit_distance(word, c);
    // A forgotten beginning or ending ("port" for "http_port") is a likely slip too.
    if (word.size() >= 3 && (c.starts_with(word) || c.ends_with(word))) d = std::min<size_t>(d, 2);
    if (d < best_distance) best = c, best_distance = d;
  }
  return best;
}

Options::Options(std::string command, std::string summary)
    : command_(std::move(command)), summary_(std::move(summary)) {
  section_ = "Options";
}

Option& Options::add(std::string name, Option::Target target, std::string help) {
  KVASIR_CHECK(!find(name), "option ", name, " is defined twice");
  auto option = std::make_unique<Option>();
  option->name_ = std::move(name);
  option->target_ = target;
  option->help_ = std::move(help);
  option->section_ = section_;
  option->default_ = option->value();
  options_.push_back(std::move(option));
  return *options_.back();
}

Option& Options::positional(std::string name, Option::Target target, std::string help) {
  Option& option = add(std::move(name), target, std::move(help));
  option.positional_ = option.only_flag_ = true;
  option.section_ = "Arguments";
  return option;
}

void Options::with_config_file() {
  has_file_ = true;
  std::string title = std::exchange(section_, "Configuration");
  add("config", &config_file_, "read options from this JSON file (comments are allowed)").value_name("FILE");
  add("print_config", &print_, "print the whole configuration, with where each value comes from, and exit").only_flag();
  add("check_config", &check_, "say whether the configuration is right, and exit").only_flag();
  section_ = title;
}

void Options::example(std::string command_line, std::string what_it_does) {
  examples_.emplace_back(std::move(command_line), std::move(what_it_does));
}

Status Options::take_foreign(const std::string& name, std::string_view value, const std::string& where) const {
  const Foreign& f = foreign_.at(name);
  if (std::find(f.values.begin(), f.values.end(), value) != f.values.end()) return {};
  std::string taken;
  for (const std::string& v : f.values) taken += cat(taken.empty() ? "" : " or ", v);
  return invalid_argument(cat(where, where.empty() ? "" : ": ", name, " is ", value.substr(0, 256), ", and ",
                              taken.empty() ? "is not served" : cat("can only be ", taken), ": ", f.why))
      .with_field(name);
}

Option* Options::find(std::string_view name) const {
  if (auto it = aliases_.find(std::string(name)); it != aliases_.end()) name = it->second;
  for (const auto& o : options_)
    if (o->name_ == name) return o.get();
  return nullptr;
}

Status Options::unknown(std::string_view what, std::string_view name, const std::string& where) const {
  std::vector<std::string> names;
  const bool flags = name.starts_with("--");
  for (const auto& o : options_)
    if (!o->positional_ && (flags || !o->only_flag_)) names.push_back(flags ? o->flag() : o->name_);
  std::string near = nearest_name(name, names);
  return invalid_argument(cat(where, where.empty() ? "" : ": ", "unknown ", what, " ", name,
                              near.empty() ? cat("; `", command_, " --help` lists what there is")
                                           : cat("; did you mean ", near, "?")))
      .with_field(std::string(name));
}

Status Options::load_json(std::string_view text, const std::string& source) {
  using nlohmann::json;
  if (text.size() > kMaxFile) return invalid_argument(cat(source, ": larger than 1 MiB; that is no configuration"));
  if (text.find('\0') != std::string_view::npos)  // the parser would take it for the end
    return invalid_argument(cat(source, ": has a zero byte at ", text.find('\0')));
  std::set<std::string> seen;
  std::string problem;
  auto watch = [&](int depth, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::key && depth == 1 && !seen.insert(parsed.get<std::string>()).second)
      problem = cat("key \"", parsed.get<std::string>(), "\" appears twice");
    if (depth > 2) problem = "a value is nested deeper than any option";
    return problem.empty();
  };
  json root;
  try {
    root = json::parse(text.begin(), text.end(), watch, true, true);
  } catch (const json::exception& e) {
    std::string what = e.what();  // "[json.exception.parse_error.101] parse error at line 3, column 5: ..."
    size_t from = what.find("] ");
    return invalid_argument(cat(source, ": ", from == std::string::npos ? what : what.substr(from + 2)));
  }
  if (!problem.empty()) return invalid_argument(cat(source, ": ", problem));
  if (!root.is_object()) return invalid_argument(cat(source, ": must be one JSON object, like {\"http_port\": 8000}"));
  for (const auto& [key, value] : root.items()) {
    if (foreign_.count(key)) {
      KVASIR_TRY(take_foreign(key, value.is_string() ? value.get<std::string>() : value.dump(), source));
      continue;
    }
    Option* option = find(key);
    if (!option || option->only_flag_ || key == "config") return unknown("key", key, source);
    const std::string from = cat(source, ", key \"", key, "\"");
    const bool text_like = std::holds_alternative<std::string*>(option->target_) || option->is_list();
    if (option->is_list() && value.is_array()) {
      std::get<std::vector<std::string>*>(option->target_)->clear();
      for (const json& each : value) {
        if (!each.is_string()) return invalid_argument(cat(from, ": must be a list of strings")).with_field(key);
        KVASIR_TRY(option->assign(each.get<std::string>(), from, true));
      }
      option->source_ = from;
    } else if (value.is_string() && !option->is_bool()) {
      KVASIR_TRY(option->assign(value.get<std::string>(), from, false));
    } else if ((value.is_number() && !text_like && !option->is_bool()) || (value.is_boolean() && option->is_bool())) {
      KVASIR_TRY(option->assign(value.dump(), from, false));
    } else {
      return invalid_argument(cat(from, ": is ", value.type_name(), "; it must be ",
                                  option->is_bool() ? "true or false"
                                  : text_like       ? "a string"
                                                    : "a number"))
          .with_field(key);
    }
  }
  return {};
}

Status Options::load_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  if (!file || !(text << file.rdbuf()))
    return not_found(cat("cannot read the configuration file ", path, "; check --config")).with_field("config");
  return load_json(text.str(), path);
}

Status Options::load_environment(const Environment& get) {
  for (const auto& option : options_) {
    const char* text = option->only_flag_ ? nullptr : get(option->variable().c_str());
    if (!text) continue;
    const std::string source = "$" + option->variable();
    if (!option->is_list()) {
      KVASIR_TRY(option->assign(text, source, false));
      continue;
    }
    std::stringstream list(text);
    bool first = true;
    for (std::string each; std::getline(list, each, ','); first = false)
      KVASIR_TRY(option->assign(each, source, !first));
  }
  return {};
}

Status Options::load_flags(std::span<const std::string> args) {
  std::vector<Option*> free_arguments;
  for (const auto& o : options_)
    if (o->positional_) free_arguments.push_back(o.get());
  size_t next_free = 0;
  bool only_free = false;
  for (size_t i = 0; i < args.size(); ++i) {
    std::string_view arg = args[i];
    if (only_free || arg == "-" || !arg.starts_with("-")) {
      if (next_free == free_arguments.size())
        return invalid_argument(cat("unexpected argument \"", arg, "\"; `", command_, " --help` shows the usage"));
      Option* option = free_arguments[next_free];
      KVASIR_TRY(option->assign(arg, "argument", option->source_ == "argument"));
      if (!option->is_list()) ++next_free;
      continue;
    }
    if (arg == "--") {
      only_free = true;
      continue;
    }
    if (arg == "-h" || arg == "--help") {
      help_ = true;
      continue;
    }
    size_t equals = arg.find('=');
    std::string_view word = arg.substr(0, equals);
    std::string name(word.starts_with("--") ? word.substr(2) : word);
    std::replace(name.begin(), name.end(), '-', '_');
    if (auto it = foreign_.find(name); word.starts_with("--") && it != foreign_.end()) {
      std::string_view value = "true";
      if (equals != std::string_view::npos)
        value = arg.substr(equals + 1);
      else if (!it->second.is_switch)
        value = ++i < args.size() ? std::string_view(args[i]) : "";
      KVASIR_TRY(take_foreign(name, value, ""));
      continue;
    }
    Option* option = find(name);
    bool negated = false;
    if (!option && name.starts_with("no_")) {
      option = find(name.substr(3));
      negated = option && option->is_bool();
      if (!negated) option = nullptr;
    }
    if (!option || option->positional_ || !word.starts_with("--")) return unknown("flag", word, "");
    if (equals != std::string_view::npos) {
      if (negated) return invalid_argument(cat(word, " takes no value"));
      KVASIR_TRY(option->assign(arg.substr(equals + 1), "flag", option->source_ == "flag"));
    } else if (option->is_bool()) {
      KVASIR_TRY(option->assign(negated ? "false" : "true", "flag", false));
    } else if (i + 1 == args.size()) {
      return invalid_argument(cat(word, " needs a value: ", word, " ", option->type_hint())).with_field(name);
    } else {
      KVASIR_TRY(option->assign(args[++i], "flag", option->source_ == "flag"));
    }
  }
  return {};
}

Status Options::validate() const {
  for (const auto& rule : rules_) KVASIR_TRY(rule());
  return {};
}

std::vector<std::string> Options::suspicious_variables(const char* const* environment) const {
  std::vector<std::string> ours, found;
  for (const auto& o : options_)
    if (!o->only_flag_) ours.push_back(o->variable());
  for (; environment && *environment; ++environment) {
    std::string_view entry = *environment;
    if (!entry.starts_with("KVASIR_")) continue;
    std::string name(entry.substr(0, entry.find('=')));
    if (std::find(ours.begin(), ours.end(), name) != ours.end()) continue;
    for (const std::string& o : ours)
      if (edit_distance(name, o) <= 2) {
        found.push_back(cat("$", name, " is not read; did you mean $", o, "?"));
        break;
      }
  }
  return found;
}

Status Options::load(std::span<const std::string> args, const Environment& get) {
  // Flags are read first for --help and --config, and again last because they win.
  KVASIR_TRY(load_flags(args));
  if (help_) return {};
  if (config_file_.empty() && has_file_)
    if (const char* path = get("KVASIR_CONFIG")) config_file_ = path;
  if (!config_file_.empty()) KVASIR_TRY(load_file(config_file_));
  KVASIR_TRY(load_environment(get));
  for (const auto& o : options_)
    if (o->source_ == "flag" || o->source_ == "argument") o->source_ = "flag again";
  return load_flags(args);
}

std::optional<int> Options::parse(int argc, const char* const* argv, std::vector<std::string>* warnings) {
  std::vector<std::string> args(argv + std::min(argc, 1), argv + argc);
  Status status = load(args, [](const char* name) { return static_cast<const char*>(std::getenv(name)); });
  if (status.ok() && !help_) status = validate();
  if (help_) {
    std::fputs(help_text().c_str(), stdout);
    return 0;
  }
  if (!status.ok()) {
    std::fprintf(stderr, "%s: %s\n", command_.c_str(), status.message().c_str());
    return 2;
  }
  std::vector<std::string> found = suspicious_variables(environ);
  for (const auto& o : options_) {
    auto gives = [&](const std::string& arg) { return arg == o->flag() || arg.starts_with(o->flag() + "="); };
    if (o->is_list() || o->is_bool() || std::count_if(args.begin(), args.end(), gives) < 2) continue;
    found.push_back(cat(o->flag(), " is given more than once; the last value counts",
                        o->secret_ ? "" : cat(", \"", o->value(), '"')));
  }
  if (warnings && !print_ && !check_)
    *warnings = found;
  else
    for (const std::string& warning : found) std::fprintf(stderr, "%s: %s\n", command_.c_str(), warning.c_str());
  if (print_) {
    std::fputs(print_config().c_str(), stdout);
    return 0;
  }
  if (check_) {
    std::printf("%s: the configuration is right\n", command_.c_str());
    return 0;
  }
  return std::nullopt;
}

}  // namespace kvasir
