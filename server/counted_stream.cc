#include "server/counted_stream.h"

#include <algorithm>

#include "core/log.h"

namespace kvasir::server {

Services::CountedStream::CountedStream(Services& services, Caller caller, const GenerateInput& in,
                                       std::string trace_parent, std::unique_ptr<engine::Stream> inner,
                                       size_t prompt_tokens)
    : services_(services),
      caller_(std::move(caller)),
      protocol_(in.protocol),
      trace_parent_(std::move(trace_parent)),
      said_(in.said),
      inner_(std::move(inner)),
      prompt_tokens_(prompt_tokens),
      began_(services.clock_.now()) {}

Services::CountedStream::~CountedStream() {
  const std::string id = inner_->id();
  inner_.reset();  // no callback, and no event, from here on
  services_.limiter_.release(caller_);
  if (!over_) code_ = Code::cancelled, reason_ = "disconnect";
  services_.metrics_.count(protocol_, code_);
  if (started_ != Time{})
    services_.metrics_.count_inference(std::chrono::duration<double>(services_.clock_.now() - started_).count());
  if (services_.spans_) export_span(id);
  const LogRequest of(id);
  log_prompt("answer", answer_);
  if (services_.options_.access_log) write_line(id);
}

std::optional<engine::Event> Services::CountedStream::seen(std::optional<engine::Event> event) {
  if (!event) return event;
  if (auto* tokens = std::get_if<engine::Tokens>(&*event)) {
    if (output_ == 0) first_ = services_.clock_.now();
    count(int64_t(tokens->tokens.size()));
    if (log_enabled(LogLevel::debug)) answer_ += tokens->text;
  } else if (auto* started = std::get_if<engine::Started>(&*event)) {
    cached_ = started->cached_tokens;
    started_ = services_.clock_.now();
  } else if (auto* finished = std::get_if<engine::Finished>(&*event)) {
    static constexpr const char* kReasons[] = {"stop_token", "stop_string", "length", "cancelled"};
    reason_ = kReasons[int(finished->reason)];
    count(std::max<int64_t>(0, finished->usage.completion_tokens - output_));  // those that stopped it are not shown
    over_ = finished->last;
    static constexpr size_t kEnding[] = {0, 0, 1, 2};
    services_.metrics_.count_ending(kEnding[int(finished->reason)]);
    if (over_ && finished->reason == engine::FinishReason::cancelled) code_ = Code::cancelled;
  } else if (auto* failed = std::get_if<engine::Failed>(&*event)) {
    over_ = true;
    code_ = failed->status.code();
    reason_ = "failed";
    if (services_.spans_) error_ = failed->status.message();
  }
  return event;
}

void Services::CountedStream::count(int64_t tokens) {
  output_ += tokens;
  services_.limiter_.spend(caller_, tokens);
}

void Services::CountedStream::write_line(const std::string& id) const {
  auto ms = [&](Time t) { return std::chrono::duration<double, std::milli>(t - began_).count(); };
  log_info("request", {{"id", id},
                       {"protocol", protocol_},
                       {"tenant", caller_.tenant},
                       {"key", caller_.key_id},
                       {"code", code_name(code_)},
                       {"reason", reason_},
                       {"prompt_tokens", prompt_tokens_},
                       {"cached_tokens", cached_},
                       {"output_tokens", output_},
                       {"ttft_ms", first_ == Time{} ? 0.0 : ms(first_)},
                       {"ms", ms(services_.clock_.now())},
                       {"traceparent", trace_parent_},
                       {"user", said_.user},
                       {"metadata", said_.metadata},
                       {"prompt_cache_key", said_.cache_key}});
}

void Services::CountedStream::export_span(const std::string& id) {
  Span span;
  span.name = protocol_;
  if (auto context = parse_traceparent(trace_parent_)) span.context = *std::move(context);
  span.began = began_;
  span.ended = services_.clock_.now();
  span.texts = {{"gen_ai.request.id", id},
                {"gen_ai.response.model", services_.model_name()},
                {"gen_ai.response.finish_reason", reason_},
                {"kvasir.tenant", caller_.tenant}};
  span.numbers = {{"gen_ai.usage.prompt_tokens", int64_t(prompt_tokens_)},
                  {"gen_ai.usage.completion_tokens", output_},
                  {"kvasir.cached_tokens", cached_}};
  if (started_ != Time{}) span.events.push_back({"started", started_});
  if (first_ != Time{}) span.events.push_back({"first token", first_});
  if (code_ != Code::ok) span.error = error_.empty() ? code_name(code_) : error_;
  services_.spans_->add(std::move(span));
}

}  // namespace kvasir::server
