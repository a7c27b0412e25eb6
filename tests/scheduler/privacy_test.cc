// One tenant sees nothing of another's prompts: not by waiting less, not in what it is told was cached, not in the
// events about the cache. The same day is lived twice: once somebody else has asked the same before, once not.
#include <gtest/gtest.h>

#include "tests/scheduler/world.h"

namespace kvasir::scheduler {
namespace {

struct Seen {
  std::vector<double> ttft_s;
  std::vector<int64_t> cached_tokens;
  std::vector<std::tuple<uint64_t, int, uint64_t, uint64_t, std::vector<int32_t>>> cache_events;
  bool operator==(const Seen&) const = default;
};

// `others`: what the other tenant asks, before and between.
Seen day_of_the_second(const std::vector<int32_t>& others, const std::string& tenant, int depth, int64_t host_pages) {
  Settings o = small();
  o.depth = depth;
  o.host_pages = host_pages;
  o.policy = "lpm";
  o.cache_events = std::make_shared<kvcache::CacheEvents>(1000);
  World w(o);
  w.by_work = true;  // a prefix that is found is time that is saved
  Seen seen;
  RequestId id = 0;
  auto ask = [&](const std::string& who, const std::vector<int32_t>& prompt) {
    Submission s = w.make(++id, prompt, 4);
    s.tenant = who;
    const Time asked = w.now;
    const SeqId seq = w.submit(s);
    w.events.clear();
    while (w.outputs[seq].empty()) {
      while (w.scheduler->in_flight() < depth && w.launch()) {
      }
      w.retire();
    }
    if (who == tenant) {
      seen.ttft_s.push_back(std::chrono::duration<double>(w.now - asked).count());
      for (const Notice& e : w.events)
        if (e.kind == Notice::Kind::admitted) seen.cached_tokens.push_back(e.cached_tokens);
    }
    w.run();
  };
  const std::vector<int32_t> mine = prompt_of(30), longer = prompt_of(40);
  ask("first", others);
  ask(tenant, mine);
  ask("first", others);
  ask(tenant, longer);
  ask(tenant, mine);
  bool lost = false;
  for (const kvcache::CacheEvent& e : o.cache_events->since(tenant, 0, &lost))
    seen.cache_events.emplace_back(e.sequence, int(e.kind), e.hash, e.parent, e.tokens);
  EXPECT_FALSE(lost);
  w.expect_all_back();
  return seen;
}

TEST(Privacy, TheSecondTenantCannotTellWhatTheFirstAsked) {
  for (int depth : {1, 2})
    for (int64_t host : {0, 16}) {
      const Seen unlike = day_of_the_second(prompt_of(30, 500), "second", depth, host);
      EXPECT_EQ(day_of_the_second(prompt_of(30), "second", depth, host), unlike) << depth;
      // Its own prompts it does find again: what is measured here can be measured.
      EXPECT_EQ(unlike.cached_tokens.size(), 3u);
      EXPECT_GT(unlike.cached_tokens[2], 0);
      EXPECT_LT(unlike.ttft_s[2], unlike.ttft_s[0]);
      EXPECT_FALSE(unlike.cache_events.empty());
    }
}

}  // namespace
}  // namespace kvasir::scheduler
