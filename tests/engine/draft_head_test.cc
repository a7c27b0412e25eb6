// A head that drafts changes when an answer comes, and nothing of what it says: what it drafts is what plain torch
// drafts, whatever became of the sequence in between, and where it agrees with the model its drafts are right.
#include "core/cat.h"
#include "tests/engine/draft_heads.h"

namespace kvasir::engine::testing {
namespace {

using model::AgreeingHead;

void expect_same(const Said& plain, const Said& ahead) {
  const size_t each = requests(256).size();
  for (size_t i = 0; i < ahead.answers.size(); ++i) {
    const Answer &a = plain.answers[i % each], &b = ahead.answers[i];
    EXPECT_TRUE(a.complete() && b.complete());
    EXPECT_EQ(a.tokens, b.tokens) << "request " << i;
    EXPECT_EQ(a.logprobs, b.logprobs) << "request " << i;
  }
}

// What the head makes of a whole sequence, of one in chunks whose steps were partly wrong drafts, and of one whose
// first rows it has from another.
TEST(DraftHead, DraftsAsPlainTorchDoes) {
  const nlohmann::json all = model::fixture("heads.json");
  for (const auto& one : all["cases"]) {
    SCOPED_TRACE(one["name"].get<std::string>());
    const model::StoredHead stored(one);
    model::RunnerOptions o = runner_options(stored.model.path.string(), "cpu");
    o.precise = true;
    auto runner = model::load_runner(o);
    ASSERT_TRUE(runner.ok()) << runner.status().message();
    o.model = stored.folder();
    auto loaded = (*runner)->load_head(o, kPlaces);
    ASSERT_TRUE(loaded.ok()) << loaded.status().message();
    ASSERT_TRUE((*runner)->allocate_cache(16).ok());
    std::vector<int32_t> tokens = all["tokens"];
    const auto count = int64_t(tokens.size());
    model::Batch b;
    b.tokens = tokens, b.seqstarts = {0, count}, b.kvstarts = {0, count}, b.start_pos = {0};
    for (int32_t i = 0; i < count; ++i) b.positions.push_back(i);
    b.max_seqlen = b.max_kvlen = count, b.max_pages = (count + 7) / 8;
    for (int64_t p = 0; p < b.max_pages; ++p) b.cachestarts.push_back(p * 8);

    auto made = DraftHead::create(std::move(*loaded), {16, 8, 128, 16, 256});
    ASSERT_TRUE(made.ok()) << made.status().message();
    DraftHead& head = **made;
    const std::vector<int32_t> want = one["draft"];
    auto show = [&](scheduler::SeqId seq, int64_t known, int64_t from, int64_t to) {
      head.lend_places(count, b.kept_at);
      ASSERT_TRUE((*runner)->launch(b, {}).ok() && (*runner)->wait().ok());
      head.see(
          {seq, {tokens.data(), size_t(known)}, from, std::span(b.kept_at).subspan(size_t(from), size_t(to - from))});
      head.give_back_places(b.kept_at);
    };
    auto draft = [&](scheduler::SeqId seq, int64_t known) {
      Drafter::Want w{seq, {tokens.data(), size_t(known)}, int(want.size()), {}};
      EXPECT_TRUE(head.takes(seq, w.tokens));
      const Status drafted = head.draft({&w, 1}, 1);
      EXPECT_TRUE(drafted.ok()) << drafted.message();
      return w.draft;
    };
    show(1, count, 0, count);
    EXPECT_EQ(draft(1, count), want) << "whole";

    show(2, count, 0, 33);  // a prompt's chunk: taken up before anything is drafted
    ASSERT_TRUE(head.catch_up(true).ok());
    show(2, 36, 33, 38);  // a draft's rows: of five, the last three are not the sequence's
    draft(2, 36);
    show(2, 38, 35, 37);
    show(2, count, 30, 40);  // computed again, and on
    EXPECT_EQ(draft(2, count), want) << "in chunks";

    head.forget(2);
    show(3, count, 24, count);  // the rest is cached
    EXPECT_EQ(draft(3, count), want) << "as another began";
    head.forget(1);
    head.forget(3);
    EXPECT_EQ(head.free_pages(), head.pages());
    head.forget_ended();
    show(4, count, 24, count);  // nobody has it: another draft, and no fault
    EXPECT_EQ(draft(4, count).size(), want.size());
  }
}

// Of a prompt's rows only the first have a place: it is gone without, and nothing is lost.
TEST(DraftHead, TooFewPlaces) {
  const AgreeingHead agreeing;
  auto runner = model::load_runner(runner_options(agreeing.model.path.string(), "cpu"));
  ASSERT_TRUE(runner.ok()) << runner.status().message();
  constexpr int64_t kFew = 24;
  auto loaded = (*runner)->load_head(runner_options(agreeing.head.path.string(), "cpu"), kFew);
  ASSERT_TRUE(loaded.ok()) << loaded.status().message();
  auto made = DraftHead::create(std::move(*loaded), {16, 8, 128, 16, 256});
  ASSERT_TRUE(made.ok()) << made.status().message();
  DraftHead& head = **made;
  const std::vector<int32_t> tokens(60, 7);
  std::vector<int32_t> places;
  head.lend_places(59, places);
  EXPECT_EQ(std::count(places.begin(), places.end(), -1), 59 - kFew);
  head.see({1, tokens, 0, places});
  head.give_back_places(places);
  EXPECT_FALSE(head.takes(1, tokens));
  head.lend_places(kFew, places);
  EXPECT_EQ(std::count(places.begin(), places.end(), -1), 0) << "places were lost";
  head.give_back_places(places);
}

TEST(DraftHead, OneThatAgreesIsRight) {
  const AgreeingHead agreeing;
  const Said plain = without(agreeing.model.path.string());
  auto engine = start(agreeing.model.path.string(), agreeing.head.path.string(), engine_options());
  const Said ahead = said(*engine, 2, 100);
  expect_same(plain, ahead);
  EXPECT_GT(ahead.drafts().accepted, 100);
  EXPECT_GT(ahead.stats.cached_tokens, 0);
  EXPECT_FALSE(ahead.stats.draft_model.name.empty());
  EXPECT_GT(ahead.stats.draft_model.seconds, 0);
}

// Counted by source: lookups in the text stand in for the head where it seems too slow, and are wrong more often.
TEST(DraftHead, OneThatAgreesIsRightWhereTheLikeliestTokenIsTaken) {
  const AgreeingHead agreeing;
  auto engine = start(agreeing.model.path.string(), agreeing.head.path.string(), engine_options());
  const DraftCount all = said(*engine, 1, 60, true).drafts();
  EXPECT_GT(double(all.accepted), 0.9 * double(all.drafted)) << all.accepted << " of " << all.drafted;
}

// Of three of four tokens.
TEST(DraftHead, AVocabularyOfItsOwn) {
  const AgreeingHead agreeing(192);
  auto engine = start(agreeing.model.path.string(), agreeing.head.path.string(), engine_options());
  const Said ahead = said(*engine, 1, 40);
  expect_same(without(agreeing.model.path.string()), ahead);
  EXPECT_GT(ahead.drafts().accepted, 40);
  EXPECT_LT(ahead.drafts().accepted, ahead.drafts().drafted);
}

// Both caches are too small for all.
TEST(DraftHead, PagesTakenAwayInEitherCache) {
  const AgreeingHead agreeing;
  EngineOptions o = engine_options();
  o.kv_memory = 20 * 8 * 512 + 20 * 8 * 256;
  auto engine = start(agreeing.model.path.string(), agreeing.head.path.string(), o);
  const Said ahead = said(*engine, 2, 30);
  expect_same(without(agreeing.model.path.string()), ahead);
  EXPECT_GT(ahead.stats.preemptions, 0);
  EXPECT_EQ(ahead.stats.draft_model.pages_total, 20);
  EXPECT_GT(ahead.drafts().accepted, 30);
}

TEST(DraftHead, AnyHeadLeavesTheAnswersAsTheyAre) {
  const nlohmann::json all = model::fixture("heads.json");
  for (const auto& one : all["cases"]) {
    SCOPED_TRACE(one["name"].get<std::string>());
    const model::StoredHead stored(one);
    auto engine = start(stored.model.path.string(), stored.folder(), engine_options());
    const Said ahead = said(*engine);
    expect_same(without(stored.model.path.string()), ahead);
    EXPECT_GT(ahead.drafts().drafted, 0);
  }
}

// As operators reach them: by the options of the engine.
TEST(DraftHead, ByName) {
  const AgreeingHead agreeing;
  EngineOptions o = engine_options();
  o.draft_model = agreeing.head.path.string();
  auto named = Engine::start(runner_options(agreeing.model.path.string(), "cpu"), o);
  ASSERT_TRUE(named->wait_ready().ok()) << named->wait_ready().message();
  EXPECT_EQ(named->stats().draft_model.name, agreeing.head.path.filename().string());

  nlohmann::json wrong = AgreeingHead::head_config(256);
  wrong["hidden_size"] = 32;
  agreeing.head.write("config.json", wrong.dump());
  auto refused = Engine::start(runner_options(agreeing.model.path.string(), "cpu"), o);
  const Status why = refused->wait_ready();
  EXPECT_EQ(why.code(), Code::invalid_argument);
  EXPECT_EQ(why.field(), "draft_model");
  EXPECT_THAT(why.message(), ::testing::HasSubstr("an EAGLE-3 head, and cannot be loaded: "));
  EXPECT_THAT(why.message(), ::testing::HasSubstr("hidden_size is 32, the model's is 64"));
}

TEST(DraftHead, AModelsOwnLayerDraftsUnlessItIsTurnedOff) {
  const nlohmann::json all = model::fixture("heads.json");
  for (const auto& one : all["cases"]) {
    const model::StoredHead stored(one);
    for (const bool mtp : {true, false}) {
      EngineOptions o = engine_options();
      o.mtp = mtp;
      auto engine = Engine::start(runner_options(stored.model.path.string(), "cpu"), o);
      ASSERT_TRUE(engine->wait_ready().ok()) << engine->wait_ready().message();
      EXPECT_EQ(engine->stats().draft_model.name.empty(), stored.own() || !mtp);
    }
  }
}

}  // namespace
}  // namespace kvasir::engine::testing
