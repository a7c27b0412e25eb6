// Identical to the bit whichever way a sequence travels: alone, in a batch, in chunks, by 1 or 2 threads.
#include "tests/model/drive.h"

namespace kvasir::model {
namespace {

using Ids = std::vector<int32_t>;

std::string model() { return smollm2().empty() ? "dummy:llama,hidden=256,layers=3,type=q4_1" : smollm2(); }

Ids prompt(int seq, int n) {
  Ids out;
  for (int i = 0; i < n; ++i) out.push_back((seq * 131 + i * 37 + 11) % 500);
  return out;
}

struct Answer {
  Ids tokens;
  std::vector<float> logprobs;
  bool operator==(const Answer&) const = default;
};

// Greedy, alone; the prompt in chunks of `chunk`.
Answer alone(Drive& drive, int slot, const Ids& prompt, int steps, size_t chunk) {
  Answer run;
  Sampled s;
  for (size_t i = 0; i < prompt.size(); i += chunk)
    s = drive.step(
        {{slot, int64_t(i),
          Ids(prompt.begin() + int64_t(i), prompt.begin() + int64_t(std::min(prompt.size(), i + chunk)))}})[0];
  int64_t at = int64_t(prompt.size());
  for (int i = 0; i < steps; ++i) {
    run.tokens.push_back(s.token), run.logprobs.push_back(s.logprob);
    s = drive.step({{slot, at++, {s.token}}})[0];
  }
  return run;
}

TEST(Batch, AloneChunkedBatchedAndThreadedAreEqualToTheBit) {
  constexpr int kSequences = 16, kSteps = 12;
  Drive one(model(), 1, false, 256, kSequences), two(model(), 2, false, 256, kSequences);
  std::vector<Ids> prompts;
  std::vector<Answer> expected;
  for (int s = 0; s < kSequences; ++s) {
    prompts.push_back(prompt(s, 5 + 9 * s));
    expected.push_back(alone(two, s, prompts.back(), kSteps, 1000));
  }
  for (int s : {0, 7, 15}) {
    EXPECT_EQ(alone(two, s, prompts[size_t(s)], kSteps, 7), expected[size_t(s)]) << s;
    EXPECT_EQ(alone(one, s, prompts[size_t(s)], kSteps, 64), expected[size_t(s)]) << s;
  }
  // Sequence s joins at step s: decodes and whole prefills share each step.
  std::vector<Answer> got(kSequences);
  std::vector<Sampled> last(kSequences);
  for (int step = 0; step < kSequences + kSteps; ++step) {
    std::vector<Piece> pieces;
    std::vector<int> who;
    for (int s = 0; s < std::min(step, kSequences); ++s) {
      size_t done = got[size_t(s)].tokens.size();
      if (done >= kSteps) continue;
      got[size_t(s)].tokens.push_back(last[size_t(s)].token),
          got[size_t(s)].logprobs.push_back(last[size_t(s)].logprob);
      pieces.push_back({s, int64_t(prompts[size_t(s)].size() + done), {last[size_t(s)].token}});
      who.push_back(s);
    }
    if (step < kSequences) pieces.push_back({step, 0, prompts[size_t(step)]}), who.push_back(step);
    if (pieces.empty()) break;
    std::vector<Sampled> out = two.step(pieces);
    for (size_t i = 0; i < who.size(); ++i) last[size_t(who[i])] = out[i];
  }
  for (int s = 0; s < kSequences; ++s) EXPECT_EQ(got[size_t(s)], expected[size_t(s)]) << s;
}

TEST(Batch, ACopiedPageIsAPrefixHit) {
  Drive drive("dummy:llama,hidden=256,layers=3", 2, false, 64, 2);
  Ids tokens = prompt(3, 24);
  Sampled whole = drive.step({{0, 0, tokens}})[0];
  Batch b;
  b.tokens = Ids(tokens.begin() + 16, tokens.end());
  for (int i = 16; i < 24; ++i) b.positions.push_back(i);
  b.seqstarts = {0, 8}, b.kvstarts = {0, 24}, b.start_pos = {16};
  b.cachestarts = {drive.page(1, 0) * 16, drive.page(1, 1) * 16};
  b.max_pages = 2, b.max_seqlen = 8, b.max_kvlen = 24;
  b.copies = {{int32_t(drive.page(0, 0)), int32_t(drive.page(1, 0)), 16}};
  b.logit_rows = {7};
  SamplingParams greedy = Drive::greedy();
  SampleRow row{.params = &greedy};
  ASSERT_TRUE(drive.runner->launch(b, {&row, 1}).ok());
  auto hit = drive.runner->wait();
  ASSERT_TRUE(hit.ok());
  EXPECT_EQ((*hit)[0].logprob, whole.logprob);
}

TEST(Batch, ATokenMayBeWhatTheLastLaunchSampled) {
  Drive drive("dummy:llama", 1, false, 64, 2);
  Sampled s = drive.step({{0, 0, {1, 2, 3}}})[0];
  Sampled named = drive.step({{0, 3, {s.token}}})[0];
  drive.step({{1, 0, {1, 2, 3}}});
  Sampled fed = drive.step({{1, 3, {previous_sample(0)}}})[0];
  EXPECT_EQ(named.token, fed.token);
  EXPECT_EQ(named.logprob, fed.logprob);
}

}  // namespace
}  // namespace kvasir::model
