// Events of one or more engine streams, as OpenAI's completion and chat bodies and server-sent events.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/request.h"
#include "model/text/text.h"
#include "server/http/answer_reader.h"
#include "server/http/streams_producer.h"

namespace kvasir::server::http {

// How the answer is to look; what was asked of the engine is in the streams already.
struct ReplyShape {
  bool chat = false;
  bool stream = false;
  bool include_usage = false;     // stream_options.include_usage
  bool usage_so_far = false;      // stream_options.continuous_usage_stats: in each chunk, of its choice
  bool outlives = false;          // the stream goes on without its client: what fails, fails in it
  bool llama = false;             // by a route of llama-server's: a stream's first chunk has no text, and no timings
  bool timings = false;           // llama-server's timings_per_token, in each chunk and the whole
  bool progress = false;          // and its return_progress: chunks of how much of the prompt is read
  int logprobs = -1;              // -1: none; k: the chosen token's and k others'
  int choices = 1;                // n, of each prompt
  int best_of = 1;                // drawn by the engine; the best `choices` of them are returned
  bool special_shown = false;     // skip_special_tokens: false
  bool seed_drawn = false;        // by the server, which tells it
  std::vector<int64_t> prompts;   // tokens of each
  std::vector<std::string> echo;  // what stands in front of each prompt's text: of a chat, its last message
  bool token_ids = false;         // return_token_ids
  bool ids_as_tokens = false;     // return_tokens_as_token_ids
  bool conversations = false;     // several chats in one call: what is said of a prompt is said with its choice
  bool metrics = false;           // vLLM's times of a request with one answer
  bool prompt_logprobs = false;
  bool hide_reasoning = false;
  bool verbose = false;                          // llama-server's: `__verbose` shows prompt, settings and raw answer
  std::vector<std::string> shown_prompts;        // with verbose, as texts
  nlohmann::ordered_json settings;               // with verbose
  std::vector<int32_t> stop_tokens;              // the client's own
  std::vector<std::vector<int32_t>> prompt_ids;  // with token_ids
  AnswerShape answer;
  std::string id, call_id;  // "chatcmpl-..."; what ids of calls are made of
  std::string model;
  int64_t created = 0;
  text::TokenizerPtr tokenizer;
};

std::unique_ptr<Producer> openai_reply(ReplyShape shape, std::vector<std::unique_ptr<engine::Stream>> streams,
                                       std::vector<std::pair<std::string, std::string>> headers);

}  // namespace kvasir::server::http
