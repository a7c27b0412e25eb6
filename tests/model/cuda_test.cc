// What a GPU does between products and tokens, against the same steps launched kernel by kernel and the host's sampler.
#include <array>
#include <cmath>
#include <deque>
#include <limits>
#include <random>

#include "attention/cuda/cuda.h"
#include "attention/cuda/memory.h"
#include "model/cuda/cublas.h"
#include "model/cuda/draw.h"
#include "model/cuda/few_rows.h"
#include "model/cuda/fp8.h"
#include "model/cuda/graphs.h"
#include "model/cuda/kernels.h"
#include "model/cuda/packed.h"
#include "model/cuda/runner.h"
#include "model/cuda/seeded.h"
#include "model/cuda/streamed.h"
#include "model/cuda/weight.h"
#include "model/formats/dummy.h"
#include "model/formats/weight_type.h"
#include "model/sampler.h"
#include "tests/model/drive.h"

namespace kvasir::model {
namespace {

using Ids = std::vector<int32_t>;

class CudaModel : public ::testing::Test {
 protected:
  void SetUp() override {
    if (Status s = attention::cuda_backend().available(); !s.ok()) GTEST_SKIP() << "skipped: " << s.message();
  }
  std::deque<std::vector<Ids>> kept_;
};

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
                            // Its products of more than 32 rows are timed.
                            "dummy:llama,hidden=1024,layers=2,heads=8,kv_heads=4,head_dim=128,ffn=4096,vocab=4096",
                            "dummy:llama,hidden=576,layers=3,heads=9,kv_heads=3,ffn=1536,vocab=4096,type=q4_0",
                            "fp8 dummy:llama,hidden=576,layers=3,heads=9,kv_heads=3,ffn=1536,vocab=4096,type=bf16"}) {
    SCOPED_TRACE(model);
    Decoding launched(model, false, greedy(-1)), replayed(model, true, greedy(-1)), by_host(model, true, greedy(0));
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
  constexpr int kMany = 5;
  constexpr int64_t kSteps = 24;
  SamplingParams warm, penalized;
  warm.seed = 9;
  penalized.seed = 4, penalized.temperature = 0.7f, penalized.frequency_penalty = 0.5f, penalized.presence_penalty = 1;
  const SamplingParams by_device = greedy(-1);
  enum class Who { device, host, turns, mixed };
  for (Who who : {Who::device, Who::host, Who::turns, Who::mixed}) {
    SCOPED_TRACE(int(who));
    auto params = [&](int64_t step, int seq) -> const SamplingParams& {
      if (who == Who::device || (who == Who::turns && step % 3 == 0)) return by_device;
      if (who == Who::mixed && seq % 2 == 0) return by_device;
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
          row.prompt = prompts[size_t(seq)];
          row.output = std::span(known).subspan(prompts[size_t(seq)].size());
          if (ahead && row.params == &penalized) row.last = sample;
        }
        // What a history points to moves when its sequence grows.
        std::vector<Ids> histories;
        histories.reserve(rows.size());
        for (SampleRow& row : rows) histories.emplace_back(row.output.begin(), row.output.end());
        for (size_t i = 0; i < rows.size(); ++i) rows[i].output = histories[i];
        kept_.push_back(std::move(histories));
        drive.launch(pieces, by_device, {}, rows);
        if (!overlapped || step > 0) take();
      }
      if (overlapped) take();
      return tokens;
    };
    EXPECT_EQ(run(true), run(false));
  }
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

