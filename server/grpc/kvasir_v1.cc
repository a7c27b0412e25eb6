#include "server/grpc/kvasir_v1.h"

#include <climits>
#include <nlohmann/json.hpp>

#include "core/cat.h"
#include "kvasir.pb.h"
#include "server/grpc/parameters.h"
#include "server/grpc/pooled_call.h"
#include "server/grpc/stream_call.h"
#include "server/json_text.h"

namespace kvasir::server::rpc {
namespace {

namespace pb = kvasir::v1;

std::string messages_json(const pb::Chat& chat) {
  auto all = nlohmann::json::array();
  for (const pb::ChatMessage& m : chat.messages()) all.push_back({{"role", m.role()}, {"content", m.content()}});
  return all.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// A field that holds JSON: of the right kind, and no deeper than anything that visits it may go.
Status check_json(const char* field, const std::string& text, bool list, size_t most) {
  if (text.empty()) return {};
  if (int depth = json_depth(text); depth > kMostJsonDepth)
    return invalid_argument(cat(field, " nests ", depth, " deep; the limit is ", kMostJsonDepth)).with_field(field);
  auto json = nlohmann::json::parse(text, nullptr, false);
  if (has_zero_byte(text) || (list ? !json.is_array() : !json.is_object()))
    return invalid_argument(cat(field, " is no JSON ", list ? "list" : "object")).with_field(field);
  if (list && json.size() > most)
    return invalid_argument(cat(field, " has ", json.size(), " entries; the limit is ", most)).with_field(field);
  return {};
}

Status check_roles(const pb::Chat& chat) {
  for (int i = 0; i < chat.messages_size(); ++i) {
    const std::string& role = chat.messages(i).role();
    if (role != "system" && role != "developer" && role != "user" && role != "assistant" && role != "tool")
      return invalid_argument(cat("chat.messages[", i, "].role is '", role.substr(0, 40),
                                  "'; it must be one of system, developer, user, assistant, tool"))
          .with_field("chat.messages");
  }
  return {};
}

ChatInput chat_input(const pb::Chat& chat, const ServerOptions& limits, Status& status) {
  ChatInput in{chat.messages_json(), chat.tools_json(), chat.template_variables_json()};
  in.continue_final_message = chat.continue_final_message();
  in.add_generation_prompt = !in.continue_final_message;
  status = check_roles(chat);
  if (status.ok()) status = check_json("chat.messages_json", in.messages_json, true, SIZE_MAX);
  if (status.ok()) status = check_json("chat.tools_json", in.tools_json, true, size_t(limits.max_tools));
  if (status.ok()) status = check_json("chat.template_variables_json", in.variables_json, false, 0);
  if (!status.ok()) return in;
  if (chat.messages_size() > 0 && !in.messages_json.empty())
    status = invalid_argument("chat.messages and chat.messages_json are both set; send one of them");
  if (chat.messages_size() == 0 && in.messages_json.empty())
    status = invalid_argument("chat has no messages; send at least one");
  if (chat.messages_size() > 0) in.messages_json = messages_json(chat);
  return in;
}

Result<text::GrammarSpec> grammar_of(const pb::Grammar& g) {
  using Kind = text::GrammarSpec::Kind;
  switch (g.kind_case()) {
    case pb::Grammar::kJsonObject: return text::GrammarSpec{g.json_object() ? Kind::json_object : Kind::none};
    case pb::Grammar::kJsonSchema: return text::GrammarSpec{Kind::json_schema, g.json_schema()};
    case pb::Grammar::kRegex: return text::GrammarSpec{Kind::regex, g.regex()};
    case pb::Grammar::kStructuralTag: return text::GrammarSpec{Kind::structural_tag, g.structural_tag()};
    case pb::Grammar::kLark: return text::GrammarSpec{Kind::lark, g.lark()};
    case pb::Grammar::kChoice:
      return text::GrammarSpec{Kind::choice, "", {g.choice().values().begin(), g.choice().values().end()}};
    case pb::Grammar::KIND_NOT_SET: return text::GrammarSpec{};
  }
  return text::GrammarSpec{};
}

Result<GenerateInput> read_request(const pb::GenerateRequest& from, const ServerOptions& limits) {
  GenerateInput in;
  in.protocol = "kvasir.v1";
  in.wire = Wire::v1;
  in.model = from.model();
  in.request.adapter = from.adapter();
  engine::Request& r = in.request;
  r.sampling = from.has_beams() ? model::SamplingParams{.temperature = 0} : limits.sampling;
  r.id = from.request_id();
  Status status;
  switch (from.input_case()) {
    case pb::GenerateRequest::kPrompt:
      in.prompt = TextInput{from.prompt(), !from.has_add_special_tokens() || from.add_special_tokens(), true};
      break;
    case pb::GenerateRequest::kTokens:
      in.prompt = TokensInput(from.tokens().ids().begin(), from.tokens().ids().end());
      break;
    case pb::GenerateRequest::kChat: in.prompt = chat_input(from.chat(), limits, status); break;
    case pb::GenerateRequest::INPUT_NOT_SET:
      status = invalid_argument("there is no input; set prompt, tokens or chat").with_field("input");
  }
  KVASIR_TRY(status);
  read_parameters(from.sampling(), in);
  read_parameters(from, in);
  KVASIR_ASSIGN(r.grammar, grammar_of(from.grammar()));
  r.detokenize = !from.omit_text();
  if (from.has_beams()) {
    const pb::BeamSearch& b = from.beams();
    r.beams = {int32_t(std::min<uint32_t>(b.width(), INT32_MAX)), b.has_length_penalty() ? b.length_penalty() : 1.0f,
               static_cast<engine::BeamOptions::Early>(std::clamp<int>(b.early_stopping(), 0, 2))};
  }
  return in;
}

class GenerateCall final : public AnswerCall<pb::GenerateRequest, pb::GenerateResponse> {
 public:
  using AnswerCall::AnswerCall;

 protected:
  Status prepare() override {
    Services& services = context_.services;
    KVASIR_ASSIGN(GenerateInput in, services.read(caller_, "kvasir.v1", read_request(*request_, services.options())));
    carry(*call_, in.request);
    logprobs_ = in.request.sampling.logprobs >= 0;
    KVASIR_ASSIGN(Submitted submitted, services.generate(caller_, std::move(in)));
    prompt_ = std::move(submitted.prompt);
    tokenizer_ = context_.services.engine().tokenizer();
    id_ = submitted.stream->id();
    feed_.add(std::move(submitted.stream));
    return {};
  }

  Next next(pb::GenerateResponse& out, bool& last, Status& status) override {
    auto event = feed_.poll();
    if (!event) return Next::waiting;
    if (auto* e = std::get_if<engine::Tokens>(&event->second)) {
      pb::GenerateResponse::Delta& delta = *out.mutable_delta();
      delta.set_choice(uint32_t(e->choice));
      delta.set_text(std::move(e->text));
      delta.mutable_tokens()->Reserve(int(e->tokens.size()));
      for (const engine::TokenOut& token : e->tokens) write(token, logprobs_, *delta.add_tokens());
    } else if (auto* e = std::get_if<engine::Started>(&event->second)) {
      return write_started(*e, out, status);
    } else if (auto* e = std::get_if<engine::Finished>(&event->second)) {
      write_finished(*e, *out.mutable_finished());
      last = e->last;
    } else {
      status = std::get<engine::Failed>(event->second).status;
      return Next::end;
    }
    return Next::message;
  }

 private:
  void write(const engine::TokenOut& from, bool with_logprob, pb::Token& to) const {
    to.set_id(uint32_t(from.id));
    if (!with_logprob) return;
    to.set_logprob(from.logprob);
    for (const model::TokenLogprob& t : from.top) {
      pb::Logprob& top = *to.add_top();
      top.set_id(uint32_t(t.token));
      top.set_logprob(t.logprob);
      if (tokenizer_) top.set_text(tokenizer_->token_text(t.token));
    }
  }

  Next write_started(const engine::Started& e, pb::GenerateResponse& out, Status& status) const {
    pb::GenerateResponse::Started& to = *out.mutable_started();
    to.set_request_id(id_);
    to.set_seed(e.seed);
    to.set_prompt_tokens(prompt_.size());
    to.set_cached_tokens(uint64_t(e.cached_tokens));
    if (request_->echo() && tokenizer_ && !request_->omit_text()) {
      auto text = tokenizer_->decode(prompt_, !request_->has_skip_special_tokens() || request_->skip_special_tokens());
      if (!text.ok()) {
        status = text.status();
        return Next::end;
      }
      to.set_prompt_text(*text);
    }
    if (!e.prompt_logprobs.empty())
      for (size_t i = 0; i < e.prompt_logprobs.size(); ++i) write(e.prompt_logprobs[i], i > 0, *to.add_prompt());
    else if (request_->echo())
      for (int32_t id : prompt_) to.add_prompt()->set_id(uint32_t(id));
    return Next::message;
  }

  void write_finished(const engine::Finished& e, pb::GenerateResponse::Finished& to) const {
    using Reason = pb::GenerateResponse::Finished;
    static constexpr pb::GenerateResponse_Finished_Reason kReasons[] = {Reason::STOP_TOKEN, Reason::STOP_STRING,
                                                                        Reason::LENGTH, Reason::CANCELLED};
    to.set_choice(uint32_t(e.choice));
    if (e.score) to.set_score(*e.score);
    to.set_reason(kReasons[int(e.reason)]);
    to.set_stop(e.stop_string);
    if (e.stop_token >= 0) to.set_stop_token_id(uint32_t(e.stop_token));
    to.set_last(e.last);
    to.mutable_usage()->set_prompt_tokens(uint64_t(e.usage.prompt_tokens));
    to.mutable_usage()->set_completion_tokens(uint64_t(e.usage.completion_tokens));
    to.mutable_usage()->set_cached_tokens(uint64_t(e.usage.cached_tokens));
  }

  std::string id_;
  std::vector<int32_t> prompt_;
  text::TokenizerPtr tokenizer_;
  bool logprobs_ = false;
};

class EmbedCall final : public PooledCall<pb::EmbedRequest, pb::EmbedResponse> {
 public:
  using PooledCall::PooledCall;

 protected:
  const char* protocol() const override { return "kvasir.v1"; }
  Result<PooledAsk> read(const pb::EmbedRequest& from) override {
    PooledAsk ask;
    ask.input.protocol = protocol();
    ask.input.wire = Wire::embeddings;
    ask.input.model = from.model();
    ask.input.request.adapter = from.adapter();
    ask.input.request.id = id_ = from.request_id();
    read_parameters(from, ask.input);
    const bool special = !from.has_add_special_tokens() || from.add_special_tokens();
    for (int i = 0; i < from.inputs_size(); ++i) {
      const pb::EmbedInput& in = from.inputs(i);
      switch (in.input_case()) {
        case pb::EmbedInput::kText: ask.prompts.push_back({TextInput{in.text(), special, false}}); break;
        case pb::EmbedInput::kTokens:
          ask.prompts.push_back({TokensInput(in.tokens().ids().begin(), in.tokens().ids().end())});
          break;
        case pb::EmbedInput::INPUT_NOT_SET:
          return invalid_argument(cat("inputs[", i, "] is empty; set text or tokens")).with_field("inputs");
      }
    }
    return ask;
  }
  void write(const engine::Finished& all, pb::EmbedResponse& out) override {
    out.set_request_id(id_);
    for (const std::vector<float>& e : all.pooled) out.add_embeddings()->mutable_values()->Add(e.begin(), e.end());
    out.mutable_usage()->set_prompt_tokens(uint64_t(all.usage.prompt_tokens));
    out.mutable_usage()->set_cached_tokens(uint64_t(all.usage.cached_tokens));
  }

 private:
  std::string id_;
};

Status tokenize(Services& services, const Caller& caller, const pb::TokenizeRequest& in, pb::TokenizeResponse& out) {
  Status status;
  PromptInput prompt;
  switch (in.input_case()) {
    case pb::TokenizeRequest::kChat: prompt = chat_input(in.chat(), services.options(), status); break;
    case pb::TokenizeRequest::kText:
      prompt = TextInput{in.text(), !in.has_add_special_tokens() || in.add_special_tokens(), in.parse_special()};
      break;
    case pb::TokenizeRequest::INPUT_NOT_SET:
      status = invalid_argument("there is no input; set text or chat").with_field("input");
  }
  KVASIR_TRY(status);
  KVASIR_ASSIGN(auto ids, services.tokenize(caller, in.model(), prompt));
  out.mutable_ids()->Add(ids.begin(), ids.end());
  text::TokenizerPtr tokenizer = services.engine().tokenizer();
  for (int32_t id : ids) out.add_pieces(tokenizer->token_text(id));
  return {};
}

void write_stats(Services& services, pb::GetStatsResponse& out) {
  engine::Stats s = services.engine().stats();
  Health h = services.health();
  out.set_state(state_name(h.state));
  out.set_message(h.message);
  out.set_running(s.running);
  out.set_waiting(s.waiting);
  out.set_pages_total(s.pages_total);
  out.set_pages_free(s.pages_free);
  out.set_pages_cached(s.pages_cached);
  out.set_prompt_tokens(s.prompt_tokens);
  out.set_cached_tokens(s.cached_tokens);
  out.set_output_tokens(s.output_tokens);
  out.set_requests(s.requests);
  out.set_finished(s.finished);
  out.set_failed(s.failed);
  out.set_cancelled(s.cancelled);
  out.set_preemptions(s.preemptions);
  out.set_steps(s.steps);
}

}  // namespace

void add_kvasir_v1(Door& door, Services& services) {
  const std::string at = "/kvasir.v1.Inference/";
  door.stream<GenerateCall>(at + "Generate", Role::user, "kvasir.v1");
  door.stream<EmbedCall>(at + "Embed", Role::user, "kvasir.v1");
  door.unary<pb::TokenizeRequest, pb::TokenizeResponse>(
      at + "Tokenize", Role::user,
      [&services](const Caller& caller, const auto& in, auto& out) { return tokenize(services, caller, in, out); },
      "tokenize");
  door.unary<pb::DetokenizeRequest, pb::DetokenizeResponse>(
      at + "Detokenize", Role::user,
      [&services](const Caller& caller, const auto& in, auto& out) -> Status {
        std::vector<int64_t> ids(in.ids().begin(), in.ids().end());
        KVASIR_ASSIGN(*out.mutable_text(), services.detokenize(caller, in.model(), ids, in.skip_special_tokens()));
        return {};
      },
      "detokenize");
  door.unary<pb::ListModelsRequest, pb::ListModelsResponse>(
      at + "ListModels", Role::user, [&services](const Caller& caller, const auto&, auto& out) -> Status {
        KVASIR_TRY(services.check_model(""));
        const model::ModelInfo& info = services.engine().info();
        pb::Model m;
        m.set_id(services.model_name());
        m.set_architecture(info.architecture);
        m.set_quantization(info.quantization);
        m.set_parameters(uint64_t(info.parameters));
        m.set_context_length(uint32_t(info.context_length));
        m.set_vocab_size(uint32_t(info.vocab_size));
        if (caller.may_use(m.id()) || caller.may_use(info.name)) *out.add_models() = m;
        m.set_parent(services.model_name());
        for (const engine::AdapterInfo& a : services.engine().adapters()) {
          if (!caller.may_use(a.name)) continue;
          m.set_id(a.name);
          *out.add_models() = m;
        }
        return {};
      });
  door.unary<pb::GetStatsRequest, pb::GetStatsResponse>(at + "GetStats", Role::metrics,
                                                        [&services](const Caller&, const auto&, auto& out) -> Status {
                                                          write_stats(services, out);
                                                          return {};
                                                        });
  door.unary<pb::CancelRequest, pb::CancelResponse>(
      at + "Cancel", Role::user, [&services](const Caller& caller, const auto& in, auto& out) -> Status {
        if (in.request_id().empty()) return invalid_argument("request_id is empty; say which request to cancel");
        out.set_found(services.cancel(caller, in.request_id()));
        return {};
      });
}

}  // namespace kvasir::server::rpc
