#include "server/http/openai_reply.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include "core/cat.h"
#include "server/http/error_body.h"
#include "server/http/logprobs.h"
#include "server/http/timings.h"
#include "server/json_text.h"

namespace kvasir::server::http {
namespace {

const char* reason_name(engine::FinishReason reason) {
  return reason == engine::FinishReason::length ? "length" : "stop";
}

std::string usage_json(const engine::Usage& u, int64_t reasoning_tokens) {
  return cat("{\"prompt_tokens\":", u.prompt_tokens, ",\"completion_tokens\":", u.completion_tokens,
             ",\"total_tokens\":", u.prompt_tokens + u.completion_tokens,
             ",\"prompt_tokens_details\":{\"cached_tokens\":", u.cached_tokens,
             "},\"completion_tokens_details\":{\"reasoning_tokens\":", reasoning_tokens,
             ",\"accepted_prediction_tokens\":", u.accepted, ",\"rejected_prediction_tokens\":", u.drafted - u.accepted,
             "}}");
}

// Any word that changes with the server; clients of llama-server look for one that begins as its own do, with a b.
constexpr const char* kFingerprint = ",\"system_fingerprint\":\"build-kvasir-" KVASIR_VERSION "\"";

// One choice of the answer as it grows.
struct Choice {
  int index = 0;
  std::string text;
  std::vector<engine::TokenOut> tokens;  // kept only when log-probabilities are wanted
  int64_t count = 0;
  double sum_logprob = 0;
  std::string finish;
  size_t echoed = 0;   // how many of them are the prompt's
  int64_t offset = 0;  // completions: where the next token's text starts
  bool opened = false;
  std::vector<int32_t> ids;  // kept only when they are wanted
  std::string reasoning;
  std::string raw;  // as the model wrote it; kept only when it is shown
  std::optional<AnswerReader> reader;
  // The last piece of a stream, kept for the chunk that says why it ended.
  AnswerReader::Out last;
  std::vector<engine::TokenOut> last_tokens;
  size_t thought_bytes = 0, said_bytes = 0;

  int64_t thoughts() const { return reasoning_tokens(count, thought_bytes, said_bytes); }
};

template <class Ids>
std::string list(const Ids& ids) {
  std::string out = "[";
  for (size_t i = 0; i < ids.size(); ++i) out += cat(i ? "," : "", ids[i]);
  return out + "]";
}

class OpenAiReply final : public StreamsProducer {
 public:
  OpenAiReply(ReplyShape shape, std::vector<std::unique_ptr<engine::Stream>> streams,
              std::vector<std::pair<std::string, std::string>> headers)
      : StreamsProducer(shape.stream, std::move(streams), std::move(headers)), shape_(std::move(shape)) {
    const size_t prompts = shape_.prompts.size();
    choices_.resize(prompts * static_cast<size_t>(shape_.best_of));
    for (size_t i = 0; i < choices_.size(); ++i) choices_[i].index = static_cast<int>(i);
    usage_.resize(prompts);
    seeds_.resize(prompts);
    drawn_.resize(prompts);
    timings_ = std::vector<Timings>(prompts);
    prompt_logprobs_.resize(prompts);
    if (shape_.answer.tools != text::ToolFormat::none || shape_.answer.reasoning != text::ReasoningFormat::none)
      for (Choice& c : choices_) c.reader.emplace(shape_.answer);
    if (shape_.outlives) begin_at_once();
    if (shape_.stream) {
      const char* object = shape_.chat ? "chat.completion.chunk" : "text_completion";
      prefix_ =
          cat("data: {\"id\":", json_string(shape_.id), ",\"object\":\"", object, "\",\"created\":", shape_.created,
              ",\"model\":", json_string(shape_.model), kFingerprint, ",\"choices\":[");
    }
  }

 private:
  Choice& choice(size_t stream, int index) {
    return choices_[stream * static_cast<size_t>(shape_.best_of) + static_cast<size_t>(index)];
  }

