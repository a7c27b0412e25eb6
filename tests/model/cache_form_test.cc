// What a checkpoint says of its cache: kv_cache_scheme, and the scales beside its weights.
#include "model/cache_form.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "model/load.h"
#include "tests/model/small_network.h"

namespace kvasir::model {
namespace {

using nlohmann::json;

json config(const json& scheme) {
  json c = {{"model_type", "llama"},  {"hidden_size", 32},        {"intermediate_size", 64},
            {"num_hidden_layers", 2}, {"num_attention_heads", 4}, {"num_key_value_heads", 2},
            {"head_dim", 16},         {"vocab_size", 64},         {"tie_word_embeddings", true}};
  if (!scheme.is_null()) c["quantization_config"] = {{"kv_cache_scheme", scheme}};
  return c;
}

const json kFloat8 = {{"num_bits", 8}, {"type", "float"}, {"strategy", "tensor"}, {"dynamic", false}};

Result<kvcache::CacheForm> form_of(const json& scheme, const Shapes& scales, const kvcache::FormWish& wish = {}) {
  Folder folder("cache-form");
  write_network(folder, config(scheme), scales);
  auto files = open_model(folder.path.string());
  if (!files.ok()) return files.status();
  return cache_form_of(files->config, wish, DType::f16, *files->weights);
}

std::string layer(int i, const char* name) { return "model.layers." + std::to_string(i) + ".self_attn." + name; }
float value(const std::string& name) { return formula(name, 1, 0.5)[0] + 1; }

// Queries have one, too, where a checkpoint is for FP8 attention; 1 where it has none.
TEST(CacheForm, Fp8TakesTheCheckpointsScaleOfQueries) {
  Shapes scales;
  for (int i : {0, 1})
    for (const char* name : {"k_scale", "v_scale"}) scales.push_back({layer(i, name), {1}});
  scales.push_back({layer(1, "q_scale"), {1}});
  auto form = form_of(kFloat8, scales);
  ASSERT_TRUE(form.ok()) << form.status().message();
  ASSERT_EQ(form->tensor_scales.size(), 2u);
  EXPECT_EQ(form->tensor_scales[0].q, 1.0f);
  EXPECT_EQ(form->tensor_scales[1].q, value(layer(1, "q_scale")));
}

TEST(CacheForm, Fp8TakesTheCheckpointsScales) {
  for (auto [k, v] :
       {std::pair{"k_scale", "v_scale"}, {"k_proj.k_scale", "v_proj.v_scale"}, {"kv_scale", "kv_scale"}}) {
    Shapes scales;
    for (int i : {0, 1}) {
      scales.push_back({layer(i, k), {1}});
      if (std::string(v) != k) scales.push_back({layer(i, v), {1}});
    }
    auto form = form_of(kFloat8, scales);
    ASSERT_TRUE(form.ok()) << form.status().message();
    EXPECT_EQ(form->dtype, DType::f8_e4m3);
    EXPECT_EQ(form->quant(), kvcache::QuantKind::per_tensor);
    ASSERT_EQ(form->tensor_scales.size(), 2u);
    for (int i : {0, 1}) {
      EXPECT_EQ(form->tensor_scales[size_t(i)].k, value(layer(i, k)));
      EXPECT_EQ(form->tensor_scales[size_t(i)].v, value(layer(i, v)));
    }
  }
}

TEST(CacheForm, WithoutScalesTheyAreOne) {
  kvcache::FormWish wish;
  wish.dtype = "fp8";
  auto form = form_of({}, {}, wish);
  ASSERT_TRUE(form.ok()) << form.status().message();
  for (const auto& s : form->tensor_scales) EXPECT_EQ(s.k + s.v, 2);
  wish.k_scale = 0.5, wish.v_scale = 0.25;
  form = form_of({}, {}, wish);
  ASSERT_TRUE(form.ok());
  for (const auto& s : form->tensor_scales) EXPECT_EQ(s.k + s.v, 0.75f);
}

TEST(CacheForm, TheOperatorsWordIsLast) {
  kvcache::FormWish wish;
  wish.dtype = "int8", wish.group = 16;
  auto form = form_of(kFloat8, {}, wish);
  ASSERT_TRUE(form.ok()) << form.status().message();
  EXPECT_EQ(form->to_string(), "int8, a float16 scale for each 16");
  json int4 = kFloat8;
  int4["num_bits"] = 4;
  form = form_of(int4, {});  // not known: said in the log, and auto is as without it
  ASSERT_TRUE(form.ok());
  EXPECT_EQ(form->dtype, DType::f16);
}

}  // namespace
}  // namespace kvasir::model
