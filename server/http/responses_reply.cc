#include "server/http/responses_reply.h"

#include <utility>

#include "core/cat.h"
#include "server/http/error_body.h"
#include "server/http/logprobs.h"
#include "server/http/timings.h"
#include "server/json_text.h"

namespace kvasir::server::http {
namespace {

class ResponsesReply final : public AnswerProducer {
 public:
  ResponsesReply(ResponsesShape shape, std::unique_ptr<engine::Stream> engine,
                 std::vector<std::pair<std::string, std::string>> headers)
      : AnswerProducer(shape.answer, shape.stream, std::move(engine), std::move(headers)), shape_(std::move(shape)) {
    if (!shape_.now) return;
    const std::string made = state("queued");
    event("response.created", made);
    event("response.queued", made);
    begin_at_once();
  }

 protected:
  void begin(const engine::Started& e) override {
    cached_ = e.cached_tokens;
    const std::string made = state("in_progress");
    if (!shape_.now) event("response.created", made);
    event("response.in_progress", made + progress(cached_));
  }

  void drawn(const std::vector<engine::TokenOut>& tokens) override {
    if (drawn_ == 0 && shape_.progress)
      event("response.in_progress", state("in_progress") + progress(shape_.prompt_tokens));
    timings_.tokens(tokens.size());
    drawn_ += static_cast<int64_t>(tokens.size());
    if (shape_.messages.tokenizer)
      for (const auto& t : tokens) ids_.push_back(t.id);
    if (!shape_.logprobs) return;
    std::string list;
    append_token_logprobs(list, *shape_.logprobs, tokens, TokenNames::texts);
    newest_logprobs_ = list.substr(1, list.size() - 2);
    add_entries(newest_logprobs_, unsaid_logprobs_);
  }

  void piece(AnswerReader::Out out) override {
    if (!out.reasoning.empty()) say(Kind::reasoning, out.reasoning);
    if (!out.content.empty()) say(Kind::message, out.content);
    for (const AnswerReader::CallPiece& call : out.calls) {
      if (call.begins) {
        unsaid_logprobs_.clear();  // of the tag and the name: not of the message before them
        open(Kind::call, call.index, call.name);
      }
      if (at_ == Kind::call && call.index == call_) say(Kind::call, call.arguments);
    }
  }

  void end(const engine::Finished& e) override {
    const bool whole = e.reason != engine::FinishReason::length;
    close(whole ? "completed" : "incomplete");
    const auto& u = e.usage;
    usage_ =
        cat("{\"input_tokens\":", u.prompt_tokens, ",\"input_tokens_details\":{\"cached_tokens\":", u.cached_tokens,
            "},\"output_tokens\":", u.completion_tokens, ",\"output_tokens_details\":{\"reasoning_tokens\":",
            reasoning_tokens(u.completion_tokens, thought_bytes_, said_bytes_),
            "},\"total_tokens\":", u.prompt_tokens + u.completion_tokens, "}");
    if (shape_.messages.tokenizer) {
      messages_ =
          cat(",\"input_messages\":", as_message(shape_.messages.prompt), ",\"output_messages\":", as_message(ids_));
    }
    const std::string made = response(whole ? "completed" : "incomplete", "null");
    if (shape_.now) shape_.now(made);
    if (shape_.keep) shape_.keep(made, cat('[', items_, ']'));
    if (stream_)
      event(whole || shape_.llama ? "response.completed" : "response.incomplete",
            cat("\"response\":", made, timings()));
    else
      out_ = cat(made.substr(0, made.size() - 1), timings(), '}');
  }

  void fail(const Status& status) override {
    const std::string error = cat("{\"code\":\"server_error\",\"message\":", json_string(status.message()), "}");
    event("response.failed", state("failed", error));
  }
  HttpResponse refuse(const Status& status) const override { return error_response(status); }

 private:
  enum class Kind { none, reasoning, message, call };

  std::string timings() const {
    if (!shape_.timings) return "";
    return cat(",\"timings\":", timings_.json(shape_.prompt_tokens, cached_, drawn_).dump());
  }
  std::string progress(int64_t processed) const {
    if (!shape_.progress) return "";
    return cat(",\"prompt_progress\":{\"total\":", shape_.prompt_tokens, ",\"cache\":", cached_,
               ",\"processed\":", processed, ",\"time_ms\":", timings_.all_ns() / 1'000'000, "}");
  }

  static void add_entries(std::string_view entries, std::string& to) {
    if (!entries.empty()) (to += to.empty() ? "" : ",") += entries;
  }

  std::string response(const char* status, const std::string& error) const {
    const bool cut = std::string_view(status) == "incomplete";
    return cat("{\"id\":", json_string(shape_.id), ",\"object\":\"response\",\"created_at\":", shape_.created,
               ",\"status\":\"", status, "\",\"error\":", error,
               ",\"incomplete_details\":", cut ? "{\"reason\":\"max_output_tokens\"}" : "null",
               ",\"model\":", json_string(shape_.model), ",\"output\":[", items_, "],\"usage\":", usage_, messages_,
               shape_.echoed, "}");
  }

  // vLLM's form of what a template, or the model, wrote.
  std::string as_message(const std::vector<int32_t>& ids) const {
    std::string tokens;
    for (int32_t id : ids) tokens += cat(tokens.empty() ? "" : ",", id);
    const auto text = shape_.messages.tokenizer->decode(ids, false);
    return cat("[{\"type\":\"raw_message_tokens\",\"message\":", json_string(text.ok() ? *text : std::string()),
               ",\"tokens\":[", tokens, "]}]");
  }

