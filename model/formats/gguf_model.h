// A GGUF file as a network's weights and as a vocabulary.
#pragma once

#include <memory>

#include "model/formats/gguf.h"
#include "model/formats/tensor_names.h"
#include "model/formats/weights.h"
#include "model/text/text.h"

namespace kvasir::model {

std::unique_ptr<Weights> gguf_weights(std::shared_ptr<const Gguf> gguf, TensorNames names = {});
Result<text::GgufVocab> gguf_vocab(const Gguf& gguf);

}  // namespace kvasir::model
