// One line an event, to standard error: text on a terminal, JSON otherwise.
//
//   log_info("model loaded", {{"path", path}, {"seconds", 0.31}});
//
// Fields keep what happened apart from its figures. Text is escaped and cut wherever it comes from, so
// nothing a client sends can forge a line or flood the log. Prompts, answers and keys have no business
// in a field; log_prompt() is the one door for prompts and shows only their length unless asked.
// Lines are handed to a thread of the log's own through a bounded queue: a stalled pipe loses the oldest
// lines (and says how many) but never stops a step.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <variant>

namespace kvasir {

class Options;

enum class LogLevel { debug, info, warn, error };

struct LogConfig {
  std::string level = "info";
  std::string format = "auto";
  bool prompts = false;
  void define(Options& options);
};

struct LogField {
  std::string_view key;
  std::variant<std::string_view, int64_t, double, bool> value;

  LogField(std::string_view k, std::string_view v) : key(k), value(v) {}
  LogField(std::string_view k, const std::string& v) : key(k), value(std::string_view(v)) {}
  LogField(std::string_view k, const char* v) : key(k), value(std::string_view(v)) {}
  LogField(std::string_view k, bool v) : key(k), value(v) {}
  template <class T>
  requires std::is_integral_v<T> LogField(std::string_view k, T v) : key(k), value(int64_t(v)) {}
  LogField(std::string_view k, double v) : key(k), value(v) {}
};
using LogFields = std::initializer_list<LogField>;

// Before the first call lines go straight to standard error as text, from level warn on.
void log_start(const LogConfig& config);
void log_stop();  // writes what is queued, as far as its reader takes it within a second, and ends the thread
bool log_enabled(LogLevel level);

void log_line(LogLevel level, std::string_view message, LogFields fields = {});
inline void log_debug(std::string_view m, LogFields f = {}) { log_line(LogLevel::debug, m, f); }
inline void log_info(std::string_view m, LogFields f = {}) { log_line(LogLevel::info, m, f); }
inline void log_warn(std::string_view m, LogFields f = {}) { log_line(LogLevel::warn, m, f); }
inline void log_error(std::string_view m, LogFields f = {}) { log_line(LogLevel::error, m, f); }

// At level debug: the length of a prompt or answer, and its text only when the configuration says so.
void log_prompt(std::string_view message, std::string_view text);

// While it lives, every line of this thread carries the request's id.
class LogRequest {
 public:
  explicit LogRequest(std::string_view id);
  ~LogRequest();
  LogRequest(const LogRequest&) = delete;

 private:
  std::string before_;
};

// At most `limit` bytes of `text`, with control characters, quotes, backslashes and broken UTF-8 escaped
// as in JSON, and the number of bytes left out said.
std::string log_escape(std::string_view text, size_t limit = 256);

// One line, as it would be written; time_ms is milliseconds since 1970.
std::string format_log_line(bool json, int64_t time_ms, LogLevel level, std::string_view message, LogFields fields);

}  // namespace kvasir
