// What of a request is in the log at level debug: lengths, and its text only where log_prompts says so.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/log.h"
#include "server/services.h"
#include "tests/server/fake_engine.h"

namespace kvasir::server {
namespace {

using testing::HasSubstr;
using testing::Not;

// The log of a request whose answer is its prompt.
std::string logged(const LogConfig& config) {
  ServerOptions options;
  FakeEngine engine;
  auto services = Services::create(options, engine);
  EXPECT_TRUE(services.ok());
  testing::internal::CaptureStderr();
  log_start(config);
  {
    GenerateInput in;
    in.prompt = TextInput{"whispered"};
    in.request.id = "one";
    in.request.max_tokens = 9;
    auto sent = (*services)->generate(everyone(), std::move(in));
    EXPECT_TRUE(sent.ok()) << sent.status().message();
    while (sent.ok()) {
      const auto event = sent->stream->next();
      const auto* finished = event ? std::get_if<engine::Finished>(&*event) : nullptr;
      if (!event || (finished && finished->last)) break;
    }
  }
  log_stop();
  return testing::internal::GetCapturedStderr();
}

TEST(PromptLog, ShowsTextsOnlyWhereItIsToldTo) {
  const std::string shown = logged({.level = "debug", .format = "text", .prompts = true});
  EXPECT_THAT(shown, HasSubstr("prompt  request=one  bytes=9  text=whispered"));
  EXPECT_THAT(shown, HasSubstr("answer  request=one  bytes=9  text=whispered"));
  const std::string lengths = logged({.level = "debug", .format = "text"});
  EXPECT_THAT(lengths, HasSubstr("prompt  request=one  bytes=9\n"));
  EXPECT_THAT(lengths, HasSubstr("answer  request=one  bytes=9\n"));
  EXPECT_THAT(lengths, Not(HasSubstr("whispered")));
  EXPECT_THAT(logged({.level = "info", .format = "text", .prompts = true}), Not(HasSubstr("whispered")));
}

}  // namespace
}  // namespace kvasir::server
