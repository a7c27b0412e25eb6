#include "server/grpc/vllm_inference.h"

#include <algorithm>

#include "server/grpc/last_tokens.h"
#include "server/grpc/stream_call.h"
#include "server/grpc/vllm_inference_request.h"

namespace kvasir::server::rpc {
namespace {

namespace pb = vllm;

// A token's place among the likeliest as far as they were asked for; 0: it is not among these.
uint32_t rank_of(const engine::TokenOut& t) {
  for (size_t i = 0; i < t.top.size(); ++i)
    if (t.top[i].token == t.id) return uint32_t(i + 1);
  return 0;
}

// Of SequenceOutput and PromptInfo alike. `ranked`: those beside it are the likeliest.
template <class Message>
void add_logprob(const engine::TokenOut& t, bool ranked, Message& to) {
  to.add_logprobs(t.logprob);
  to.add_ranks(ranked ? rank_of(t) : 0);
  pb::CandidateTokenInfo& others = *to.add_candidate_tokens();
  for (size_t i = 0; i < t.top.size(); ++i) {
    if (t.top[i].token == t.id) continue;
    pb::CandidateTokenInfo::TokenInfo& other = *others.add_tokens();
    other.set_id(uint32_t(t.top[i].token));
    other.set_logprob(t.top[i].logprob);
    other.set_rank(ranked ? uint32_t(i + 1) : 0);
  }
}

// Streamed: what is known of the prompt, pieces of each sequence, and how each ended. Else all of it in one.
class GenerateCall final : public AnswerCall<pb::GenerateRequest, pb::GenerateResponse> {
 public:
  GenerateCall(Opening opening, bool streamed) : AnswerCall(std::move(opening)), streamed_(streamed) {}

 protected:
  Status prepare() override {
    Services& services = context_.services;
    KVASIR_ASSIGN(GenerateInput in, services.read(caller_, kVllmInference,
                                                  read_vllm_inference(*request_, streamed_, services.options())));
    carry(*call_, in.request);
    if (const uint32_t most = request_->truncate_prompt_tokens(); most > 0)
      KVASIR_TRY(keep_last(services, caller_, most, in));
    drawn_.resize(size_t(std::clamp(in.request.n, 1, services.options().max_choices)));
    stop_tokens_ = in.request.stop_tokens;
    KVASIR_ASSIGN(Submitted submitted, services.generate(caller_, std::move(in)));
    prompt_ = std::move(submitted.prompt);
    feed_.add(std::move(submitted.stream));
    return {};
  }

  Next next(pb::GenerateResponse& out, bool& last, Status& status) override {
    pb::GenerateResponse& to = streamed_ ? out : whole_;
    while (auto event = feed_.poll()) {
      if (auto* e = std::get_if<engine::Started>(&event->second)) {
        describe(*e, *to.mutable_prompt_info());
      } else if (auto* e = std::get_if<engine::Tokens>(&event->second)) {
        if (e->tokens.empty() && e->text.empty()) continue;
        add(*e, *to.mutable_outputs());
      } else if (auto* e = std::get_if<engine::Finished>(&event->second)) {
        finish(*e, *to.mutable_outputs());
        last = e->last;
        if (!streamed_) out.Swap(&whole_);
        return Next::message;
      } else {
        status = std::get<engine::Failed>(event->second).status;
        return Next::end;
      }
      if (streamed_) return Next::message;
    }
    return Next::waiting;
  }

 private:
  void describe(const engine::Started& e, pb::PromptInfo& to) const {
    to.set_num_prompt_tokens(uint32_t(prompt_.size()));
    if (request_->response().prompt_token_ids()) to.mutable_token_ids()->Add(prompt_.begin(), prompt_.end());
    for (size_t i = 0; i < e.prompt_logprobs.size(); ++i)  // nothing stands before the first
      add_logprob(i > 0 ? e.prompt_logprobs[i] : engine::TokenOut(), true, to);
  }

  void add(engine::Tokens& e, pb::SequenceOutput& to) {
    const pb::ResponseOptions& shape = request_->response();
    to.set_index(uint32_t(e.choice));
    if (wants_text(*request_)) to.mutable_text()->append(e.text);
    to.set_num_tokens(to.num_tokens() + uint32_t(e.tokens.size()));
    for (const engine::TokenOut& t : e.tokens) {
      if (shape.output_token_ids()) to.add_token_ids(uint32_t(t.id));
      if (shape.output_logprobs()) add_logprob(t, !shape.output_candidates().has_token_ids(), to);
    }
    drawn_[size_t(e.choice)] += uint32_t(e.tokens.size());
  }

  void finish(const engine::Finished& e, pb::SequenceOutput& to) {
    using Info = pb::FinishInfo;
    to.set_index(uint32_t(e.choice));
    Info& info = *to.mutable_finish_info();
    switch (e.reason) {
      case engine::FinishReason::length: info.set_finish_reason(Info::LENGTH); break;
      case engine::FinishReason::cancelled: info.set_finish_reason(Info::ABORTED); break;
      case engine::FinishReason::stop_string:
        info.set_finish_reason(Info::STOP);
        info.set_stop_string(e.stop_string);
        break;
      case engine::FinishReason::stop_token:
        info.set_finish_reason(Info::STOP);
        if (std::find(stop_tokens_.begin(), stop_tokens_.end(), e.stop_token) != stop_tokens_.end())
          info.set_stop_token_id(uint32_t(e.stop_token));
        else
          info.set_eos_token_id(uint32_t(e.stop_token));
    }
    info.set_num_output_tokens(drawn_[size_t(e.choice)]);
  }

  const bool streamed_;
  std::vector<int32_t> prompt_, stop_tokens_;
  std::vector<uint32_t> drawn_;  // of each sequence
  pb::GenerateResponse whole_;
};

}  // namespace

void add_vllm_inference(Door& door) {
  for (const bool streamed : {false, true})
    door.add(
        streamed ? "/vllm.Inference/GenerateStream" : "/vllm.Inference/Generate", Role::user,
        [streamed](Opening o) -> std::shared_ptr<Incoming> {
          return std::make_shared<GenerateCall>(std::move(o), streamed);
        },
        kVllmInference);
}

}  // namespace kvasir::server::rpc
