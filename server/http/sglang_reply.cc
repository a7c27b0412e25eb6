#include "server/http/sglang_reply.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/cat.h"
#include "server/http/error_body.h"
#include "server/http/logprobs.h"
#include "server/http/timings.h"
#include "server/json_text.h"

namespace kvasir::server::http {
namespace {

using Json = nlohmann::ordered_json;

std::string text_of(const Json& value) { return value.dump(-1, ' ', false, Json::error_handler_t::replace); }

// One choice of one prompt, as far as it has come. Every event has all of it, so lists are kept as they are written.
struct Answer {
  std::string text, ids, logprobs, others;
  int64_t made = 0;
  std::string ended = "null";  // why
};

void append(std::string& list, std::string_view entry) { list += cat(list.empty() ? "" : ",", entry); }

class SglangReply final : public StreamsProducer {
 public:
  SglangReply(SglangShape shape, std::vector<std::unique_ptr<engine::Stream>> streams,
              std::vector<std::pair<std::string, std::string>> headers)
      : StreamsProducer(shape.stream, std::move(streams), std::move(headers)),
        shape_(std::move(shape)),
        cached_(shape_.prompts.size()),
        read_(shape_.prompts.size()) {
    for (const SglangShape::Prompt& p : shape_.prompts) {
      first_.push_back(answers_.size());
      answers_.resize(answers_.size() + size_t(p.choices));
    }
  }

 private:
  void on(size_t s, engine::Started& e) override {
    cached_[s] = e.cached_tokens;
    const SglangShape::Prompt& p = shape_.prompts[s];
    if (!p.logprobs) return;
    Json own = Json::array(), others = Json::array();
    for (size_t i = size_t(std::max<int64_t>(0, p.from)); p.from >= 0 && i < e.prompt_logprobs.size(); ++i) {
      const engine::TokenOut& t = e.prompt_logprobs[i];
      own.push_back(entry(t.id, t.logprob));
      others.push_back(i == 0 ? Json() : likeliest(t));
      if (i == 0) own.back()[0] = nullptr;  // nothing came before
    }
    read_[s] = cat(",\"input_token_logprobs\":", text_of(own));
    if (p.others) read_[s] += cat(",\"input_top_logprobs\":", text_of(others));
  }

  void on(size_t s, engine::Tokens& e) override {
    Answer& a = answers_[first_[s] + size_t(e.choice)];
    const SglangShape::Prompt& p = shape_.prompts[s];
    a.text += e.text;
    a.made += int64_t(e.tokens.size());
    for (const auto& t : e.tokens) {
      append(a.ids, cat(t.id));
      if (p.logprobs) append(a.logprobs, text_of(entry(t.id, t.logprob)));
      if (p.others) append(a.others, text_of(likeliest(t)));
    }
    if (stream_ && !e.tokens.empty()) send(s, e.choice);
  }

  void on(size_t s, engine::Finished& e) override {
    Answer& a = answers_[first_[s] + size_t(e.choice)];
    if (shape_.prompts[s].choices == 1) a.made = e.usage.completion_tokens;  // with what stopped it
    using Reason = engine::FinishReason;
    switch (e.reason) {
      case Reason::length: a.ended = cat("{\"type\":\"length\",\"length\":", a.made, '}'); break;
      case Reason::cancelled:
        a.ended = R"({"type":"abort","message":"the request was ended by /abort_request"})";
        break;
      default:
        a.ended = cat("{\"type\":\"stop\",\"matched\":",
                      e.reason == Reason::stop_string ? json_string(e.stop_string) : cat(e.stop_token), '}');
    }
    if (stream_) send(s, e.choice);
  }

  void close() override {
    if (stream_) {
      out_ += "data: [DONE]\n\n";
      return;
    }
    for (size_t s = 0; s < shape_.prompts.size(); ++s)
      for (int k = 0; k < shape_.prompts[s].choices; ++k) append(out_, answer(s, k, ""));
    if (lists()) out_ = cat('[', out_, ']');
  }

  bool tells_cancelled() const override { return true; }
  void fail(const Status& status) override { out_ += cat("data: ", error_json(status), "\n\ndata: [DONE]\n\n"); }
  HttpResponse refuse(const Status& status) const override { return error_response(status); }

  bool lists() const { return shape_.batch || answers_.size() > 1; }

  Json entry(int32_t id, float logprob) const {
    return {finite_logprob(logprob), id, shape_.texts ? Json(token_shown(*shape_.tokenizer, id)) : Json()};
  }
  Json likeliest(const engine::TokenOut& token) const {
    Json out = Json::array();
    for (const auto& t : token.top) out.push_back(entry(t.token, t.logprob));
    return out;
  }

  std::string answer(size_t s, int choice, std::string_view more) const {
    const Answer& a = answers_[first_[s] + size_t(choice)];
    const SglangShape::Prompt& p = shape_.prompts[s];
    std::string out =
        cat("{\"text\":", json_string(a.text), ",\"output_ids\":[", a.ids,
            "],\"meta_info\":{\"id\":", json_string(p.choices > 1 ? cat(p.id, '-', choice) : p.id),
            ",\"finish_reason\":", a.ended, ",\"prompt_tokens\":", p.tokens, ",\"completion_tokens\":", a.made,
            ",\"cached_tokens\":", cached_[s], ",\"e2e_latency\":", double(timings_.all_ns()) / 1e9, read_[s]);
    if (p.logprobs) out += cat(",\"output_token_logprobs\":[", a.logprobs, ']');
    if (p.others) out += cat(",\"output_top_logprobs\":[", a.others, ']');
    return out + cat('}', more, '}');
  }

  void send(size_t s, int choice) {
    const std::string index = lists() ? cat(",\"index\":", first_[s] + size_t(choice)) : "";
    out_ += cat("data: ", answer(s, choice, index), "\n\n");
  }

  const SglangShape shape_;
  std::vector<size_t> first_;  // of each prompt's answers
  std::vector<Answer> answers_;
  std::vector<int64_t> cached_;
  std::vector<std::string> read_;  // what is said of the prompt's tokens
  Timings timings_;
};

}  // namespace

std::unique_ptr<Producer> sglang_reply(SglangShape shape, std::vector<std::unique_ptr<engine::Stream>> streams,
                                       std::vector<std::pair<std::string, std::string>> headers) {
  return std::make_unique<SglangReply>(std::move(shape), std::move(streams), std::move(headers));
}

}  // namespace kvasir::server::http
