// Adapters: as PEFT merges them, whichever file they and their model come from; each row its own, to the bit; and what
// is broken or not served is refused by name.
#include "tests/model/adapters.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include <cmath>
#include <limits>

#include "core/dtype.h"
#include "model/cpu/kernels.h"
#include "model/formats/adapter_file.h"
#include "tests/model/drive.h"

namespace kvasir::model {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using Ids = std::vector<int32_t>;
constexpr int64_t kRoom = 64 << 20;

const json& networks() {
  static const json all = fixture("architectures.json");
  return all;
}
const json& adapters() {
  static const json all = fixture("adapters.json");
  return all;
}
const json& network(const std::string& name) {
  for (const json& one : networks()["cases"])
    if (one["name"] == name) return one;
  ADD_FAILURE() << name;
  return networks();
}
const json& adapter(const std::string& name) {
  for (const json& one : adapters()["cases"])
    if (one["name"] == name) return one;
  ADD_FAILURE() << name;
  return adapters();
}

AdapterPtr load(Drive& drive, const std::string& path) {
  auto loaded = drive.runner->load_adapter(path, kRoom);
  EXPECT_TRUE(loaded.ok()) << loaded.status().message();
  return loaded.ok() ? *loaded : nullptr;
}

// The greatest difference of a log-probability from the stored rows.
double worst(Drive& drive, const Adapter* adapter, const json& logprobs) {
  SamplingParams params = Drive::greedy();
  params.logprobs = 256;
  const auto rows = drive.step({{0, 0, networks()["tokens"], true, adapter}}, params);
  double out = 0;
  for (size_t i = 0; i < networks()["rows"].size(); ++i) {
    const std::vector<double> want = logprobs[i];
    for (const TokenLogprob& t : rows[networks()["rows"][i].get<size_t>()].top)
      out = std::max(out, std::fabs(t.logprob - want[size_t(t.token)]));
  }
  return out;
}

TEST(Adapters, AreAsPeftMergesThem) {
  for (const json& one : adapters()["cases"]) {
    SCOPED_TRACE(one["name"].get<std::string>());
    const json& base = network(one["network"]);
    Folder folder("adapters");
    StoredNetwork(base).write_folder(folder);
    const std::string path = StoredAdapter(one).write(folder.path / "adapter");
    Drive drive(folder.path.string(), 2, true, 64);
    const AdapterPtr loaded = load(drive, path);
    ASSERT_TRUE(loaded);
    EXPECT_LT(worst(drive, loaded.get(), one["logprobs"]), 1e-3);
    EXPECT_LT(worst(drive, nullptr, base["logprobs"]), 1e-3);
    EXPECT_GT(worst(drive, nullptr, one["logprobs"]), 0.1) << "the adapter changes nothing: a test of nothing";
  }
}

TEST(Adapters, AModelFromGgufTakesBothKinds) {
  for (const char* name : {"plain", "rsLoRA", "DoRA", "plain of granite"}) {
    SCOPED_TRACE(name);
    const json& one = adapter(name);
    Folder folder("adapters");
    folder.write("m.gguf", StoredNetwork(network(one["network"])).gguf());
    Drive drive((folder.path / "m.gguf").string(), 2, true, 64);
    const AdapterPtr loaded = load(drive, StoredAdapter(one).write(folder.path / "adapter"));
    ASSERT_TRUE(loaded);
    EXPECT_LT(worst(drive, loaded.get(), one["logprobs"]), 1e-3);
  }
  const json& one = adapter("plain");
  Folder folder("adapters");
  StoredNetwork(network("llama")).write_folder(folder);
  folder.write("adapter.gguf", StoredAdapter(one).gguf(4, 2));
  folder.write("m.gguf", StoredNetwork(network("llama")).gguf());
  for (const char* model : {"", "m.gguf"}) {
    SCOPED_TRACE(model);
    Drive drive((folder.path / model).string(), 2, true, 64);
    const AdapterPtr loaded = load(drive, (folder.path / "adapter.gguf").string());
    ASSERT_TRUE(loaded);
    EXPECT_LT(worst(drive, loaded.get(), one["logprobs"]), 1e-3);
  }
}

// Each rank has its rows, or columns, of an adapter as it has them of the weights.
TEST(Adapters, SeveralRanksAreAsPeftMergesThem) {
  for (const json& one : adapters()["cases"]) {
    if (one["network"] == "deepseek_v3") continue;  // latent attention is not split
    Folder folder("adapters");
    StoredNetwork(network(one["network"])).write_folder(folder);
    const std::string path = StoredAdapter(one).write(folder.path / "adapter");
    const bool stretches = one["config"].value("use_dora", false);
    for (int32_t ranks : {2, 4}) {
      SCOPED_TRACE(one["name"].get<std::string>() + " over " + std::to_string(ranks));
      RunnerOptions o;
      o.model = folder.path.string(), o.ranks = ranks, o.precise = true, o.threads = 2, o.device = "cpu";
      Drive drive(o, 64, 1, 2048);
      if (stretches) {
        const auto loaded = drive.runner->load_adapter(path, kRoom);
        ASSERT_FALSE(loaded.ok());
        EXPECT_THAT(loaded.status().message(), HasSubstr("has magnitudes (DoRA)"));
        continue;
      }
      const AdapterPtr loaded = load(drive, path);
      ASSERT_TRUE(loaded);
      EXPECT_LT(worst(drive, loaded.get(), one["logprobs"]), 1e-3);
      EXPECT_GT(worst(drive, nullptr, one["logprobs"]), 0.1);
    }
  }
}

struct Answer {
  Ids tokens;
  std::vector<float> logprobs;
  bool operator==(const Answer&) const = default;
};

// Greedy; the prompt in chunks, then decodes beside others.
Answer answer(Drive& drive, const Adapter* adapter, const Ids& prompt, size_t chunk, const std::vector<Piece>& beside) {
  Answer out;
  Sampled s;
  for (size_t i = 0; i < prompt.size(); i += chunk) {
    std::vector<Piece> pieces{{0, int64_t(i), {}, false, adapter}};
    pieces[0].tokens.assign(prompt.begin() + int64_t(i), prompt.begin() + int64_t(std::min(prompt.size(), i + chunk)));
    if (pieces[0].tokens.size() > 1) pieces.insert(pieces.end(), beside.begin(), beside.end());
    s = drive.step(pieces)[0];
  }
  for (int64_t at = int64_t(prompt.size()); out.tokens.size() < 8; ++at) {
    out.tokens.push_back(s.token), out.logprobs.push_back(s.logprob);
    std::vector<Piece> pieces{{0, at, {s.token}, false, adapter}};
    pieces.insert(pieces.end(), beside.begin(), beside.end());
    s = drive.step(pieces)[0];
  }
  return out;
}

TEST(Adapters, AloneChunkedAndInAMixedBatchAreEqualToTheBit) {
  const Ids tokens = networks()["tokens"], prompt(tokens.begin(), tokens.begin() + 30);
  Folder folder("adapters");
  StoredNetwork(network("llama")).write_folder(folder);
  for (bool precise : {false, true}) {
    Drive two(folder.path.string(), 2, precise, 64, 4), single(folder.path.string(), 1, precise, 64, 4);
    std::vector<AdapterPtr> held{nullptr}, held_single{nullptr};
    for (const char* name : {"plain", "rsLoRA", "DoRA"}) {
      const std::string path = StoredAdapter(adapter(name)).write(folder.path / name);
      held.push_back(load(two, path)), held_single.push_back(load(single, path));
    }
    std::vector<Answer> seen;
    for (size_t i = 0; i < held.size(); ++i) {
      SCOPED_TRACE(i);
      std::vector<Piece> beside;  // one of each other adapter, another of this one, and one of none
      for (int s = 1; s < 4; ++s)
        beside.push_back({s, 0, Ids(tokens.begin() + s, tokens.begin() + 12 + 5 * s), false,
                          held[(i + size_t(s) - 1) % held.size()].get()});
      const Answer expected = answer(two, held[i].get(), prompt, 1000, {});
      EXPECT_EQ(answer(two, held[i].get(), prompt, 7, {}), expected);
      EXPECT_EQ(answer(two, held[i].get(), prompt, 1000, beside), expected);
      EXPECT_EQ(answer(two, held[i].get(), prompt, 7, beside), expected);
      EXPECT_EQ(answer(single, held_single[i].get(), prompt, 16, {}), expected);
      seen.push_back(expected);
    }
    for (size_t i = 0; i < seen.size(); ++i)
      for (size_t j = 0; j < i; ++j) EXPECT_FALSE(seen[i] == seen[j]) << i << " and " << j;
  }
}

TEST(Adapters, EveryInstructionSetHasTheSameBits) {
  constexpr int64_t kDepth = 67, kOutputs = 48;
  std::vector<float> wide = formula("factor", kDepth * kOutputs, 2), x = formula("x", 2 * kDepth, 2);
  std::vector<uint16_t> half;
  for (float f : wide) half.push_back(f32_to_bf16(f));
  for (bool is_half : {false, true}) {
    const cpu::Factor f{reinterpret_cast<const uint8_t*>(is_half ? static_cast<const void*>(half.data()) : wide.data()),
                        is_half, kDepth, kOutputs};
    std::vector<float> expected;
    for (const cpu::Kernels* k : cpu::runnable_kernels())
      for (int rows : {1, 2}) {  // both rows alone, and together
        std::vector<float> y(80, 0.5f);
        for (int t = 0; t < 2; t += rows) {
          const float* from[] = {x.data() + t * kDepth, x.data() + kDepth};
          float* to[] = {y.data() + t * 40, y.data() + 40};
          k->low_rank(f, 5, 37, from, rows, to);
        }
        if (expected.empty()) expected = y;
        EXPECT_EQ(y, expected) << k->name << ", " << rows << " rows at once";
        EXPECT_EQ(y[37], 0.5f);
      }
    double sum = 0.5;
    for (int64_t d = 0; d < kDepth; ++d)
      sum += double(x[size_t(d)]) *
             (is_half ? double(bf16_to_f32(half[size_t(d * 16 + 5)])) : double(wide[size_t(d * 16 + 5)]));
    EXPECT_NEAR(expected[0], sum, 1e-4);
  }
}

// ---- what is refused

std::string refusal(const json& config, const std::vector<StoredTensor>& tensors, size_t bytes = SIZE_MAX) {
  const std::string text = safetensors_of(tensors);
  auto got =
      peft_adapter("folder", config.dump(), {text.begin(), text.begin() + int64_t(std::min(bytes, text.size()))});
  return got.ok() ? "" : got.status().message();
}

TEST(Adapters, ConfigurationsThatAreNotServedAreRefusedByName) {
  const StoredAdapter plain(adapter("plain"));
  EXPECT_EQ(refusal(plain.config, plain.tensors), "");
  const std::vector<std::pair<json, const char*>> cases = {
      {{{"peft_type", "IA3"}}, "peft_type is \"IA3\""},
      {{{"modules_to_save", {"lm_head"}}}, "modules_to_save is [\"lm_head\"]"},
      {{{"bias", "all"}}, "bias is \"all\""},
      {{{"lora_bias", true}}, "lora_bias is true"},
      {{{"init_lora_weights", "pissa_niter_4"}}, "init_lora_weights is \"pissa_niter_4\""},
      {{{"layer_replication", {{0, 2}}}}, "layer_replication"},
      {{{"trainable_token_indices", {1}}}, "trainable_token_indices"},
      {{{"target_parameters", {"experts.gate_up_proj"}}}, "target_parameters"},
      {{{"r", "4"}}, "r is missing or no number"},
      {{{"lora_alpha", nullptr}}, "lora_alpha is missing"},
      {{{"use_dora", 1}}, "use_dora is neither true nor false"},
      {{{"use_dora", true}}, "has no lora_magnitude_vector"},
      {{{"r", 5}}, "has rank 4 where"},
      {{{"r", 0}}, "is 0; it must be from 1 to 256"},
      {{{"r", 257}}, "is 257; it must be from 1 to 256"},
      {{{"rank_pattern", {{"(q|k)_proj", 4}}}}, "rank_pattern has '(q|k)_proj'"},
      {{{"alpha_pattern", {{"q_proj", "8"}}}}, "alpha_pattern.q_proj is no number"}};
  for (const auto& [change, want] : cases) {
    json config = plain.config;
    config.update(change);
    EXPECT_THAT(refusal(config, plain.tensors), HasSubstr(want));
  }
  EXPECT_THAT(peft_adapter("folder", "[", {}).status().message(), HasSubstr("is not a JSON object"));
}

TEST(Adapters, BrokenTensorsAreRefusedByName) {
  const StoredAdapter plain(adapter("plain"));
  auto with = [&](const std::function<void(std::vector<StoredTensor>&)>& change) {
    std::vector<StoredTensor> tensors = plain.tensors;
    change(tensors);
    return refusal(plain.config, tensors);
  };
  const std::string first = plain.tensors[0].name;
  EXPECT_THAT(with([](auto& t) { t[0].values[3] = NAN; }), AllOf(HasSubstr(first), HasSubstr("NaN or Inf")));
  EXPECT_THAT(with([](auto& t) { t[1].values[3] = std::numeric_limits<float>::infinity(); }), HasSubstr("NaN or Inf"));
  EXPECT_THAT(with([](auto& t) { t.erase(t.begin()); }), HasSubstr("has only one of its two tensors"));
  EXPECT_THAT(with([](auto& t) { t[0].shape.push_back(1); }), HasSubstr("has 3 dimensions"));
  EXPECT_THAT(with([](auto& t) { std::swap(t[1].shape[0], t[1].shape[1]); }), HasSubstr("they must be equal"));
  EXPECT_THAT(with([](auto& t) { t[0].name = "base_model.model.model.embed_tokens.lora_embedding_A"; }),
              HasSubstr("lora_embedding_A is not served"));
  EXPECT_THAT(with([](auto& t) { t[0].name = "base_model.model.lm_head.weight"; }), HasSubstr("is not served"));
  EXPECT_THAT(with([](auto& t) { t.clear(); }), HasSubstr("holds no module"));
  const size_t whole = safetensors_of(plain.tensors).size();
  for (size_t bytes : {size_t(0), size_t(7), size_t(100), whole / 2, whole - 1})
    EXPECT_NE(refusal(plain.config, plain.tensors, bytes), "") << bytes;
}

TEST(Adapters, WhatDoesNotFitTheModelIsRefusedByName) {
  Folder folder("adapters");
  StoredNetwork(network("llama")).write_folder(folder);
  Drive drive(folder.path.string(), 1, true, 64);
  auto refused = [&](const std::function<void(StoredAdapter&)>& change, int64_t room = kRoom) {
    StoredAdapter changed(adapter("plain"));
    change(changed);
    auto got = drive.runner->load_adapter(changed.write(folder.path / "changed"), room);
    EXPECT_FALSE(got.ok());
    return got.status().message();
  };
  EXPECT_THAT(refused([](auto& a) {
                for (StoredTensor& t : a.tensors)
                  if (const size_t at = t.name.find("q_proj"); at != std::string::npos) t.name.replace(at, 6, "x_proj");
              }),
              AllOf(HasSubstr("x_proj"), HasSubstr("q, k, v, o, gate, up, down")));
  EXPECT_THAT(refused([](auto& a) {
                for (StoredTensor& t : a.tensors)
                  if (const size_t at = t.name.find("layers.3."); at != std::string::npos) t.name[at + 7] = '9';
              }),
              HasSubstr("layers.9."));
  EXPECT_THAT(refused([](auto& a) {
                for (StoredTensor& t : a.tensors)
                  if (t.name.find("down_proj.lora_A") != std::string::npos) t.shape[1] -= 16, t.values.resize(4 * 80);
              }),
              HasSubstr("the model's is 64 x 96"));
  EXPECT_THAT(refused([](auto&) {}, 1000), HasSubstr("lora_memory"));
  EXPECT_THAT(refused([](auto&) {}, 20000), HasSubstr("there is room for 20000"));
  EXPECT_THAT(drive.runner->load_adapter((folder.path / "nowhere").string(), kRoom).status().message(),
              HasSubstr("does not exist"));
  EXPECT_THAT(drive.runner->load_adapter(folder.path.string(), kRoom).status().message(),
              HasSubstr("adapter_config.json is not there"));
  // And after all that it answers as before.
  EXPECT_LT(worst(drive, nullptr, network("llama")["logprobs"]), 1e-3);
}

TEST(Adapters, GgufFilesThatAreNoAdaptersAreRefused) {
  const std::string good = StoredAdapter(adapter("plain")).gguf(4, 2);
  auto refused = [](std::string text) { return gguf_adapter("a.gguf", {text.begin(), text.end()}).status().message(); };
  EXPECT_EQ(refused(good), "");
  EXPECT_THAT(refused(StoredNetwork(network("llama")).gguf()), HasSubstr("general.type must be adapter"));
  auto with = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos);
    return refused(text.replace(at, from.size(), to));
  };
  EXPECT_THAT(with("adapter.lora.alpha", "adapter.lora.alphx"), HasSubstr("adapter.lora.alpha is missing"));
  EXPECT_THAT(with("weight.lora_a", "weight.lora_x"), HasSubstr("is not served"));
  EXPECT_NE(refused(good.substr(0, good.size() / 2)), "");
  Folder folder("adapters");
  StoredNetwork(network("qwen3")).write_folder(folder);
  folder.write("adapter.gguf", good);
  Drive drive(folder.path.string(), 1, true, 64);
  EXPECT_THAT(drive.runner->load_adapter((folder.path / "adapter.gguf").string(), kRoom).status().message(),
              HasSubstr("general.architecture is llama; the model's is qwen3"));
}

