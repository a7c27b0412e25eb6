#include "core/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <thread>

namespace kvasir {
namespace {

using nlohmann::json;
using testing::HasSubstr;

TEST(Log, JsonLinesParseWhateverTheTextIs) {
  for (std::string text :
       {std::string("plain"), std::string("two\nlines \"quoted\" \\ \t"), std::string("\xff\xfe broken"),
        std::string("caf\u00e9 \xF0\x9F\x98\x80"), std::string("a\0b", 3), std::string("\x1b[2J wipe"),
        std::string("\xc2\x9b[2J also wipes"), std::string("\xed\xa0\x80 surrogate")}) {
    std::string line = format_log_line(true, 1700000000123, LogLevel::info, text,
                                       {{"text", text}, {"n", 3}, {"f", 0.25}, {"b", true}});
    EXPECT_EQ(line.find('\n'), std::string::npos);
    EXPECT_EQ(line.find('\x1b'), std::string::npos);
    EXPECT_EQ(line.find("\xc2\x9b"), std::string::npos);
    json parsed = json::parse(line);
    EXPECT_EQ(parsed["level"], "info");
    EXPECT_EQ(parsed["time"], "2023-11-14T22:13:20.123Z");
    EXPECT_EQ(parsed["n"], 3);
    EXPECT_EQ(parsed["f"], 0.25);
    EXPECT_EQ(parsed["b"], true);
    EXPECT_EQ(parsed["message"], parsed["text"]);
  }
  json odd = json::parse(format_log_line(true, 0, LogLevel::warn, "m", {{"nan", NAN}, {"inf", -INFINITY}}));
  EXPECT_EQ(odd["nan"], "nan");
  EXPECT_EQ(odd["inf"], "-inf");
}

TEST(Log, NothingHiddenReachesATerminal) {
  // Overrides and isolates of direction, marks, line and paragraph separators: a line must look like what it says.
  for (const char* c :
       {"\u061c", "\u200e", "\u200f", "\u2028", "\u2029", "\u202a", "\u202e", "\u2066", "\u2069", "\ufeff"}) {
    const std::string text = std::string("user") + c + "nimda",
                      line = format_log_line(false, 0, LogLevel::info, text, {});
    EXPECT_EQ(line.find(c), std::string::npos) << line;
    EXPECT_THAT(line, HasSubstr("user\\u"));
    EXPECT_EQ(json::parse(format_log_line(true, 0, LogLevel::info, text, {}))["message"], text);
  }
  EXPECT_EQ(log_escape("\u05d0\u200d\u2030\u2027"), "\u05d0\u200d\u2030\u2027");  // letters and joiners stay
}

TEST(Log, LongTextIsCutAtACharacterAndSaysSo) {
  EXPECT_EQ(log_escape("abcdef", 4), "abcd... (2 bytes more)");
  EXPECT_EQ(log_escape("caf\u00e9", 4), "caf... (2 bytes more)");
  EXPECT_EQ(log_escape("caf\u00e9", 5), "caf\u00e9");
  EXPECT_LT(log_escape(std::string(1 << 20, '\x01')).size(), 2000u);
}

TEST(Log, TextLinesQuoteOnlyWhatIsAmbiguous) {
  EXPECT_EQ(
      format_log_line(false, 1700000000123, LogLevel::info, "ready", {{"port", 8000}, {"path", "/a b"}, {"x", "y"}}),
      "22:13:20.123 info  ready  port=8000  path=\"/a b\"  x=y");
  EXPECT_EQ(format_log_line(false, 0, LogLevel::error, "a\nb", {{"k", "v=1"}}), "00:00:00.000 error a\\nb  k=\"v=1\"");
}

TEST(Log, RequestIdsFollowTheThreadAndNest) {
  auto line = [] { return format_log_line(true, 0, LogLevel::info, "m", {}); };
  EXPECT_THAT(line(), Not(HasSubstr("request")));
  LogRequest outer("req-1");
  {
    LogRequest inner("req-2\n");
    EXPECT_EQ(json::parse(line())["request"], "req-2\n");
  }
  EXPECT_EQ(json::parse(line())["request"], "req-1");
  std::thread([&] { EXPECT_THAT(line(), Not(HasSubstr("request"))); }).join();
}

TEST(Log, LevelsAndPrompts) {
  auto captured = [](LogConfig config) {
    testing::internal::CaptureStderr();
    log_start(config);
    EXPECT_EQ(log_enabled(LogLevel::debug), config.level == "debug");
    log_debug("detail");
    log_info("news");
    log_error("trouble", {{"why", "because"}});
    log_prompt("prompt", "a secret thought");
    log_stop();
    return testing::internal::GetCapturedStderr();
  };
  std::string quiet = captured({.level = "error", .format = "json"});
  EXPECT_EQ(json::parse(quiet)["why"], "because");
  std::string all = captured({.level = "debug", .format = "text"});
  EXPECT_THAT(all, HasSubstr("detail"));
  EXPECT_THAT(all, HasSubstr("prompt  bytes=16\n"));
  EXPECT_THAT(all, Not(HasSubstr("secret")));
  EXPECT_THAT(captured({.level = "debug", .format = "text", .prompts = true}), HasSubstr("a secret thought"));
  EXPECT_THAT(captured({}), HasSubstr("\"message\":\"news\""));  // no terminal here: JSON
}

TEST(Log, ManyThreadsLoseNothingBelowTheQueueSize) {
  testing::internal::CaptureStderr();
  log_start({.level = "info", .format = "text"});
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([t] {
      for (int i = 0; i < 500; ++i) log_info("line", {{"t", t}, {"i", i}});
    });
  for (auto& t : threads) t.join();
  log_stop();
  std::string out = testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::count(out.begin(), out.end(), '\n'), 2000);
}

}  // namespace
}  // namespace kvasir
