// Pages on the move: copied, and away to the second tier and back, on every device there is.
#include "attention/backend.h"
#include "tests/model/drive.h"

#ifdef KVASIR_CUDA
#include "attention/cuda/cuda.h"
#endif

namespace kvasir::model {
namespace {

using Ids = std::vector<int32_t>;

struct Where {
  const char* device;
  kvcache::FormWish kv;
};

// Sequences by the pages that they are given, step by step.
class Paged {
 public:
  explicit Paged(const Where& where) {
    RunnerOptions o;
    o.model = "dummy:llama,hidden=256,layers=3";
    o.device = where.device;
    o.kv = where.kv;
    o.threads = 2;
    o.page_size = kPage;
    o.max_batch = 4, o.max_tokens = 64, o.max_kvlen = 64;
    auto loaded = load_runner(o);
    EXPECT_TRUE(loaded.ok()) << loaded.status().to_string();
    runner_ = std::move(loaded).value();
    Status s = runner_->allocate_cache({{12}, 4});
    EXPECT_TRUE(s.ok()) << s.to_string();
  }

  Sampled step(const Ids& tokens, int64_t begin, const std::vector<int64_t>& pages,
               const std::vector<PageMove>& moves = {}, const std::vector<PageCopy>& copies = {}) {
    const int64_t n = int64_t(tokens.size());
    Batch b;
    b.tokens = tokens;
    for (int64_t i = 0; i < n; ++i) b.positions.push_back(int32_t(begin + i));
    b.seqstarts = {0, n}, b.kvstarts = {0, begin + n}, b.start_pos = {begin};
    for (int64_t p : pages) b.cachestarts.push_back(p * kPage);
    b.max_pages = int64_t(pages.size()), b.max_seqlen = n, b.max_kvlen = begin + n;
    b.decoding_batches = n == 1;
    b.logit_rows = {int32_t(n - 1)};
    b.moves = moves, b.copies = copies;
    const SamplingParams greedy = Drive::greedy();
    const SampleRow row{.params = &greedy, .position = int32_t(begin + n)};
    const Status s = runner_->launch(b, {&row, 1});
    EXPECT_TRUE(s.ok()) << s.to_string();
    auto out = runner_->wait();
    EXPECT_TRUE(out.ok());
    return (*out)[0];
  }

 private:
  static constexpr int64_t kPage = 16;
  std::unique_ptr<Runner> runner_;
};

Ids prompt(int32_t seed, int64_t n) {
  Ids ids;
  for (int64_t i = 0; i < n; ++i) ids.push_back(int32_t((seed * 31 + i * 7) % 250));
  return ids;
}

class Pages : public ::testing::TestWithParam<Where> {
 protected:
  void SetUp() override {
#ifdef KVASIR_CUDA
    if (std::string(GetParam().device) == "cuda")
      if (Status s = attention::cuda_backend().available(); !s.ok()) GTEST_SKIP() << "skipped: " << s.message();
#endif
  }
};

void expect_same(const Sampled& a, const Sampled& b) {
  EXPECT_EQ(a.token, b.token);
  EXPECT_EQ(a.logprob, b.logprob);
}

// Two sequences by turns in the same pages: each is as it is alone, wherever its pages come back to.
TEST_P(Pages, MoveToTheHostAndBack) {
  const Ids first = prompt(3, 40), second = prompt(8, 40);
  Paged plenty(GetParam()), few(GetParam());
  const Sampled a0 = plenty.step(first, 0, {0, 1, 2}), b0 = plenty.step(second, 0, {5, 3, 4});
  const Sampled a1 = plenty.step({a0.token}, 40, {0, 1, 2}), b1 = plenty.step({b0.token}, 40, {5, 3, 4});

  expect_same(few.step(first, 0, {7, 2, 9}), a0);
  // Away before the step writes: its own tokens go into those pages.
  expect_same(few.step(second, 0, {9, 7, 2}, {{7, 3, true}, {2, 0, true}, {9, 1, true}}), b0);
  // In order: what leaves makes room for what comes.
  expect_same(
      few.step({a0.token}, 40, {2, 7, 1}, {{2, 2, true}, {2, 3, false}, {7, 3, true}, {7, 0, false}, {1, 1, false}}),
      a1);
  expect_same(few.step({b0.token}, 40, {9, 11, 0}, {{11, 3, false}, {0, 2, false}}), b1);
}

TEST_P(Pages, ACopyIsAPrefixHit) {
  const Ids tokens = prompt(5, 24), rest(tokens.begin() + 16, tokens.end());
  Paged pages(GetParam());
  const Sampled whole = pages.step(tokens, 0, {0, 1});
  const Sampled cached = pages.step(rest, 16, {0, 4});
  EXPECT_EQ(cached.token, whole.token);
  EXPECT_NEAR(cached.logprob, whole.logprob, 1e-2);
  expect_same(pages.step(rest, 16, {7, 3}, {}, {{0, 7, 16}}), cached);
}

std::vector<Where> everywhere() {
  std::vector<Where> out;
  for (const char* device : {"cpu",
#ifdef KVASIR_CUDA
                             "cuda"
#endif
       })
    for (auto [dtype, group, layout] : {std::tuple{"auto", -1, "auto"},
                                        {"fp8", -1, "auto"},
                                        {"int8", 8, "auto"},
                                        {"int8", 32, "0"},
                                        {"int4", 32, "auto"},
                                        {"int4", 16, "1"},
                                        {"bfloat16", -1, "lht2d"},
                                        {"int8", 16, "2lhtd"},
                                        {"float16", -1, "2"}}) {
      Where& w = out.emplace_back(Where{device, {}});
      w.kv.dtype = dtype, w.kv.group = group, w.kv.layout = layout;
    }
  return out;
}

INSTANTIATE_TEST_SUITE_P(Devices, Pages, ::testing::ValuesIn(everywhere()), [](const auto& info) {
  const kvcache::FormWish& kv = info.param.kv;
  std::string name = std::string(info.param.device) + "_" + kv.dtype;
  if (kv.group > 0) name += "_" + std::to_string(kv.group);
  return kv.layout == "auto" ? name : name + "_in_" + kv.layout;
});

}  // namespace
}  // namespace kvasir::model
