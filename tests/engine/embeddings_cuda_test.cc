// Embeddings and scores on a GPU: decoders and encoders, as sentence-transformers and transformers have them.
#include <filesystem>

#include "tests/engine/pooled.h"
#include "tests/engine/real_case.h"
#include "tests/model/architectures.h"
#include "tests/model/cuda_case.h"

namespace kvasir::engine::testing {
namespace {

using nlohmann::json;

using EmbeddingsCuda = model::NeedsDevice;

std::unique_ptr<Engine> engine_of(const std::string& model, const char* pooling) {
  model::RunnerOptions m;
  m.model = model;
  m.device = "cuda";
  m.pooling = pooling;
  auto engine = Engine::start(m, Case("").options);
  EXPECT_TRUE(engine->wait_ready().ok()) << engine->wait_ready().message();
  return engine;
}

// Where two experts are nearly as good, bfloat16 may choose the other, and one token's states are then another's.
bool has_experts(const json& network) {
  const json& config = network["configs"][0];
  return config.contains("num_experts") || config.contains("num_local_experts") || config.contains("n_routed_experts");
}

// All at once, several of each; the greatest distance of one.
void compare(Engine& engine, const json& texts, const json& wanted, size_t count, double* worst) {
  std::vector<std::unique_ptr<Stream>> streams;
  for (size_t i = 0; i < 3 * count; ++i) {
    Request r;
    r.prompt = texts[i % count].get<std::vector<int32_t>>();
    r.detokenize = false;
    streams.push_back(*engine.submit(pooled(r)));
  }
  for (size_t i = 0; i < streams.size(); ++i)
    *worst = std::max(*worst, 1 - cosine(embedding(read(*streams[i])), wanted[i % count].get<std::vector<double>>()));
}

TEST_F(EmbeddingsCuda, DecodersEmbedAsSentenceTransformersDoes) {
  const json stored = model::fixture("embeddings.json"), networks = model::fixture("architectures.json");
  double worst = 0;
  for (const json& one : stored["cases"]) {
    if (one["network"].get<std::string>().starts_with("phi3 ")) continue;  // as on the CPU
    SCOPED_TRACE(one["network"].get<std::string>());
    model::Folder folder("embeddings");
    for (const json& network : networks["cases"])
      if (network["name"] == one["network"] && !has_experts(network))
        model::StoredNetwork(network).write_folder(folder);
    if (!std::filesystem::exists(folder.path / "config.json")) continue;
    for (const char* pooling : {"last", "mean", "cls"}) {
      double off = 0;
      compare(*engine_of(folder.path.string(), pooling), stored["texts"], one["embeddings"][pooling], 2, &off);
      printf("%-28s %-4s 1 - cosine %.6f\n", one["network"].get<std::string>().c_str(), pooling, off);
      worst = std::max(worst, off);
    }
  }
  EXPECT_LT(worst, 2e-3);
}

TEST_F(EmbeddingsCuda, EncodersEmbedAsSentenceTransformersDoes) {
  const json stored = model::fixture("embeddings.json");
  double worst = 0;
  for (const json& one : stored["encoders"]) {
    if (!one.contains("embeddings")) continue;
    SCOPED_TRACE(one["name"].get<std::string>());
    model::Folder folder("encoder");
    model::StoredNetwork(one).write_folder(folder);
    for (const char* pooling : {"last", "mean", "cls"}) {
      double off = 0;
      compare(*engine_of(folder.path.string(), pooling), stored["texts"], one["embeddings"][pooling], 2, &off);
      printf("%-28s %-4s 1 - cosine %.6f\n", one["name"].get<std::string>().c_str(), pooling, off);
      worst = std::max(worst, off);
    }
  }
  EXPECT_LT(worst, 1e-3);
}

TEST_F(EmbeddingsCuda, EncodersScorePairsAsTransformersDoes) {
  const json stored = model::fixture("embeddings.json");
  int seen = 0;
  for (const json& one : stored["encoders"]) {
    if (!one.contains("pairs")) continue;
    SCOPED_TRACE(one["name"].get<std::string>());
    model::Folder folder("encoder");
    model::StoredNetwork(one).write_folder(folder);
    auto engine = engine_of(folder.path.string(), "auto");
    // ModernBERT's head reads two norms after one another, each rounded to bfloat16.
    const double near = one["configs"][0]["model_type"] == "modernbert" ? 4e-2 : 2e-2;
    for (const json& pair : one["pairs"]) {
      const auto got = embedding(run(*engine, scored_pair(pair)));
      ASSERT_EQ(got.size(), 1u);
      printf("%-28s %.4f, transformers %.4f\n", one["name"].get<std::string>().c_str(), got[0], pair[2].get<double>());
      EXPECT_NEAR(got[0], pair[2].get<double>(), near);
      ++seen;
    }
  }
  EXPECT_GE(seen, 4);
}

}  // namespace
}  // namespace kvasir::engine::testing
