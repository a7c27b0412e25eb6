// An engine stream as Anthropic's message, or as its server-sent events.
#pragma once

#include <memory>
#include <string>

#include "server/http/answer_producer.h"

namespace kvasir::server::http {

struct MessagesShape {
  bool stream = false;
  std::string id, model;
  int64_t prompt_tokens = 0;
  AnswerShape answer;
};

std::unique_ptr<Producer> messages_reply(MessagesShape shape, std::unique_ptr<engine::Stream> stream,
                                         std::vector<std::pair<std::string, std::string>> headers);

// A refusal in Anthropic's form.
HttpResponse messages_error(const Status& status);

}  // namespace kvasir::server::http
