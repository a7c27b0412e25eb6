#include "model/formats/dummy_shapes.h"

#include <algorithm>

namespace kvasir::model {
namespace {

constexpr LatentConfig kV2{.rank = 512, .rope = 64, .nope = 128, .value = 128},
    kV3{.rank = 512, .rope = 64, .nope = 128, .value = 128, .query_rank = 1536},
    kGlm{.rank = 512, .rope = 64, .nope = 192, .value = 256, .query_rank = 768};

constexpr DummyShape kShapes[] = {
    {"smollm2-135m", "llama", 30, 576, 1536, 9, 3, 64, 49152, 8192, 100000},
    {"llama-3.2-1b", "llama", 16, 2048, 8192, 32, 8, 64, 128256, 131072, 500000},
    {"llama-3.2-3b", "llama", 28, 3072, 8192, 24, 8, 128, 128256, 131072, 500000},
    {"llama-3.1-8b", "llama", 32, 4096, 14336, 32, 8, 128, 128256, 131072, 500000},
    {"llama-3.3-70b", "llama", 80, 8192, 28672, 64, 8, 128, 128256, 131072, 500000},
    {"mistral-7b", "mistral", 32, 4096, 14336, 32, 8, 128, 32768, 32768, 1e6},
    {"ministral-3-8b", "ministral3", 34, 4096, 14336, 32, 8, 128, 131072, 262144, 1e6},
    {"qwen2.5-0.5b", "qwen2", 24, 896, 4864, 14, 2, 64, 151936, 32768, 1e6},
    {"qwen2.5-7b", "qwen2", 28, 3584, 18944, 28, 4, 128, 152064, 32768, 1e6},
    {"qwen3-0.6b", "qwen3", 28, 1024, 3072, 16, 8, 128, 151936, 40960, 1e6},
    {"qwen3-4b", "qwen3", 36, 2560, 9728, 32, 8, 128, 151936, 40960, 1e6},
    {"qwen3-8b", "qwen3", 36, 4096, 12288, 32, 8, 128, 151936, 40960, 1e6},
    {"qwen3-32b", "qwen3", 64, 5120, 25600, 64, 8, 128, 151936, 40960, 1e6},
    {"gemma-2-9b", "gemma2", 42, 3584, 14336, 16, 8, 256, 256000, 8192, 10000, 4096},
    {"gemma-3-4b", "gemma3", 34, 2560, 10240, 8, 4, 256, 262208, 131072, 1e6, 1024},
    {"phi-4", "phi3", 40, 5120, 17920, 40, 10, 128, 100352, 16384, 250000},
    {"smollm3-3b", "smollm3", 36, 2048, 11008, 16, 4, 128, 128256, 65536, 5e6},
    {"olmo-2-7b", "olmo2", 32, 4096, 11008, 32, 32, 128, 100352, 4096, 500000},
    {"granite-3.3-8b", "granite", 40, 4096, 12800, 32, 8, 128, 49159, 131072, 1e7},
    {"seed-oss-36b", "seed_oss", 64, 5120, 27648, 80, 8, 128, 155136, 524288, 1e7},
    {"mixtral-8x7b", "mixtral", 32, 4096, 14336, 32, 8, 128, 32000, 32768, 1e6, 0, 8, 2, 14336},
    {"qwen1.5-moe-a2.7b", "qwen2_moe", 24, 2048, 5632, 16, 16, 128, 151936, 8192, 1e6, 0, 60, 4, 1408, 5632},
    {"qwen3-30b-a3b", "qwen3_moe", 48, 2048, 6144, 32, 4, 128, 151936, 40960, 1e6, 0, 128, 8, 768},
    {"qwen3-235b-a22b", "qwen3_moe", 94, 4096, 12288, 64, 4, 128, 151936, 40960, 1e6, 0, 128, 8, 1536},
    {"gpt-oss-20b", "gpt_oss", 24, 2880, 2880, 64, 8, 64, 201088, 131072, 150000, 128, 32, 4, 2880},
    {"gpt-oss-120b", "gpt_oss", 36, 2880, 2880, 64, 8, 64, 201088, 131072, 150000, 128, 128, 4, 2880},
    {"glm-4.5-air", "glm4_moe", 46, 4096, 10944, 96, 8, 128, 151552, 131072, 1e6, 0, 128, 8, 1408, 1408},
    {"qwen3-next-80b-a3b", "qwen3_next", 48, 2048, 5120, 16, 2, 256, 151936, 262144, 1e7, 0, 512, 10, 512, 512, 0, 32},
    {"qwen3.5-4b", "qwen3_5", 32, 2560, 9216, 16, 4, 256, 248320, 262144, 1e7, 0, 0, 0, 0, 0, 0, 32},
    {"qwen3.5-9b", "qwen3_5", 32, 4096, 12288, 16, 4, 256, 248320, 262144, 1e7, 0, 0, 0, 0, 0, 0, 32},
    {"qwen3.5-35b-a3b", "qwen3_5_moe", 40, 2048, 512, 16, 2, 256, 248320, 262144, 1e7, 0, 256, 8, 512, 512, 0, 32},
    {"minimax-m2", "minimax_m2", 62, 3072, 1536, 48, 8, 128, 200064, 196608, 5e6, 0, 256, 8, 1536},
    {"deepseek-v2-lite", "deepseek_v2", 27, 2048, 10944, 16, 16, 128, 102400, 163840, 10000, 0, 64, 6, 1408, 2816, 1, 0,
     kV2},
    {"deepseek-v3", "deepseek_v3", 61, 7168, 18432, 128, 128, 128, 129280, 163840, 10000, 0, 256, 8, 2048, 2048, 3, 0,
     kV3},
    {"kimi-k2", "kimi_k2", 61, 7168, 18432, 64, 64, 128, 163840, 131072, 50000, 0, 384, 8, 2048, 2048, 1, 0, kV3},
    {"glm-4.7-flash", "glm4_moe_lite", 47, 2048, 10240, 20, 20, 128, 154880, 202752, 1e6, 0, 64, 4, 1536, 1536, 1, 0,
     kGlm},
};

}  // namespace

void DummyShape::apply(ModelConfig& c) const {
  c.name = name;
  c.layers = layers, c.hidden = hidden, c.ffn = ffn, c.heads = heads, c.kv_heads = kv_heads, c.head_dim = head_dim;
  c.vocab = vocab, c.context = context, c.window = window;
  c.rope.base = rope_base;
  c.latent = latent;
  if (linear_heads > 0) {
    c.linear.key_heads = 16, c.linear.value_heads = linear_heads;
    c.linear.key_dim = c.linear.value_dim = 128;
  }
  if (experts == 0) return;
  c.experts.routing.experts = experts, c.experts.routing.used = experts_used;
  c.experts.ffn = expert_ffn, c.experts.shared_ffn = shared_ffn;
  if (dense_layers == 0) return;
  c.experts.dense.assign(size_t(layers), false);
  std::fill_n(c.experts.dense.begin(), dense_layers, true);
}

std::span<const DummyShape> dummy_shapes() { return kShapes; }

const DummyShape* find_dummy_shape(std::string_view name) {
  auto it = std::find_if(std::begin(kShapes), std::end(kShapes), [&](const DummyShape& s) { return s.name == name; });
  return it == std::end(kShapes) ? nullptr : it;
}

}  // namespace kvasir::model
