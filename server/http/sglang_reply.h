// Engine streams as SGLang's answers, or as its server-sent events, each of which has all of the text so far.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "model/text/text.h"
#include "server/http/streams_producer.h"

namespace kvasir::server::http {

struct SglangShape {
  struct Prompt {
    int choices = 1;
    bool logprobs = false;  // return_logprob
    bool others = false;    // top_logprobs_num
    int64_t from = -1;      // logprob_start_len; -1: none of the prompt's
    int64_t tokens = 0;
    std::string id;
  };
  bool stream = false;
  bool batch = false;  // a list was asked, so a list is answered
  bool texts = false;  // return_text_in_logprobs
  std::vector<Prompt> prompts;
  text::TokenizerPtr tokenizer;
};

std::unique_ptr<Producer> sglang_reply(SglangShape shape, std::vector<std::unique_ptr<engine::Stream>> streams,
                                       std::vector<std::pair<std::string, std::string>> headers);

}  // namespace kvasir::server::http
