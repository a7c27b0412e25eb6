#include "server/http/messages_reply.h"

#include <nlohmann/json.hpp>

#include "core/cat.h"
#include "server/http/error_body.h"
#include "server/json_text.h"

namespace kvasir::server::http {
namespace {

const char* error_type(int status) {
  switch (status) {
    case 401: return "authentication_error";
    case 403: return "permission_error";
    case 404: return "not_found_error";
    case 413: return "request_too_large";
    case 429: return "rate_limit_error";
    case 503: return "overloaded_error";
    case 504: return "timeout_error";
  }
  return status < 500 ? "invalid_request_error" : "api_error";
}

std::string error_body(const Status& status) {
  return cat("{\"type\":\"error\",\"error\":{\"type\":\"", error_type(http_status(status.code())),
             "\",\"message\":", json_string(status.message()), "}}");
}

class MessagesReply final : public AnswerProducer {
 public:
  MessagesReply(MessagesShape shape, std::unique_ptr<engine::Stream> engine,
                std::vector<std::pair<std::string, std::string>> headers)
      : AnswerProducer(shape.answer, shape.stream, std::move(engine), std::move(headers)), shape_(std::move(shape)) {}

 protected:
  void begin(const engine::Started& e) override {
    cached_ = e.cached_tokens;
    if (!stream_) return;
    append_event(out_, "message_start",
                 cat("{\"type\":\"message_start\",\"message\":", message("[]", "null", "null", 0), "}"));
    append_event(out_, "ping", "{\"type\":\"ping\"}");
  }

  void piece(AnswerReader::Out out) override {
    if (!out.reasoning.empty()) say(Kind::thinking, out.reasoning);
    if (!out.content.empty()) say(Kind::text, out.content);
    for (const AnswerReader::CallPiece& call : out.calls) {
      if (call.begins) open(Kind::call, call.index, call.name);
      if (call.index == call_) say(Kind::call, call.arguments);
    }
  }

  void end(const engine::Finished& e) override {
    close();
    const bool called = !reader().calls().empty() && e.reason != engine::FinishReason::length;
    const char* reason = e.reason == engine::FinishReason::length        ? "\"max_tokens\""
                         : called                                        ? "\"tool_use\""
                         : e.reason == engine::FinishReason::stop_string ? "\"stop_sequence\""
                                                                         : "\"end_turn\"";
    const std::string sequence =
        e.reason == engine::FinishReason::stop_string ? json_string(e.stop_string) : std::string("null");
    cached_ = e.usage.cached_tokens;
    const int64_t made = e.usage.completion_tokens;
    if (!stream_) {
      out_ = message(cat('[', blocks_, ']'), reason, sequence, made);
      return;
    }
    append_event(out_, "message_delta",
                 cat("{\"type\":\"message_delta\",\"delta\":{\"stop_reason\":", reason, ",\"stop_sequence\":", sequence,
                     "},\"usage\":", usage(made), "}"));
    append_event(out_, "message_stop", "{\"type\":\"message_stop\"}");
  }

  void fail(const Status& status) override { append_event(out_, "error", error_body(status)); }
  HttpResponse refuse(const Status& status) const override { return messages_error(status); }

 private:
  enum class Kind { none, thinking, text, call };

  // What was not in the cache is what Anthropic calls input.
  std::string usage(int64_t made) const {
    return cat("{\"input_tokens\":", shape_.prompt_tokens - cached_, ",\"cache_creation_input_tokens\":0,",
               "\"cache_read_input_tokens\":", cached_, ",\"output_tokens\":", made, "}");
  }
  std::string message(const std::string& content, const char* reason, const std::string& sequence, int64_t made) const {
    return cat("{\"id\":", json_string(shape_.id),
               ",\"type\":\"message\",\"role\":\"assistant\",\"model\":", json_string(shape_.model),
               ",\"content\":", content, ",\"stop_reason\":", reason, ",\"stop_sequence\":", sequence,
               ",\"usage\":", usage(made), "}");
  }
  std::string tool_id() const { return cat("toolu_", shape_.id, '_', call_); }

  void open(Kind kind, int call = -1, const std::string& name = "") {
    close();
    at_ = kind;
    call_ = call;
    name_ = name;
    if (!stream_) return;
    std::string block = kind == Kind::text       ? std::string("{\"type\":\"text\",\"text\":\"\"}")
                        : kind == Kind::thinking ? "{\"type\":\"thinking\",\"thinking\":\"\",\"signature\":\"\"}"
                                                 : cat("{\"type\":\"tool_use\",\"id\":", json_string(tool_id()),
                                                       ",\"name\":", json_string(name), ",\"input\":{}}");
    append_event(out_, "content_block_start",
                 cat("{\"type\":\"content_block_start\",\"index\":", index_, ",\"content_block\":", block, "}"));
  }

  void say(Kind kind, const std::string& text) {
    if (at_ != kind) open(kind);
    text_ += text;
    if (!stream_ || text.empty()) return;
    const char* what = kind == Kind::text       ? "\"text_delta\",\"text\":"
                       : kind == Kind::thinking ? "\"thinking_delta\",\"thinking\":"
                                                : "\"input_json_delta\",\"partial_json\":";
    delta(cat("{\"type\":", what, json_string(text), "}"));
  }

  void delta(const std::string& what) {
    append_event(out_, "content_block_delta",
                 cat("{\"type\":\"content_block_delta\",\"index\":", index_, ",\"delta\":", what, "}"));
  }

  void close() {
    if (at_ == Kind::none) return;
    if (stream_) {
      if (at_ == Kind::thinking) delta("{\"type\":\"signature_delta\",\"signature\":\"\"}");
      append_event(out_, "content_block_stop", cat("{\"type\":\"content_block_stop\",\"index\":", index_, "}"));
    } else {
      if (!blocks_.empty()) blocks_ += ',';
      if (at_ == Kind::text)
        blocks_ += cat("{\"type\":\"text\",\"text\":", json_string(text_), "}");
      else if (at_ == Kind::thinking)
        blocks_ += cat("{\"type\":\"thinking\",\"thinking\":", json_string(text_), ",\"signature\":\"\"}");
      else
        blocks_ += cat("{\"type\":\"tool_use\",\"id\":", json_string(tool_id()), ",\"name\":", json_string(name_),
                       ",\"input\":", input(), "}");
    }
    ++index_;
    text_.clear();
    at_ = Kind::none;
  }

  // An object, whatever is there of a call that was cut.
  std::string input() const {
    const auto parsed = nlohmann::ordered_json::parse(text_, nullptr, false);
    return parsed.is_object() ? parsed.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) : "{}";
  }

  const MessagesShape shape_;
  int64_t cached_ = 0;
  Kind at_ = Kind::none;
  int call_ = -1, index_ = 0;
  std::string name_, text_;
  std::string blocks_;  // those that are whole, separated by commas
};

}  // namespace

HttpResponse messages_error(const Status& status) {
  HttpResponse r = error_response(status);
  r.body = error_body(status);
  return r;
}

std::unique_ptr<Producer> messages_reply(MessagesShape shape, std::unique_ptr<engine::Stream> stream,
                                         std::vector<std::pair<std::string, std::string>> headers) {
  return std::make_unique<MessagesReply>(std::move(shape), std::move(stream), std::move(headers));
}

}  // namespace kvasir::server::http
