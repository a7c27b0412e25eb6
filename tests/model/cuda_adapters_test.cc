// Adapters on a GPU: as PEFT merges them; rows without one have the very bits that they have where there is none; and
// launched or replayed, alone or beside others.
#include <cmath>
#include <functional>

#include "attention/cuda/memory.h"
#include "core/dtype.h"
#include "model/cuda/low_rank.h"
#include "model/cuda/runner.h"
#include "tests/model/adapters.h"
#include "tests/model/cuda_case.h"
#include "tests/model/drive.h"

namespace kvasir::model {
namespace {

using nlohmann::json;
using Ids = std::vector<int32_t>;
using attention::cuda::DeviceMemory;
constexpr int64_t kRoom = int64_t(256) << 20;

using CudaAdapters = NeedsDevice;

RunnerOptions on_gpu(const std::string& model) {
  RunnerOptions o;
  const bool fp8 = model.starts_with("fp8 "), invariant = model.starts_with("invariant ");
  o.model = model.substr(fp8 ? 4 : invariant ? 10 : 0), o.device = "cuda", o.threads = 2;
  if (fp8) o.quantize = "fp8";
  o.batch_invariant = invariant;
  return o;
}

AdapterPtr load(Drive& drive, const std::string& path) {
  auto loaded = drive.runner->load_adapter(path, kRoom);
  EXPECT_TRUE(loaded.ok()) << loaded.status().message();
  return loaded.ok() ? *loaded : nullptr;
}

// ---- the fixtures

// In a prompt, and in decodes of which the later ones are replayed.
double worst(Drive& drive, const Adapter* adapter, const json& all, const json& logprobs) {
  const Ids tokens = all["tokens"];
  const std::vector<size_t> rows = all["rows"];
  double worst = 0;
  const auto whole = drive.step({{0, 0, tokens, true, adapter}});
  for (size_t i = 0; i < rows.size(); ++i) compare_best(logprobs[i], whole[rows[i]], &worst);
  Sampled s = drive.step({{1, 0, Ids(tokens.begin(), tokens.begin() + int64_t(rows[0]) + 1), false, adapter}})[0];
  for (size_t at = rows[0];; ++at) {
    for (size_t i = 0; i < rows.size(); ++i)
      if (rows[i] == at) compare_best(logprobs[i], s, &worst);
    if (at == rows.back()) break;
    s = drive.step({{1, int64_t(at) + 1, {tokens[at + 1]}, false, adapter}})[0];
  }
  return worst;
}

// Over two GPUs too, where there are two: each has its rows, or columns, of the factors.
TEST_F(CudaAdapters, AreAsPeftMergesThem) {
  const json networks = fixture("architectures.json"), adapters = fixture("adapters.json");
  for (const json& one : adapters["cases"]) {
    SCOPED_TRACE(one["name"].get<std::string>());
    for (const json& base : networks["cases"]) {
      // Its latent of 24 columns is no multiple of 16.
      if (base["name"] != one["network"] || latent_attention(base)) continue;
      Folder folder("adapters");
      StoredNetwork(base).write_folder(folder);
      const std::string path = StoredAdapter(one).write(folder.path / "adapter");
      for (int32_t ranks = 1; ranks <= std::min(devices(), 2); ++ranks) {
        if (ranks > 1 && one["config"].value("use_dora", false)) continue;  // refused: model_adapters
        RunnerOptions o = on_gpu(folder.path.string());
        o.ranks = ranks;
        Drive drive(o, 64, 2, 64);
        const AdapterPtr loaded = load(drive, path);
        ASSERT_TRUE(loaded);
        const double off = worst(drive, loaded.get(), networks, one["logprobs"]);
        printf("%-28s over %d: worst |difference| of the best token's log-probability %.4f\n",
               one["name"].get<std::string>().c_str(), ranks, off);
        EXPECT_LT(off, 0.15);
        EXPECT_LT(worst(drive, nullptr, networks, base["logprobs"]), 0.15);
      }
    }
  }
}

// ---- models and adapters made up here

struct Sizes {
  int64_t layers, hidden, q, kv, ffn;
};

// Every projection of every layer; the magnitudes of DoRA are about what rows of such weights have.
std::string write_adapter(const std::filesystem::path& path, const Sizes& s, int64_t rank, bool dora, int seed) {
  const std::vector<std::tuple<const char*, int64_t, int64_t>> modules = {
      {"self_attn.q_proj", s.q, s.hidden}, {"self_attn.k_proj", s.kv, s.hidden}, {"self_attn.v_proj", s.kv, s.hidden},
      {"self_attn.o_proj", s.hidden, s.q}, {"mlp.gate_proj", s.ffn, s.hidden},   {"mlp.up_proj", s.ffn, s.hidden},
      {"mlp.down_proj", s.hidden, s.ffn}};
  std::vector<StoredTensor> tensors;
  for (int64_t layer = 0; layer < s.layers; ++layer)
    for (const auto& [module, rows, cols] : modules) {
      const std::string name = cat("base_model.model.model.layers.", layer, ".", module, ".lora_");
      auto values = [&](const char* what, int64_t count, float by) {
        return formula(cat(seed, name, what), count, by);
      };
      tensors.push_back({name + "A.weight", {rank, cols}, values("A", rank * cols, 2 / std::sqrt(float(cols)))});
      tensors.push_back({name + "B.weight", {rows, rank}, values("B", rows * rank, 1 / std::sqrt(float(rank)))});
      if (!dora) continue;
      std::vector<float> magnitude = values("m", rows, 0.2f);
      for (float& f : magnitude) f = f + 1;
      tensors.push_back({name + "magnitude_vector", {rows}, std::move(magnitude)});
    }
  std::filesystem::create_directories(path);
  std::ofstream(path / "adapter_model.safetensors", std::ios::binary) << safetensors_of(tensors);
  std::ofstream(path / "adapter_config.json")
      << json{{"peft_type", "LORA"}, {"r", rank}, {"lora_alpha", rank}, {"use_dora", dora}}.dump();
  return path.string();
}

struct Model {
  const char* name;
  Sizes sizes;
};
const Model kModels[] = {
    {"dummy:llama,hidden=576,layers=3,heads=9,kv_heads=3,ffn=1536,vocab=4096,type=bf16", {3, 576, 576, 192, 1536}},
    {"dummy:llama,hidden=1024,layers=2,heads=8,kv_heads=4,head_dim=128,ffn=4096,vocab=4096,type=bf16",
     {2, 1024, 1024, 512, 4096}},
    {"dummy:llama,hidden=576,layers=3,heads=9,kv_heads=3,ffn=1536,vocab=4096,type=q4_0", {3, 576, 576, 192, 1536}},
    {"fp8 dummy:llama,hidden=1024,layers=2,heads=8,kv_heads=4,head_dim=128,ffn=4096,vocab=4096,type=bf16",
     {2, 1024, 1024, 512, 4096}},
    {"invariant dummy:llama,hidden=576,layers=3,heads=9,kv_heads=3,ffn=1536,vocab=4096,type=bf16",
     {3, 576, 576, 192, 1536}}};

std::vector<AdapterPtr> load_four(Drive& drive, const Folder& folder, const Sizes& s) {
  std::vector<AdapterPtr> out;
  const std::pair<int64_t, bool> kinds[] = {{16, false}, {8, false}, {40, true}, {256, false}};
  for (int i = 0; i < 4; ++i)
    out.push_back(load(drive, write_adapter(folder.path / std::to_string(i), s, kinds[i].first, kinds[i].second, i)));
  return out;
}

struct Drawn {
  int32_t token;
  float logprob;
  bool operator==(const Drawn&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Drawn& d) { return out << d.token << " (" << d.logprob << ")"; }

constexpr int kMany = 20;

// Sequence s has the adapter of `which(s)`; all are fed the same tokens whatever is drawn. By sequence, what each step
// says of its next token.
std::vector<std::vector<Drawn>> run(Drive& drive, int sequences, int steps,
                                    const std::function<const Adapter*(int)>& which) {
  auto token = [](int seq, int64_t i) { return int32_t((seq * 31 + i * i * 7 + i * 3) % 4000); };
  std::vector<std::vector<Drawn>> out(static_cast<size_t>(sequences));
  std::vector<Piece> prompts;
  auto take = [&](const std::vector<Piece>& pieces) {
    Ids targets;
    for (const Piece& p : pieces) targets.push_back(token(p.seq, p.begin + int64_t(p.tokens.size())));
    const auto drawn = drive.step(pieces, Drive::greedy(), targets);
    for (size_t i = 0; i < drawn.size(); ++i) out[size_t(pieces[i].seq)].push_back({drawn[i].token, drawn[i].logprob});
  };
  auto length = [](int seq) { return int64_t(3 + seq * 5 % 50); };
  for (int seq = 0; seq < sequences; ++seq) {
    prompts.push_back({seq, 0, {}, false, which(seq)});
    for (int64_t i = 0; i < length(seq); ++i) prompts.back().tokens.push_back(token(seq, i));
  }
  take(prompts);
  for (int64_t step = 0; step < steps; ++step) {
    std::vector<Piece> pieces;
    for (int seq = 0; seq < sequences; ++seq)
      pieces.push_back({seq, length(seq) + step, {token(seq, length(seq) + step)}, false, which(seq)});
    take(pieces);
  }
  return out;
}

TEST_F(CudaAdapters, RowsWithoutOneKeepTheirBits) {
  for (const Model& m : kModels) {
    SCOPED_TRACE(m.name);
    Folder folder("adapters");
    for (int sequences : {4, 12, kMany}) {
      SCOPED_TRACE(sequences);
      Drive drive(on_gpu(m.name), 256, kMany, 1024);
      const auto plain = run(drive, sequences, 4, [](int) { return nullptr; });
      const auto held = load_four(drive, folder, m.sizes);
      const auto mixed =
          run(drive, sequences, 4, [&](int seq) { return seq % 2 ? held[size_t(seq / 2 % 4)].get() : nullptr; });
      for (size_t seq = 0; seq < plain.size(); ++seq)
        EXPECT_EQ(mixed[seq] == plain[seq], seq % 2 == 0) << "sequence " << seq;
    }
  }
}

TEST_F(CudaAdapters, ReplayedStepsAreTheLaunchedOnes) {
  for (const Model& m : kModels) {
    SCOPED_TRACE(m.name);
    Folder folder("adapters");
    std::vector<std::vector<std::vector<Drawn>>> seen;
    for (bool graphs : {false, true}) {
      RunnerOptions o = on_gpu(m.name);
      o.graphs = graphs;
      Drive drive(o, 256, kMany, 1024);
      const auto held = load_four(drive, folder, m.sizes);
      seen.push_back(
          run(drive, kMany, 12, [&](int seq) { return seq % 5 ? held[size_t(seq % 5 - 1)].get() : nullptr; }));
      // The same graphs with other adapters in them.
      seen.push_back(
          run(drive, kMany, 12, [&](int seq) { return seq % 5 ? held[size_t(4 - seq % 5)].get() : nullptr; }));
      EXPECT_EQ(dynamic_cast<const cuda::Replaying&>(*drive.runner).replays() > 10, graphs);
    }
    EXPECT_EQ(seen[0], seen[2]);
    EXPECT_EQ(seen[1], seen[3]);
    EXPECT_NE(seen[0], seen[1]);
  }
}

// The products beside it may take another way for fewer rows, so near; with batch_invariant to the bit.
TEST_F(CudaAdapters, AloneOrBesideOthers) {
  for (const Model& m : kModels) {
    SCOPED_TRACE(m.name);
    const std::string name = m.name;
    Folder folder("adapters");
    Drive drive(on_gpu(name), 256, kMany, 1024);
    const auto held = load_four(drive, folder, m.sizes);
    auto of = [&](int seq) { return seq % 5 ? held[size_t(seq % 5 - 1)].get() : nullptr; };
    const auto together = run(drive, kMany, 6, of);
    double sum = 0, count = 0;
    for (int seq = 0; seq < 5; ++seq) {
      // Sequence 0 of a run has the prompt of 0: the others are run beside those before them, without adapters.
      const auto alone = run(drive, seq + 1, 6, [&](int s) { return s == seq ? of(s) : nullptr; });
      if (name.starts_with("invariant ")) {
        EXPECT_EQ(alone[size_t(seq)], together[size_t(seq)]) << seq;
      }
      for (size_t i = 0; i < alone[size_t(seq)].size(); ++i, ++count)
        sum += std::fabs(alone[size_t(seq)][i].logprob - together[size_t(seq)][i].logprob);
    }
    EXPECT_LT(sum / count, name.starts_with("fp8 ") ? 0.3 : 0.05);
  }
}

// What steps in flight read is there until they have ended, whoever lets go of it.
TEST_F(CudaAdapters, UnloadedInFlight) {
  const Model& m = kModels[0];
  Folder folder("adapters");
  Drive drive(on_gpu(m.name), 256, kMany, 1024);
  const std::string path = write_adapter(folder.path / "a", m.sizes, 16, false, 1);
  const SamplingParams greedy = Drive::greedy();
  Ids prompt;
  for (int i = 0; i < 200; ++i) prompt.push_back(i * 13 % 4000);
  auto answer = [&](bool unload) {
    std::vector<Drawn> out;
    AdapterPtr held = load(drive, path);
    for (int round = 0; round < 2; ++round) {
      drive.launch({{0, 0, prompt, false, held.get()}}, greedy);
      drive.launch({{1, 0, prompt, false, held.get()}}, greedy);
      if (unload && round == 1) {
        held.reset();
        held = load(drive, write_adapter(folder.path / "b", m.sizes, 16, false, 2));  // likely where the other was
      }
      for (int i = 0; i < 2; ++i) {
        const Sampled s = drive.wait()[0];
        out.push_back({s.token, s.logprob});
      }
    }
    return out;
  };
  EXPECT_EQ(answer(true), answer(false));
}

TEST_F(CudaAdapters, WhatDoesNotFitIsRefused) {
  const Model& m = kModels[0];
  Folder folder("adapters");
  Drive drive(on_gpu(m.name), 256, 2, 256);
  const std::string path = write_adapter(folder.path / "a", m.sizes, 16, false, 1);
  const auto refused = drive.runner->load_adapter(path, 300000);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.status().message().find("lora_memory"), std::string::npos) << refused.status().message();
  const auto other =
      drive.runner->load_adapter(write_adapter(folder.path / "b", {1, 64, 64, 64, 64}, 4, false, 1), kRoom);
  EXPECT_FALSE(other.ok());
  EXPECT_TRUE(load(drive, path));
}

// ---- the two products by themselves

struct Shape {
  int64_t k, n;
  std::vector<std::array<int64_t, 3>> parts;  // first, rows, rank
  bool stretched;
};

TEST_F(CudaAdapters, ProductsAreTheHosts) {
  const std::vector<Shape> shapes = {{64, 96, {{0, 64, 4}, {64, 32, 4}}, false},
                                     {576, 1000, {{8, 700, 16}, {709, 100, 33}}, true},
                                     {4096, 6144, {{0, 4096, 16}, {4096, 1024, 16}, {5120, 1024, 16}}, false},
                                     {14336, 512, {{0, 512, 256}}, true}};
  for (const Shape& s : shapes)
    for (int64_t rows : {1, 7, 70})
      for (bool half : {false, true}) {
        if (s.stretched && half && rows > 7) continue;
        SCOPED_TRACE(testing::Message() << s.k << " " << s.n << " rows " << rows << " half " << half);
        std::vector<float> x = formula("x", rows * s.k, 1), y = formula("y", rows * s.n, 1), want(y.begin(), y.end());
        std::vector<uint16_t> x_half, y_half;
        for (float& f : x) x_half.push_back(f32_to_bf16(f)), f = bf16_to_f32(x_half.back());
        for (float f : y) y_half.push_back(f32_to_bf16(f));
        const bool saved = s.stretched && !half;
        std::vector<float> before = formula("before", rows * s.n, 1);

        cuda::LowRankWeight w{};
        std::deque<DeviceMemory> memory;
        auto room = [&](int64_t bytes) -> void* {
          EXPECT_TRUE(memory.emplace_back().allocate(size_t(bytes)).ok());
          return memory.back().get();
        };
        auto up = [&](const void* from, size_t bytes) -> void* {
          EXPECT_TRUE(memory.emplace_back().upload(from, bytes).ok());
          return memory.back().get();
        };
        int64_t ranks = 0, blocks = 0;
        for (const auto& [first, features, rank] : s.parts) ranks += cuda::tiles_of(rank);
        auto* a_tiles = static_cast<std::byte*>(room(ranks * cuda::tiles_of(s.k) * cuda::kFactorTileBytes));
        w.a = a_tiles;
        // Rows 2, 5, 8, .. have no adapter.
        std::vector<int32_t> list;
        for (int32_t r = 0; r < rows; ++r)
          if (r % 3 != 2) list.push_back(r);
        if (half)
          for (size_t i = 0; i < want.size(); ++i) want[i] = bf16_to_f32(y_half[i]);
        for (size_t p = 0; p < s.parts.size(); ++p) {
          const auto& [first, features, rank] = s.parts[p];
          const std::vector<float> a = formula(cat("a", p), rank * s.k, 2 / std::sqrt(float(s.k)));
          const std::vector<float> b = formula(cat("b", p), features * rank, 1 / std::sqrt(float(rank)));
          std::vector<float> factors = formula(cat("f", p), features, 0.5f);
          for (float& f : factors) f += 1;
          cuda::LowRankPart& part = w.part[w.parts++];
          void* b_tiles = room(cuda::tiles_of(features) * cuda::tiles_of(rank) * cuda::kFactorTileBytes);
          const auto* by = s.stretched ? static_cast<const float*>(up(factors.data(), factors.size() * 4)) : nullptr;
          part = {b_tiles, by, int32_t(first), int32_t(features), int32_t(cuda::tiles_of(rank)), w.ranks};
          cuda::launch_pack_factor(static_cast<const float*>(up(a.data(), a.size() * 4)), rank, s.k, 1, nullptr,
                                   a_tiles + w.ranks * cuda::tiles_of(s.k) * cuda::kFactorTileBytes, nullptr);
          cuda::launch_pack_factor(static_cast<const float*>(up(b.data(), b.size() * 4)), features, rank, 0.5f, by,
                                   b_tiles, nullptr);
          w.ranks += part.ranks;
          blocks += (features + cuda::kBlockFeatures - 1) / cuda::kBlockFeatures;
          for (int32_t r : list) {
            std::vector<double> reduced;
            for (int64_t i = 0; i < rank; ++i) {
              double sum = 0;
              for (int64_t j = 0; j < s.k; ++j)
                sum += double(x[size_t(r * s.k + j)]) * double(bf16_to_f32(f32_to_bf16(a[size_t(i * s.k + j)])));
              reduced.push_back(sum);
            }
            for (int64_t f = 0; f < features; ++f) {
              float& to = want[size_t(r * s.n + first + f)];
              const double by_factor = s.stretched ? double(factors[size_t(f)]) : 1;
              double sum = double(to) * by_factor;
              for (int64_t i = 0; i < rank; ++i)
                sum += reduced[size_t(i)] *
                       double(bf16_to_f32(f32_to_bf16(float(by_factor) * 0.5f * b[size_t(f * rank + i)])));
              to = float(sum);
            }
          }
        }
        const int64_t tile_rows = rows > 7 ? cuda::kManyTileRows : cuda::kFewTileRows;
        const auto* weights = static_cast<const cuda::LowRankWeight*>(up(&w, sizeof(w)));
        std::vector<cuda::LowRankTile> tiles;
        for (int32_t first = 0; first < int32_t(list.size()); first += int32_t(tile_rows))
          tiles.push_back({weights, first, std::min(int32_t(tile_rows), int32_t(list.size()) - first)});
        tiles.push_back({nullptr, 0, 0});
        cuda::LowRankProduct p;
        p.tiles = static_cast<const cuda::LowRankTile*>(up(tiles.data(), tiles.size() * sizeof(tiles[0])));
        p.rows = static_cast<const int32_t*>(up(list.data(), list.size() * 4));
        p.count = int64_t(tiles.size()), p.tile_rows = tile_rows;
        p.in = up(x_half.data(), x_half.size() * 2), p.k = s.k;
        p.ranks = ranks + 1, p.blocks = blocks + 1;  // as where another adapter has more
        p.sums = static_cast<float*>(room(cuda::low_rank_splits(s.k) * p.count * tile_rows * p.ranks * 16 * 4));
        p.half = half, p.n = s.n;
        p.out = half ? up(y_half.data(), y_half.size() * 2) : up(saved ? before.data() : y.data(), y.size() * 4);
        if (saved) {
          p.saved = static_cast<float*>(room(rows * s.n * 4));
          cuda::launch_take_out(p, nullptr);
          std::vector<float> now(y.size());
          ASSERT_EQ(cudaMemcpy(now.data(), p.out, now.size() * 4, cudaMemcpyDefault), cudaSuccess);
          for (size_t i = 0; i < now.size(); ++i) now[i] += y[i], want[i] += before[i];
          ASSERT_EQ(cudaMemcpy(p.out, now.data(), now.size() * 4, cudaMemcpyDefault), cudaSuccess);
        }
        cuda::launch_low_rank(p, nullptr);
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        std::vector<uint8_t> got(size_t(rows * s.n) * (half ? 2 : 4));
        ASSERT_EQ(cudaMemcpy(got.data(), p.out, got.size(), cudaMemcpyDefault), cudaSuccess);
        double off = 0;
        for (size_t i = 0; i < want.size(); ++i) {
          const float g =
              half ? bf16_to_f32(reinterpret_cast<uint16_t*>(got.data())[i]) : reinterpret_cast<float*>(got.data())[i];
          off = std::max(off, std::fabs(double(g) - double(want[i])) / (1 + std::fabs(double(want[i]))));
        }
        EXPECT_LT(off, 0.02);
      }
}

}  // namespace
}  // namespace kvasir::model
