// Engine streams as vLLM's answers in token ids, whole or as server-sent events.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "model/text/text.h"
#include "server/http/streams_producer.h"

namespace kvasir::server::http {

struct TokensShape {
  bool stream = false;
  bool include_usage = false, usage_so_far = false;  // stream_options
  bool logprobs = false, prompt_logprobs = false;
  int choices = 1;
  std::vector<int32_t> stop_tokens;  // the client's own
  int64_t prompt = 0;                // its tokens
  std::string id, model;
  int64_t created = 0;
  text::TokenizerPtr tokenizer;  // may be null where no prompt_logprobs are wanted
};

std::unique_ptr<Producer> tokens_reply(TokensShape shape, std::unique_ptr<engine::Stream> stream,
                                       std::vector<std::pair<std::string, std::string>> headers);

}  // namespace kvasir::server::http
