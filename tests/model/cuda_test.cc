// What a GPU does between products and tokens, against the same steps launched kernel by kernel and the host's sampler.
#include <cmath>
#include <deque>

#include "attention/cuda/cuda.h"
#include "attention/cuda/memory.h"
#include "core/cat.h"
#include "model/cuda/graphs.h"
#include "model/cuda/runner.h"
#include "model/draws.h"
#include "model/sampler.h"
#include "tests/model/cuda_case.h"
#include "tests/model/drive.h"

namespace kvasir::model {
namespace {

using Ids = std::vector<int32_t>;

using CudaModel = NeedsDevice;

constexpr int kSequences = 40;

// A model, before which "fp8 " may say what its weights are to become.
RunnerOptions as_named(const std::string& model) {
  RunnerOptions o;
  const bool fp8 = model.starts_with("fp8 ");
  o.model = model.substr(fp8 ? 4 : 0), o.device = "cuda", o.threads = 2;
  if (fp8) o.quantize = "fp8";
  return o;
}

// Sequences that are fed what they drew: a prompt each, then decodes of whoever is asked for.
class Decoding {
 public:
  Decoding(const std::string& model, bool graphs, const SamplingParams& params)
      : drive_(options(model, graphs), 512, kSequences, 512), params_(params), tokens_(kSequences) {}

  void prompt(int seq, int64_t tokens) {
    for (int64_t i = 0; i < tokens; ++i) tokens_[size_t(seq)].push_back(int32_t((seq * 31 + i * 7) % 250));
    feed(seq, 0);
  }
  // Begins with the first 32 tokens of `owner`, whose pages it reads.
  void prefix_hit(int seq, int owner, int64_t tokens) {
    const Ids& from = tokens_[size_t(owner)];
    tokens_[size_t(seq)].assign(from.begin(), from.begin() + 32);
    for (int64_t i = 0; i < tokens; ++i) tokens_[size_t(seq)].push_back(int32_t((seq * 13 + i * 3) % 250));
    drive_.share(seq, owner, 32 / Drive::kPage);
    feed(seq, 32);
  }
  std::vector<Sampled> decode(const std::vector<int>& seqs) {
    std::vector<Piece> pieces;
    for (int seq : seqs) {
      const Ids& ids = tokens_[size_t(seq)];
      pieces.push_back({seq, int64_t(ids.size()) - 1, {ids.back()}});
    }
    auto drawn = drive_.step(pieces, params_);
    for (size_t i = 0; i < drawn.size(); ++i) tokens_[size_t(seqs[i])].push_back(drawn[i].token);
    return drawn;
  }
  int64_t replays() const { return dynamic_cast<const cuda::Replaying&>(*drive_.runner).replays(); }

 private:
  static RunnerOptions options(const std::string& model, bool graphs) {
    RunnerOptions o = as_named(model);
    o.graphs = graphs;
    return o;
  }
  void feed(int seq, int64_t begin) {
    Ids& ids = tokens_[size_t(seq)];
    ids.push_back(drive_.step({{seq, begin, {ids.begin() + begin, ids.end()}}}, params_)[0].token);
  }

