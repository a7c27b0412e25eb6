// Every quantized type, and Gemma 3, against llama.cpp's float32 forward of the same file (make_outside.py).
#include <unistd.h>

#include <cmath>
#include <map>

#include "core/cat.h"
#include "tests/model/drive.h"
#include "tests/model/small_gguf.h"

namespace kvasir::model {
namespace {

using nlohmann::json;

std::vector<Sampled> run(const std::string& model, const json& all, bool precise) {
  Drive drive(model, 2, precise, 64);
  SamplingParams params = Drive::greedy();
  params.logprobs = 64;
  return drive.step({{0, 0, all["tokens"], true}}, params);
}

// The widest difference in log-probability from a row of logits.
double off(const Sampled& got, const std::vector<double>& logits) {
  double sum = 0, most = *std::max_element(logits.begin(), logits.end()), worst = 0;
  for (double v : logits) sum += std::exp(v - most);
  EXPECT_EQ(got.top.size(), logits.size());
  for (const TokenLogprob& t : got.top)
    worst = std::max(worst, std::fabs(t.logprob - (logits[size_t(t.token)] - most - std::log(sum))));
  return worst;
}

TEST(Outside, LogitsAreLlamaCpps) {
  json all = fixture("outside.json");
  ASSERT_EQ(all["cases"].size(), 12u);
  for (auto& one : all["cases"]) {
    Folder folder("outside");
    folder.write("m.gguf", gguf_text(one, all["scales"]));
    auto precise = run((folder.path / "m.gguf").string(), all, true);
    auto integers = run((folder.path / "m.gguf").string(), all, false);
    double worst = 0, worst_integers = 0;
    for (size_t i = 0; i < all["rows"].size(); ++i) {
      worst = std::max(worst, off(precise[all["rows"][i]], one["logits"][i]));
      worst_integers = std::max(worst_integers, off(integers[all["rows"][i]], one["logits"][i]));
    }
    printf("%-16s worst |difference| %.6f float32, %.6f 12-bit\n", one["name"].get<std::string>().c_str(), worst,
           worst_integers);
    EXPECT_LT(worst, 1e-3) << one["name"];
    EXPECT_LT(worst_integers, 0.05) << one["name"];
  }
}

// q, k and v, and a gate and what it opens, of types that kernels multiply differently: what the numbers in float32
// give.
TEST(Outside, TypesBesideOneAnother) {
  const json all = fixture("outside.json");
  json mixed = all["cases"][0], floats = mixed;
  const std::map<std::string, const char*> kinds = {
      {"attn_q", "Q8_0"}, {"attn_k", "Q4_K"}, {"attn_v", "Q6_K"}, {"ffn_gate", "Q5_0"}, {"ffn_up", "Q8_0"}};
  int changed = 0;
  for (size_t i = 0; i < mixed["tensors"].size(); ++i) {
    const std::string name = mixed["tensors"][i][0];
    for (const auto& [part, kind] : kinds)
      if (name.find(cat(".", part, ".")) != std::string::npos) {
        mixed["tensors"][i][1] = kind, ++changed;
        floats["tensors"][i][1] = "F32", floats["tensors"][i].push_back(kind);
      }
  }
  ASSERT_EQ(changed, 10);
  Folder folder("mixed");
  folder.write("mixed.gguf", gguf_text(mixed, all["scales"]));
  folder.write("floats.gguf", gguf_text(floats, all["scales"]));
  const auto expected = run((folder.path / "floats.gguf").string(), all, true);
  for (const bool precise : {true, false}) {
    const auto got = run((folder.path / "mixed.gguf").string(), all, precise);
    double worst = 0;
    for (const int64_t row : all["rows"])
      for (const TokenLogprob& t : got[size_t(row)].top)
        for (const TokenLogprob& e : expected[size_t(row)].top)
          if (t.token == e.token) worst = std::max(worst, double(std::fabs(t.logprob - e.logprob)));
    std::printf("types beside one another, %s: worst %.6f\n", precise ? "float32" : "12-bit", worst);
    EXPECT_LT(worst, precise ? 1e-3 : 0.05);
  }
}

bool same(const std::vector<Sampled>& a, const std::vector<Sampled>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](auto& x, auto& y) { return x.token == y.token && x.logprob == y.logprob; });
}

TEST(Split, AGgufInPartsIsTheWholeOne) {
  json all = fixture("outside.json");
  const json& one = all["cases"][0];
  Folder folder("parts");
  folder.write("m.gguf", gguf_text(one, all["scales"]));
  for (int part = 0; part < 3; ++part)
    folder.write("p-0000" + std::to_string(part + 1) + "-of-00003.gguf", gguf_text(one, all["scales"], part, 3));
  auto whole = run((folder.path / "m.gguf").string(), all, false);
  EXPECT_TRUE(same(whole, run((folder.path / "p-00001-of-00003.gguf").string(), all, false)));
  // A folder of nothing else is named by itself.
  std::filesystem::remove(folder.path / "m.gguf");
  EXPECT_TRUE(same(whole, run(folder.path.string(), all, false)));
}

TEST(Split, SafetensorsInShardsAreTheWholeOnes) {
  json all = fixture("networks.json");
  const json& config = all["cases"][0]["config"];
  Folder whole("whole"), shards("shards");
  write_network(whole, config);
  write_network(shards, config);
  // The one file again as two, each with every other tensor.
  std::ifstream in(whole.path / "model.safetensors", std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(in), {}};
  uint64_t size = 0;
  std::memcpy(&size, text.data(), 8);
  json header = json::parse(text.substr(8, size)), heads[2], map;
  std::string data[2];
  int next = 0;
  for (auto& [name, t] : header.items()) {
    int k = next++ % 2;
    size_t begin = t["data_offsets"][0], end = t["data_offsets"][1], at = data[k].size();
    data[k] += text.substr(8 + size + begin, end - begin);
    heads[k][name] = {{"dtype", t["dtype"]}, {"shape", t["shape"]}, {"data_offsets", {at, data[k].size()}}};
    map[name] = k ? "model-00002-of-00002.safetensors" : "model-00001-of-00002.safetensors";
  }
  for (int k = 0; k < 2; ++k) {
    std::string head = heads[k].dump();
    uint64_t n = head.size();
    shards.write(k ? "model-00002-of-00002.safetensors" : "model-00001-of-00002.safetensors",
                 std::string(reinterpret_cast<const char*>(&n), 8) + head + data[k]);
  }
  std::filesystem::remove(shards.path / "model.safetensors");
  shards.write("model.safetensors.index.json", json{{"weight_map", map}}.dump());
  EXPECT_TRUE(same(run(whole.path.string(), all, false), run(shards.path.string(), all, false)));
}

}  // namespace
}  // namespace kvasir::model
