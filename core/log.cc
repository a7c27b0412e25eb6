#include "core/log.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <ctime>
#include <limits>
#include <memory>
#include <mutex>

#define SPDLOG_HEADER_ONLY
#define FMT_HEADER_ONLY
#include <spdlog/async.h>
#include <spdlog/async_logger.h>
#include <spdlog/sinks/base_sink.h>

#include "core/config.h"
#include "core/utf8.h"

namespace kvasir {
namespace {

constexpr size_t kQueuedLines = 8192;
constexpr std::chrono::milliseconds kLastWords{1000};  // that a stalled reader is waited for at the end

int64_t now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Standard error, whose reader may have stopped to read: a write is begun only when there is room for it, so whoever
// writes can give up. What is not written by then is counted.
class StderrSink final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  void give_up_in(std::chrono::milliseconds time) { until_ = now_ms() + time.count(); }
  size_t lost() const { return lost_; }

 private:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t line;
    formatter_->format(message, line);
    struct stat what {};
    const mode_t kind = fstat(STDERR_FILENO, &what) == 0 ? what.st_mode & S_IFMT : 0;
    const size_t most = kind == S_IFCHR ? 256 : 4096;  // what a terminal, or a pipe, takes once it takes anything
    for (size_t done = 0; done < line.size();) {
      pollfd room{STDERR_FILENO, POLLOUT, 0};
      const bool last = now_ms() >= until_;  // thousands of lines may be queued: none of them waits then
      const int ready = poll(&room, 1, last ? 0 : 100);
      if (ready == 0 && last) {
        ++lost_;
        return;
      }
      if (ready <= 0) continue;
      const size_t n = std::min(most, line.size() - done);
      const ssize_t wrote = kind == S_IFSOCK ? send(STDERR_FILENO, line.data() + done, n, MSG_DONTWAIT | MSG_NOSIGNAL)
                                             : write(STDERR_FILENO, line.data() + done, n);
      if (wrote < 0 && errno != EINTR && errno != EAGAIN) return;  // nobody is there
      if (wrote > 0) done += static_cast<size_t>(wrote);
    }
  }
  void flush_() override {}

  std::atomic<int64_t> until_{std::numeric_limits<int64_t>::max()};
  std::atomic<size_t> lost_{0};
};

struct Log {
  std::shared_ptr<spdlog::details::thread_pool> writer;
  std::shared_ptr<StderrSink> sink = std::make_shared<StderrSink>();
  std::shared_ptr<spdlog::logger> logger;
  bool json = false, prompts = false;
};

// Never destroyed: threads may log until the process ends.
Log& log_state() {
  static Log* log = [] {
    auto* l = new Log;
    l->logger = std::make_shared<spdlog::logger>("", l->sink);
    l->logger->set_pattern("%v");
    l->logger->set_level(spdlog::level::warn);
    return l;
  }();
  return *log;
}

thread_local std::string request_id;

spdlog::level::level_enum to_spdlog(LogLevel level) {
  constexpr spdlog::level::level_enum levels[] = {spdlog::level::debug, spdlog::level::info, spdlog::level::warn,
                                                  spdlog::level::err};
  return levels[int(level)];
}

const char* level_name(LogLevel level) {
  constexpr const char* names[] = {"debug", "info", "warn", "error"};
  return names[int(level)];
}

std::string timestamp(int64_t time_ms) {
  std::time_t seconds = time_ms / 1000;
  std::tm utc;
  gmtime_r(&seconds, &utc);
  char text[40];
  size_t n = std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &utc);
  std::snprintf(text + n, sizeof text - n, ".%03dZ", int(time_ms % 1000));
  return text;
}

std::string number(double v) {
  if (std::isfinite(v)) {
    char text[32];
    std::snprintf(text, sizeof text, "%.6g", v);
    return text;
  }
  return std::isnan(v) ? "\"nan\"" : v > 0 ? "\"inf\"" : "\"-inf\"";
}

// On a terminal a value is quoted only where it would be ambiguous bare.
std::string write_value(const LogField& field, bool json) {
  if (auto* text = std::get_if<std::string_view>(&field.value)) {
    std::string escaped = log_escape(*text);
    bool bare = !json && !escaped.empty() && escaped.find_first_of(" =\\\"") == std::string::npos;
    return bare ? escaped : "\"" + escaped + "\"";
  }
  if (auto* i = std::get_if<int64_t>(&field.value)) return std::to_string(*i);
  if (auto* b = std::get_if<bool>(&field.value)) return *b ? "true" : "false";
  return number(std::get<double>(field.value));
}

// The number of a character of two or three bytes that ends a line for some readers, or changes the order in which they
// see what follows; 0 for all others.
unsigned hidden_character(std::string_view text) {
  auto low = [&](size_t i) { return static_cast<unsigned char>(text[i]) & 0x3fu; };
  const unsigned first = static_cast<unsigned char>(text[0]);
  const unsigned c = text.size() == 2 ? (first & 0x1fu) << 6 | low(1) : (first & 0x0fu) << 12 | low(1) << 6 | low(2);
  const bool separator = c == 0x2028 || c == 0x2029;
  const bool direction =
      c == 0x061c || c == 0x200e || c == 0x200f || (c >= 0x202a && c <= 0x202e) || (c >= 0x2066 && c <= 0x2069);
  return separator || direction || c == 0xfeff ? c : 0;
}

}  // namespace

