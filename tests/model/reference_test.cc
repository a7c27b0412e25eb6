// The forward pass against stored outputs of an outside float32 implementation.
#include <cmath>

#include "tests/model/drive.h"

namespace kvasir::model {
namespace {

using Ids = std::vector<int32_t>;

struct Agreement {
  int tokens = 0, same_argmax = 0, same_where_clear = 0, clear = 0;
  double mean = 0, worst = 0;
};

// The stored continuations, each scored in one step.
Agreement agreement(Drive& drive) {
  Agreement a;
  for (auto& run : fixture("smollm2_fp32.json")) {
    Ids all = run["prompt"], output = run["output"], argmax = run["fp32_argmax"];
    size_t prompt = all.size();
    all.insert(all.end(), output.begin(), output.end());
    Ids targets(all.begin() + 1, all.end());
    Ids context(all.begin(), all.end() - 1);
    std::vector<Sampled> scored = drive.step({{0, 0, context, true}}, Drive::greedy(), targets);
    for (size_t i = 0; i < output.size(); ++i) {
      const Sampled& s = scored[prompt - 1 + i];
      double off = std::fabs(s.logprob - run["fp32_logprob"][i].get<double>());
      bool same = s.top[0].token == argmax[i], clear = s.top[0].logprob - s.top[1].logprob > 1e-3;
      a.tokens++, a.same_argmax += same, a.clear += clear, a.same_where_clear += clear && same;
      a.mean += off, a.worst = std::max(a.worst, off);
    }
  }
  a.mean /= a.tokens;
  return a;
}

TEST(Reference, PreciseForwardIsTheFloat32Forward) {
  if (smollm2().empty()) GTEST_SKIP() << "the SmolLM2 model is not downloaded (./test fetches it)";
  Drive drive(smollm2(), 2, true);
  Agreement a = agreement(drive);
  printf("precise: argmax %d/%d, |dlogprob| mean %.6f worst %.6f\n", a.same_argmax, a.tokens, a.mean, a.worst);
  EXPECT_LT(a.worst, 1e-3);
  EXPECT_EQ(a.same_where_clear, a.clear);
}

TEST(Reference, IntegerActivationsAgreeAsWellAsLlamaCpp) {
  if (smollm2().empty()) GTEST_SKIP() << "the SmolLM2 model is not downloaded (./test fetches it)";
  Drive drive(smollm2(), 2);
  Agreement a = agreement(drive);
  printf("integers: argmax %d/%d, |dlogprob| mean %.6f worst %.6f\n", a.same_argmax, a.tokens, a.mean, a.worst);
  EXPECT_GE(a.same_argmax, 309);
  EXPECT_LE(a.mean, 0.036);
}

// Windows of 512, the second half of each scored.
double perplexity(Drive& drive, const Ids& ids) {
  double sum = 0;
  int64_t count = 0;
  for (size_t begin = 0; begin + 512 <= ids.size(); begin += 512) {
    Ids window(ids.begin() + int64_t(begin), ids.begin() + int64_t(begin) + 512),
        targets(window.begin() + 1, window.end());
    std::vector<Sampled> scored = drive.step({{0, 0, window, true}}, Drive::greedy(), targets);
    for (size_t i = 256; i < 511; ++i) sum -= scored[i].logprob, ++count;
  }
  return std::exp(sum / double(count));
}

TEST(Reference, PerplexityOfTheLicence) {
  if (smollm2().empty()) GTEST_SKIP() << "the SmolLM2 model is not downloaded (./test fetches it)";
  Ids ids = fixture("gpl3_20k_ids.json");
  Drive drive(smollm2(), 2);
  double p = perplexity(drive, ids);
  printf("perplexity %.4f (float32 18.342, llama.cpp 18.380)\n", p);
  EXPECT_LE(p, 18.40);
  EXPECT_GE(p, 18.20);
}

// What coarser caches cost, against a float16 cache's.
TEST(Reference, PerplexityWithEachTypeOfCache) {
  if (smollm2().empty()) GTEST_SKIP() << "the SmolLM2 model is not downloaded (./test fetches it)";
  Ids ids = fixture("gpl3_20k_ids.json");
  auto with = [&](const char* dtype, int32_t group, const char* attention = "auto") {
    RunnerOptions o;
    o.attention_dtype = attention;
    o.model = smollm2(), o.threads = 2;
    o.kv.dtype = dtype, o.kv.group = group;
    Drive drive(o, 2048, 1, 2048);
    const double p = perplexity(drive, ids);
    printf("perplexity %.4f with a cache of %s, attention in %s\n", p, drive.runner->info().kv_type.c_str(),
           drive.runner->info().attention_type.c_str());
    return p;
  };
  const double half = with("float16", -1);
  EXPECT_LE(with("int8", 64), half + 0.02);
  EXPECT_LE(with("int8", 8), half + 0.01);
  const double cache = with("fp8", -1), attention = with("auto", -1, "fp8");
  EXPECT_LE(cache, half + 0.25);
  EXPECT_LE(attention, half + 0.35);  // queries in E4M3 add some .1 to what the cache costs
  EXPECT_NE(attention, cache) << "queries are rounded as well";
  with("int4", 32);  // stated, not bounded
}

}  // namespace
}  // namespace kvasir::model
