#include "server/http/ollama_reply.h"

#include <chrono>
#include <ctime>
#include <nlohmann/json.hpp>

#include "core/cat.h"
#include "server/http/error_body.h"
#include "server/http/timings.h"
#include "server/json_text.h"

namespace kvasir::server::http {
namespace {

using Json = nlohmann::ordered_json;

std::string text_of(const Json& value) { return value.dump(-1, ' ', false, Json::error_handler_t::replace); }

std::string error_text(const Status& status) { return cat("{\"error\":", json_string(status.message()), "}"); }

Json beginning(const OllamaShape& shape) {
  return {{"model", shape.model}, {"created_at", rfc3339(std::chrono::system_clock::now())}};
}

class OllamaReply final : public AnswerProducer {
 public:
  OllamaReply(OllamaShape shape, std::unique_ptr<engine::Stream> engine,
              std::vector<std::pair<std::string, std::string>> headers)
      : AnswerProducer(shape.answer, shape.stream, std::move(engine), std::move(headers), kJsonLines),
        shape_(std::move(shape)) {}

 private:
  void begin(const engine::Started&) override {}

  void piece(AnswerReader::Out out) override {
    timings_.tokens(1);
    if (!stream_) {
      text_ += out.content;
      thoughts_ += out.reasoning;
    } else if (!out.content.empty() || !out.reasoning.empty()) {
      say(out.content, out.reasoning, Json());
    }
  }

  // Calls come whole, with the end.
  void end(const engine::Finished& e) override {
    timings_.tokens(0);
    Json calls = Json::array();
    for (const AnswerReader::Call& call : reader().calls()) {
      Json arguments = Json::parse(call.arguments, nullptr, false);
      if (!arguments.is_object()) arguments = Json::object();  // of a call that was cut
      calls.push_back(
          {{"function", {{"index", calls.size()}, {"name", call.name}, {"arguments", std::move(arguments)}}}});
    }
    if (stream_ && !calls.empty()) say("", "", std::exchange(calls, Json::array()));
    Json all = line(text_, thoughts_, calls);
    all["done"] = true;
    all["done_reason"] = e.reason == engine::FinishReason::length ? "length" : "stop";
    all["total_duration"] = timings_.all_ns();
    all["load_duration"] = 0;  // it was there
    all["prompt_eval_count"] = shape_.prompt_tokens;
    all["prompt_eval_duration"] = timings_.prompt_ns();
    all["eval_count"] = e.usage.completion_tokens;
    all["eval_duration"] = timings_.answer_ns();
    out_ += text_of(all) + '\n';
  }

  void fail(const Status& status) override { out_ += error_text(status) + '\n'; }
  HttpResponse refuse(const Status& status) const override { return ollama_error(status); }

  Json line(const std::string& text, const std::string& thoughts, const Json& calls) const {
    Json out = beginning(shape_);
    if (shape_.chat) {
      Json message{{"role", "assistant"}, {"content", text}};
      if (!thoughts.empty()) message["thinking"] = thoughts;
      if (!calls.empty()) message["tool_calls"] = calls;
      out["message"] = std::move(message);
    } else {
      out["response"] = text;
      if (!thoughts.empty()) out["thinking"] = thoughts;
    }
    return out;
  }

  void say(const std::string& text, const std::string& thoughts, const Json& calls) {
    Json out = line(text, thoughts, calls);
    out["done"] = false;
    out_ += text_of(out) + '\n';
  }

  const OllamaShape shape_;
  Timings timings_;
  std::string text_, thoughts_;
};

}  // namespace

std::string rfc3339(std::chrono::system_clock::time_point time) {
  using namespace std::chrono;
  const auto micros = duration_cast<microseconds>(time.time_since_epoch()).count();
  const std::time_t seconds = micros / 1'000'000;
  std::tm utc{};
  gmtime_r(&seconds, &utc);
  char date[32], fraction[16];
  std::strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%S", &utc);
  std::snprintf(fraction, sizeof fraction, ".%06dZ", int(micros % 1'000'000));
  return cat(date, fraction);
}

HttpResponse ollama_error(const Status& status) {
  HttpResponse r = error_response(status);
  r.body = error_text(status);
  return r;
}

HttpResponse ollama_loaded(const OllamaShape& shape) {
  Json all = beginning(shape);
  if (shape.chat)
    all["message"] = {{"role", "assistant"}, {"content", ""}};
  else
    all["response"] = "";
  all["done"] = true;
  all["done_reason"] = "load";
  HttpResponse r;
  if (shape.stream) r.content_type = kJsonLines;
  r.body = text_of(all) + '\n';
  return r;
}

std::unique_ptr<Producer> ollama_reply(OllamaShape shape, std::unique_ptr<engine::Stream> stream,
                                       std::vector<std::pair<std::string, std::string>> headers) {
  return std::make_unique<OllamaReply>(std::move(shape), std::move(stream), std::move(headers));
}

}  // namespace kvasir::server::http
