#include "server/http/llama_reply.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/cat.h"
#include "server/http/error_body.h"
#include "server/http/logprobs.h"
#include "server/http/timings.h"

namespace kvasir::server::http {
namespace {

using Json = nlohmann::ordered_json;

std::string text_of(const Json& value) { return value.dump(-1, ' ', false, Json::error_handler_t::replace); }

// {"a":{"b":1}} by "a/b" is {"a/b":1}; what is not there is left out.
Json chosen(const Json& all, const std::vector<std::string>& fields) {
  if (fields.empty()) return all;
  Json out = Json::object();
  for (const std::string& field : fields) {
    const Json* at = &all;
    for (std::string_view rest = field; at && !rest.empty();) {
      const size_t end = std::min(rest.find('/'), rest.size());
      const auto it = at->is_object() ? at->find(rest.substr(0, end)) : at->end();
      at = it == at->end() ? nullptr : &*it;
      rest.remove_prefix(std::min(end + 1, rest.size()));
    }
    if (at) out[field] = *at;
  }
  return out;
}

// One choice of one prompt.
struct Answer {
  std::string text;
  std::vector<int32_t> ids;
  Json probabilities = Json::array();
  int64_t made = 0;
  bool new_line = false;
  Json last;  // once it has ended
};

class LlamaReply final : public StreamsProducer {
 public:
  LlamaReply(LlamaShape shape, std::vector<std::unique_ptr<engine::Stream>> streams,
             std::vector<std::pair<std::string, std::string>> headers)
      : StreamsProducer(shape.stream, std::move(streams), std::move(headers)),
        shape_(std::move(shape)),
        answers_(shape_.prompts.size() * size_t(shape_.choices)),
        cached_(shape_.prompts.size()),
        seeds_(shape_.prompts.size()),
        timings_(shape_.prompts.size()) {}

 private:
  void on(size_t s, engine::Started& e) override {
    cached_[s] = e.cached_tokens;
    seeds_[s] = e.seed;
    if (stream_ && shape_.progress) send(progress(s, e.cached_tokens));
  }

  void on(size_t s, engine::Tokens& e) override {
    Answer& a = answer(s, e.choice);
    const bool first = a.made == 0;
    timings_[s].tokens(e.tokens.size());
    a.made += int64_t(e.tokens.size());
    a.new_line |= e.text.find('\n') != std::string::npos;
    Json ids = Json::array(), probabilities = Json::array();
    for (const auto& t : e.tokens) {
      ids.push_back(t.id);
      if (const auto& asked = shape_.asked.sampling; asked.logprobs > 0)
        probabilities.push_back(token_probabilities(*shape_.tokenizer, t, asked.post_sampling_probs));
    }
    if (!stream_) {
      a.text += e.text;
      if (shape_.tokens) a.ids.insert(a.ids.end(), ids.begin(), ids.end());
      for (Json& p : probabilities) a.probabilities.push_back(std::move(p));
      return;
    }
    if (first && e.choice == 0 && shape_.progress) send(progress(s, shape_.prompt_tokens[s]));
    if (e.text.empty() && e.tokens.empty()) return;
    Json piece = head(s, e.choice, e.text, std::move(ids), false);
    if (!probabilities.empty()) piece["completion_probabilities"] = std::move(probabilities);
    if (shape_.timings) piece["timings"] = timings_[s].json(shape_.prompt_tokens[s], cached_[s], a.made);
    send(piece);
  }

  void on(size_t s, engine::Finished& e) override {
    Answer& a = answer(s, e.choice);
    if (shape_.choices == 1) a.made = e.usage.completion_tokens;  // with what stopped it
    Json ids = Json::array();
    for (int32_t id : a.ids) ids.push_back(id);
    Json all = head(s, e.choice, a.text, std::move(ids), true);
    const auto& own = shape_.asked.stop_tokens;
    const bool word =
        e.reason == engine::FinishReason::stop_string ||
        (e.reason == engine::FinishReason::stop_token && std::find(own.begin(), own.end(), e.stop_token) != own.end());
    const bool limit = e.reason == engine::FinishReason::length;
    all["model"] = shape_.model;
    Json settings = llama_settings(shape_.asked);
    settings["seed"] = seeds_[s];
    settings["stream"] = stream_;
    all["generation_settings"] = std::move(settings);
    all["prompt"] = shape_.prompts[s];
    all["has_new_line"] = a.new_line;
    all["truncated"] = limit && (!shape_.asked.max_tokens || a.made < *shape_.asked.max_tokens);  // the context is full
    all["stop_type"] = limit ? "limit" : word ? "word" : "eos";
    all["stopping_word"] = e.stop_string;
    all["tokens_cached"] = shape_.prompt_tokens[s] + a.made;
    all["timings"] = timings_[s].json(shape_.prompt_tokens[s], cached_[s], a.made);
    if (!a.probabilities.empty()) all["completion_probabilities"] = std::move(a.probabilities);
    a.last = chosen(all, shape_.fields);
    if (stream_) send(a.last);
  }

