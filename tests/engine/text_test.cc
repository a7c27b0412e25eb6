// Text through the whole engine on a small dummy model: detokenizing, stop strings, grammars, and the same
// tokens with a real forward pass however they are batched.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/engine.h"

namespace kvasir::engine {
namespace {

using ::testing::HasSubstr;

class Text : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    model::RunnerOptions model;
    model.model = "dummy:llama,layers=2,hidden=64,heads=2,kv_heads=1,head_dim=32,ffn=64,vocab=300,context=512";
    model.threads = 1;
    EngineOptions options;
    options.kv_memory = 8 << 20;
    options.max_running = 32;
    options.max_tokens_per_step = 64;
    engine_ = Engine::start(model, options).release();
    Status ready = engine_->wait_ready();
    ASSERT_TRUE(ready.ok()) << ready.message();
  }
  static void TearDownTestSuite() { delete engine_; }

  struct Answer {
    std::string text;
    std::vector<int32_t> tokens;
    std::vector<Finished> finished;
    Status failed;
  };
  static Answer run(Request r) {
    Answer a;
    auto stream = engine_->submit(std::move(r));
    if (!stream.ok()) {
      a.failed = stream.status();
      return a;
    }
    return read(**stream);
  }
  static Answer read(Stream& stream) {
    Answer a;
    while (auto event = stream.next()) {
      if (auto* tokens = std::get_if<Tokens>(&*event)) {
        a.text += tokens->text;
        for (auto& t : tokens->tokens) a.tokens.push_back(t.id);
      } else if (auto* finished = std::get_if<Finished>(&*event)) {
        a.finished.push_back(*finished);
      } else if (auto* failed = std::get_if<Failed>(&*event)) {
        a.failed = failed->status;
      }
    }
    return a;
  }
  static Request ask(const std::string& text, int64_t max_tokens) {
    Request r;
    r.prompt = *engine_->tokenizer()->encode(text, false, false);
    r.max_tokens = max_tokens;
    r.ignore_eos = true;
    r.sampling.temperature = 0;
    return r;
  }
  static Engine* engine_;
};
Engine* Text::engine_ = nullptr;

// Other threads may ask at any time; the step thread writes these while it loads.
TEST(Loading, TextIsSeenOnceAllHasLoaded) {
  model::RunnerOptions model;
  model.model = "dummy:llama,layers=1,hidden=64,heads=2,kv_heads=1,head_dim=32,ffn=64,vocab=300,context=512";
  EngineOptions options;
  options.kv_memory = 1;  // the model and its text are read, then there is no room for a page
  auto engine = Engine::start(model, options);
  EXPECT_FALSE(engine->wait_ready().ok());
  EXPECT_EQ(engine->tokenizer(), nullptr);
  EXPECT_EQ(engine->chat_template(), nullptr);
}

TEST_F(Text, TheTextIsThatOfTheTokens) {
  Answer a = run(ask("hello", 40));
  ASSERT_TRUE(a.failed.ok()) << a.failed.message();
  EXPECT_EQ(a.tokens.size(), 40u);
  EXPECT_EQ(a.text, *engine_->tokenizer()->decode(a.tokens, true));
}

TEST_F(Text, TheSameAloneAndInABatchAndAfterAPrefixHit) {
  std::vector<Answer> alone;
  for (int i = 0; i < 6; ++i) alone.push_back(run(ask(std::string(size_t(1 + 20 * i), char('a' + i)), 30)));
  std::vector<std::unique_ptr<Stream>> streams;
  for (int i = 0; i < 6; ++i)
    streams.push_back(std::move(*engine_->submit(ask(std::string(size_t(1 + 20 * i), char('a' + i)), 30))));
  for (size_t i = 0; i < 6; ++i) EXPECT_EQ(read(*streams[i]).tokens, alone[i].tokens) << i;
}

TEST_F(Text, AStopStringAcrossTokensEndsItAndIsCutOrShown) {
  Request r = ask("stop here", 60);
  r.sampling.temperature = 1;
  r.sampling.seed = 5;
  Answer whole = run(r);
  ASSERT_GT(whole.text.size(), 20u);
  r.stop_strings = {whole.text.substr(10, 4), "never said"};
  size_t at = whole.text.find(r.stop_strings[0]);
  Answer cut = run(r);
  ASSERT_EQ(cut.finished.size(), 1u);
  EXPECT_EQ(cut.finished[0].reason, FinishReason::stop_string);
  EXPECT_EQ(cut.finished[0].stop_string, r.stop_strings[0]);
  EXPECT_EQ(cut.text, whole.text.substr(0, at));
  EXPECT_LT(cut.finished[0].usage.completion_tokens, 60);
  r.include_stop = true;
  EXPECT_EQ(run(r).text, whole.text.substr(0, at + 4));
}

