// Encoder-decoders on a GPU: what transformers computes, with operands that are rounded to bfloat16
// (make_t5_rounded.py), of a prompt, of a whole answer and of one token after another; and the same alone and in
// company.
#include "model/cuda/runner.h"
#include "tests/model/architectures.h"
#include "tests/model/cuda_case.h"
#include "tests/model/drive.h"

namespace kvasir::model {
namespace {

using nlohmann::json;
using Ids = std::vector<int32_t>;
using EncoderDecodersCuda = NeedsDevice;

// Of prompt `which` and what its decoder has begun with, those from `first` on; at most `count`.
Piece piece(const json& all, const json& one, size_t which, const Ids& answer, int64_t first, size_t count, int seq) {
  Piece out{.seq = seq, .begin = first, .tokens = all["prompts"][which].get<Ids>()};
  out.source = std::ssize(out.tokens);
  out.tokens.push_back(one["configs"][0]["decoder_start_token_id"].get<int32_t>());
  out.tokens.insert(out.tokens.end(), answer.begin(), answer.end());
  out.tokens.erase(out.tokens.begin(), out.tokens.begin() + first);
  out.tokens.resize(std::min(out.tokens.size(), count));
  return out;
}

// The likeliest tokens of a row, each with its log-probability.
void compare(const json& want, const Sampled& got, double* worst) {
  if (want[0][1].get<double>() - want[1][1].get<double>() > 0.1) {
    EXPECT_EQ(got.token, want[0][0].get<int32_t>());
  }
  size_t found = 0;
  for (const json& w : want)
    for (const TokenLogprob& t : got.top)
      if (t.token == w[0]) *worst = std::max(*worst, std::fabs(double(t.logprob) - w[1].get<double>())), ++found;
  EXPECT_EQ(found, want.size());
}

void run(const std::string& model, const json& all, const json& one) {
  RunnerOptions options;
  options.model = model, options.device = "cuda";
  Drive drive(options, 128, 3, 256);
  SamplingParams likeliest = Drive::greedy();
  likeliest.logprobs = 20;
  const Ids answer = all["answer"], rows = all["rows"];
  static const json rounded = fixture("t5_rounded.json");
  double worst = 0;
  std::vector<std::vector<Sampled>> alone(3);
  for (size_t p = 0; p < 3; ++p) {
    Piece whole = piece(all, one, p, answer, 0, 1000, 0);
    whole.every = true;
    const auto got = drive.step({whole}, likeliest);
    ASSERT_EQ(got.size(), answer.size() + 1);
    // Then the prompt, and one token after another: as graphs in the end.
    const int64_t begin = whole.source + 1;
    alone[p].push_back(drive.step({piece(all, one, p, answer, 0, size_t(begin), int(p))}, likeliest)[0]);
    for (int64_t t = 0; t < std::ssize(answer); ++t)
      alone[p].push_back(drive.step({piece(all, one, p, answer, begin + t, 1, int(p))}, likeliest)[0]);
    for (size_t i = 0; i < rows.size(); ++i)
      for (const auto* of : {&got, &std::as_const(alone[p])})
        compare(rounded[one["name"].get<std::string>()][p][i], (*of)[size_t(rows[i])], &worst);
  }
  printf("%-24s worst |difference| of a log-probability %.4f\n", one["name"].get<std::string>().c_str(), worst);
  // A sum in another order is rounded to another number here and there, and scores are large in all but the first.
  EXPECT_LT(worst, one["name"] == "t5" ? 0.02 : 0.5);
  EXPECT_GT(dynamic_cast<const cuda::Replaying&>(*drive.runner).replays(), 20);

  // One joins after another.
  double apart = 0;
  for (size_t step = 0; step < answer.size() + 3; ++step) {
    std::vector<Piece> pieces;
    std::vector<const Sampled*> like;
    for (size_t p = 0; p < 3; ++p) {
      const int64_t begin = std::ssize(all["prompts"][p]) + 1, t = int64_t(step) - int64_t(p) - 1;
      if (t < 0 || t >= std::ssize(answer)) continue;
      pieces.push_back(piece(all, one, p, answer, begin + t, 1, int(p)));
      like.push_back(&alone[p][size_t(t) + 1]);
    }
    if (step < 3) {
      pieces.push_back(piece(all, one, step, answer, 0, size_t(std::ssize(all["prompts"][step]) + 1), int(step)));
      like.push_back(&alone[step][0]);
    }
    if (pieces.empty()) break;
    const auto got = drive.step(pieces);
    for (size_t i = 0; i < like.size(); ++i) {
      if (like[i]->top[0].logprob - like[i]->top[1].logprob > 0.1) {
        EXPECT_EQ(got[i].token, like[i]->token) << "step " << step << ", row " << i;
      }
      apart = std::max(apart, std::fabs(double(got[i].top[0].logprob) - double(like[i]->top[0].logprob)));
    }
  }
  EXPECT_LT(apart, 0.1);
}

TEST_F(EncoderDecodersCuda, FoldersAreAsTransformersHasThemRounded) {
  const json all = fixture("t5.json");
  for (const json& one : all["cases"])
    for (size_t config = 0; config < one["configs"].size(); ++config) {
      SCOPED_TRACE(one["name"].get<std::string>() + ", configuration " + std::to_string(config));
      Folder folder("t5-cuda");
      StoredNetwork(one).write_folder(folder, config);
      run(folder.path.string(), all, one);
    }
}

TEST_F(EncoderDecodersCuda, GgufFilesAreAsTransformersHasThemRounded) {
  const json all = fixture("t5.json");
  int files = 0;
  for (const json& one : all["cases"]) {
    const StoredNetwork network(one);
    if (!network.has_gguf()) continue;
    SCOPED_TRACE(one["name"].get<std::string>());
    Folder folder("t5-cuda-gguf");
    folder.write("m.gguf", network.gguf());
    run(folder.path.string(), all, one);
    ++files;
  }
  EXPECT_EQ(files, 2);
}

TEST_F(EncoderDecodersCuda, AStepThatSaysNoSourcesIsRefused) {
  const json all = fixture("t5.json");
  Folder folder("t5-cuda-sources");
  StoredNetwork(all["cases"][0]).write_folder(folder);
  RunnerOptions options;
  options.model = folder.path.string(), options.device = "cuda";
  Drive drive(options, 64, 1, 64);
  Batch b;
  b.tokens = {1, 2}, b.positions = {0, 1};
  b.seqstarts = b.kvstarts = {0, 2};
  b.start_pos = {0}, b.cachestarts = {0};
  b.max_pages = 1, b.max_seqlen = b.max_kvlen = 2;
  EXPECT_EQ(drive.runner->launch(b, {}).message(), "a step of 1 sequences says the sources of 0");
}

}  // namespace
}  // namespace kvasir::model
