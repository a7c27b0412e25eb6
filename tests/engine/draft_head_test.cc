// A head that drafts changes when an answer comes, and nothing of what it says: what it drafts is what plain torch
// drafts, whatever became of the sequence in between, and where it agrees with the model its drafts are right.
#include "engine/draft_head.h"

#include "core/cat.h"
#include "tests/engine/real_case.h"
#include "tests/model/heads.h"

namespace kvasir::engine::testing {
namespace {

using model::AgreeingHead;
using std::chrono::milliseconds;

// A step of the model takes a while, so that drafts pay.
class Slow final : public model::Runner {
 public:
  explicit Slow(std::unique_ptr<model::Runner> of) : of_(std::move(of)) {}
  const model::ModelInfo& info() const override { return of_->info(); }
  int depth() const override { return of_->depth(); }
  int64_t cache_room() const override { return of_->cache_room(); }
  int cache_groups() const override { return of_->cache_groups(); }
  Status allocate_cache(const model::CachePages& pages) override { return of_->allocate_cache(pages); }
  Result<std::unique_ptr<model::Runner>> load_head(const model::RunnerOptions& o) override { return of_->load_head(o); }
  Status launch(const model::Batch& batch, std::span<const model::SampleRow> rows) override {
    std::this_thread::sleep_for(milliseconds(4));
    return of_->launch(batch, rows);
  }
  Result<std::vector<model::Sampled>> wait() override { return of_->wait(); }