TEST(Adapters, ExpertsAndEncodersTakeNone) {
  Folder folder("adapters");
  StoredNetwork(network("mixtral")).write_folder(folder);
  Drive drive(folder.path.string(), 1, true, 64);
  StoredAdapter experts(adapter("attention of mixtral"));
  for (StoredTensor& t : experts.tensors)
    if (const size_t at = t.name.find("self_attn.q_proj"); at != std::string::npos)
      t.name.replace(at, 16, "mlp.experts.0.down_proj");
  EXPECT_THAT(drive.runner->load_adapter(experts.write(folder.path / "adapter"), kRoom).status().message(),
              HasSubstr("those of experts and routers are not"));

  Folder latent("adapters-latent");
  StoredNetwork(network("deepseek_v3")).write_folder(latent);
  Drive deepseek(latent.path.string(), 1, true, 64);
  StoredAdapter heads(adapter("latent of deepseek_v3"));
  for (StoredTensor& t : heads.tensors)
    if (const size_t at = t.name.find("q_b_proj"); at != std::string::npos) t.name.replace(at, 8, "kv_b_proj");
  EXPECT_THAT(deepseek.runner->load_adapter(heads.write(latent.path / "adapter"), kRoom).status().message(),
              AllOf(HasSubstr("kv_b_proj"), HasSubstr("q or q_a and q_b, kv_a, o, gate, up, down")));

  const json encoders = fixture("embeddings.json");
  Folder bert("adapters-bert");
  StoredNetwork(encoders["encoders"][0]).write_folder(bert);
  Drive encoder(bert.path.string(), 1, true, 64);
  EXPECT_THAT(encoder.runner->load_adapter(experts.write(bert.path / "adapter"), kRoom).status().message(),
              HasSubstr("the architecture bert"));
}

