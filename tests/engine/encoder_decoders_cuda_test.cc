// Encoder-decoders served from a GPU: what transformers' generate() says, and the same alone and beside others, until
// the first token that another is nearly as good as.
#include "tests/engine/near_lines.h"
#include "tests/model/architectures.h"
#include "tests/model/cuda_case.h"

namespace kvasir::engine::testing {
namespace {

using nlohmann::json;
using Ids = std::vector<int32_t>;
using EncoderDecodersCuda = model::NeedsDevice;

std::unique_ptr<Engine> serve(const std::string& model, EngineOptions options) {
  model::RunnerOptions m;
  m.model = model, m.device = "cuda";
  auto engine = Engine::start(m, std::move(options));
  EXPECT_TRUE(engine->wait_ready().ok()) << engine->wait_ready().message();
  return engine;
}

EngineOptions plenty() {
  EngineOptions o;
  o.page_size = 4;
  o.max_running = 16;
  o.max_tokens_per_step = 64;
  o.kv_memory = 16 << 20;
  o.max_draft = 0;
  return o;
}

// Where scores are large, rounding to bfloat16 leaves transformers' choices only in "t5" (model_encoder_decoders_cuda
// compares the others with what rounding makes of them).
TEST_F(EncoderDecodersCuda, AnswersAreTransformersOwn) {
  const json all = model::fixture("t5.json");
  for (const json& one : all["cases"]) {
    SCOPED_TRACE(one["name"].get<std::string>());
    const model::Folder folder("t5-served-cuda");
    model::StoredNetwork(one).write_folder(folder);
    auto engine = serve(folder.path.string(), plenty());
    auto submit = [&](size_t p) {
      Request r = ask(0, std::ssize(one["greedy"][p]));
      r.prompt = all["prompts"][p].get<Ids>();
      r.sampling.logprobs = 2;
      return std::move(*engine->submit(std::move(r)));
    };
    std::vector<Line> alone;
    const double near = one["name"] == "t5" ? 0.1 : 0.3;  // what a sum in another order may do where scores are large
    size_t own = 0, same = 0, tokens = 0;
    for (size_t p = 0; p < 3; ++p) {
      alone.push_back(line(*submit(p)));
      if (one["name"] == "t5") own += compare(alone[p], one["greedy"][p], near);
    }
    std::vector<std::unique_ptr<Stream>> streams;
    for (size_t i = 0; i < 12; ++i) streams.push_back(submit(i % 3));
    for (size_t i = 0; i < streams.size(); ++i)
      same += compare(line(*streams[i]), alone[i % 3].tokens, near), tokens += alone[i % 3].tokens.size();
    printf("%-24s %zu of %zu tokens are the same beside others\n", one["name"].get<std::string>().c_str(), same,
           tokens);
    EXPECT_GT(same, tokens / 2);
    if (one["name"] == "t5") {
      EXPECT_GE(own, 30u);
    }
    expect_all_pages_back(*engine);
  }
}

// Beams, choices that are drawn, drafts by prediction; and a cache so small that some are computed again.
TEST_F(EncoderDecodersCuda, EverySortOfRequest) {
  const char* dummy = "dummy:t5,layers=2,hidden=128,heads=4,head_dim=32,ffn=128,type=bf16";
  EngineOptions o = plenty();
  o.max_draft = 8;
  {
    auto probe = serve(dummy, plenty());
    o.kv_memory = probe->info().kv_bytes_per_token * 4 * 80;
  }
  auto engine = serve(dummy, o);
  for (int round = 0; round < 2; ++round) {
    std::vector<std::unique_ptr<Stream>> streams;
    for (int32_t i = 0; i < 8; ++i) {
      Request r = ask(30, 40, i);
      for (int32_t& t : r.prompt) t = 4 + t % 250;
      if (i == 1) r.beams = BeamOptions{.width = 3}, r.n = 3;
      if (i == 2) r.sampling.temperature = 1, r.sampling.seed = 7, r.n = 12;  // whose tokens alone are too many
      if (i == 3) r.prediction.assign(40, 5);
      streams.push_back(std::move(*engine->submit(std::move(r))));
    }
    for (auto& stream : streams) {
      const Answer a = read(*stream);
      EXPECT_TRUE(a.complete()) << a.failed.message();
      for (const Ids& tokens : a.tokens) EXPECT_EQ(tokens.size(), 40u);
    }
  }
  EXPECT_GT(engine->stats().preemptions, 0);
  expect_all_pages_back(*engine);
}

}  // namespace
}  // namespace kvasir::engine::testing