  Drive drive_;
  SamplingParams params_;
  std::vector<Ids> tokens_;
};

SamplingParams greedy(int32_t logprobs) {
  SamplingParams p;
  p.temperature = 0, p.logprobs = logprobs;
  return p;
}

// Lengths that pass pages and powers of two, batches that grow and shrink, a prefix that another sequence wrote.
TEST_F(CudaModel, ReplayedStepsAreTheLaunchedOnes) {
  for (const char* model : {"dummy:llama,hidden=576,layers=3,heads=9,kv_heads=3,ffn=1536,vocab=4096",
                            "dummy:gemma3,hidden=256,layers=7,window=48",
                            "dummy:deepseek_v3,hidden=256,layers=3,heads=16,head_dim=128,ffn=256,experts=8,"
                            "experts_used=2,expert_ffn=64,vocab=4096",
                            // Its products of more than 32 rows are timed.
                            "dummy:llama,hidden=1024,layers=2,heads=8,kv_heads=4,head_dim=128,ffn=4096,vocab=4096",
                            "dummy:llama,hidden=576,layers=3,heads=9,kv_heads=3,ffn=1536,vocab=4096,type=q4_0",
                            "fp8 dummy:llama,hidden=576,layers=3,heads=9,kv_heads=3,ffn=1536,vocab=4096,type=bf16"}) {
    SCOPED_TRACE(model);
    Decoding launched(model, false, greedy(-1)), replayed(model, true, greedy(-1)),
        by_host(model, true, greedy(kMostDeviceTop + 1));
    int step = 0;
    auto same = [&](const std::vector<int>& seqs) {
      const auto a = launched.decode(seqs), b = replayed.decode(seqs), c = by_host.decode(seqs);
      ASSERT_EQ(a.size(), b.size());
      for (size_t i = 0; i < a.size(); ++i) {
        EXPECT_EQ(a[i].token, b[i].token) << "step " << step << ", row " << i;
        EXPECT_EQ(a[i].logprob, b[i].logprob) << "step " << step << ", row " << i;
        EXPECT_EQ(a[i].token, c[i].token) << "step " << step << ", row " << i;
        EXPECT_NEAR(a[i].logprob, c[i].logprob, 1e-4) << "step " << step << ", row " << i;
      }
      ++step;
    };
    auto on_all = [&](auto f) { f(launched), f(replayed), f(by_host); };
    on_all([](Decoding& d) { d.prompt(0, 3), d.prompt(1, 60), d.prompt(2, 250); });
    for (int i = 0; i < 12; ++i) same({0});
    for (int i = 0; i < 12; ++i) same({2, 0, 1});
    on_all([](Decoding& d) { d.prefix_hit(3, 2, 5); });
    for (int i = 0; i < 12; ++i) same({3, 1, 2});
    for (int seq = 4; seq < kSequences; ++seq) on_all([&](Decoding& d) { d.prompt(seq, 1 + seq * 4); });
    std::vector<int> seqs;
    for (int seq = 0; seq < kSequences; ++seq) seqs.push_back(seq);
    for (int i = 0; i < 8; ++i) same(seqs);
    while (seqs.size() > 1) seqs.resize(seqs.size() - std::min<size_t>(3, seqs.size() - 1)), same(seqs);
    for (int i = 0; i < 6; ++i) same({1});
    EXPECT_EQ(launched.replays(), 0);
    EXPECT_GE(replayed.replays(), 30) << "of " << step << " steps";
  }
}

// Steps that feed on tokens which nobody on the host has seen, two in flight: the same tokens as one after another,
// drawn by the device, by the host, and by both in turn.
TEST_F(CudaModel, TwoInFlight) {
  std::deque<std::vector<Ids>> kept;  // histories that steps in flight point into
  constexpr int kMany = 5;
  constexpr int64_t kSteps = 24;
  SamplingParams warm, penalized;
  warm.seed = 9;
  penalized.seed = 4, penalized.temperature = 0.7f, penalized.frequency_penalty = 0.5f, penalized.presence_penalty = 1;
  const SamplingParams by_device = greedy(-1), changed = penalized;  // both by the device
  penalized.logprobs = kMostDeviceTop + 1;                           // more than it says
  SamplingParams odd = warm;
  odd.typical_p = 0.8f, odd.top_n_sigma = 3;
  std::vector<uint32_t> thirds(4096 / 32, 0x49249249u);  // masks
  enum class Who { device, host, turns, mixed, changed, masked };
  for (Who who : {Who::device, Who::host, Who::turns, Who::mixed, Who::changed, Who::masked}) {
    SCOPED_TRACE(int(who));
    auto params = [&](int64_t step, int seq) -> const SamplingParams& {
      if (who == Who::device || (who == Who::turns && step % 3 == 0)) return by_device;
      if (who == Who::mixed && seq % 2 == 0) return by_device;
      if (who == Who::changed && seq != 1) return changed;
      if (who == Who::masked) return seq == 1 ? penalized : seq == 2 ? changed : odd;
      return seq == 1 ? warm : penalized;
    };
    std::vector<Ids> prompts(kMany);
    for (int seq = 0; seq < kMany; ++seq)
      for (int i = 0; i < 3 + seq * 20; ++i) prompts[size_t(seq)].push_back((seq * 31 + i * 7) % 250);
    auto run = [&](bool overlapped) {
      RunnerOptions o;
      o.model = "dummy:llama,hidden=576,layers=3,heads=9,kv_heads=3,ffn=1536,vocab=4096", o.device = "cuda";
      o.threads = 2;
      Drive drive(o, 512, kMany, 512);
      std::vector<Ids> tokens = prompts;
      auto take = [&] {
        const auto drawn = drive.wait();
        for (int seq = 0; seq < kMany; ++seq) tokens[size_t(seq)].push_back(drawn[size_t(seq)].token);
      };
      for (int64_t step = 0; step < kSteps; ++step) {
        const bool ahead = overlapped && step > 0;  // of the step before, whose tokens are not known here
        std::vector<Piece> pieces;
        std::vector<SampleRow> rows(kMany);
        for (int seq = 0; seq < kMany; ++seq) {
          const Ids& known = tokens[size_t(seq)];
          const int32_t sample = previous_sample(seq);
          if (step == 0)
            pieces.push_back({seq, 0, known});
          else
            pieces.push_back({seq, int64_t(known.size()) - !ahead, {ahead ? sample : known.back()}});
          SampleRow& row = rows[size_t(seq)];
          row.params = &params(step, seq), row.choice = seq;
          if (who == Who::masked && seq != 3) row.mask = thirds.data();
          row.prompt = prompts[size_t(seq)];
          row.output = std::span(known).subspan(prompts[size_t(seq)].size());
          if (ahead && (row.params == &penalized || row.params == &changed)) row.last = sample;
        }
        // What a history points to moves when its sequence grows.
        std::vector<Ids> histories;
        histories.reserve(rows.size());
        for (SampleRow& row : rows) histories.emplace_back(row.output.begin(), row.output.end());
        for (size_t i = 0; i < rows.size(); ++i) rows[i].output = histories[i];
        kept.push_back(std::move(histories));
        drive.launch(pieces, by_device, {}, rows);
        if (!overlapped || step > 0) take();
      }
      if (overlapped) take();
      return tokens;
    };
    EXPECT_EQ(run(true), run(false));
  }
}

// Its k-th token has the remainder k by three.
class ByThrees final : public Constraint {
 public:
  bool take(int32_t token, bool) override {
    if (token % 3 != taken_ % 3) return false;
    ++taken_;
    return true;
  }
  const uint32_t* mask() override {
    bits_.assign(4096 / 32, 0);
    for (int32_t t = 0; t < 4096; ++t)
      if (t % 3 == taken_ % 3) bits_[size_t(t) / 32] |= 1u << (t % 32);
    return bits_.data();
  }

