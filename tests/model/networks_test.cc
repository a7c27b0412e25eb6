// Small seeded networks of every architecture and rope rule against a plain float64 forward
// (make_fixtures.py), read from safetensors.
#include <unistd.h>

#include <cmath>

#include "tests/model/drive.h"
#include "tests/model/small_network.h"

namespace kvasir::model {
namespace {

TEST(Networks, LogProbabilitiesAreThoseOfThePlainForward) {
  auto all = fixture("networks.json");
  std::vector<int32_t> tokens = all["tokens"];
  for (auto& one : all["cases"]) {
    SCOPED_TRACE(one["name"].get<std::string>());
    Folder folder("network");
    write_network(folder, one["config"]);
    Drive drive(folder.path.string(), 2, true, 64);
    SamplingParams params = Drive::greedy();
    params.logprobs = 64;
    auto rows = drive.step({{0, 0, tokens, true}}, params);
    size_t at[] = {7, 20, 39};
    for (int i = 0; i < 3; ++i) {
      std::vector<double> want = one["logits"][size_t(i)];
      double sum = 0, most = *std::max_element(want.begin(), want.end()), worst = 0;
      for (double v : want) sum += std::exp(v - most);
      ASSERT_EQ(rows[at[i]].top.size(), 64u);
      for (const TokenLogprob& t : rows[at[i]].top)
        worst = std::max(worst, std::fabs(t.logprob - (want[size_t(t.token)] - most - std::log(sum))));
      EXPECT_LT(worst, 1e-3);
    }
  }
}

TEST(Networks, ChunkedIsTheSameToTheBit) {
  auto all = fixture("networks.json");
  std::vector<int32_t> tokens = all["tokens"];
  for (auto& one : all["cases"]) {
    SCOPED_TRACE(one["name"].get<std::string>());
    Folder folder("chunks");
    write_network(folder, one["config"]);
    Drive whole(folder.path.string(), 2, false, 64), chunks(folder.path.string(), 1, false, 64);
    Sampled a = whole.step({{0, 0, tokens}})[0], b;
    for (size_t i = 0; i < tokens.size(); i += 7)
      b = chunks.step({{0,
                        int64_t(i),
                        {tokens.begin() + int64_t(i), tokens.begin() + int64_t(std::min(tokens.size(), i + 7))}}})[0];
    EXPECT_EQ(a.token, b.token);
    EXPECT_EQ(a.logprob, b.logprob);
  }
}

}  // namespace
}  // namespace kvasir::model
