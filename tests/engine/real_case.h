// An engine over a network that computes, on a CPU, and what it answers.
#pragma once

#include <cstdlib>
#include <filesystem>

#include "tests/engine/harness.h"

namespace kvasir::engine::testing {

struct Ran {
  std::vector<std::vector<int32_t>> tokens;
  Stats stats;
  int64_t bytes_per_token = 0;
};

struct Case {
  std::string model;
  EngineOptions options;
  int threads = 1;
  kvcache::FormWish kv;
  std::string attention_dtype = "auto";
  int32_t window = 0, sinks = 0;  // StreamingLLM

  explicit Case(std::string name) : model(std::move(name)) {
    options.page_size = 8;
    options.max_tokens_per_step = 64;
    options.max_running = 16;
    options.kv_memory = 64 << 20;
    options.max_draft = 0;    // so that answers of one length take equally many steps
    options.max_step_ms = 0;  // so that pages move by what that is said to cost, not by what a busy machine makes of it
  }
  // All at once; every step takes a while, so that they meet.
  Ran run(int32_t requests, int32_t prompt, int64_t output) const {
    Ran out;
    model::RunnerOptions m;
    m.model = model;
    m.threads = threads;
    m.kv = kv;
    m.attention_dtype = attention_dtype;
    m.attention_window = window, m.attention_sinks = sinks;
    auto engine = Engine::start(m, options);
    Status ready = engine->wait_ready();
    EXPECT_TRUE(ready.ok()) << ready.message();
    if (!ready.ok()) return out;
    out.bytes_per_token = engine->info().kv_bytes_per_token;
    std::vector<std::unique_ptr<Stream>> streams;
    for (int32_t i = 0; i < requests; ++i) {
      Request r = ask(prompt, output, i);
      for (int32_t& t : r.prompt) t = 4 + t % 250;
      auto stream = engine->submit(std::move(r));
      EXPECT_TRUE(stream.ok()) << stream.status().message();
      if (stream.ok()) streams.push_back(std::move(*stream));
    }
    for (auto& stream : streams) {
      Answer a = read(*stream);
      EXPECT_TRUE(a.complete()) << a.failed.message();
      out.tokens.push_back(a.tokens.empty() ? std::vector<int32_t>() : a.tokens[0]);
    }
    expect_all_pages_back(*engine);
    out.stats = engine->stats();
    return out;
  }
};

// Six of those eight requests again, where `pages` (of 13 that each has in the end) are all there is: computed again,
// and moved to the host and back.
inline void expect_same_with_few_pages(Case c, const Ran& eight, int64_t pages) {
  const int64_t page_bytes = eight.bytes_per_token * c.options.page_size;
  c.options.kv_memory = page_bytes * pages;
  const Ran again = c.run(6, 40, 60);
  EXPECT_GT(again.stats.preemptions, 0);
  EXPECT_EQ(again.tokens, std::vector(eight.tokens.begin(), eight.tokens.begin() + 6)) << "computed again";
  c.options.host_kv_memory = page_bytes * 200;
  const Ran moved = c.run(6, 40, 60);
  EXPECT_GT(moved.stats.moved, 0);
  EXPECT_EQ(moved.tokens, again.tokens) << "moved away and back";
}

// Eight requests have the same tokens whichever way they travel; what they are. `step`: tokens that a step of two
// threads takes.
inline Ran expect_same_whichever_way(Case c, int32_t step) {
  Ran eight = c.run(8, 40, 60);
  EXPECT_EQ(eight.tokens.size(), 8u);
  EXPECT_EQ(eight.stats.preemptions, 0);
  if (eight.tokens.size() != 8) return eight;
  EXPECT_EQ(c.run(1, 40, 60).tokens[0], eight.tokens[0]) << "alone";
  Case two = c;
  two.threads = 2, two.options.max_tokens_per_step = step;
  EXPECT_EQ(two.run(8, 40, 60).tokens, eight.tokens) << "two threads, " << step << " tokens a step";
  Case table = c;
  table.options.kv_index = kvcache::IndexMode::token_table;
  EXPECT_EQ(table.run(8, 40, 60).tokens, eight.tokens) << "token table";
  c.options.prefix_cache = false;
  Case offset = c;
  offset.options.kv_index = kvcache::IndexMode::offset;
  EXPECT_EQ(offset.run(8, 40, 60).tokens, eight.tokens) << "offset";
  expect_same_with_few_pages(c, eight, 24);
  return eight;
}

inline std::string smollm2() {
  const char* home = std::getenv("HOME");
  std::string path = std::string(home ? home : "") + "/.cache/kvasir/models/SmolLM2-135M-Instruct.Q4_1.gguf";
  return std::filesystem::exists(path) ? path : "";
}

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

// Under a sanitizer the arithmetic of a real model takes ten minutes; its threads and its memory are those of the
// dummies.
inline const char* smollm2_missing() {
  if (kSanitized) return "its bits are checked without a sanitizer";
  return smollm2().empty() ? "no SmolLM2 on this machine" : nullptr;
}

}  // namespace kvasir::engine::testing
