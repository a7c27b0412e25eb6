// An engine stream as Ollama's answer: one object, or a line for each piece.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "server/http/answer_producer.h"

namespace kvasir::server::http {

struct OllamaShape {
  bool stream = true;
  bool chat = false;
  std::string model;  // as the client called it
  int64_t prompt_tokens = 0;
  AnswerShape answer;
};

std::unique_ptr<Producer> ollama_reply(OllamaShape shape, std::unique_ptr<engine::Stream> stream,
                                       std::vector<std::pair<std::string, std::string>> headers);
// To a request without a prompt.
HttpResponse ollama_loaded(const OllamaShape& shape);
// A refusal in Ollama's form.
HttpResponse ollama_error(const Status& status);

std::string rfc3339(std::chrono::system_clock::time_point time);

}  // namespace kvasir::server::http
