// Heads that draft on a GPU: torch's logits within what bfloat16 leaves of them, from hidden states that never leave
// the device.
#include "model/cuda/runner.h"
#include "tests/model/cuda_case.h"
#include "tests/model/heads.h"

namespace kvasir::model {
namespace {

using nlohmann::json;
using HeadsCuda = NeedsDevice;

RunnerOptions on_gpu(const std::string& model) {
  RunnerOptions o;
  o.model = model, o.device = "cuda";
  o.max_batch = 4, o.max_tokens = 64;
  return o;
}

struct Both {
  Both(const std::string& model, const std::string& folder) {
    auto loaded = load_runner(on_gpu(model));
    EXPECT_TRUE(loaded.ok()) << loaded.status().message();
    runner = std::move(*loaded);
    auto made = runner->load_head(on_gpu(folder), 64);
    EXPECT_TRUE(made.ok()) << made.status().message();
    head = std::move(*made);
    EXPECT_TRUE(head && head->allocate_cache(8).ok() && runner->allocate_cache(8).ok());
  }
  std::unique_ptr<Runner> runner, head;
};

double margin(const Sampled& row) { return row.top[0].logprob - row.top[1].logprob; }

TEST_F(HeadsCuda, AsPlainTorchComputesThem) {
  const json all = fixture("heads.json");
  const std::vector<int32_t> tokens = all["tokens"], behind(tokens.begin() + 1, tokens.end());
  const auto count = int32_t(behind.size());
  for (const json& one : all["cases"]) {
    SCOPED_TRACE(one["name"].get<std::string>());
    const StoredHead stored(one);
    const Both both(stored.model.path.string(), stored.folder());
    const int64_t width = both.head->info().given, hidden = both.head->info().kept;
    pass(*both.runner, tokens, 0, {.kept = 0});
    const auto whole = pass(*both.head, behind, 0, {.given = 0, .given_cols = width});
    double worst = 0;
    for (size_t i = 0; i < all["rows"].size(); ++i) {
      const Sampled& row = whole[all["rows"][i].get<size_t>()];
      const std::vector<double> want = one["logprobs"][i];
      const std::vector<int64_t> d2t = one["d2t"];
      worst = std::max(worst, worst_of(row, want, d2t));
      std::vector<double> sorted = want;
      std::nth_element(sorted.begin(), sorted.begin() + 1, sorted.end(), std::greater<>());
      const auto best = std::max_element(want.begin(), want.end()) - want.begin();
      if (want[size_t(best)] - sorted[1] > 0.1) {
        EXPECT_EQ(row.token, best + (d2t.empty() ? 0 : d2t[size_t(best)]));
      }
    }
    printf("%-28s worst |difference| of a log-probability %.4f\n", one["name"].get<std::string>().c_str(), worst);
    EXPECT_LT(worst, 0.25);

    // In chunks; then torch's draft, each row with the state of the one before.
    pass(*both.head, {behind.begin(), behind.begin() + 17}, 0, {.given = 0, .given_cols = width});
    auto last =
        pass(*both.head, {behind.begin() + 17, behind.end()}, 17, {.kept = 17, .given = 17, .given_cols = width});
    EXPECT_NEAR(last.back().logprob, whole.back().logprob, 0.05);
    const std::vector<int32_t> draft = one["draft"];
    int32_t state = count - 1;
    for (size_t i = 0; i < draft.size(); ++i, ++state) {
      if (margin(last.back()) > 0.1) {
        EXPECT_EQ(last.back().token, draft[i]) << "token " << i << " of the draft";
      }
      const Places places{.kept = state + 1, .given = state, .given_cols = hidden};
      last = pass(*both.head, {draft[i]}, count + int64_t(i), places);
      for (int again = 0; again < 4; ++again) {  // a graph by then, in either slot
        EXPECT_EQ(pass(*both.head, {draft[i]}, count + int64_t(i), places).back().logprob, last.back().logprob);
      }
    }
    EXPECT_GT(dynamic_cast<const cuda::Replaying&>(*both.head).replays(), 0);
  }
}

// Steps of the model that overlap, some of which keep their states and some not; then the head reads them all.
TEST_F(HeadsCuda, StatesOfStepsInFlight) {
  const AgreeingHead agreeing(192);
  const Both both(agreeing.model.path.string(), agreeing.head.path.string());
  auto alone = load_runner(on_gpu(agreeing.model.path.string()));
  ASSERT_TRUE(alone.ok() && (*alone)->allocate_cache(8).ok());
  const SamplingParams greedy = Drive::greedy();
  struct Step {
    Batch batch;
    SampleRow row;
  };
  std::deque<Step> steps;
  auto launch = [&](Runner& runner, std::vector<int32_t> tokens, int32_t begin, bool keeps) {
    Step& s = steps.emplace_back();
    Batch& b = s.batch;
    b.tokens = std::move(tokens);
    const auto count = int32_t(b.tokens.size());
    for (int32_t i = 0; i < count; ++i) {
      b.positions.push_back(begin + i);
      if (keeps) b.kept_at.push_back(begin + i);
    }
    b.seqstarts = {0, count}, b.kvstarts = {0, begin + count}, b.start_pos = {begin}, b.logit_rows = {count - 1};
    b.max_seqlen = count, b.max_kvlen = begin + count, b.decoding_batches = count == 1, b.max_pages = 4;
    b.cachestarts = {0, 16, 32, 48};
    s.row.params = &greedy, s.row.position = begin + count;
    const Status launched = runner.launch(b, {&s.row, 1});
    EXPECT_TRUE(launched.ok()) << launched.message();
  };
  auto answer = [&](Runner& runner, bool keeps) {
    std::vector<Sampled> out;
    std::vector<int32_t> prompt;
    for (int32_t i = 0; i < 20; ++i) prompt.push_back((7 * i + 3) % 256);
    launch(runner, prompt, 0, keeps);
    for (int32_t i = 0; i < 30; ++i) {
      launch(runner, {previous_sample(0)}, 20 + i, keeps && i != 25);
      out.push_back(std::move((*runner.wait())[0]));
    }
    out.push_back(std::move((*runner.wait())[0]));
    return out;
  };
  const auto plain = answer(**alone, false), kept = answer(*both.runner, true), unread = answer(*both.runner, false);
  ASSERT_EQ(plain.size(), 31u);
  std::vector<int32_t> drawn;
  for (size_t i = 0; i < plain.size(); ++i) {
    for (const auto* other : {&kept, &unread}) {
      EXPECT_EQ((*other)[i].token, plain[i].token);
      EXPECT_EQ((*other)[i].logprob, plain[i].logprob);
    }
    drawn.push_back(plain[i].token);
  }
  EXPECT_GT(dynamic_cast<const cuda::Replaying&>(*both.runner).replays(), 20);
  // Row i of the head reads token i + 1 and draws i + 2: the model's own, wherever it may draw that.
  const std::vector<int32_t> behind(drawn.begin(), drawn.begin() + 20);
  const auto rows = pass(*both.head, behind, 0, {.given = 19, .given_cols = 3 * AgreeingHead::kHidden});
  int right = 0;
  for (size_t i = 0; i < rows.size(); ++i) right += rows[i].token == drawn[i + 1];
  printf("%d of %zu rows draw what the model draws\n", right, rows.size());
  EXPECT_GE(right, 10);
}

TEST_F(HeadsCuda, RefusedOverSeveralGpus) {
  if (devices() < 2) GTEST_SKIP() << "skipped: one device";
  const AgreeingHead agreeing;
  RunnerOptions o = on_gpu(agreeing.model.path.string());
  o.device = "cuda:0,1";
  auto runner = load_runner(o);
  ASSERT_TRUE(runner.ok()) << runner.status().message();
  const auto head = (*runner)->load_head(on_gpu(agreeing.head.path.string()), 64);
  EXPECT_EQ(head.status().message(), "ranks is 2; a head drafts for a model that is not split: --ranks 1");
}

}  // namespace
}  // namespace kvasir::model