TEST_F(Text, EveryTokenIsToldAndTheStopTokensTextIsNot) {
  Request r = ask("stop here", 60);
  r.sampling.temperature = 1;
  r.sampling.seed = 5;
  const Answer whole = run(r);
  ASSERT_GT(whole.tokens.size(), 8u);
  r.stop_tokens = {whole.tokens[8]};
  const Answer cut = run(r);
  r.every_token = true;
  const Answer told = run(r);
  std::vector<int32_t> ids = cut.tokens;
  ids.push_back(r.stop_tokens[0]);
  EXPECT_EQ(told.tokens, ids);
  EXPECT_EQ(told.text, cut.text);
  EXPECT_EQ(told.finished[0].usage.completion_tokens, std::ssize(ids));
}

TEST_F(Text, AGrammarHoldsForEachOfSeveralChoices) {
  Request r = ask("a digit and a letter", 30);
  r.ignore_eos = false;
  r.n = 3;
  r.sampling.temperature = 1;
  r.grammar.kind = text::GrammarSpec::Kind::regex;
  r.grammar.text = "[0-9]{3}-[a-f]{2}";
  auto stream = std::move(*engine_->submit(r));
  std::map<int32_t, std::string> texts;
  int finished = 0;
  while (auto event = stream->next()) {
    if (auto* tokens = std::get_if<Tokens>(&*event)) texts[tokens->choice] += tokens->text;
    if (auto* f = std::get_if<Finished>(&*event)) {
      EXPECT_EQ(f->reason, FinishReason::stop_token);
      ++finished;
    }
  }
  EXPECT_EQ(finished, 3);
  ASSERT_EQ(texts.size(), 3u);
  for (auto& [choice, text] : texts) EXPECT_THAT(text, ::testing::MatchesRegex("[0-9]{3}-[a-f]{2}")) << choice;
}

TEST_F(Text, AGrammarWithinAllowedTokens) {
  Request r = ask("x", 30);
  r.ignore_eos = false;
  r.grammar.kind = text::GrammarSpec::Kind::regex;
  r.grammar.text = "[0-9]{3}";
  r.allowed_tokens = *engine_->tokenizer()->encode("78", false, false);
  Answer a = run(r);
  EXPECT_EQ(a.failed.field(), "allowed_token_ids");  // nothing that ends it
  EXPECT_THAT(a.failed.message(), ::testing::HasSubstr("after 3 tokens none of allowed_token_ids"));
  r.allowed_tokens.push_back(engine_->tokenizer()->end_of_generation()[0]);
  EXPECT_THAT(run(r).text, ::testing::MatchesRegex("[78]{3}"));
  r.allowed_tokens = *engine_->tokenizer()->encode("x", false, false);
  EXPECT_THAT(run(r).failed.message(), ::testing::HasSubstr("after 0 tokens"));
}

TEST_F(Text, AGrammarThatDoesNotCompileIsRefused) {
  Request r = ask("x", 5);
  r.grammar.kind = text::GrammarSpec::Kind::regex;
  r.grammar.text = "(unclosed";
  EXPECT_EQ(run(r).failed.code(), Code::invalid_argument);
}

TEST_F(Text, CancelledWhileItsGrammarCompiles) {
  Request r = ask("x", 5);
  r.grammar.kind = text::GrammarSpec::Kind::json_schema;
  r.grammar.text = R"({"type":"object","properties":{"a":{"type":"string","maxLength":500}}})";
  for (int i = 0; i < 10; ++i) {
    r.grammar.text += ' ';  // not the cached one
    auto stream = std::move(*engine_->submit(r));
    if (i % 2) stream->cancel();
    if (i % 3) read(*stream);
  }
  EXPECT_EQ(run(ask("still here", 3)).tokens.size(), 3u);
}

TEST_F(Text, LogprobsOfTheChosenAndTheBest) {
  Request r = ask("logs", 5);
  r.sampling.logprobs = 3;
  r.prompt_logprobs = 1;
  auto stream = std::move(*engine_->submit(r));
  size_t tokens = 0;
  while (auto event = stream->next()) {
    if (auto* started = std::get_if<Started>(&*event)) {
      ASSERT_EQ(started->prompt_logprobs.size(), 4u);
      for (size_t i = 1; i < 4; ++i) EXPECT_LT(started->prompt_logprobs[i].logprob, 0);
    }
    if (auto* t = std::get_if<Tokens>(&*event))
      for (auto& out : t->tokens) {
        ++tokens;
        ASSERT_EQ(out.top.size(), 3u);
        EXPECT_EQ(out.top[0].token, out.id);  // greedy: the best is the chosen
        EXPECT_FLOAT_EQ(out.top[0].logprob, out.logprob);
        EXPECT_GE(out.top[0].logprob, out.top[1].logprob);
      }
  }
  EXPECT_EQ(tokens, 5u);
}

}  // namespace
}  // namespace kvasir::engine