  void on(size_t s, engine::Started& e) override {
    usage_[s].cached_tokens = e.cached_tokens;
    timings_[s].started();
    if (shape_.prompt_logprobs) append_prompt_logprobs(prompt_logprobs_[s], *shape_.tokenizer, e.prompt_logprobs);
    drawn_[s] = e.seed;
    if (shape_.seed_drawn) seeds_[s] = cat(",\"seed\":", e.seed);
    say_progress(s, e.cached_tokens);
    if (shape_.echo.empty()) return;
    // Echo: the prompt is the first piece of each choice; of a chat its last message, as text alone.
    for (int k = 0; k < shape_.best_of; ++k) {
      Choice& c = choice(s, k);
      std::vector<engine::TokenOut> tokens;
      if (!shape_.chat) tokens = e.prompt_logprobs;
      add(c, shape_.echo[s], std::move(tokens), true);
    }
  }

  void on(size_t s, engine::Tokens& e) override {
    Choice& c = choice(s, e.choice);
    if (c.count == 0 && e.choice == 0) say_progress(s, shape_.prompts[s]);
    if (shape_.stream) open_choice(c);  // before there are tokens to count
    timings_[s].tokens(e.tokens.size());
    c.count += static_cast<int64_t>(e.tokens.size());
    for (const auto& t : e.tokens) c.sum_logprob += t.logprob;
    if (shape_.verbose) c.raw += e.text;
    if (e.last && shape_.stream && ends_with_text())
      hold(c, e);
    else
      add(c, e.text, std::move(e.tokens), false);
  }

  void on(size_t s, engine::Finished& e) override {
    Choice& c = choice(s, e.choice);
    if (c.reader && shape_.stream && ends_with_text())
      append(c.last, c.reader->finish());
    else if (c.reader)
      emit(c, c.reader->finish(), {}, false);
    const bool called = calls(c) && shape_.answer.says_so && e.reason != engine::FinishReason::length;
    c.finish = cat("\"finish_reason\":\"", called ? "tool_calls" : reason_name(e.reason), '"', stop_reason(e));
    if (e.score) c.finish += cat(",\"score\":", *e.score);  // of a beam
    usage_[s] = e.usage;
    if (shape_.stream) {
      open_choice(c);
      count(c, c.last, false);
      write_chunk(c, c.last, c.last_tokens, false, cat(c.finish, seeds_[s]), verbose(s, c));
    }
  }

  // Whether the chunk that says why a choice ended has its last text, too: in completions, and where a client counts
  // tokens by chunks, as vLLM's do. In chats it has none, as OpenAI's.
  bool ends_with_text() const { return !shape_.chat || shape_.usage_so_far; }

  void hold(Choice& c, engine::Tokens& e) {
    if (c.reader)
      append(c.last, c.reader->push(e.text));
    else
      c.last.content += e.text;
    std::move(e.tokens.begin(), e.tokens.end(), std::back_inserter(c.last_tokens));
  }
  static void append(AnswerReader::Out& to, AnswerReader::Out&& more) {
    to.reasoning += more.reasoning;
    to.content += more.content;
    std::move(more.calls.begin(), more.calls.end(), std::back_inserter(to.calls));
  }

  void fail(const Status& status) override { out_ += cat("data: ", error_json(status), "\n\ndata: [DONE]\n\n"); }
  HttpResponse refuse(const Status& status) const override { return error_response(status); }

  static bool calls(const Choice& c) { return c.reader && !c.reader->calls().empty(); }

  // vLLM's: the stop string, or the id among those the client named. SGLang's has the model's own end, too.
  std::string stop_reason(const engine::Finished& e) const {
    if (e.reason == engine::FinishReason::stop_string)
      return cat(",\"stop_reason\":", json_string(e.stop_string), ",\"matched_stop\":", json_string(e.stop_string));
    if (e.reason != engine::FinishReason::stop_token) return ",\"stop_reason\":null,\"matched_stop\":null";
    const auto& own = shape_.stop_tokens;
    const bool asked = std::find(own.begin(), own.end(), e.stop_token) != own.end();
    return cat(",\"stop_reason\":", asked ? cat(e.stop_token) : "null", ",\"matched_stop\":", e.stop_token);
  }

  // What was asked of the prompt, in the first chunk of a choice or in the whole answer, which as vLLM's says what it
  // does not have.
  std::string of_prompt(const Choice& c) const {
    const size_t s = static_cast<size_t>(c.index) / static_cast<size_t>(shape_.best_of);
    std::string out;
    if (shape_.token_ids)
      out += cat(",\"prompt_token_ids\":", list(shape_.prompt_ids[s]));
    else if (!shape_.stream)
      out += ",\"prompt_token_ids\":null";
    if (shape_.prompt_logprobs)
      out += cat(",\"prompt_logprobs\":", prompt_logprobs_[s]);
    else if (!shape_.stream)
      out += ",\"prompt_logprobs\":null";
    return out;
  }

