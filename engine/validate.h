// What a request must be before it enters the engine, whichever protocol it came by.
#pragma once

#include "engine/engine.h"

namespace kvasir::engine {

struct RequestLimits {
  int32_t vocab_size = 0;
  int32_t context_length = 0;
  int32_t default_length = 0;  // of prompt and answer, where a request names no max_tokens; 0: the context
  int32_t max_choices = 0;
  bool has_text = false;  // a tokenizer, which text and stop strings need
  bool has_grammars = false;
  int64_t max_input = 0, max_output = 0, max_total = 0;  // of a request; 0: no bound of its own
  int32_t hidden = 0;                                    // numbers of an embedding
  int32_t labels = 0;                                    // of a classification head; 0: there is none
  std::string no_embeddings;                             // why there are none; empty: there are
  bool encoder = false;                                  // which generates nothing
  bool encodes = false;                                  // an encoder-decoder
};

Status validate(const Request& request, const RequestLimits& limits);

}  // namespace kvasir::engine