  void close() override {
    if (stream_) return;
    Json all = Json::array();
    for (Answer& a : answers_) all.push_back(std::move(a.last));
    out_ = text_of(all.size() == 1 ? all[0] : all);
  }

  void fail(const Status& status) override { out_ += cat("data: ", error_json(status), "\n\n"); }
  HttpResponse refuse(const Status& status) const override { return error_response(status); }

  size_t index(size_t s, int choice) const { return s * size_t(shape_.choices) + size_t(choice); }
  Answer& answer(size_t s, int choice) { return answers_[index(s, choice)]; }
  void send(const Json& event) { out_ += cat("data: ", text_of(event), "\n\n"); }

  Json head(size_t s, int choice, const std::string& text, Json ids, bool stop) {
    return {{"index", index(s, choice)},
            {"content", text},
            {"tokens", std::move(ids)},
            {"stop", stop},
            {"id_slot", -1},
            {"tokens_predicted", answer(s, choice).made},
            {"tokens_evaluated", shape_.prompt_tokens[s]}};
  }

  Json progress(size_t s, int64_t processed) {
    Json event = head(s, 0, "", Json::array(), false);
    event["prompt_progress"] = {{"total", shape_.prompt_tokens[s]},
                                {"cache", cached_[s]},
                                {"processed", processed},
                                {"time_ms", timings_[s].all_ns() / 1'000'000}};
    if (shape_.timings) event["timings"] = timings_[s].json(processed, cached_[s], 0);
    return event;
  }

  const LlamaShape shape_;
  std::vector<Answer> answers_;
  std::vector<int64_t> cached_;
  std::vector<uint64_t> seeds_;
  std::vector<Timings> timings_;
};

}  // namespace

Json llama_settings(const engine::Request& r) {
  const model::SamplingParams& s = r.sampling;
  Json bias = Json::array();
  for (const auto& [id, value] : s.logit_bias)
    bias.push_back({{"token", id}, {"bias", value > kNeverDrawn ? Json(value) : Json()}});
  return {{"seed", s.seed},
          {"temperature", s.temperature},
          {"dynatemp_range", 0},
          {"top_k", s.top_k},
          {"top_p", s.top_p},
          {"min_p", s.min_p},
          {"top_n_sigma", s.top_n_sigma > 0 ? s.top_n_sigma : -1},
          {"xtc_probability", 0},
          {"typical_p", s.typical_p},
          {"repeat_last_n", -1},
          {"repeat_penalty", s.repetition_penalty},
          {"presence_penalty", s.presence_penalty},
          {"frequency_penalty", s.frequency_penalty},
          {"dry_multiplier", 0},
          {"mirostat", 0},
          {"adaptive_target", -1},
          {"adaptive_decay", 0},
          {"stop", r.stop_strings},
          {"max_tokens", r.max_tokens.value_or(-1)},
          {"n_predict", r.max_tokens.value_or(-1)},
          {"ignore_eos", r.ignore_eos},
          {"stream", false},
          {"logit_bias", std::move(bias)},
          {"n_probs", std::max(0, s.logprobs)},
          {"post_sampling_probs", s.post_sampling_probs},
          {"min_keep", 0},
          {"grammar", r.grammar.text},
          {"samplers", {"penalties", "top_k", "top_n_sigma", "temperature", "typ_p", "top_p", "min_p"}}};
}

std::unique_ptr<Producer> llama_reply(LlamaShape shape, std::vector<std::unique_ptr<engine::Stream>> streams,
                                      std::vector<std::pair<std::string, std::string>> headers) {
  return std::make_unique<LlamaReply>(std::move(shape), std::move(streams), std::move(headers));
}

}  // namespace kvasir::server::http