  std::string chunk_end(const Choice& c, bool timed = true) const {
    const size_t s = static_cast<size_t>(c.index) / static_cast<size_t>(shape_.best_of);
    std::string end = cat(timed ? timings(s, c.count) : "", "}\n\n");
    if (!shape_.include_usage) return end;
    if (!shape_.usage_so_far) return cat(",\"usage\":null", end);
    return cat(",\"usage\":", usage_json({shape_.prompts[s], c.count, usage_[s].cached_tokens}, c.thoughts()), end);
  }

  std::string timings(size_t s, int64_t made) const {
    if (!shape_.timings) return "";
    return cat(",\"timings\":", timings_[s].json(shape_.prompts[s], usage_[s].cached_tokens, made).dump());
  }

  // Of a choice that has ended, what it was made of.
  std::string verbose(size_t s, const Choice& c) const {
    if (!shape_.verbose) return "";
    nlohmann::ordered_json settings = shape_.settings;
    settings["stream"] = shape_.stream, settings["seed"] = drawn_[s];
    // Of several choices usage is a sum; their own counts lack the token that ended them.
    const int64_t made = shape_.best_of == 1 ? usage_[s].completion_tokens : c.count;
    return cat(",\"__verbose\":{\"index\":", c.index, ",\"prompt\":", json_string(shape_.shown_prompts[s]),
               ",\"content\":", json_string(c.raw), ",\"tokens_evaluated\":", shape_.prompts[s],
               ",\"tokens_predicted\":", made,
               ",\"generation_settings\":", settings.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace),
               '}');
  }

  void say_progress(size_t s, int64_t processed) {
    if (!shape_.stream || !shape_.progress) return;
    out_ += cat(prefix_, "],\"prompt_progress\":{\"total\":", shape_.prompts[s], ",\"cache\":", usage_[s].cached_tokens,
                ",\"processed\":", processed, ",\"time_ms\":", timings_[s].all_ns() / 1'000'000, "}}\n\n");
  }

  // The first chunk of a choice; completions have one where something is asked of the prompt.
  void open_choice(Choice& c) {
    if (c.opened) return;
    c.opened = true;
    const std::string prompt = of_prompt(c);
    if (!shape_.chat && prompt.empty()) return;
    const char* nothing = !shape_.chat   ? ",\"text\":\"\""
                          : shape_.llama ? ",\"delta\":{\"role\":\"assistant\",\"content\":null}"
                                         : ",\"delta\":{\"role\":\"assistant\",\"content\":\"\"}";
    // Of a chat it stands beside the choices, as in a whole answer.
    out_ += cat(prefix_, "{\"index\":", c.index, nothing, ",\"logprobs\":null",
                shape_.token_ids ? ",\"token_ids\":[]" : "", ",\"finish_reason\":null", shape_.chat ? "" : prompt, "}]",
                shape_.chat ? prompt : "", chunk_end(c, !shape_.llama));
  }

  void add(Choice& c, std::string_view text, std::vector<engine::TokenOut> tokens, bool echo) {
    if (c.reader && !echo) return emit(c, c.reader->push(text), std::move(tokens), echo);
    AnswerReader::Out out;
    out.content = text;
    emit(c, std::move(out), std::move(tokens), echo);
  }

  // Which part of the answer it is.
  void count(Choice& c, AnswerReader::Out& out, bool echo) const {
    c.thought_bytes += out.reasoning.size();
    if (!echo) c.said_bytes += out.content.size();
    for (const AnswerReader::CallPiece& call : out.calls) c.said_bytes += call.arguments.size();
    if (shape_.hide_reasoning) out.reasoning.clear();
  }

  void keep(Choice& c, std::vector<engine::TokenOut> tokens, bool echo) const {
    if (shape_.token_ids && !echo)
      for (const auto& t : tokens) c.ids.push_back(t.id);
    if (echo) c.echoed = tokens.size();
    if (shape_.logprobs >= 0) std::move(tokens.begin(), tokens.end(), std::back_inserter(c.tokens));
  }