 private:
  std::unique_ptr<model::Runner> of_;
};

model::RunnerOptions runner_options(const std::string& model) {
  model::RunnerOptions m;
  m.model = model, m.device = "cpu", m.threads = 1, m.page_size = 8;
  m.max_batch = 16, m.max_tokens = 128;
  return m;
}

EngineOptions engine_options() {
  EngineOptions o;
  o.page_size = 8, o.max_running = 16, o.kv_memory = 4 << 20, o.max_tokens_per_step = 128;
  o.max_step_ms = 100, o.max_draft = 6;
  return o;
}

// `head`: a folder, or empty for the model's own.
std::unique_ptr<Engine> start(const std::string& model, const std::string& head, const EngineOptions& options) {
  auto engine = Engine::start(
      [model, head, drafts = options.max_draft > 0](const LoadProgress&) -> Result<Loaded> {
        Loaded out;
        KVASIR_ASSIGN(auto runner, model::load_runner(runner_options(model)));
        out.runner = std::make_unique<Slow>(std::move(runner));
        if (drafts) {
          KVASIR_ASSIGN(out.draft, out.runner->load_head(runner_options(head)));
        }
        return out;
      },
      options);
  const Status ready = engine->wait_ready();
  EXPECT_TRUE(ready.ok()) << ready.message();
  return engine;
}

// Some draw, some are penalized, some say log-probabilities, some fork; two begin alike.
std::vector<Request> requests(int32_t vocab) {
  std::vector<Request> out;
  for (int32_t i = 0; i < 8; ++i) {
    Request r = ask(i < 2 ? 45 : 10 + 6 * i, 60, i < 2 ? 0 : i);
    for (int32_t& t : r.prompt) t = 4 + t % (vocab - 6);
    if (i == 1) r.prompt.back() = 5;
    if (i == 2) r.sampling.temperature = 0.8f, r.sampling.seed = 4;
    if (i == 3) r.sampling.frequency_penalty = 0.5f;
    if (i == 4) r.sampling.logprobs = 2;
    if (i == 5) r.sampling.temperature = 0.7f, r.sampling.seed = 9, r.n = 3;
    out.push_back(std::move(r));
  }
  return out;
}

struct Said {
  std::vector<Answer> answers;
  Stats stats;
  DraftCount drafts() const { return stats.drafts[size_t(DraftSource::model)]; }
};

// So often, and until so many tokens were accepted: on a busy machine it may take a while until drafts seem to pay.
Said said(Engine& e, int rounds = 1, int64_t accepted = 0) {
  Said out;
  for (int round = 0; round < 30; ++round) {
    std::vector<std::unique_ptr<Stream>> streams;
    for (Request& r : requests(256)) streams.push_back(std::move(*e.submit(std::move(r))));
    for (auto& s : streams) out.answers.push_back(read(*s));
    out.stats = e.stats();
    if (round + 1 >= rounds && out.drafts().accepted >= accepted) break;
  }
  expect_all_pages_back(e);
  EXPECT_TRUE(eventually([&] {
    const Stats s = e.stats();
    return s.draft_model.pages_free == s.draft_model.pages_total;
  }));
  return out;
}

void expect_same(const Said& plain, const Said& ahead) {
  const size_t each = requests(256).size();
  for (size_t i = 0; i < ahead.answers.size(); ++i) {
    const Answer &a = plain.answers[i % each], &b = ahead.answers[i];
    EXPECT_TRUE(a.complete() && b.complete());
    EXPECT_EQ(a.tokens, b.tokens) << "request " << i;
    EXPECT_EQ(a.logprobs, b.logprobs) << "request " << i;
  }
}

Said without(const std::string& model) {
  EngineOptions o = engine_options();
  o.max_draft = 0;
  return said(*start(model, "", o));
}

// What the head makes of a whole sequence, of one in chunks whose steps were partly wrong drafts, and of one whose
// first rows it has from another.
TEST(DraftHead, DraftsAsPlainTorchDoes) {
  const nlohmann::json all = model::fixture("heads.json");
  for (const auto& one : all["cases"]) {
    SCOPED_TRACE(one["name"].get<std::string>());
    const model::StoredHead stored(one);
    model::RunnerOptions o = runner_options(stored.model.path.string());
    o.precise = true;
    auto runner = model::load_runner(o);
    ASSERT_TRUE(runner.ok()) << runner.status().message();
    o.model = stored.folder();
    auto loaded = (*runner)->load_head(o);
    ASSERT_TRUE(loaded.ok()) << loaded.status().message();
    ASSERT_TRUE((*runner)->allocate_cache(16).ok());
    std::vector<int32_t> tokens = all["tokens"];
    const auto count = int64_t(tokens.size());
    const int64_t width = (*runner)->info().kept;
    std::vector<float> states(size_t(count * width));
    model::Batch b;
    b.tokens = tokens, b.seqstarts = {0, count}, b.kvstarts = {0, count}, b.start_pos = {0};
    for (int32_t i = 0; i < count; ++i) b.positions.push_back(i);
    b.max_seqlen = b.max_kvlen = count, b.max_pages = (count + 7) / 8, b.kept = states.data();
    for (int64_t p = 0; p < b.max_pages; ++p) b.cachestarts.push_back(p * 8);
    ASSERT_TRUE((*runner)->launch(b, {}).ok() && (*runner)->wait().ok());

    auto made = DraftHead::create(std::move(*loaded), {16, 8, 128, 16});
    ASSERT_TRUE(made.ok()) << made.status().message();
    DraftHead& head = **made;
    const std::vector<int32_t> want = one["draft"];
    auto show = [&](scheduler::SeqId seq, int64_t known, int64_t from, int64_t to) {
      head.see({seq, {tokens.data(), size_t(known)}, from, to - from, states.data() + from * width});
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
  int64_t drafted = 0, accepted = 0;  // of answers that take the likeliest token and whose drafts are all the head's
  for (size_t i = 0; i < ahead.answers.size(); ++i) {
    const size_t which = i % requests(256).size();
    if (which == 2 || which == 3 || which == 5) continue;
    drafted += ahead.answers[i].finished[0].usage.drafted, accepted += ahead.answers[i].finished[0].usage.accepted;
  }
  EXPECT_GT(double(accepted), 0.9 * double(drafted));
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
  auto named = Engine::start(runner_options(agreeing.model.path.string()), o);
  ASSERT_TRUE(named->wait_ready().ok()) << named->wait_ready().message();
  EXPECT_EQ(named->stats().draft_model.name, agreeing.head.path.filename().string());

  nlohmann::json wrong = AgreeingHead::head_config(256);
  wrong["hidden_size"] = 32;
  agreeing.head.write("config.json", wrong.dump());
  auto refused = Engine::start(runner_options(agreeing.model.path.string()), o);
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
      auto engine = Engine::start(runner_options(stored.model.path.string()), o);
      ASSERT_TRUE(engine->wait_ready().ok()) << engine->wait_ready().message();
      EXPECT_EQ(engine->stats().draft_model.name.empty(), stored.own() || !mtp);
    }
  }
}

}  // namespace
}  // namespace kvasir::engine::testing