// A file with any of its bytes changed or cut is served or refused, and never more.
TEST(Adapters, ChangedBytesAreServedOrRefused) {
  const StoredAdapter plain(adapter("rsLoRA"));
  const std::string safe = safetensors_of(plain.tensors), gguf = StoredAdapter(adapter("plain")).gguf(4, 2);
  const std::string config = plain.config.dump();
  uint64_t state = 88172645463325252u;
  auto random = [&](size_t n) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return size_t(state % n);
  };
  for (int round = 0; round < 3000; ++round) {
    auto changed = [&](std::string text) {
      const size_t head = std::min<size_t>(text.size(), 6000);
      for (size_t n = 1 + random(3); n > 0; --n) text[random(random(2) ? head : text.size())] = char(random(256));
      if (random(8) == 0) text.resize(random(text.size()));
      return text;
    };
    const std::string a = changed(safe), b = changed(gguf), c = random(2) ? changed(config) : config;
    auto peft = peft_adapter("p", c, {a.begin(), a.end()});
    auto other = gguf_adapter("g", {b.begin(), b.end()});
    for (auto* got : {&peft, &other})
      if (got->ok())
        for (const AdapterModule& m : (*got)->modules) ASSERT_TRUE(m.a.rows == m.b.cols && m.a.rows <= 256);
  }
}

}  // namespace
}  // namespace kvasir::model