 private:
  int64_t taken_ = 0;
  std::vector<uint32_t> bits_;
};

// Constraints follow what the device draws, which draws again what they refuse: the tokens and log-probabilities of the
// host, to which the logits come where more than a device's log-probabilities are asked for.
TEST_F(CudaModel, ConstraintsAreFollowedOnTheDevice) {
  constexpr int kMany = 6;
  auto run = [&](bool by_host) {
    std::vector<SamplingParams> params(kMany);
    std::vector<ByThrees> constraints(kMany);
    RunnerOptions o = as_named("dummy:llama,hidden=576,layers=3,heads=9,kv_heads=3,ffn=1536,vocab=4096");
    Drive drive(o, 512, kMany, 512);
    std::vector<Ids> tokens(kMany);
    std::vector<float> logprobs;
    for (int step = 0; step < 20; ++step) {
      std::vector<Piece> pieces;
      std::vector<SampleRow> rows(kMany);
      for (int seq = 0; seq < kMany; ++seq) {
        SamplingParams& p = params[size_t(seq)];
        p.seed = uint64_t(seq), p.temperature = seq % 2 ? 0.8f : 0.0f;
        if (seq == 2) p.presence_penalty = 1;
        if (seq == 3) p.typical_p = 0.9f;
        p.logprobs = by_host ? kMostDeviceTop + 1 : seq == 5 ? 3 : -1;
        Ids& known = tokens[size_t(seq)];
        const bool begins = step == 0;
        if (begins)
          for (int i = 0; i < 4 + seq; ++i) known.push_back((seq * 31 + i * 7) % 250);
        pieces.push_back(begins ? Piece{seq, 0, known} : Piece{seq, int64_t(known.size()) - 1, {known.back()}});
        SampleRow& row = rows[size_t(seq)];
        row.params = &p, row.choice = seq, row.output = known;
        if (seq != 4) row.constraint = &constraints[size_t(seq)];
      }
      drive.launch(pieces, params[0], {}, rows);
      const std::vector<Sampled> drawn = drive.wait();
      for (int seq = 0; seq < kMany; ++seq) {
        tokens[size_t(seq)].push_back(drawn[size_t(seq)].token);
        logprobs.push_back(drawn[size_t(seq)].logprob);
      }
    }
    return std::pair(tokens, logprobs);
  };
  const auto want = run(true), got = run(false);
  EXPECT_EQ(got.first, want.first);
  for (size_t i = 0; i < want.second.size(); ++i) EXPECT_NEAR(got.second[i], want.second[i], 2e-3) << i;
}

// A token at a time, by the products for few rows and by graphs, or all at once: the same odds of what comes next.
TEST_F(CudaModel, DecodesSayWhatPrefillSays) {
  for (const std::string& model :
       {std::string("dummy:llama,hidden=576,layers=4,heads=9,kv_heads=3,ffn=1536,vocab=4096"),
        std::string("dummy:llama,hidden=576,layers=4,heads=9,kv_heads=3,ffn=1536,vocab=4096,type=bf16"),
        std::string("dummy:llama,hidden=576,layers=4,heads=9,kv_heads=3,ffn=1536,vocab=4096,type=q4_1"),
        std::string("fp8 dummy:llama,hidden=576,layers=4,heads=9,kv_heads=3,ffn=1536,vocab=4096,type=bf16"),
        std::string("dummy:gemma3,hidden=256,layers=7,window=48"), smollm2(),
        smollm2().empty() ? "" : "fp8 " + smollm2()}) {
    if (model.empty()) continue;
    SCOPED_TRACE(model);
    // Few rows by E4M3 weights are bfloat16, many are E4M3 as well.
    const bool fp8 = model.starts_with("fp8 ");
    constexpr int64_t kTokens = 160, kPrompt = 16;
    Ids ids, next;
    for (int64_t i = 0; i < kTokens; ++i) ids.push_back(int32_t((i * i * 7 + i * 3 + 11) % 500));
    next.assign(ids.begin() + 1, ids.end());
    next.push_back(0);
    const RunnerOptions o = as_named(model);
    Drive whole(o, 256, 4, 256), pieces(o, 256, 4, 256);
    const auto want = whole.step({{0, 0, ids, true}}, Drive::greedy(), next);
    for (int seq = 0; seq < 4; ++seq) pieces.step({{seq, 0, {ids.begin(), ids.begin() + kPrompt}}});
    double sum = 0, worst = 0;
    for (int64_t i = kPrompt; i < kTokens; ++i) {
      std::vector<Piece> decodes;
      for (int seq = 0; seq < 4; ++seq) decodes.push_back({seq, i, {ids[size_t(i)]}});
      for (const Sampled& s : pieces.step(decodes, Drive::greedy(), Ids(4, next[size_t(i)]))) {
        const double off = std::fabs(s.logprob - want[size_t(i)].logprob);
        sum += off, worst = std::max(worst, off);
      }
    }
    EXPECT_GE(dynamic_cast<const cuda::Replaying&>(*pieces.runner).replays(), 100);
    EXPECT_LT(sum / (4 * (kTokens - kPrompt)), fp8 ? 0.2 : 0.03);
    EXPECT_LT(worst, fp8 ? 2 : 0.3);
  }
}

// Sequences that begin with the same pages are read together: near what each gives alone, and replayed as graphs.
TEST_F(CudaModel, SharedPrefixesAreReadOnce) {
  const char* llama = "dummy:llama,hidden=1024,layers=3,heads=8,kv_heads=2,head_dim=128,ffn=2048,vocab=4096,type=bf16";
  const char* latent =
      "dummy:deepseek_v3,hidden=1024,layers=3,heads=16,head_dim=128,ffn=1024,experts=4,experts_used=4,expert_ffn=256,"
      "vocab=4096,type=bf16";
  for (auto [model, kv] :
       {std::pair{llama, "auto"}, std::pair{llama, "fp8"}, std::pair{llama, "int8"}, std::pair{latent, "auto"}}) {
    SCOPED_TRACE(cat(model, " ", kv));
    constexpr int64_t kShared = 512, kOwn = 40, kSteps = 12;
    constexpr int kMany = 20;
    RunnerOptions o = as_named(model);
    o.kv.dtype = kv;
    auto token = [](int seq, int64_t i) { return int32_t((i < kShared ? i * i * 7 : seq * 31 + i * 5) % 4000); };
    auto logprobs = [&](bool together) {
      Drive drive(o, 1024, kMany, 1024);
      for (int seq = 0; seq < kMany; ++seq) {
        Piece prompt{seq, together && seq > 0 ? kShared : 0, {}};
        for (int64_t i = prompt.begin; i < kShared + kOwn; ++i) prompt.tokens.push_back(token(seq, i));
        if (prompt.begin > 0) drive.share(seq, 0, kShared / Drive::kPage);
        drive.step({prompt});
      }
      std::vector<float> out;
      for (int64_t i = kShared + kOwn; i < kShared + kOwn + kSteps; ++i) {
        std::vector<Piece> pieces;
        Ids targets;
        for (int seq = 0; seq < kMany; ++seq)
          pieces.push_back({seq, i, {token(seq, i)}}), targets.push_back(token(seq, i + 1));
        for (const Sampled& s : drive.step(pieces, Drive::greedy(), targets)) out.push_back(s.logprob);
      }
      EXPECT_GT(dynamic_cast<const cuda::Replaying&>(*drive.runner).replays(), 0);
      return out;
    };
    const auto apart = logprobs(false), together = logprobs(true);
    ASSERT_EQ(apart.size(), together.size());
    double sum = 0, worst = 0;
    for (size_t i = 0; i < apart.size(); ++i) {
      const double off = std::fabs(double(apart[i]) - double(together[i]));
      sum += off, worst = std::max(worst, off);
    }
    EXPECT_GT(sum, 0) << "the same bits: nothing was read together";
    EXPECT_LT(sum / double(apart.size()), 0.02);
    EXPECT_LT(worst, 0.2);
  }
}

// A prompt whole, in chunks, decoded alone and among others: the same bits.
TEST_F(CudaModel, BatchInvariantLogits) {
  for (const char* model : {"dummy:llama,hidden=576,layers=3,heads=9,kv_heads=3,ffn=1536,vocab=4096,type=bf16",
                            "dummy:llama,hidden=1024,layers=2,heads=8,kv_heads=4,head_dim=128,ffn=4096,vocab=4096",
                            "dummy:gemma3,hidden=256,layers=7,window=48,type=f16",
                            "dummy:deepseek_v3,hidden=256,layers=3,heads=16,head_dim=128,ffn=256,experts=8,"
                            "experts_used=2,expert_ffn=64,vocab=4096,type=bf16",
                            "fp8 dummy:llama,hidden=1024,layers=2,heads=8,kv_heads=4,head_dim=128,ffn=4096,vocab=4096",
                            "dummy:llama,hidden=576,layers=3,heads=9,kv_heads=3,ffn=1536,vocab=4096,type=q4_1"}) {
    SCOPED_TRACE(model);
    constexpr int64_t kTokens = 130, kPrompt = 20;
    Ids ids, next;
    for (int64_t i = 0; i < kTokens; ++i) ids.push_back(int32_t((i * i * 7 + i * 3 + 11) % 500));
    next.assign(ids.begin() + 1, ids.end());
    next.push_back(0);
    RunnerOptions o = as_named(model);
    o.batch_invariant = true;
    auto slice = [&](int64_t begin, int64_t end) { return Ids(ids.begin() + begin, ids.begin() + end); };
    auto targets = [&](int64_t begin, int64_t end) { return Ids(next.begin() + begin, next.begin() + end); };
    std::vector<float> want;
    {
      Drive whole(o, 256, 4, 256);
      for (const Sampled& s : whole.step({{0, 0, ids, true}}, Drive::greedy(), next)) want.push_back(s.logprob);
    }
    {
      Drive chunked(o, 256, 4, 256);
      for (auto [begin, end] : {std::pair<int64_t, int64_t>{0, 7}, {7, 8}, {8, 71}, {71, kTokens}}) {
        const auto got = chunked.step({{0, begin, slice(begin, end), true}}, Drive::greedy(), targets(begin, end));
        for (int64_t i = begin; i < end; ++i)
          ASSERT_EQ(got[size_t(i - begin)].logprob, want[size_t(i)]) << "position " << i << " in chunks";
      }
    }
    for (int many : {1, 4, 40}) {
      Drive decoded(o, 256, 40, 1024);
      for (int seq = 0; seq < many; ++seq) decoded.step({{seq, 0, slice(0, kPrompt)}});
      for (int64_t i = kPrompt; i < kTokens; ++i) {
        std::vector<Piece> pieces;
        for (int seq = 0; seq < many; ++seq) pieces.push_back({seq, i, {ids[size_t(i)]}});
        for (const Sampled& s : decoded.step(pieces, Drive::greedy(), Ids(size_t(many), next[size_t(i)])))
          ASSERT_EQ(s.logprob, want[size_t(i)]) << "position " << i << " of " << many;
      }
    }
  }
}

// A step that cannot be captured is launched, and so are those after it.
TEST_F(CudaModel, WhatCannotBeCapturedIsLaunched) {
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  {
    attention::cuda::DeviceMemory byte;
    ASSERT_TRUE(byte.allocate(1).ok());
    cuda::Graphs graphs(stream);
    auto run = [&](uint64_t key, bool capturable, char value) {
      EXPECT_TRUE(graphs
                      .run(key,
                           [&] {
                             if (!capturable) (void)cudaStreamSynchronize(stream);
                             return attention::cuda::check(cudaMemsetAsync(byte.get(), value, 1, stream), "memset");
                           })
                      .ok());
      char now = 0;
      EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      EXPECT_EQ(cudaMemcpy(&now, byte.get(), 1, cudaMemcpyDefault), cudaSuccess);
      return now;
    };
    EXPECT_EQ(run(1, true, 5), 5);
    EXPECT_EQ(run(1, true, 5), 5);  // captured
    EXPECT_EQ(run(1, true, 6), 5);  // replayed as it was
    EXPECT_EQ(graphs.replays(), 1);
    for (uint64_t key = 2; key < 3 * cuda::Graphs::kMost; ++key) EXPECT_EQ(run(key, true, char(key)), char(key));
    EXPECT_EQ(run(1, true, 7), 7);  // forgotten since
    EXPECT_FALSE(graphs.off());
    EXPECT_EQ(run(9001, false, 3), 3);
    EXPECT_EQ(run(9001, false, 4), 4);
    EXPECT_TRUE(graphs.off());
    EXPECT_EQ(run(1, true, 9), 9);
    EXPECT_EQ(run(1, true, 2), 2);
  }
  cudaStreamDestroy(stream);
}

}  // namespace
}  // namespace kvasir::model
