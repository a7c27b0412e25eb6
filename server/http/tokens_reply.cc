#include "server/http/tokens_reply.h"

#include <algorithm>
#include <numeric>

#include "core/cat.h"
#include "server/http/error_body.h"
#include "server/http/logprobs.h"
#include "server/json_text.h"

namespace kvasir::server::http {
namespace {

// One answer of the request, as far as it has come; of a streamed one only what is not sent.
struct Answer {
  std::string ids, logprobs;
  int64_t made = 0;
  std::string end = "\"finish_reason\":null";
};

void append(std::string& list, std::string_view entry) { list += cat(list.empty() ? "" : ",", entry); }

// Chat's form of log-probabilities, in which a token is named by its id: there is no text here.
std::string entry(int32_t id, float logprob) {
  return cat("{\"token\":\"token_id:", id, "\",\"logprob\":", finite_logprob(logprob), ",\"bytes\":null");
}

std::string entry(const engine::TokenOut& token) {
  std::string others;
  for (const auto& t : token.top) append(others, cat(entry(t.token, t.logprob), '}'));
  return cat(entry(token.id, token.logprob), ",\"top_logprobs\":[", others, "]}");
}

class TokensReply final : public StreamsProducer {
 public:
  TokensReply(TokensShape shape, std::vector<std::unique_ptr<engine::Stream>> streams,
              std::vector<std::pair<std::string, std::string>> headers)
      : StreamsProducer(shape.stream, std::move(streams), std::move(headers)),
        shape_(std::move(shape)),
        answers_(size_t(shape_.choices)) {}

 private:
  void on(size_t, engine::Started& e) override {
    cached_ = e.cached_tokens;
    if (shape_.prompt_logprobs) append_prompt_logprobs(prompt_logprobs_, *shape_.tokenizer, e.prompt_logprobs);
  }

  void on(size_t, engine::Tokens& e) override {
    Answer& a = answers_[size_t(e.choice)];
    a.made += int64_t(e.tokens.size());
    for (const auto& t : e.tokens) {
      append(a.ids, cat(t.id));
      if (shape_.logprobs) append(a.logprobs, entry(t));
    }
    if (stream_ && !e.tokens.empty()) send(e.choice);
  }

  void on(size_t, engine::Finished& e) override {
    Answer& a = answers_[size_t(e.choice)];
    a.end = cat("\"finish_reason\":", e.reason == engine::FinishReason::length ? "\"length\"" : "\"stop\"",
                ",\"stop_reason\":", stop_reason(e));
    if (stream_) send(e.choice);
  }

  void close() override {
    if (stream_) {
      if (shape_.include_usage) out_ += cat("data: ", about(), "\"choices\":[],\"usage\":", usage(made()), "}\n\n");
      out_ += "data: [DONE]\n\n";
      return;
    }
    out_ = cat(about(), "\"choices\":[");
    for (int i = 0; i < shape_.choices; ++i) out_ += cat(i ? "," : "", choice(i));
    out_ += cat("],\"prompt_logprobs\":", prompt_logprobs_.empty() ? "null" : prompt_logprobs_,
                ",\"usage\":", usage(made()), ",\"kv_transfer_params\":null}");
  }

  void fail(const Status& status) override { out_ += cat("data: ", error_json(status), "\n\ndata: [DONE]\n\n"); }
  HttpResponse refuse(const Status& status) const override { return error_response(status); }

  // The stop text, or the id among those the client named.
  std::string stop_reason(const engine::Finished& e) const {
    const auto& own = shape_.stop_tokens;
    if (e.reason == engine::FinishReason::stop_string) return json_string(e.stop_string);
    const bool named =
        e.reason == engine::FinishReason::stop_token && std::find(own.begin(), own.end(), e.stop_token) != own.end();
    return named ? cat(e.stop_token) : "null";
  }

  std::string about() const {
    return cat("{\"id\":", json_string(shape_.id), ",\"request_id\":", json_string(shape_.id),
               ",\"created\":", shape_.created, ",\"model\":", json_string(shape_.model), ',');
  }

  std::string choice(int index) const {
    const Answer& a = answers_[size_t(index)];
    return cat("{\"index\":", index,
               ",\"logprobs\":", shape_.logprobs ? cat("{\"content\":[", a.logprobs, "]}") : "null", ',', a.end,
               ",\"token_ids\":[", a.ids, "]}");
  }

  int64_t made() const {
    return std::accumulate(answers_.begin(), answers_.end(), int64_t(0),
                           [](int64_t sum, const Answer& a) { return sum + a.made; });
  }
  std::string usage(int64_t made) const {
    return cat("{\"prompt_tokens\":", shape_.prompt, ",\"completion_tokens\":", made,
               ",\"total_tokens\":", shape_.prompt + made, ",\"prompt_tokens_details\":{\"cached_tokens\":", cached_,
               "}}");
  }

  void send(int index) {
    out_ += cat("data: ", about(), "\"choices\":[", choice(index), ']');
    if (!prompt_logprobs_.empty()) out_ += cat(",\"prompt_logprobs\":", std::exchange(prompt_logprobs_, {}));
    if (shape_.usage_so_far) out_ += cat(",\"usage\":", usage(made()));
    out_ += "}\n\n";
    Answer& a = answers_[size_t(index)];
    a.ids.clear();
    a.logprobs.clear();
  }

  const TokensShape shape_;
  std::vector<Answer> answers_;
  int64_t cached_ = 0;
  std::string prompt_logprobs_;
};

}  // namespace

std::unique_ptr<Producer> tokens_reply(TokensShape shape, std::unique_ptr<engine::Stream> stream,
                                       std::vector<std::pair<std::string, std::string>> headers) {
  std::vector<std::unique_ptr<engine::Stream>> streams;
  streams.push_back(std::move(stream));
  return std::make_unique<TokensReply>(std::move(shape), std::move(streams), std::move(headers));
}

}  // namespace kvasir::server::http
