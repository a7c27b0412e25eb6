// StreamingLLM on any network with rope: each layer sees its first tokens and a window, and keys get their positions
// when they are read, by rank among what is seen. So text goes on without end, in the memory of a window.
#pragma once

#include <algorithm>

#include "attention/params.h"
#include "core/cat.h"
#include "core/status.h"
#include "model/config.h"
#include "model/runner.h"

namespace kvasir::model {

constexpr int32_t kWithoutEnd = 1 << 24;  // tokens of a request, where nothing else bounds it

// What the options make of one kind of layer.
inline Result<attention::Attributes> streamed(attention::Attributes a, const RunnerOptions& o) {
  if (o.attention_window == 0) return a;
  if (a.is_alibi)
    return invalid_argument("attention_window gives keys positions by rank, which a model with ALiBi has no use for")
        .with_field("attention_window");
  a.window = a.window > 0 ? std::min(a.window, o.attention_window) : o.attention_window;
  a.sinks = std::min(o.attention_sinks, a.window - 1);
  a.streaming_positions = a.rope.style != attention::RopeStyle::none;
  return a;
}

inline Status say_streaming(const ModelConfig& config, const RunnerOptions& o, ModelInfo* info) {
  info->trained_context = info->context_length;
  if (o.attention_sinks < 0 || o.attention_window < 0 ||
      (o.attention_sinks > 0 && o.attention_sinks >= o.attention_window))
    return invalid_argument(cat("attention_sinks is ", o.attention_sinks,
                                "; sinks are counted inside attention_window, "
                                "which is ",
                                o.attention_window, ": there must be fewer of them"))
        .with_field("attention_sinks");
  if (o.attention_window == 0) return {};
  if (config.encoder_layers > 0)
    return invalid_argument(
               "attention_window is for texts without end; an encoder-decoder reads its prompt as a whole: 0")
        .with_field("attention_window");
  if (info->state_bytes > 0)
    return invalid_argument(
               "attention_window is for texts without end; a model with layers of linear attention keeps what they "
               "have seen in its states, and loses none of it: 0")
        .with_field("attention_window");
  if (o.attention_window > config.context)
    return invalid_argument(cat("attention_window is ", o.attention_window, "; the model has positions for ",
                                config.context, " tokens"))
        .with_field("attention_window");
  // One pool serves all layers: what the longest window needs is kept.
  info->sliding_window =
      info->windowed_layers == info->layers ? std::min(config.window, o.attention_window) : o.attention_window;
  info->windowed_layers = info->layers;
  info->attention_sinks = o.attention_sinks;
  info->context_length = kWithoutEnd;
  info->streaming = true;
  return {};
}

}  // namespace kvasir::model
