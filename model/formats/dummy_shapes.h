// Shapes of models that people ask about, for dummy:NAME: what one would measure, without its files.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "model/config.h"

namespace kvasir::model {

struct DummyShape {
  std::string_view name, architecture;
  int32_t layers, hidden, ffn, heads, kv_heads, head_dim, vocab, context;
  double rope_base = 10000;
  int32_t window = 0;
  int32_t experts = 0, experts_used = 0, expert_ffn = 0, shared_ffn = 0;
  int32_t dense_layers = 0;  // before those with experts
  int32_t linear_heads = 0;  // of values, each of 128, with 16 of keys
  LatentConfig latent = {};

  void apply(ModelConfig& c) const;
};

std::span<const DummyShape> dummy_shapes();
const DummyShape* find_dummy_shape(std::string_view name);  // null: none

}  // namespace kvasir::model