  // What is ready: kept for the whole answer, or sent as a chunk.
  void emit(Choice& c, AnswerReader::Out out, std::vector<engine::TokenOut> tokens, bool echo) {
    count(c, out, echo);
    if (!shape_.stream) {
      c.text += out.content;
      c.reasoning += out.reasoning;
      return keep(c, std::move(tokens), echo);
    }
    open_choice(c);
    if (out.empty() && ((shape_.logprobs < 0 && !shape_.token_ids) || tokens.empty())) return;
    write_chunk(c, out, tokens, echo, "\"finish_reason\":null");
  }

  // `end`: why the choice ended, if it has. Of one that has, and says nothing more, all but that is empty.
  void write_chunk(Choice& c, const AnswerReader::Out& out, const std::vector<engine::TokenOut>& tokens, bool echo,
                   const std::string& end, const std::string& beside = "") {
    out_ += prefix_;
    out_ += cat("{\"index\":", c.index);
    if (!shape_.chat) {
      out_ += ",\"text\":";
      append_json_string(out_, out.content);
    } else {
      out_ += ",\"delta\":{";
      const bool others = !out.calls.empty() || !out.reasoning.empty() || (out.empty() && tokens.empty());
      if (!out.reasoning.empty())
        out_ += cat("\"reasoning_content\":", json_string(out.reasoning),
                    out.content.empty() && out.calls.empty() ? "" : ",");
      if (!others || !out.content.empty()) {
        out_ += "\"content\":";
        append_json_string(out_, out.content);
        if (!out.calls.empty()) out_ += ',';
      }
      if (!out.calls.empty()) append_calls(c, out.calls);
      out_ += '}';
    }
    out_ += ",\"logprobs\":";
    if (tokens.empty())
      out_ += "null";
    else
      append_logprobs(c, tokens, echo ? tokens.size() : 0);
    if (shape_.token_ids) {
      std::vector<int32_t> ids;
      ids.reserve(tokens.size());
      for (const auto& t : tokens)
        if (!echo) ids.push_back(t.id);
      out_ += cat(",\"token_ids\":", list(ids));
    }
    out_ += cat(',', end, "}]", beside, chunk_end(c));
  }

  std::string id_of(const Choice& c, int index) const { return cat("call_", shape_.call_id, '_', c.index, '_', index); }

  void append_calls(const Choice& c, const std::vector<AnswerReader::CallPiece>& calls) {
    out_ += "\"tool_calls\":[";
    for (size_t i = 0; i < calls.size(); ++i) {
      const auto& call = calls[i];
      out_ += cat(i ? "," : "", "{\"index\":", call.index);
      if (call.begins)
        out_ += cat(",\"id\":", json_string(id_of(c, call.index)),
                    ",\"type\":\"function\",\"function\":{\"name\":", json_string(call.name), ',');
      else
        out_ += ",\"function\":{";
      out_ += cat("\"arguments\":", json_string(call.arguments), "}}");
    }
    out_ += ']';
  }

  // Of them the first `echoed` are the prompt's: its text is shown whole, and its first token was not drawn.
  void append_logprobs(Choice& c, const std::vector<engine::TokenOut>& tokens, size_t echoed) {
    const TokenNames names = shape_.ids_as_tokens ? TokenNames::ids : TokenNames::texts;
    if (shape_.logprobs < 0)
      out_ += "null";
    else if (shape_.chat)
      append_chat_logprobs(out_, *shape_.tokenizer, tokens, names);
    else
      append_completion_logprobs(out_, *shape_.tokenizer, tokens, c.offset, echoed > 0,
                                 shape_.special_shown ? tokens.size() : echoed, names);
  }

  int64_t thoughts() const {
    return std::accumulate(choices_.begin(), choices_.end(), int64_t(0),
                           [](int64_t sum, const Choice& c) { return sum + c.thoughts(); });
  }

  engine::Usage total() const {
    engine::Usage sum;
    for (const auto& u : usage_) {
      sum.prompt_tokens += u.prompt_tokens;
      sum.completion_tokens += u.completion_tokens;
      sum.cached_tokens += u.cached_tokens;
      sum.drafted += u.drafted;
      sum.accepted += u.accepted;
    }
    return sum;
  }

