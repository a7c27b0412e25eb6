// What a GPU does between products and tokens, against the same steps launched kernel by kernel and the host's sampler.
#include <array>
#include <cmath>
#include <deque>
#include <limits>
#include <random>

#include "attention/cuda/cuda.h"
#include "attention/cuda/memory.h"
#include "model/cuda/draw.h"
#include "model/cuda/few_rows.h"
#include "model/cuda/graphs.h"
#include "model/cuda/kernels.h"
#include "model/cuda/runner.h"
#include "model/cuda/seeded.h"
#include "model/cuda/streamed.h"
#include "model/formats/dummy.h"
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
    RunnerOptions o;
    o.model = model, o.device = "cuda", o.threads = 2, o.graphs = graphs;
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
                            "dummy:llama,hidden=1024,layers=2,heads=8,kv_heads=4,head_dim=128,ffn=4096,vocab=4096"}) {
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
        std::string("dummy:gemma3,hidden=256,layers=7,window=48"), smollm2()}) {
    if (model.empty()) continue;
    SCOPED_TRACE(model);
    constexpr int64_t kTokens = 160, kPrompt = 16;
    Ids ids, next;
    for (int64_t i = 0; i < kTokens; ++i) ids.push_back(int32_t((i * i * 7 + i * 3 + 11) % 500));
    next.assign(ids.begin() + 1, ids.end());
    next.push_back(0);
    RunnerOptions o;
    o.model = model, o.device = "cuda", o.threads = 2;
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
    EXPECT_LT(sum / (4 * (kTokens - kPrompt)), 0.03);
    EXPECT_LT(worst, 0.3);
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
                 cuda::launch_streamed);
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
