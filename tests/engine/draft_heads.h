// Engines whose model has a head that drafts, and what they are asked.
#pragma once

#include <thread>

#include "engine/draft_head.h"
#include "tests/engine/real_case.h"
#include "tests/model/heads.h"

namespace kvasir::engine::testing {

// Of steps of 128 tokens and 16 sequences.
constexpr int64_t kPlaces = DraftHead::places(128, 16, 2);

// A step of the model takes a while, so that drafts pay.
class Slow final : public model::Runner {
 public:
  explicit Slow(std::unique_ptr<model::Runner> of) : of_(std::move(of)) {}
  const model::ModelInfo& info() const override { return of_->info(); }
  int depth() const override { return of_->depth(); }
  int64_t cache_room() const override { return of_->cache_room(); }
  int cache_groups() const override { return of_->cache_groups(); }
  Status allocate_cache(const model::CachePages& pages) override { return of_->allocate_cache(pages); }
  Result<std::unique_ptr<model::Runner>> load_head(const model::RunnerOptions& o, int64_t places) override {
    return of_->load_head(o, places);
  }
  Status launch(const model::Batch& batch, std::span<const model::SampleRow> rows) override {
    std::this_thread::sleep_for(std::chrono::milliseconds(4));
    return of_->launch(batch, rows);
  }
  Result<std::vector<model::Sampled>> wait() override { return of_->wait(); }

 private:
  std::unique_ptr<model::Runner> of_;
};

inline model::RunnerOptions runner_options(const std::string& model, const std::string& device) {
  model::RunnerOptions m;
  m.model = model, m.device = device, m.threads = 1, m.page_size = 8;
  m.max_batch = 16, m.max_tokens = 128;
  return m;
}

inline EngineOptions engine_options() {
  EngineOptions o;
  o.page_size = 8, o.max_running = 16, o.kv_memory = 4 << 20, o.max_tokens_per_step = 128;
  o.max_step_ms = 100, o.max_draft = 6;
  return o;
}

// `head`: a folder, or empty for the model's own.
inline std::unique_ptr<Engine> start(const std::string& model, const std::string& head, const EngineOptions& options,
                                     const std::string& device = "cpu") {
  auto engine = Engine::start(
      [model, head, device, drafts = options.max_draft > 0](const LoadProgress&) -> Result<Loaded> {
        Loaded out;
        KVASIR_ASSIGN(auto runner, model::load_runner(runner_options(model, device)));
        out.runner = std::make_unique<Slow>(std::move(runner));
        if (drafts) {
          KVASIR_ASSIGN(out.draft, out.runner->load_head(runner_options(head, device), kPlaces));
        }
        return out;
      },
      options);
  const Status ready = engine->wait_ready();
  EXPECT_TRUE(ready.ok()) << ready.message();
  return engine;
}

// Some draw, some are penalized and some fork, unless all are to be greedy; some say log-probabilities; two begin
// alike.
inline std::vector<Request> requests(int32_t vocab, bool greedy = false) {
  std::vector<Request> out;
  for (int32_t i = 0; i < 8; ++i) {
    Request r = ask(i < 2 ? 45 : 10 + 6 * i, 60, i < 2 ? 0 : i);
    for (int32_t& t : r.prompt) t = 4 + t % (vocab - 6);
    if (i == 1) r.prompt.back() = 5;
    if (i == 2 && !greedy) r.sampling.temperature = 0.8f, r.sampling.seed = 4;
    if (i == 3 && !greedy) r.sampling.frequency_penalty = 0.5f;
    if (i == 4) r.sampling.logprobs = 2;
    if (i == 5 && !greedy) r.sampling.temperature = 0.7f, r.sampling.seed = 9, r.n = 3;
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
inline Said said(Engine& e, int rounds = 1, int64_t accepted = 0, bool greedy = false) {
  Said out;
  for (int round = 0; round < 30; ++round) {
    std::vector<std::unique_ptr<Stream>> streams;
    for (Request& r : requests(256, greedy)) streams.push_back(std::move(*e.submit(std::move(r))));
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

inline Said without(const std::string& model, const std::string& device = "cpu") {
  EngineOptions o = engine_options();
  o.max_draft = 0;
  return said(*start(model, "", o, device));
}

}  // namespace kvasir::engine::testing