  void close() override {
    if (shape_.stream) {
      if (shape_.include_usage)
        out_ += cat(prefix_, "],\"usage\":", usage_json(total(), thoughts()), timings(0, usage_[0].completion_tokens),
                    metrics(), "}\n\n");
      out_ += "data: [DONE]\n\n";
      return;
    }
    out_ = cat("{\"id\":", json_string(shape_.id), ",\"object\":\"",
               shape_.chat ? "chat.completion" : "text_completion", "\",\"created\":", shape_.created,
               ",\"model\":", json_string(shape_.model), kFingerprint, ",\"choices\":[");
    int index = 0;
    for (size_t s = 0; s < usage_.size(); ++s)
      for (Choice* c : best(s)) {
        if (index > 0) out_ += ',';
        write_choice(*c, index++, seeds_[s]);
      }
    out_ += cat("],\"usage\":", usage_json(total(), thoughts()),
                shape_.chat && !shape_.conversations ? of_prompt(choices_[0]) : std::string(),
                timings(0, usage_[0].completion_tokens), verbose(0, choices_[0]), metrics(), "}");
  }

  // Of one answer alone: several share their request's times.
  std::string metrics() const {
    if (!shape_.metrics || choices_.size() != 1) return "";
    return cat(",\"metrics\":", timings_[0].metrics(usage_[0].completion_tokens).dump());
  }

  // The `choices` of a prompt's best_of with the highest log-probability a token, best first.
  std::vector<Choice*> best(size_t s) {
    std::vector<Choice*> all;
    all.reserve(static_cast<size_t>(shape_.best_of));
    for (int k = 0; k < shape_.best_of; ++k) all.push_back(&choice(s, k));
    if (shape_.best_of > shape_.choices) {
      auto mean = [](const Choice* c) { return c->sum_logprob / static_cast<double>(std::max<int64_t>(1, c->count)); };
      std::stable_sort(all.begin(), all.end(), [&](Choice* a, Choice* b) { return mean(a) > mean(b); });
      all.resize(static_cast<size_t>(shape_.choices));
    }
    return all;
  }

  void write_choice(Choice& c, int index, const std::string& seed) {
    out_ += cat("{\"index\":", index);
    if (shape_.chat) {
      out_ += ",\"message\":{\"role\":\"assistant\",\"content\":";
      if (calls(c) && c.text.empty())
        out_ += "null";
      else
        append_json_string(out_, c.text);
      if (!c.reasoning.empty()) out_ += cat(",\"reasoning_content\":", json_string(c.reasoning));
      if (calls(c)) out_ += cat(",\"tool_calls\":", calls_json(c));
      out_ += '}';
    } else {
      out_ += ",\"text\":";
      append_json_string(out_, c.text);
    }
    out_ += ",\"logprobs\":";
    append_logprobs(c, c.tokens, c.echoed);
    if (shape_.token_ids) out_ += cat(",\"token_ids\":", list(c.ids));
    if (!shape_.chat || shape_.conversations) out_ += of_prompt(c);
    out_ += cat(',', c.finish, seed, '}');
  }

  std::string calls_json(const Choice& c) const {
    std::string out = "[";
    int index = 0;
    for (const AnswerReader::Call& call : c.reader->calls()) {
      out += cat(index ? "," : "", "{\"id\":", json_string(id_of(c, index)),
                 ",\"type\":\"function\",\"function\":{\"name\":", json_string(call.name),
                 ",\"arguments\":", json_string(call.arguments), "}}");
      ++index;
    }
    return out + "]";
  }

  ReplyShape shape_;
  std::vector<Choice> choices_;
  std::vector<engine::Usage> usage_;
  std::vector<uint64_t> drawn_;     // each prompt's seed
  std::vector<std::string> seeds_;  // what a choice says of it
  std::vector<Timings> timings_;
  std::vector<std::string> prompt_logprobs_;  // of each prompt, as JSON
  std::string prefix_;
};

}  // namespace

std::unique_ptr<Producer> openai_reply(ReplyShape shape, std::vector<std::unique_ptr<engine::Stream>> streams,
                                       std::vector<std::pair<std::string, std::string>> headers) {
  return std::make_unique<OpenAiReply>(std::move(shape), std::move(streams), std::move(headers));
}

}  // namespace kvasir::server::http