// A prompt whole, in chunks, decoded alone and among others: the same bits.
TEST_F(CudaModel, BatchInvariantLogits) {
  for (const char* model : {"dummy:llama,hidden=576,layers=3,heads=9,kv_heads=3,ffn=1536,vocab=4096,type=bf16",
                            "dummy:llama,hidden=1024,layers=2,heads=8,kv_heads=4,head_dim=128,ffn=4096,vocab=4096",
                            "dummy:gemma3,hidden=256,layers=7,window=48,type=f16",
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

TEST_F(CudaModel, TheGreatestIsTheOneThatTheHostFinds) {
  constexpr int32_t kRows = 64;
  std::mt19937 random(11);
  std::normal_distribution<float> normal(0, 4);
  for (int32_t vocab : {1, 31, 1000, 1024, 49152}) {
    std::vector<float> logits(size_t(kRows * vocab));
    for (float& x : logits) x = std::round(normal(random) * 4) / 4;  // equal ones are common
    for (int32_t row = 0; row < kRows; ++row) {
      float* x = logits.data() + int64_t(row) * vocab;
      const auto at = size_t(random() % size_t(vocab));
      if (row % 8 == 1) x[at] = std::numeric_limits<float>::quiet_NaN();
      if (row % 8 == 2) x[at] = std::numeric_limits<float>::infinity();
      if (row % 8 == 3) x[at] = -std::numeric_limits<float>::infinity();
      if (row % 8 == 4)
        for (int32_t i = 0; i < vocab; ++i) x[i] = random() % 2 ? 0.0f : -0.0f;
      if (row % 8 == 5) std::fill_n(x, vocab, -3000.0f);
      if (row % 8 == 6)
        for (int32_t i = 0; i < vocab; ++i) x[i] -= 1000;
    }
    attention::cuda::DeviceMemory there, tokens;
    attention::cuda::PinnedMemory found;
    ASSERT_TRUE(tokens.allocate(kRows * sizeof(int32_t)).ok());
    ASSERT_TRUE(there.upload(logits.data(), logits.size() * 4).ok());
    ASSERT_TRUE(found.allocate(kRows * sizeof(DeviceDraw)).ok());
    cuda::launch_greatest(there.as<float>(), found.as<DeviceDraw>(), tokens.as<int32_t>(), kRows, vocab, nullptr);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    std::vector<int32_t> next(kRows);
    ASSERT_EQ(cudaMemcpy(next.data(), tokens.get(), kRows * sizeof(int32_t), cudaMemcpyDefault), cudaSuccess);
    Sampler sampler(vocab);
    const SamplingParams params = greedy(-1);
    for (int32_t row = 0; row < kRows; ++row) {
      const DeviceDraw& got = found.as<DeviceDraw>()[row];
      Sampled want;
      Sampler::Refused refused;
      sampler.sample({logits.data() + int64_t(row) * vocab, size_t(vocab)}, {.params = &params}, want, refused);
      ASSERT_EQ(bool(got.bad_logits), want.bad_logits) << "row " << row << " of " << vocab;
      EXPECT_EQ(next[size_t(row)], want.bad_logits ? 0 : want.token);
      if (want.bad_logits) continue;
      EXPECT_EQ(got.token, want.token) << "row " << row << " of " << vocab;
      EXPECT_NEAR(got.logprob, want.logprob, 1e-3) << "row " << row << " of " << vocab;
    }
  }
}

// Draws by temperature, top-k, top-p and min-p, of rows with many equal logits, sharp ones and flat ones. The host
// weighs with other roundings, so that a random number next to a border may fall on its other side.
TEST_F(CudaModel, DrawsAreTheOnesOfTheHost) {
  constexpr int32_t kRows = 96;
  std::mt19937 random(23);
  std::normal_distribution<float> normal;
  int64_t all = 0, other = 0;
  for (int32_t vocab : {1, 33, 1000, 49152, 128256}) {
    std::vector<float> logits(size_t(kRows) * size_t(vocab));
    std::vector<SamplingParams> params(kRows);
    std::vector<cuda::Wish> wishes(kRows);
    std::vector<SampleRow> rows(kRows);
    for (int32_t row = 0; row < kRows; ++row) {
      const float spread = std::array{0.3f, 1.0f, 3.0f, 8.0f}[size_t(row % 4)];
      for (int32_t i = 0; i < vocab; ++i) {
        float x = normal(random) * spread;
        if (row % 3 == 0) x = std::round(x);
        if (row == 5) x = -7;
        logits[size_t(row) * size_t(vocab) + size_t(i)] = x;
      }
      SamplingParams& p = params[size_t(row)];
      p.seed = random();
      p.temperature = std::array{1.0f, 0.7f, 1.5f, 1e-9f, 0.05f}[size_t(row % 5)];
      p.top_p = std::array{1.0f, 0.9f, 0.3f, 0.999f}[size_t(row / 5 % 4)];
      p.top_k = std::array{0, 0, 1, 40, 1000, 1024, 3}[size_t(row / 2 % 7)];
      p.min_p = std::array{0.0f, 0.1f, 0.0f, 0.5f}[size_t(row / 4 % 4)];
      rows[size_t(row)].params = &p, rows[size_t(row)].choice = row % 3, rows[size_t(row)].position = row * 7;
      if (row % 11 != 10) wishes[size_t(row)] = cuda::wish_of(rows[size_t(row)], vocab);
    }
    logits[size_t(7) * size_t(vocab)] = std::numeric_limits<float>::quiet_NaN();
    attention::cuda::DeviceMemory there, tokens, asked;
    attention::cuda::PinnedMemory found;
    ASSERT_TRUE(there.upload(logits.data(), logits.size() * 4).ok());
    ASSERT_TRUE(asked.upload(wishes.data(), wishes.size() * sizeof(cuda::Wish)).ok());
    ASSERT_TRUE(tokens.allocate(kRows * sizeof(int32_t)).ok());
    ASSERT_TRUE(found.allocate(kRows * sizeof(DeviceDraw)).ok());
    cuda::launch_greatest(there.as<float>(), found.as<DeviceDraw>(), tokens.as<int32_t>(), kRows, vocab, nullptr);
    cuda::launch_draw(there.as<float>(), asked.as<cuda::Wish>(), found.as<DeviceDraw>(), tokens.as<int32_t>(), kRows,
                      vocab, nullptr);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    std::vector<int32_t> next(kRows);
    ASSERT_EQ(cudaMemcpy(next.data(), tokens.get(), kRows * sizeof(int32_t), cudaMemcpyDefault), cudaSuccess);
    Sampler sampler(vocab);
    for (int32_t row = 0; row < kRows; ++row) {
      SCOPED_TRACE(cat("row ", row, " of ", vocab));
      const DeviceDraw& got = found.as<DeviceDraw>()[row];
      if (row % 11 == 10) params[size_t(row)].temperature = 0;  // without a wish: the greatest
      Sampled want;
      Sampler::Refused refused;
      std::vector<float> copy(logits.begin() + int64_t(row) * vocab, logits.begin() + int64_t(row + 1) * vocab);
      sampler.sample(copy, rows[size_t(row)], want, refused);
      ASSERT_EQ(bool(got.bad_logits), want.bad_logits);
      if (want.bad_logits) continue;
      EXPECT_EQ(next[size_t(row)], got.token);
      ASSERT_GE(got.token, 0);
      ASSERT_LT(got.token, vocab);
      ++all, other += got.token != want.token;
      if (got.token == want.token)
        EXPECT_NEAR(got.logprob, want.logprob, 2e-3);
      else
        std::printf("another token: row %d of %d, %d instead of %d\n", row, vocab, got.token, want.token);
    }
  }
  EXPECT_LE(other, all / 100) << "of " << all;
}

// A dummy's weights are the same ones on every device.
TEST_F(CudaModel, SeededWeightsAreTheOnesOfTheHost) {
  for (const std::string type : {"f32", "f16", "bf16", "q4_0", "q4_1", "q8_0"}) {
    auto config = config_from_dummy("llama,seed=77777777777,type=" + type);
    ASSERT_TRUE(config.ok());
    const auto host = dummy_weights(*config), device = dummy_weights(*config);
    device->leave_seeded();
    for (auto [rows, cols] : {std::pair<int64_t, int64_t>{3, 32}, {70, 576}}) {
      const auto want = host->get(cat("t", rows), rows, cols), left = device->get(cat("t", rows), rows, cols);
      ASSERT_TRUE(want.ok() && left.ok());
      ASSERT_TRUE(left->seeded && !left->data);
      attention::cuda::DeviceMemory out;
      ASSERT_TRUE(out.allocate(size_t(rows * cols) * 2).ok());
      cuda::launch_seeded(*left, out.get(), nullptr);
      std::vector<uint16_t> got(size_t(rows * cols));
      ASSERT_EQ(cudaMemcpy(got.data(), out.get(), got.size() * 2, cudaMemcpyDefault), cudaSuccess);
      std::vector<float> row(static_cast<size_t>(cols));
      for (int64_t r = 0; r < rows; ++r) {
        dequantize(want->type, want->data + r * want->row_bytes(), cols, row.data());
        for (int64_t i = 0; i < cols; ++i)
          ASSERT_EQ(got[size_t(r * cols + i)], f32_to_bf16(row[size_t(i)])) << type << ", " << r << ", " << i;
      }
    }
    EXPECT_EQ(host->parameters(), device->parameters());
    EXPECT_EQ(host->bytes(), device->bytes());
  }
}

uint16_t half(float x) { return f32_to_bf16(x); }
float whole(uint16_t x) { return bf16_to_f32(x); }

// Against a plain sum of what the rounded operands give, in every form and for shapes that fill no block evenly.
template <class Launch>
void check_products(std::initializer_list<std::array<int64_t, 3>> shapes, Launch launch) {
  using cuda::Form;
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  for (auto [rows, n, k] : shapes)
    for (Form form : {Form::f32, Form::added_f32, Form::bf16, Form::silu, Form::gelu}) {
      SCOPED_TRACE(cat(rows, " rows, ", n, " x ", k, ", form ", int(form)));
      const int64_t parts = form == Form::silu || form == Form::gelu ? 2 : 1;
      const bool wide = form == Form::f32 || form == Form::added_f32;
      std::vector<uint16_t> in(size_t(rows * k)), weight(size_t(parts * n * k));
      for (uint16_t& x : in) x = half(normal(random));
      for (uint16_t& x : weight) x = half(normal(random) / std::sqrt(float(k)));
      std::vector<float> was(size_t(rows * n)), got(size_t(rows * n));
      for (float& x : was) x = normal(random);
      attention::cuda::DeviceMemory d_in, d_weight, d_out;
      ASSERT_TRUE(d_in.upload(in.data(), in.size() * 2).ok());
      ASSERT_TRUE(d_weight.upload(weight.data(), weight.size() * 2).ok());
      ASSERT_TRUE(d_out.upload(was.data(), was.size() * 4).ok());
      launch(d_in.get(), d_weight.get(), d_out.get(), rows, n, k, form, nullptr);
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      std::vector<uint16_t> narrow(got.size());
      ASSERT_EQ(cudaMemcpy(wide ? static_cast<void*>(got.data()) : narrow.data(), d_out.get(),
                           got.size() * (wide ? 4 : 2), cudaMemcpyDefault),
                cudaSuccess);
      double worst = 0;
      const int64_t every = 1 + rows * n * parts * k / 50'000'000;  // some of many
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t f = r % every; f < n; f += every) {
          double y[2] = {};
          for (int64_t p = 0; p < parts; ++p)
            for (int64_t i = 0; i < k; ++i)
              y[p] += double(whole(in[size_t(r * k + i)])) * double(whole(weight[size_t((p * n + f) * k + i)]));
          const auto at = size_t(r * n + f);
          double want = y[0];
          if (form == Form::added_f32) want += double(was[at]);
          if (form == Form::silu) want = y[0] / (1 + std::exp(-y[0])) * y[1];
          if (form == Form::gelu)
            want = 0.5 * y[0] * (1 + std::tanh(0.7978845608028654 * (y[0] + 0.044715 * y[0] * y[0] * y[0]))) * y[1];
          const double off = std::fabs(double(wide ? got[at] : whole(narrow[at])) - want);
          worst = std::max(worst, off / (1 + std::fabs(want)));
        }
      EXPECT_LT(worst, wide ? 1e-5 : 4e-3);
    }
}

TEST_F(CudaModel, ProductsOfFewRows) {
  check_products({{1, 16, 32},
                  {1, 960, 576},
                  {3, 48, 288},
                  {8, 576, 1536},
                  {9, 64, 96},
                  {16, 192, 800},
                  {17, 32, 1024},
                  {32, 48, 512}},
                 [](auto... all) {
                   const auto [in, weight, out, rows, n, k, form, stream] = std::tuple(all...);
                   ASSERT_TRUE(cuda::few_rows_takes(rows, n, k, form));
                   cuda::launch_few_rows(all...);
                 });
}

// Tiles of both heights, one and more of them a block, and rings that end in the middle of one.
TEST_F(CudaModel, ProductsStreamed) {
  check_products({{1, 16, 512},
                  {2, 2144, 512},
                  {3, 4224, 576},
                  {8, 48, 4096},
                  {9, 2112, 704},
                  {12, 4240, 512},
                  {16, 4224, 832},
                  {16, 64, 14336},
                  {17, 2112, 576},
                  {32, 4240, 512},
                  {25, 4256, 832}},
                 [](auto... all) { cuda::launch_streamed(all...); });
}

// A value of E4M3, by its definition.
float e4m3(uint8_t b) {
  const int exponent = b >> 3 & 15, fraction = b & 7;
  const float x = exponent == 0 ? std::ldexp(float(fraction), -9) : std::ldexp(float(8 + fraction), exponent - 10);
  return b & 0x80 ? -x : x;
}

// Random rows of a type's blocks whose scales are numbers, dequantized by the host.
struct Quantized {
  HostTensor tensor;
  std::vector<uint8_t> bytes;
  std::vector<float> values;
};
std::unique_ptr<Quantized> quantized(WeightType type, int64_t rows, int64_t cols, uint32_t seed) {
  auto q = std::make_unique<Quantized>();
  const TypeInfo& info = *type_info(type);
  std::mt19937 random(seed);
  q->bytes.resize(size_t(rows * cols / info.block * info.bytes));
  for (uint8_t& b : q->bytes) b = uint8_t(random());
  for (size_t at = 0; at < q->bytes.size(); at += size_t(info.bytes)) {
    auto put = [&](size_t offset, float x) {
      const uint16_t h = f32_to_f16(x);
      std::memcpy(&q->bytes[at + offset], &h, 2);
    };
    const float d = std::ldexp(float(1 + random() % 1000), -18);
    switch (type) {
      case WeightType::q2_k: put(80, d), put(82, d / 2); break;
      case WeightType::q3_k: put(108, d); break;
      case WeightType::q6_k: put(208, d / 64); break;
      case WeightType::q4_1:
      case WeightType::q5_1: put(0, d), put(2, -7 * d); break;
      case WeightType::q4_k:
      case WeightType::q5_k: put(0, d / 64), put(2, d / 32); break;
      default: put(0, d);
    }
  }
  q->values.resize(size_t(rows * cols));
  const int64_t row_bytes = int64_t(q->bytes.size()) / rows;
  for (int64_t r = 0; r < rows; ++r)
    dequantize(type, &q->bytes[size_t(r * row_bytes)], cols, &q->values[size_t(r * cols)]);
  q->tensor = {"blk.0.ffn_up.weight", type, rows, cols, q->bytes.data(), int64_t(q->bytes.size())};
  return q;
}

// A product against sums of the numbers that `value(feature, element)` of the weights are, in every form.
template <class Value, class Launch>
void check_against(int64_t rows, int64_t n, int64_t k, double bound, const std::vector<cuda::Form>& forms, Value value,
                   Launch launch) {
  using cuda::Form;
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> in(size_t(rows * k));
  for (uint16_t& x : in) x = half(normal(random));
  attention::cuda::DeviceMemory d_in;
  ASSERT_TRUE(d_in.upload(in.data(), in.size() * 2).ok());
  for (Form form : forms) {
    SCOPED_TRACE(cat(rows, " rows, ", n, " x ", k, ", form ", int(form)));
    const bool gated = form == Form::silu || form == Form::gelu;
    const bool wide = form == Form::f32 || form == Form::added_f32;
    const int64_t out = gated ? n / 2 : n;
    std::vector<float> was(size_t(rows * out)), got(was.size());
    for (float& x : was) x = normal(random);
    attention::cuda::DeviceMemory d_out;
    ASSERT_TRUE(d_out.upload(was.data(), was.size() * 4).ok());
    launch(d_in.get(), d_out.get(), form);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    std::vector<uint16_t> narrow(got.size());
    ASSERT_EQ(cudaMemcpy(wide ? static_cast<void*>(got.data()) : narrow.data(), d_out.get(),
                         got.size() * (wide ? 4 : 2), cudaMemcpyDefault),
              cudaSuccess);
    double worst = 0;
    const int64_t every = 1 + rows * n * k / 20'000'000;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t f = r % every; f < out; f += every) {
        double y[2] = {}, size = 0;
        for (int64_t p = 0; p <= int64_t(gated); ++p)
          for (int64_t i = 0; i < k; ++i) {
            const double x = double(whole(in[size_t(r * k + i)])) * double(value(p * out + f, i));
            y[p] += x, size += x * x;
          }
        const auto at = size_t(r * out + f);
        double want = y[0];
        if (form == Form::added_f32) want += double(was[at]);
        if (form == Form::silu) want = y[0] / (1 + std::exp(-y[0])) * y[1];
        if (form == Form::gelu)
          want = 0.5 * y[0] * (1 + std::tanh(0.7978845608028654 * (y[0] + 0.044715 * y[0] * y[0] * y[0]))) * y[1];
        const double off = std::fabs(double(wide ? got[at] : whole(narrow[at])) - want);
        worst = std::max(worst, off / (std::sqrt(size) + std::fabs(want) + 1e-6));
      }
    EXPECT_LT(worst, wide ? bound : bound + 4e-3);
  }
}
const std::vector<cuda::Form> kForms = {cuda::Form::f32, cuda::Form::added_f32, cuda::Form::bf16, cuda::Form::silu,
                                        cuda::Form::gelu};

// Every code that is a number, in every place of a word.
TEST_F(CudaModel, ProductsStreamedOfBytes) {
  std::mt19937 random(3);
  for (auto [rows, n, k] : {std::array<int64_t, 3>{1, 32, 128},
                            {2, 2144, 576},
                            {8, 48, 4096},
                            {9, 4256, 1536},
                            {16, 64, 14336},
                            {16, 4224, 832},
                            {13, 9216, 576}}) {
    ASSERT_TRUE(cuda::streamed_bytes_takes(rows, n, k, cuda::Form::bf16));
    std::vector<uint8_t> weight(size_t(n * k));
    for (uint8_t& b : weight) do
        b = uint8_t(random());
      while ((b & 0x7f) == 0x7f);
    std::vector<float> scales(static_cast<size_t>(n));
    for (float& s : scales) s = std::ldexp(float(1 + random() % 256), -14) / std::sqrt(float(k));
    attention::cuda::DeviceMemory d_weight, d_scales;
    ASSERT_TRUE(d_weight.upload(weight.data(), weight.size()).ok());
    ASSERT_TRUE(d_scales.upload(scales.data(), scales.size() * 4).ok());
    check_against(
        rows, n, k, 1e-5, kForms,
        [&](int64_t f, int64_t i) { return e4m3(weight[size_t(f * k + i)]) * scales[size_t(f)]; },
        [&, rows = rows, n = n, k = k](const void* in, void* out, cuda::Form form) {
          const int64_t features = form == cuda::Form::silu || form == cuda::Form::gelu ? n / 2 : n;
          cuda::launch_streamed_bytes(in, d_weight.get(), d_scales.as<float>(), out, rows, features, k, form, nullptr);
        });
  }
}

// The library's, with a scale for each row and feature.
TEST_F(CudaModel, ProductsOfBytesByTheLibrary) {
  if (!cuda::parse_quantize("fp8").ok()) GTEST_SKIP() << "skipped: no matrix unit for E4M3";
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  {
    auto library = cuda::Cublas::open(stream);
    ASSERT_TRUE(library.ok()) << library.status().to_string();
    std::mt19937 random(4);
    std::normal_distribution<float> normal;
    for (auto [rows, n, k] :
         {std::array<int64_t, 3>{17, 960, 576}, {33, 48, 1536}, {64, 6144, 4096}, {300, 576, 1536}}) {
      std::vector<uint16_t> in(size_t(rows * k)), weight(size_t(n * k));
      for (uint16_t& x : in) x = half(normal(random));
      for (uint16_t& x : weight) x = half(normal(random) / std::sqrt(float(k)));
      attention::cuda::DeviceMemory d_in, d_weight, in_bytes, weight_bytes, in_scales, weight_scales;
      ASSERT_TRUE(d_in.upload(in.data(), in.size() * 2).ok() && d_weight.upload(weight.data(), weight.size() * 2).ok());
      ASSERT_TRUE(in_bytes.allocate(in.size()).ok() && weight_bytes.allocate(weight.size()).ok());
      ASSERT_TRUE(in_scales.allocate(size_t(rows) * 4).ok() && weight_scales.allocate(size_t(n) * 4).ok());
      cuda::launch_to_bytes(d_in.get(), {in_bytes.get(), in_scales.as<float>()}, rows, k, stream);
      cuda::launch_to_bytes(d_weight.get(), {weight_bytes.get(), weight_scales.as<float>()}, n, k, stream);
      // Both as numbers again, which the products are held to.
      auto numbers = [&](attention::cuda::DeviceMemory& elements, attention::cuda::DeviceMemory& scales, int64_t r) {
        std::vector<uint8_t> b(size_t(r * k));
        std::vector<float> s(static_cast<size_t>(r)), out(b.size());
        EXPECT_EQ(cudaMemcpy(b.data(), elements.get(), b.size(), cudaMemcpyDefault), cudaSuccess);
        EXPECT_EQ(cudaMemcpy(s.data(), scales.get(), s.size() * 4, cudaMemcpyDefault), cudaSuccess);
        for (size_t i = 0; i < b.size(); ++i) out[i] = e4m3(b[i]) * s[i / size_t(k)];
        return out;
      };
      ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      const auto x = numbers(in_bytes, in_scales, rows), w = numbers(weight_bytes, weight_scales, n);
      for (size_t i = 0; i < x.size(); ++i) ASSERT_NEAR(x[i], whole(in[i]), std::fabs(whole(in[i])) / 15 + 2e-2f);
      for (int way = 0; way < 6; ++way) {
        const auto form = std::array{cuda::Form::f32, cuda::Form::added_f32, cuda::Form::bf16}[size_t(way % 3)];
        const bool apart = way >= 3, wide = form != cuda::Form::bf16;  // scales by a kernel of their own
        SCOPED_TRACE(cat(rows, " rows, ", n, " x ", k, ", form ", int(form), apart ? ", scaled apart" : ""));
        std::vector<float> got(size_t(rows * n), 0.5f);
        attention::cuda::DeviceMemory out, sums;
        ASSERT_TRUE(out.upload(got.data(), got.size() * 4).ok() && sums.allocate(got.size() * 4).ok());
        const auto *of_rows = in_scales.as<float>(), *of_cols = weight_scales.as<float>();
        const Status s = !apart ? (*library)->product(in_bytes.get(), weight_bytes.get(), out.get(), rows, n, k, form,
                                                      cuda::Elements::fp8_scaled, {of_rows, of_cols})
                                : (*library)->product(in_bytes.get(), weight_bytes.get(), wide ? sums.get() : out.get(),
                                                      rows, n, k, wide ? cuda::Form::f32 : form, cuda::Elements::fp8);
        ASSERT_TRUE(s.ok()) << s.to_string();
        if (apart && wide)
          cuda::launch_scale(sums.as<float>(), of_rows, of_cols, form == cuda::Form::added_f32, out.as<float>(), rows,
                             n, stream);
        else if (apart)
          cuda::launch_scale_half(out.get(), of_rows, of_cols, rows, n, stream);
        ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        std::vector<uint16_t> narrow(got.size());
        ASSERT_EQ(cudaMemcpy(wide ? static_cast<void*>(got.data()) : narrow.data(), out.get(),
                             got.size() * (wide ? 4 : 2), cudaMemcpyDefault),
                  cudaSuccess);
        double worst = 0;
        for (int64_t r = 0; r < rows; r += 7)
          for (int64_t f = r % 5; f < n; f += 5) {
            double want = form == cuda::Form::added_f32 ? 0.5 : 0;
            for (int64_t i = 0; i < k; ++i) want += double(x[size_t(r * k + i)]) * double(w[size_t(f * k + i)]);
            const auto at = size_t(r * n + f);
            worst =
                std::max(worst, std::fabs(double(wide ? got[at] : whole(narrow[at])) - want) / (1 + std::fabs(want)));
          }
        EXPECT_LT(worst, 1.5e-2) << "the matrix unit's own sums of E4M3 have 14 bits";
      }
    }
  }
  cudaStreamDestroy(stream);
}

// A norm and a gate that give E4M3 give what would be made of their bfloat16.
TEST_F(CudaModel, FusedBytesAreTheOnesMadeOfHalf) {
  std::mt19937 random(9);
  std::normal_distribution<float> normal;
  for (auto [rows, cols] : {std::pair<int64_t, int64_t>{3, 576}, {40, 4096}, {2, 14336}, {5, 16384}, {1, 40000}}) {
    SCOPED_TRACE(cat(rows, " x ", cols));
    std::vector<float> x(size_t(rows * cols)), weight(static_cast<size_t>(cols));
    std::vector<uint16_t> gates(size_t(2 * rows * cols));
    for (float& v : x) v = normal(random);
    for (float& v : weight) v = normal(random);
    for (uint16_t& v : gates) v = half(normal(random));
    std::fill_n(x.begin(), cols, 0.0f);  // a row without any
    attention::cuda::DeviceMemory d_x, d_weight, d_gates, d_half, bytes[2], scales[2];
    ASSERT_TRUE(d_x.upload(x.data(), x.size() * 4).ok() && d_weight.upload(weight.data(), weight.size() * 4).ok());
    ASSERT_TRUE(d_gates.upload(gates.data(), gates.size() * 2).ok() && d_half.allocate(x.size() * 2).ok());
    for (int i : {0, 1}) ASSERT_TRUE(bytes[i].allocate(x.size()).ok() && scales[i].allocate(size_t(rows) * 4).ok());
    auto of = [&](int i) { return cuda::Bytes{bytes[i].get(), scales[i].as<float>()}; };
    auto same = [&](const char* what) {
      std::vector<uint8_t> b[2];
      std::vector<float> s[2];
      for (int i : {0, 1}) {
        b[i].resize(x.size()), s[i].resize(size_t(rows));
        ASSERT_EQ(cudaMemcpy(b[i].data(), bytes[i].get(), x.size(), cudaMemcpyDefault), cudaSuccess);
        ASSERT_EQ(cudaMemcpy(s[i].data(), scales[i].get(), size_t(rows) * 4, cudaMemcpyDefault), cudaSuccess);
      }
      EXPECT_EQ(s[0], s[1]) << what;
      EXPECT_EQ(b[0], b[1]) << what;
    };
    cuda::launch_glu(false, d_gates.get(), true, d_half.get(), rows, cols, nullptr);
    cuda::launch_to_bytes(d_half.get(), of(0), rows, cols, nullptr);
    cuda::launch_glu_bytes(false, d_gates.get(), of(1), rows, cols, nullptr);
    same("gate");
    if (cols > cuda::most_norm_bytes()) continue;
    cuda::launch_norm_bytes(d_x.as<float>(), d_weight.as<float>(), 1e-5f, d_half.get(), of(1), rows, cols, nullptr);
    cuda::launch_to_bytes(d_half.get(), of(0), rows, cols, nullptr);
    same("norm");
    std::vector<uint16_t> normed(x.size()), plain(x.size());
    ASSERT_EQ(cudaMemcpy(normed.data(), d_half.get(), x.size() * 2, cudaMemcpyDefault), cudaSuccess);
    cuda::launch_norm(d_x.as<float>(), d_weight.as<float>(), 1e-5f, d_half.get(), rows, cols, nullptr);
    ASSERT_EQ(cudaMemcpy(plain.data(), d_half.get(), x.size() * 2, cudaMemcpyDefault), cudaSuccess);
    for (size_t i = 0; i < plain.size(); ++i)
      ASSERT_NEAR(whole(normed[i]), whole(plain[i]), std::fabs(whole(plain[i])) / 100 + 1e-6f);
  }
}

// Packed weights of every type, parts of different types too, as they are multiplied, unpacked and looked up.
TEST_F(CudaModel, ProductsOfPackedWeights) {
  if (!cuda::packs(16, 32)) GTEST_SKIP() << "skipped: no copy engine";
  ThreadPool pool(2);
  using T = WeightType;
  struct Case {
    std::vector<T> types;
    int64_t rows, n, k;  // features of each part
    cuda::Packing packing;
  };
  for (const Case& c : {Case{{T::q4_0}, 1, 64, 576, cuda::Packing::q4},
                        {{T::q4_1}, 8, 2144, 1536, cuda::Packing::q4},
                        {{T::q4_k}, 16, 4256, 1280, cuda::Packing::q4},
                        {{T::q4_k}, 11, 32, 14336, cuda::Packing::q4},
                        {{T::q4_k, T::q4_k}, 37, 160, 2048, cuda::Packing::q4},
                        {{T::q4_k, T::q4_k}, 1, 2112, 4096, cuda::Packing::q4},
                        {{T::q4_0, T::q4_1}, 16, 4256, 576, cuda::Packing::q4},
                        {{T::q4_1, T::q4_1}, 9, 160, 8192, cuda::Packing::q4},
                        {{T::q4_0}, 13, 128, 4096, cuda::Packing::q4},
                        {{T::q8_0, T::q8_0}, 16, 64, 4096, cuda::Packing::q8},
                        {{T::q8_0}, 8, 64, 14336, cuda::Packing::q8},
                        {{T::q6_k, T::q6_k}, 5, 2112, 4096, cuda::Packing::q6},
                        {{T::q6_k}, 16, 64, 14336, cuda::Packing::q6},
                        {{T::q8_0}, 1, 960, 576, cuda::Packing::q8},
                        {{T::q8_0}, 5, 4224, 1056, cuda::Packing::q8},
                        {{T::q8_0}, 16, 4256, 2048, cuda::Packing::q8},
                        {{T::q6_k}, 1, 48, 4096, cuda::Packing::q6},
                        {{T::q6_k}, 7, 4256, 1024, cuda::Packing::q6},
                        {{T::q6_k}, 16, 4224, 1280, cuda::Packing::q6},
                        {{T::q5_0}, 3, 96, 608, cuda::Packing::q6},
                        {{T::q5_1}, 3, 96, 576, cuda::Packing::q6},
                        {{T::q5_k}, 12, 96, 512, cuda::Packing::q6},
                        {{T::q3_k}, 2, 96, 768, cuda::Packing::q6},
                        {{T::q2_k}, 2, 96, 768, cuda::Packing::q6},
                        {{T::q4_k, T::q4_k, T::q6_k}, 4, 112, 512, cuda::Packing::q6}}) {
    std::vector<std::unique_ptr<Quantized>> parts;
    std::vector<HostTensor> tensors;
    for (T type : c.types) {
      parts.push_back(quantized(type, c.n, c.k, uint32_t(parts.size() + 1)));
      tensors.push_back(parts.back()->tensor);
      if (c.types.size() == 2)
        tensors.back().name = parts.size() == 1 ? "blk.0.ffn_gate.weight" : "blk.0.ffn_up.weight";
    }
    SCOPED_TRACE(cat(type_info(c.types.back())->name, ", ", c.types.size(), " parts"));
    cuda::Weight w;
    ASSERT_TRUE(cuda::load_weight(tensors, cuda::Quantize::as_stored, pool, nullptr, &w).ok());
    ASSERT_EQ(w.packing, c.packing);
    // Gates want their own rows in turn with others'.
    const auto forms = w.half > 0 ? std::vector{cuda::Form::silu, cuda::Form::gelu}
                                  : std::vector{cuda::Form::f32, cuda::Form::added_f32, cuda::Form::bf16};
    auto value = [&](int64_t f, int64_t i) { return parts[size_t(f / c.n)]->values[size_t(f % c.n * c.k + i)]; };
    // d * scale of the K types, and their much larger offsets, are rounded to float16.
    check_against(c.rows, w.rows, c.k, 2e-3, forms, value, [&](const void* in, void* out, cuda::Form form) {
      const int64_t n = form == cuda::Form::silu || form == cuda::Form::gelu ? w.rows / 2 : w.rows;
      cuda::launch_packed(w.packing, in, w.data.get(), w.unit, out, c.rows, n, c.k, form, nullptr);
    });
    attention::cuda::DeviceMemory out, ids;
    ASSERT_TRUE(out.allocate(size_t(w.rows * c.k) * 4).ok());
    const int64_t first = w.rows / 2;
    cuda::launch_unpack(w.packing, w.data.get(), w.unit, w.half, out.get(), first, w.rows - first, c.k, nullptr);
    std::vector<uint16_t> unpacked(size_t((w.rows - first) * c.k));
    ASSERT_EQ(cudaMemcpy(unpacked.data(), out.get(), unpacked.size() * 2, cudaMemcpyDefault), cudaSuccess);
    for (int64_t i = 0; i < c.k; ++i)
      for (int64_t f = first; f < w.rows; f += 13)
        ASSERT_NEAR(whole(unpacked[size_t((f - first) * c.k + i)]), value(f, i), std::fabs(value(f, i)) / 100 + 1e-4f);
    if (w.half > 0) continue;  // no table of tokens
    const std::vector<int32_t> tokens = {0, -2, int32_t(w.rows - 1)}, drawn = {5, 9};
    attention::cuda::DeviceMemory before;
    ASSERT_TRUE(ids.upload(tokens.data(), 12).ok() && before.upload(drawn.data(), 8).ok());
    cuda::launch_embed_packed(w.packing, ids.as<int32_t>(), before.as<int32_t>(), w.data.get(), w.unit, 2.0f,
                              out.as<float>(), 3, c.k, nullptr);
    std::vector<float> looked_up(size_t(3 * c.k));
    ASSERT_EQ(cudaMemcpy(looked_up.data(), out.get(), looked_up.size() * 4, cudaMemcpyDefault), cudaSuccess);
    for (int64_t i = 0; i < c.k; ++i) {
      int at = 0;
      for (int64_t f : {int64_t(0), int64_t(9), w.rows - 1}) {
        ASSERT_NEAR(looked_up[size_t(at * c.k + i)], 2 * value(f, i), std::fabs(value(f, i)) / 100 + 1e-4f);
        ++at;
      }
    }
  }
}

// A checkpoint's E4M3 is multiplied as it is.
TEST_F(CudaModel, BytesOfACheckpoint) {
  if (!cuda::multiplies_bytes()) GTEST_SKIP() << "skipped: no matrix unit for E4M3";
  ThreadPool pool(2);
  constexpr int64_t kRows = 32, kCols = 160;
  std::vector<uint8_t> bytes(size_t(2 * kRows * kCols));
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = uint8_t(i * 37 % 127);
  std::vector<HostTensor> parts(2);
  for (int p : {0, 1}) {
    parts[size_t(p)] = {p ? "blk.0.attn_k.weight" : "blk.0.attn_q.weight",
                        WeightType::f8_e4m3,
                        kRows,
                        kCols,
                        bytes.data() + p * kRows * kCols,
                        kRows * kCols};
    for (int64_t r = 0; r < kRows; ++r)
      parts[size_t(p)].row_scales.push_back(std::ldexp(float(1 + p * kRows + r), -16));
  }
  cuda::Weight w, widened;
  ASSERT_TRUE(cuda::load_weight(parts, cuda::Quantize::as_stored, pool, nullptr, &w).ok());
  ASSERT_EQ(w.packing, cuda::Packing::fp8);
  check_against(
      3, 2 * kRows, kCols, 1e-5, {cuda::Form::f32},
      [&](int64_t f, int64_t i) { return e4m3(bytes[size_t(f * kCols + i)]) * std::ldexp(float(1 + f), -16); },
      [&](const void* in, void* out, cuda::Form form) {
        cuda::launch_streamed_bytes(in, w.data.get(), w.scales.as<float>(), out, 3, 2 * kRows, kCols, form, nullptr);
      });
  ASSERT_TRUE(cuda::load_weight(parts, cuda::Quantize::bf16, pool, nullptr, &widened).ok());
  ASSERT_EQ(widened.packing, cuda::Packing::bf16);
  std::vector<uint16_t> half(bytes.size());
  ASSERT_EQ(cudaMemcpy(half.data(), widened.data.get(), half.size() * 2, cudaMemcpyDefault), cudaSuccess);
  for (int64_t i = 0; i < 2 * kRows * kCols; ++i)
    ASSERT_NEAR(whole(half[size_t(i)]), e4m3(bytes[size_t(i)]) * std::ldexp(float(1 + i / kCols), -16), 2e-3);
}

// A dummy's packed weights are those of the host, packed.
TEST_F(CudaModel, SeededBlocksAreTheOnesOfTheHost) {
  if (!cuda::packs(16, 32)) GTEST_SKIP() << "skipped: no copy engine";
  ThreadPool pool(2);
  for (const std::string type : {"q4_0", "q4_1", "q8_0"}) {
    auto config = config_from_dummy("llama,seed=5,type=" + type);
    ASSERT_TRUE(config.ok());
    const auto host = dummy_weights(*config), device = dummy_weights(*config);
    device->leave_seeded();
    const std::vector<HostTensor> there = {*device->get("blk.0.ffn_gate.weight", 48, 608),
                                           *device->get("blk.0.ffn_up.weight", 48, 608)},
                                  here = {*host->get("blk.0.ffn_gate.weight", 48, 608),
                                          *host->get("blk.0.ffn_up.weight", 48, 608)};
    cuda::Weight made, packed;
    ASSERT_TRUE(cuda::load_weight(there, cuda::Quantize::as_stored, pool, nullptr, &made).ok());
    ASSERT_TRUE(cuda::load_weight(here, cuda::Quantize::as_stored, pool, nullptr, &packed).ok());
    ASSERT_EQ(made.packing, packed.packing);
    ASSERT_EQ(made.bytes, packed.bytes);
    std::vector<uint16_t> out[2];
    for (auto [w, o] : {std::pair(&made, &out[0]), std::pair(&packed, &out[1])}) {
      attention::cuda::DeviceMemory half;
      ASSERT_TRUE(half.allocate(size_t(w->rows * w->cols) * 2).ok());
      cuda::launch_unpack(w->packing, w->data.get(), w->unit, w->half, half.get(), 0, w->rows, w->cols, nullptr);
      o->resize(size_t(w->rows * w->cols));
      ASSERT_EQ(cudaMemcpy(o->data(), half.get(), o->size() * 2, cudaMemcpyDefault), cudaSuccess);
    }
    EXPECT_EQ(out[0], out[1]) << type;
  }
}

// What would leave features or elements over goes to the library.
TEST(CudaFewRows, TakesWhatFillsItsBlocks) {
  using cuda::Form;
  EXPECT_TRUE(cuda::few_rows_takes(1, 960, 576, Form::bf16));
  EXPECT_FALSE(cuda::few_rows_takes(33, 960, 576, Form::bf16));
  EXPECT_FALSE(cuda::few_rows_takes(1, 24, 576, Form::silu)) << "48 rows of weights, but 24 features";
  EXPECT_FALSE(cuda::few_rows_takes(1, 960, 584, Form::f32));
  EXPECT_FALSE(cuda::few_rows_takes(9, 4096, 4096, Form::added_f32)) << "long rows";
  EXPECT_FALSE(cuda::few_rows_takes(1, 128256, 4096, Form::f32)) << "many weights";
}

TEST_F(CudaModel, StreamedTakesManyWeights) {
  using cuda::Form;
  EXPECT_TRUE(cuda::streamed_takes(1, 4096, 14336, Form::added_f32));
  EXPECT_TRUE(cuda::streamed_takes(8, 14336, 4096, Form::silu));
  EXPECT_TRUE(cuda::streamed_takes(32, 4096, 14336, Form::added_f32));
  EXPECT_FALSE(cuda::streamed_takes(33, 4096, 14336, Form::added_f32));
  EXPECT_FALSE(cuda::streamed_takes(17, 128256, 4096, Form::f32)) << "the rows are read too often";
  EXPECT_FALSE(cuda::streamed_takes(9, 49152, 576, Form::f32)) << "short rows";
  EXPECT_FALSE(cuda::streamed_takes(1, 960, 576, Form::bf16)) << "few weights";
  EXPECT_FALSE(cuda::streamed_takes(1, 4104, 4096, Form::bf16)) << "features over";
  EXPECT_FALSE(cuda::streamed_takes(1, 4096, 4128, Form::bf16)) << "elements over";
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
