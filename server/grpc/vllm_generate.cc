#include "server/grpc/vllm_generate.h"

#include <algorithm>

#include "server/grpc/last_tokens.h"
#include "server/grpc/stream_call.h"
#include "server/grpc/vllm_request.h"
#include "vllm_engine.pb.h"

namespace kvasir::server::rpc {
namespace {

namespace pb = vllm::grpc::engine;

void add_top(const engine::TokenOut& from, pb::TopLogProbs& to) {
  for (const model::TokenLogprob& t : from.top) {
    to.add_values(t.logprob);
    to.add_token_ids(uint32_t(t.token));
  }
}

void add_logprobs(const std::vector<engine::TokenOut>& tokens, pb::OutputLogProbs& to) {
  for (const engine::TokenOut& t : tokens) {
    to.add_token_logprobs(t.logprob);
    to.add_token_ids(uint32_t(t.id));
    add_top(t, *to.add_top_logprobs());
  }
}

class GenerateCall final : public AnswerCall<pb::GenerateRequest, pb::GenerateResponse> {
 public:
  using AnswerCall::AnswerCall;

 protected:
  Status prepare() override {
    Services& services = context_.services;
    std::optional<int64_t> truncate;
    KVASIR_ASSIGN(GenerateInput in, services.read(caller_, "vllm", read_vllm_request(*request_, truncate)));
    carry(*call_, in.request);
    if (truncate) {
      const int64_t context = services.engine().info().context_length;
      KVASIR_TRY(keep_last(services, caller_, size_t(*truncate == -1 ? context - 1 : *truncate), in));
    }
    logprobs_ = in.request.sampling.logprobs >= 0;
    choices_.resize(size_t(std::clamp(in.request.n, 1, services.options().max_choices)));
    stop_tokens_ = in.request.stop_tokens;
    KVASIR_ASSIGN(Submitted submitted, services.generate(caller_, std::move(in)));
    prompt_tokens_ = uint32_t(submitted.prompt.size());
    feed_.add(std::move(submitted.stream));
    return {};
  }

  Next next(pb::GenerateResponse& out, bool& last, Status& status) override {
    while (auto event = feed_.poll()) {
      if (auto* e = std::get_if<engine::Started>(&event->second)) {
        cached_ = uint32_t(e->cached_tokens);
        keep_prompt_logprobs(*e);
      } else if (auto* e = std::get_if<engine::Tokens>(&event->second)) {
        if (add(*e, out)) return Next::message;
      } else if (auto* e = std::get_if<engine::Finished>(&event->second)) {
        complete(*e, *out.mutable_complete());
        last = e->last;
        return Next::message;
      } else {
        status = std::get<engine::Failed>(event->second).status;
        return Next::end;
      }
    }
    return Next::waiting;
  }

 private:
  struct Choice {
    std::vector<uint32_t> ids;
    pb::OutputLogProbs logprobs;
  };

  void keep_prompt_logprobs(const engine::Started& e) {
    for (size_t i = 0; i < e.prompt_logprobs.size(); ++i) {
      const engine::TokenOut& t = e.prompt_logprobs[i];
      pb::InputTokenLogProb& to = *prompt_logprobs_.add_token_logprobs();
      if (i > 0) to.set_value(t.logprob);
      prompt_logprobs_.add_token_ids(uint32_t(t.id));
      add_top(t, *prompt_logprobs_.add_top_logprobs());
    }
  }

  // False: there is nothing to send for it.
  bool add(const engine::Tokens& e, pb::GenerateResponse& out) {
    Choice& choice = choices_[size_t(e.choice)];
    for (const engine::TokenOut& t : e.tokens) choice.ids.push_back(uint32_t(t.id));
    if (logprobs_) add_logprobs(e.tokens, choice.logprobs);
    if (!request_->stream() || e.tokens.empty()) return false;
    pb::GenerateStreamChunk& chunk = *out.mutable_chunk();
    chunk.mutable_token_ids()->Reserve(int(e.tokens.size()));
    for (const engine::TokenOut& t : e.tokens) chunk.add_token_ids(uint32_t(t.id));
    chunk.set_prompt_tokens(prompt_tokens_);
    chunk.set_completion_tokens(uint32_t(choice.ids.size()));
    chunk.set_cached_tokens(cached_);
    chunk.set_index(uint32_t(e.choice));
    if (logprobs_) add_logprobs(e.tokens, *chunk.mutable_output_logprobs());
    if (prompt_logprobs_.token_ids_size() > 0 && !prompt_sent_) {
      *chunk.mutable_input_logprobs() = prompt_logprobs_;
      prompt_sent_ = true;
    }
    return true;
  }

  void complete(const engine::Finished& e, pb::GenerateComplete& to) {
    Choice& choice = choices_[size_t(e.choice)];
    to.set_prompt_tokens(prompt_tokens_);
    to.set_completion_tokens(uint32_t(choice.ids.size()));
    to.set_cached_tokens(cached_);
    to.set_index(uint32_t(e.choice));
    to.mutable_output_ids()->Add(choice.ids.begin(), choice.ids.end());
    if (logprobs_) to.mutable_output_logprobs()->Swap(&choice.logprobs);
    if (prompt_logprobs_.token_ids_size() > 0) *to.mutable_input_logprobs() = prompt_logprobs_;
    switch (e.reason) {
      case engine::FinishReason::length: to.set_finish_reason("length"); break;
      case engine::FinishReason::cancelled: to.set_finish_reason("abort"); break;
      case engine::FinishReason::stop_string:
        to.set_finish_reason("stop");
        to.set_matched_stop_str(e.stop_string);
        break;
      case engine::FinishReason::stop_token:
        to.set_finish_reason("stop");
        // The model's own end is no match of what was asked for.
        if (std::find(stop_tokens_.begin(), stop_tokens_.end(), e.stop_token) != stop_tokens_.end())
          to.set_matched_token_id(uint32_t(e.stop_token));
    }
    choice = {};
  }

  std::vector<int32_t> stop_tokens_;
  std::vector<Choice> choices_;
  pb::InputLogProbs prompt_logprobs_;
  uint32_t prompt_tokens_ = 0, cached_ = 0;
  bool logprobs_ = false, prompt_sent_ = false;
};

}  // namespace

std::shared_ptr<Incoming> vllm_generate(Opening opening) { return std::make_shared<GenerateCall>(std::move(opening)); }

}  // namespace kvasir::server::rpc
