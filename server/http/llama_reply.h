// Engine streams as llama-server's completions, or as its server-sent events.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "model/text/text.h"
#include "server/http/streams_producer.h"

namespace kvasir::server::http {

struct LlamaShape {
  bool stream = false;
  bool tokens = false;               // return_tokens, of a whole answer; events have them always
  bool timings = false;              // timings_per_token
  bool progress = false;             // return_progress
  int choices = 1;                   // n, of each prompt
  std::vector<std::string> fields;   // of the last object, "generation_settings/seed"; none: all
  engine::Request asked;             // its parameters
  std::vector<std::string> prompts;  // as texts
  std::vector<int64_t> prompt_tokens;
  std::string model;
  text::TokenizerPtr tokenizer;
};

// A bias that a client means by `false`, or by minus infinity, which is shown as null.
inline constexpr float kNeverDrawn = -100;

// What `generation_settings` says of a request.
nlohmann::ordered_json llama_settings(const engine::Request& asked);

std::unique_ptr<Producer> llama_reply(LlamaShape shape, std::vector<std::unique_ptr<engine::Stream>> streams,
                                      std::vector<std::pair<std::string, std::string>> headers);

}  // namespace kvasir::server::http