  // As a field of an event; who follows it without events is told, too.
  std::string state(const char* status, const std::string& error = "null") const {
    const std::string made = response(status, error);
    if (shape_.now) shape_.now(made);
    return "\"response\":" + made;
  }

  void event(const char* name, const std::string& fields) {
    if (!stream_) return;
    append_event(out_, name, cat("{\"type\":\"", name, "\",\"sequence_number\":", sequence_++, ',', fields, "}"));
  }
  // Of the item that is open.
  void item_event(const char* name, const std::string& fields) {
    const char* part = at_ == Kind::call ? "" : ",\"content_index\":0";
    event(name, cat("\"item_id\":", json_string(item_id()), ",\"output_index\":", index_, part, fields));
  }

  std::string item_id() const {
    const char* kind = at_ == Kind::reasoning ? "rs_" : at_ == Kind::message ? "msg_" : "fc_";
    return cat(kind, shape_.id.substr(5), '_', index_);  // without "resp_"
  }

  // The item as it is now; its text is there when it is done.
  std::string item(const char* status) const {
    const bool done = std::string_view(status) != "in_progress";
    const std::string head = cat("{\"id\":", json_string(item_id()), ",\"type\":");
    const std::string parts = done ? cat('[', part(text_), ']') : "[]";
    switch (at_) {
      case Kind::reasoning:
        return cat(head, "\"reasoning\",\"summary\":[],\"content\":", parts, ",\"status\":\"", status, "\"}");
      case Kind::message:
        return cat(head, "\"message\",\"role\":\"assistant\",\"status\":\"", status, "\",\"content\":", parts, "}");
      default:
        return cat(head, "\"function_call\",\"call_id\":", json_string(cat("call_", shape_.id.substr(5), '_', index_)),
                   ",\"name\":", json_string(name_), ",\"arguments\":", json_string(done ? text_ : ""),
                   ",\"status\":\"", status, "\"}");
    }
  }
  std::string part(const std::string& text) const {
    if (at_ == Kind::reasoning) return cat("{\"type\":\"reasoning_text\",\"text\":", json_string(text), "}");
    return cat("{\"type\":\"output_text\",\"text\":", json_string(text), ",\"annotations\":[],\"logprobs\":[",
               logprobs_, "]}");
  }

  void open(Kind kind, int call = -1, const std::string& name = "") {
    close("completed");
    at_ = kind;
    call_ = call;
    name_ = name;
    event("response.output_item.added", cat("\"output_index\":", index_, ",\"item\":", item("in_progress")));
    if (kind != Kind::call) item_event("response.content_part.added", cat(",\"part\":", part("")));
  }

  void say(Kind kind, const std::string& text) {
    if (at_ != Kind::none && at_ != kind && kind == Kind::message)
      unsaid_logprobs_ = newest_logprobs_;  // without the tag
    if (at_ != kind) open(kind);
    text_ += text;
    const std::string logprobs = std::exchange(unsaid_logprobs_, {});  // of thoughts and calls they are not told
    if (kind == Kind::message) add_entries(logprobs, logprobs_);
    (kind == Kind::reasoning ? thought_bytes_ : said_bytes_) += text.size();
    if (text.empty()) return;
    const std::string delta = cat(",\"delta\":", json_string(text), timings());
    switch (kind) {
      case Kind::reasoning: return item_event("response.reasoning_text.delta", delta);
      case Kind::message: return item_event("response.output_text.delta", cat(delta, ",\"logprobs\":[", logprobs, ']'));
      default: return item_event("response.function_call_arguments.delta", delta);
    }
  }

  void close(const char* status) {
    if (at_ == Kind::none) return;
    const std::string text = json_string(text_);
    if (at_ == Kind::reasoning) item_event("response.reasoning_text.done", cat(",\"text\":", text));
    if (at_ == Kind::message) {
      add_entries(std::exchange(unsaid_logprobs_, {}), logprobs_);
      item_event("response.output_text.done", cat(",\"text\":", text, ",\"logprobs\":[", logprobs_, ']'));
    }
    if (at_ == Kind::call)
      item_event("response.function_call_arguments.done",
                 cat(",\"name\":", json_string(name_), ",\"arguments\":", text));
    else
      item_event("response.content_part.done", cat(",\"part\":", part(text_)));
    const std::string whole = item(status);
    event("response.output_item.done", cat("\"output_index\":", index_, ",\"item\":", whole));
    items_ += cat(items_.empty() ? "" : ",", whole);
    ++index_;
    text_.clear();
    logprobs_.clear();
    at_ = Kind::none;
  }

  const ResponsesShape shape_;
  Kind at_ = Kind::none;
  int call_ = -1, index_ = 0, sequence_ = 0;
  size_t thought_bytes_ = 0, said_bytes_ = 0;
  int64_t cached_ = 0, drawn_ = 0;
  Timings timings_;
  std::string name_, text_, logprobs_, unsaid_logprobs_, newest_logprobs_;
  std::string items_;  // those that are whole, separated by commas
  std::string usage_ = "null";
  std::vector<int32_t> ids_;  // that were drawn, where they are told
  std::string messages_;
};

}  // namespace

std::unique_ptr<Producer> responses_reply(ResponsesShape shape, std::unique_ptr<engine::Stream> stream,
                                          std::vector<std::pair<std::string, std::string>> headers) {
  return std::make_unique<ResponsesReply>(std::move(shape), std::move(stream), std::move(headers));
}

}  // namespace kvasir::server::http
