// Options with one definition each: name, default, range and help feed the JSON file, the
// environment, the flags, --help, --print-config and --check-config alike.
//
//   struct ServeConfig {
//     int http_port = 8000;
//     void define(Options& o) {
//       o.section("Server");
//       o.add("http_port", &http_port, "TCP port of the HTTP server; 0 turns it off").range(0, 65535);
//     }
//   };
//   ServeConfig config;
//   Options options("kvasir serve", "Serves a model over gRPC and HTTP.");
//   options.with_config_file();
//   config.define(options);
//   if (auto exit_code = options.parse(argc, argv)) return *exit_code;
//
// That one line gives the flag --http-port, the JSON key "http_port" and $KVASIR_HTTP_PORT. Flags win
// over the environment, the environment over the file, the file over the default (the value the field
// held when it was added). Nothing unknown is accepted: the nearest known name is offered instead.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "core/cat.h"
#include "core/check.h"
#include "core/status.h"

namespace kvasir {

// A byte count written as 1048576, 512MiB or 4GB.
struct ByteSize {
  int64_t bytes = 0;
  bool operator==(const ByteSize&) const = default;
};

class Option {
 public:
  using Millis = std::chrono::milliseconds;  // written as 500ms, 30s, 5m, 2h or a number of seconds
  using Target = std::variant<bool*, int*, int64_t*, uint64_t*, double*, std::string*, ByteSize*, Millis*,
                              std::vector<std::string>*>;

  // Both ends are allowed values. Sizes are in bytes, durations in seconds.
  Option& range(double low, double high);
  Option& at_least(double low) { return range(low, std::numeric_limits<double>::infinity()); }
  Option& one_of(std::vector<std::string> choices);
  Option& secret();                      // --print-config shows that it is set, never what it is
  Option& value_name(std::string name);  // what --help shows for the value: "FILE"
  Option& only_flag();                   // means nothing in a file or the environment

  const std::string& name() const { return name_; }
  const std::string& help() const { return help_; }
  const std::string& section() const { return section_; }
  const std::vector<std::string>& choices() const { return choices_; }
  std::string flag() const;                              // "--http-port"
  std::string variable() const;                          // "KVASIR_HTTP_PORT"
  std::string value() const;                             // as it would be typed
  const std::string& source() const { return source_; }  // "default", "flag", "$KVASIR_...", or the file
  bool is_bool() const { return std::holds_alternative<bool*>(target_); }
  bool is_list() const { return std::holds_alternative<std::vector<std::string>*>(target_); }

 private:
  friend class Options;
  Status assign(std::string_view text, const std::string& source, bool append);
  Status refuse(std::string_view text, const std::string& why) const;
  Status check(std::string_view text) const;
  std::string type_hint() const;
  std::string limit_text(double v) const;

  std::string name_, help_, section_, default_, source_ = "default", value_name_;
  Target target_;
  double low_ = -std::numeric_limits<double>::infinity(), high_ = std::numeric_limits<double>::infinity();
  std::vector<std::string> choices_;
  bool secret_ = false, only_flag_ = false, positional_ = false;
};

class Options {
 public:
  Options(std::string command, std::string summary);
  Options(const Options&) = delete;  // it points into the config it was given

  void section(std::string title) { section_ = std::move(title); }
  Option& add(std::string name, Option::Target target, std::string help);
  // Arguments without a flag, taken in this order; a list takes all that are left.
  Option& positional(std::string name, Option::Target target, std::string help);
  void with_config_file();  // adds --config, --print-config and --check-config
  // Another program's name for an option, so that its configurations are taken as they are.
  void alias(std::string name, std::string option) { aliases_[std::move(name)] = std::move(option); }
  // One that can only say what is so anyway: these values are taken, others refused with the reason. A switch stands
  // without a value, which is then true.
  void foreign(std::string name, std::vector<std::string> values, std::string why, bool is_switch = false) {
    foreign_[std::move(name)] = {std::move(values), std::move(why), is_switch};
  }
  void example(std::string command_line, std::string what_it_does);
  // Said about the whole, after each value has been read: "at least one port must be on".
  void check(std::function<Status()> rule) { rules_.push_back(std::move(rule)); }

  // Everything a main() needs: file, environment, flags, --help, --print-config, --check-config.
  // Prints what is to be printed; a value means "exit with it now" (0 done, 2 wrong usage).
  // argv[0] is the command. What deserves a warning is printed, or left to a caller that logs.
  std::optional<int> parse(int argc, const char* const* argv, std::vector<std::string>* warnings = nullptr);

  // The steps of it, in the order of who wins last.
  Status load_json(std::string_view text, const std::string& source);
  Status load_file(const std::string& path);
  using Environment = std::function<const char*(const char* name)>;
  Status load_environment(const Environment& get);
  Status load_flags(std::span<const std::string> args);
  Status load(std::span<const std::string> args, const Environment& get);  // all of them, as parse() does
  Status validate() const;

  std::string help_text(int width = 100) const;
  std::string print_config() const;  // JSON with comments: a file that load_json reads back
  const std::vector<std::unique_ptr<Option>>& all() const { return options_; }
  const std::string& command() const { return command_; }
  const std::string& summary() const { return summary_; }

  // KVASIR_ variables that look like a misspelt option of ours (others may own such names: Kubernetes
  // sets KVASIR_SERVICE_HOST for a service called kvasir, so an unknown one is never an error).
  std::vector<std::string> suspicious_variables(const char* const* environment) const;

 private:
  Option* find(std::string_view name) const;
  Status unknown(std::string_view what, std::string_view name, const std::string& where) const;
  std::string command_, summary_, section_;
  std::vector<std::unique_ptr<Option>> options_;
  std::vector<std::pair<std::string, std::string>> examples_;
  std::vector<std::function<Status()>> rules_;
  struct Foreign {
    std::vector<std::string> values;
    std::string why;
    bool is_switch = false;
  };
  Status take_foreign(const std::string& name, std::string_view value, const std::string& where) const;
  std::map<std::string, std::string> aliases_;
  std::map<std::string, Foreign> foreign_;
  std::string config_file_;
  bool has_file_ = false, help_ = false, print_ = false, check_ = false;
};

// The candidate closest to a misspelt word, or empty when none is close enough to be meant.
std::string nearest_name(std::string_view word, std::span<const std::string> candidates);

Result<ByteSize> parse_bytes(std::string_view text);
Result<std::chrono::milliseconds> parse_duration(std::string_view text);

}  // namespace kvasir