void LogConfig::define(Options& o) {
  o.section("Logging");
  o.add("log_level", &level, "what is worth a line").one_of({"debug", "info", "warn", "error"});
  o.add("log_format", &format, "auto is text on a terminal and JSON otherwise").one_of({"auto", "text", "json"});
  o.add("log_prompts", &prompts, "let prompts and answers into the log (at level debug)");
}

std::string log_escape(std::string_view text, size_t limit) {
  std::string out;
  size_t at = 0;
  while (at < text.size()) {
    size_t n = utf8_length(text.substr(at));
    if (at + std::max<size_t>(n, 1) > limit) break;
    unsigned char c = text[at];
    char code[8];
    if (c == '"' || c == '\\') {
      out += '\\', out += char(c);
    } else if (c == '\n') {
      out += "\\n";
    } else if (n == 0 || c < 0x20 || c == 0x7f || (c == 0xc2 && static_cast<unsigned char>(text[at + 1]) < 0xa0)) {
      // Control characters (those past ASCII too: terminals obey them) and broken bytes, as \u00XX.
      std::snprintf(code, sizeof code, "\\u%04x", n == 2 ? static_cast<unsigned char>(text[at + 1]) : c);
      out += code;
    } else if (const unsigned hidden = n == 2 || n == 3 ? hidden_character(text.substr(at, n)) : 0) {
      std::snprintf(code, sizeof code, "\\u%04x", hidden);
      out += code;
    } else {
      out.append(text, at, n);
    }
    at += std::max<size_t>(n, 1);
  }
  if (at < text.size()) out += cat("... (", text.size() - at, " bytes more)");
  return out;
}

std::string format_log_line(bool json, int64_t time_ms, LogLevel level, std::string_view message, LogFields fields) {
  std::string out;
  const std::string text = log_escape(message, 1024), id = log_escape(request_id, 64);
  if (json) {
    out =
        cat("{\"time\":\"", timestamp(time_ms), "\",\"level\":\"", level_name(level), "\",\"message\":\"", text, "\"");
    if (!id.empty()) out += cat(",\"request\":\"", id, "\"");
    for (const LogField& f : fields) out += cat(",\"", log_escape(f.key, 64), "\":", write_value(f, true));
    return out + "}";
  }
  out = cat(timestamp(time_ms).substr(11, 12), " ", level_name(level), level_name(level)[4] ? " " : "  ", text);
  if (!id.empty()) out += cat("  request=", id);
  for (const LogField& f : fields) out += cat("  ", log_escape(f.key, 64), "=", write_value(f, false));
  return out;
}

void log_start(const LogConfig& config) {
  Log& log = log_state();
  log.json = config.format == "json" || (config.format == "auto" && !isatty(STDERR_FILENO));
  log.prompts = config.prompts;
  log.writer = std::make_shared<spdlog::details::thread_pool>(kQueuedLines, 1);
  log.sink = std::make_shared<StderrSink>();
  log.logger =
      std::make_shared<spdlog::async_logger>("", log.sink, log.writer, spdlog::async_overflow_policy::overrun_oldest);
  log.logger->set_pattern("%v");
  log.logger->set_level(spdlog::level::from_str(config.level == "error" ? "err" : config.level));
  log.logger->flush_on(spdlog::level::debug);
}

void log_stop() {
  Log& log = log_state();
  if (!log.writer) return;
  const size_t overrun = log.writer->overrun_counter();
  auto level = log.logger->level();
  log.sink->give_up_in(kLastWords);
  log.writer.reset();
  const size_t lost = overrun + log.sink->lost();
  // Back to writing directly: a line logged during exit still comes out, if it can.
  log.logger = std::make_shared<spdlog::logger>("", log.sink);
  log.logger->set_pattern("%v");
  log.logger->set_level(level);
  if (lost > 0) log_warn("log lines were lost because standard error was stalled", {{"lines", lost}});
}

bool log_enabled(LogLevel level) { return log_state().logger->should_log(to_spdlog(level)); }

void log_line(LogLevel level, std::string_view message, LogFields fields) {
  Log& log = log_state();
  if (!log.logger->should_log(to_spdlog(level))) return;
  using namespace std::chrono;
  const int64_t now = duration_cast<milliseconds>(system_clock::now().time_since_epoch()).count();
  log.logger->log(to_spdlog(level), spdlog::string_view_t(format_log_line(log.json, now, level, message, fields)));
}

void log_prompt(std::string_view message, std::string_view text) {
  if (!log_enabled(LogLevel::debug)) return;
  if (log_state().prompts)
    log_debug(message, {{"bytes", text.size()}, {"text", text}});
  else
    log_debug(message, {{"bytes", text.size()}});
}

LogRequest::LogRequest(std::string_view id) : before_(std::exchange(request_id, std::string(id))) {}
LogRequest::~LogRequest() { request_id = std::move(before_); }

}  // namespace kvasir
