#include "client/openai_target.h"

#include <nlohmann/json.hpp>

#include "client/http_client.h"
#include "client/server_figures.h"

namespace kvasir::client {
namespace {

using Json = nlohmann::json;

Code code_of_http(int status) {
  switch (status) {
    case 400: return Code::invalid_argument;
    case 401: return Code::unauthenticated;
    case 403: return Code::permission_denied;
    case 404: return Code::not_found;
    case 429: return Code::resource_exhausted;
    case 501: return Code::unimplemented;
    case 503: return Code::unavailable;
    case 504: return Code::deadline_exceeded;
    default: return Code::internal;
  }
}

// A token's alternatives: a list of objects (chat, and llama-server always) or an object of text to value
// (completions).
double gap_of_token(const Json& alternatives) {
  std::vector<double> values;
  for (const Json& a : alternatives) {
    const Json& value = a.is_object() && a.contains("logprob") ? a["logprob"] : a;
    if (value.is_number()) values.push_back(value.get<double>());
  }
  return top_gap_of(values);
}

double gap_of_choice(const Json& choice) {
  const auto odds = choice.find("logprobs");
  if (odds == choice.end() || !odds->is_object()) return -1;
  double gap = -1;
  if (const auto content = odds->find("content"); content != odds->end() && content->is_array()) {
    for (const Json& token : *content) {
      if (token.contains("top_logprobs")) gap = lesser_gap(gap, gap_of_token(token["top_logprobs"]));
    }
  } else if (const auto top = odds->find("top_logprobs"); top != odds->end() && top->is_array()) {
    for (const Json& alternatives : *top) gap = lesser_gap(gap, gap_of_token(alternatives));
  }
  return gap;
}

class OpenAiTarget final : public Target {
 public:
  OpenAiTarget(TargetOptions options, bool chat, std::unique_ptr<HttpClient> http)
      : options_(std::move(options)), chat_(chat), http_(std::move(http)) {}

  void start(const Ask& ask, std::shared_ptr<Sink> sink) override {
    auto s = std::make_shared<Stream>();
    http_->post(
        chat_ ? "/v1/chat/completions" : "/v1/completions", body_of(ask),
        [this, s, sink](const HttpStream& answer, std::string_view bytes) {
          if (answer.status() == 200) {
            s->lines.feed(bytes, [&](std::string_view data) { take_event(data, *s, *sink); });
          } else if (s->error.size() < 4096) {
            s->error += bytes;
          }
        },
        [s, sink](const HttpStream& answer, Status status) {
          if (status.ok() && (answer.status() != 200 || !s->error.empty())) {
            status = refusal(answer.status(), s->error);
          } else if (status.ok() && !s->finished) {
            status = unavailable("the answer ended early");
          }
          sink->on_done(status, s->usage);
        });
  }

  ServerFigures server_figures() override { return fetch_metrics(*http_, "/metrics", std::chrono::seconds(2)); }

 private:
  struct Stream {
    EventLines lines;
    std::string error;
    Usage usage;
    bool finished = false;
  };

  // Only what every server of this protocol takes, and what was asked for.
  std::string body_of(const Ask& ask) const {
    Json body = {{"model", options_.model},
                 {"max_tokens", ask.max_tokens},
                 {"temperature", ask.temperature},
                 {"stream", true},
                 {"stream_options", {{"include_usage", true}}}};
    if (ask.ignore_eos) body["ignore_eos"] = true;
    if (ask.seed) body["seed"] = *ask.seed;
    if (chat_) {
      body["messages"] = {{{"role", "user"}, {"content", ask.prompt}}};
    } else {
      body["prompt"] = ask.prompt;
    }
    if (ask.top_two && chat_) {
      body["logprobs"] = true;
      body["top_logprobs"] = 2;
    } else if (ask.top_two) {
      body["logprobs"] = 2;
    }
    return body.dump(-1, ' ', false, Json::error_handler_t::replace);
  }

  void take_event(std::string_view data, Stream& s, Sink& sink) const {
    if (data == "[DONE]") {
      s.finished = true;
      return;
    }
    const Json j = Json::parse(data, nullptr, false);
    if (!j.is_object()) return;
    if (j.contains("error")) {
      s.error = data;
      return;
    }
    if (const auto u = j.find("usage"); u != j.end() && u->is_object()) take_usage(*u, s.usage);
    const auto choices = j.find("choices");
    if (choices == j.end() || !choices->is_array() || choices->empty()) return;
    const Json& choice = (*choices)[0];
    const auto delta = chat_ ? choice.find("delta") : choice.end();
    const Json& from = delta != choice.end() ? *delta : choice;
    AnswerPiece piece;
    piece.text = text_in(from, chat_ ? "content" : "text");
    const bool thinks = chat_ && (!text_in(from, "reasoning_content").empty() || !text_in(from, "reasoning").empty());
    if (piece.text.empty() && !thinks) return;  // what is thought aloud is drawn, too, and no part of the answer
    piece.top_gap = gap_of_choice(choice);
    sink.on_tokens(piece);
  }

  static std::string_view text_in(const Json& object, const char* name) {
    const auto at = object.find(name);
    return at != object.end() && at->is_string() ? std::string_view(at->get_ref<const std::string&>())
                                                 : std::string_view();
  }

  static void take_usage(const Json& from, Usage& to) {
    const auto count = [](const Json& in, const char* name) -> int64_t {
      const auto value = in.find(name);
      return value != in.end() && value->is_number() ? value->get<int64_t>() : -1;
    };
    to.prompt_tokens = count(from, "prompt_tokens");
    to.output_tokens = count(from, "completion_tokens");
    if (const auto d = from.find("prompt_tokens_details"); d != from.end() && d->is_object()) {
      to.cached_tokens = count(*d, "cached_tokens");
    }
  }

  static Status refusal(int status, const std::string& body) {
    std::string message = "HTTP " + std::to_string(status);
    const Json j = Json::parse(body, nullptr, false);
    if (j.is_object() && j.contains("error")) {
      const Json& e = j["error"];
      if (e.is_object() && e.contains("message") && e["message"].is_string())
        message += ": " + e["message"].get<std::string>();
    }
    return {code_of_http(status), message.substr(0, 300)};
  }

  const TargetOptions options_;
  const bool chat_;
  const std::unique_ptr<HttpClient> http_;
};

}  // namespace

Result<std::unique_ptr<Target>> make_openai_target(const TargetOptions& options, bool chat) {
  KVASIR_ASSIGN(auto http, HttpClient::create({options.address, options.api_key, options.tls}, options.timeout));
  return std::unique_ptr<Target>(std::make_unique<OpenAiTarget>(options, chat, std::move(http)));
}

}  // namespace kvasir::client
