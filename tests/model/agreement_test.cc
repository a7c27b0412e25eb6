// Integer activations against float32 ones over a long text; long, because float32 takes its time.
#include "tests/model/drive.h"

namespace kvasir::model {
namespace {

using Ids = std::vector<int32_t>;

// The first 2,000 ids of the text, eight windows of 250: what float32 prefers and by how much, beside what
// integers prefer.
TEST(Agreement, TwoThousandTokensDisagreeOnlyWhereItIsClose) {
  if (smollm2().empty()) GTEST_SKIP() << "the SmolLM2 model is not downloaded (./test fetches it)";
  Ids ids = fixture("gpl3_20k_ids.json");
  Drive precise(smollm2(), 2, true), integers(smollm2(), 2);
  int disagree = 0, far = 0, tokens = 0;
  double widest = 0;
  for (size_t begin = 0; begin < 2000; begin += 250) {
    Ids window(ids.begin() + int64_t(begin), ids.begin() + int64_t(begin) + 250);
    std::vector<Sampled> want = precise.step({{0, 0, window, true}}), got = integers.step({{0, 0, window, true}});
    for (size_t i = 0; i < window.size(); ++i, ++tokens) {
      if (want[i].top[0].token == got[i].top[0].token) continue;
      double apart = want[i].top[0].logprob - want[i].top[1].logprob;
      ++disagree, far += apart >= 0.3, widest = std::max(widest, apart);
    }
  }
  printf("%d tokens: %d disagree, the widest where the top two are %.4f apart\n", tokens, disagree, widest);
  EXPECT_EQ(tokens, 2000);
  EXPECT_LE(100 * far, disagree);
  EXPECT_LE(disagree, 40);  // llama.cpp: 11 of 320
}

}  // namespace
}  // namespace kvasir::model
