// An engine stream as OpenAI's response object, or as its server-sent events.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "server/http/answer_producer.h"

namespace kvasir::server::http {

struct ResponsesShape {
  bool stream = false;
  std::string id, model;
  int64_t created = 0;
  int64_t prompt_tokens = 0;
  std::string echoed;  // fields of the request, as ,"name":value
  AnswerShape answer;
  bool timings = false, progress = false;  // llama-server's, in the events; timings also of a whole answer
  text::TokenizerPtr logprobs;             // names tokens; null: no log-probabilities are wanted
  // vLLM's: a whole response tells its prompt and answer as text and tokens. Without a tokenizer: it does not.
  struct Messages {
    text::TokenizerPtr tokenizer;
    std::vector<int32_t> prompt;
  } messages;
  // Told the whole response and its output items when it ended well.
  std::function<void(const std::string& response, const std::string& output)> keep;
  // Of one that is made without its client: told the response whenever its status changes, before `keep`.
  std::function<void(const std::string& response)> now;
  bool llama = false;  // by llama-server's route: its streams have one last event, whatever ended the answer
};

std::unique_ptr<Producer> responses_reply(ResponsesShape shape, std::unique_ptr<engine::Stream> stream,
                                          std::vector<std::pair<std::string, std::string>> headers);

}  // namespace kvasir::server::http
