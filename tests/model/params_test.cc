// A folder of ppl.llm: params.json beside the checkpoint, the same network as its config.json would be; what is asked
// for and not served is refused by name.
#include <gmock/gmock.h>
#include <unistd.h>

#include "model/config.h"
#include "tests/model/drive.h"
#include "tests/model/small_network.h"

namespace kvasir::model {
namespace {

using nlohmann::json;

json small() {
  return {{"hidden_dim", 64},  {"intermediate_dim", 96}, {"num_layers", 2},    {"num_heads", 4},
          {"num_kv_heads", 2}, {"vocab_size", 64},       {"norm_eps", 0.0001}, {"rope_theta", 5000.0}};
}
Result<ModelConfig> read(const json& params) { return config_from_params(params.dump(), "params.json"); }

TEST(Params, EachKeyIsTheModels) {
  json params = small();
  params.update({{"max_position", 777},
                 {"sliding_window", 33},
                 {"head_dim", 32},
                 {"num_experts", 1},
                 {"rope_scaling_type", "linear"},
                 {"rope_scaling_factor", 4.0},
                 {"auto_causal", true}});
  auto c = read(params);
  ASSERT_TRUE(c.ok()) << c.status().message();
  EXPECT_EQ(c->architecture, "llama");
  EXPECT_EQ(c->hidden, 64);
  EXPECT_EQ(c->ffn, 96);
  EXPECT_EQ(c->layers, 2);
  EXPECT_EQ(c->heads, 4);
  EXPECT_EQ(c->kv_heads, 2);
  EXPECT_EQ(c->head_dim, 32);
  EXPECT_EQ(c->vocab, 64);
  EXPECT_EQ(c->context, 777);
  EXPECT_EQ(c->window, 33);
  EXPECT_FLOAT_EQ(c->norm_eps, 0.0001f);
  EXPECT_EQ(c->rope.base, 5000);
  EXPECT_EQ(c->rope.scaling, attention::RopeScaling::linear);
  EXPECT_EQ(c->rope.factor, 4);
}

TEST(Params, WhatIsNotSaidIsAsThere) {
  json params = small();
  for (const char* key : {"num_kv_heads", "norm_eps", "rope_theta"}) params.erase(key);
  auto c = read(params);
  ASSERT_TRUE(c.ok()) << c.status().message();
  EXPECT_EQ(c->kv_heads, 4);
  EXPECT_FLOAT_EQ(c->norm_eps, 1e-5f);
  EXPECT_EQ(c->rope.base, 10000);
}

TEST(Params, WhatItSaysOfTheCacheIsHowItIsServed) {
  json params = small();
  params.update({{"cache_quant_bit", 8},
                 {"cache_quant_group", 8},
                 {"cache_layout", 1},
                 {"cache_mode", 0},
                 {"page_size", 128},
                 {"dynamic_batching", true}});
  auto c = read(params);
  ASSERT_TRUE(c.ok()) << c.status().message();
  EXPECT_EQ(c->kv.dtype, "int8");
  EXPECT_EQ(c->kv.group, 8);
  EXPECT_EQ(c->kv.layout, "1");
  EXPECT_EQ(c->kv_index, "offset");
  EXPECT_EQ(c->page_size, 128);
  params["cache_quant_bit"] = 0;  // then a group means nothing there, too
  params["cache_mode"] = 1;
  c = read(params);
  ASSERT_TRUE(c.ok());
  EXPECT_EQ(c->kv.dtype, "auto");
  EXPECT_EQ(c->kv.group, -1);
  EXPECT_EQ(c->kv_index, "page_table");
}

TEST(Params, WhatIsNotServedIsRefusedByName) {
  struct {
    const char* key;
    json value;
    const char* says;
  } wrong[] = {{"num_experts", 8, "num_experts is 8"},
               {"num_experts", "many", "num_experts"},
               {"auto_causal", false, "auto_causal is false"},
               {"dynamic_batching", false, "dynamic_batching is false"},
               {"cache_quant_bit", 2, "cache_quant_bit is 2; it must be 0, 4 or 8"},
               {"cache_quant_group", 7, "cache_quant_group is 7"},
               {"cache_layout", 4, "cache_layout is 4; it must be 0, 1, 2 or 3"},
               {"cache_mode", "page", "cache_mode is \"page\"; it must be 0 or 1"},
               {"page_size", 0, "page_size is 0; it must be from 1 to 65536"},
               {"page_size", "many", "page_size is \"many\""},
               {"rope_scaling_type", "dynamic", "rope_scaling_type is 'dynamic'"},
               {"rope_scaling_factor", 2.0, "rope_scaling_type is ''"},
               {"num_heads", "four", "num_attention_heads must be a whole number"},
               {"hidden_dim", -1, "hidden_size must be from 0"},
               {"kv_lora_rank", 512, "the key kv_lora_rank is not known"}};
  for (const auto& w : wrong) {
    json params = small();
    params[w.key] = w.value;
    auto c = read(params);
    ASSERT_FALSE(c.ok()) << w.key;
    EXPECT_THAT(c.status().message(), testing::HasSubstr(w.says));
    EXPECT_THAT(c.status().message(), testing::HasSubstr("params.json"));
  }
  for (const char* key : {"hidden_dim", "intermediate_dim", "num_layers", "num_heads", "vocab_size"}) {
    json params = small();
    params.erase(key);
    EXPECT_THAT(read(params).status().message(), testing::HasSubstr(std::string(key) + " is missing"));
  }
  EXPECT_FALSE(config_from_params("[1]", "params.json").ok());
  EXPECT_FALSE(config_from_params("{", "params.json").ok());
}

TEST(Params, AFolderRunsAsWithItsConfig) {
  json config = {{"model_type", "llama"},
                 {"hidden_size", 64},
                 {"intermediate_size", 96},
                 {"num_hidden_layers", 2},
                 {"num_attention_heads", 4},
                 {"num_key_value_heads", 2},
                 {"head_dim", 16},
                 {"vocab_size", 64},
                 {"rms_norm_eps", 0.0001},
                 {"rope_theta", 5000.0},
                 {"max_position_embeddings", 128}};
  json params = small();
  params["max_position"] = 128;
  Folder ours("config"), theirs("params");
  for (const Folder* f : {&ours, &theirs}) {
    config["tie_word_embeddings"] = true;
    write_network(*f, config);
  }
  std::filesystem::remove(theirs.path / "config.json");
  theirs.write("params.json", params.dump());
  auto draw = [](const Folder& folder) {
    Drive drive(folder.path.string(), 1, true, 64);
    return drive.step({{0, 0, {1, 2, 3, 4, 5}}})[0];
  };
  Sampled a = draw(ours), b = draw(theirs);
  EXPECT_EQ(a.token, b.token);
  EXPECT_EQ(a.logprob, b.logprob);
  params["cache_quant_bit"] = 8;
  theirs.write("params.json", params.dump());
  {
    Drive drive(theirs.path.string(), 1, true, 64);
    EXPECT_EQ(drive.runner->info().kv_type, "int8, a float16 scale for each 8");
  }
  // What its graphs came in is not read, and is said to be.
  std::filesystem::remove(theirs.path / "model.safetensors");
  RunnerOptions options;
  options.model = theirs.path.string();
  EXPECT_THAT(load_runner(options).status().message(), testing::HasSubstr("params.json without model.safetensors"));
}

}  // namespace
}  // namespace kvasir::model
