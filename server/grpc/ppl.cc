#include "server/grpc/ppl.h"

#include <algorithm>
#include <unordered_set>

#include "core/cat.h"
#include "ppl_llm.pb.h"
#include "server/grpc/parameters.h"
#include "server/grpc/stream_call.h"

namespace kvasir::server::rpc {
namespace {

namespace pb = ppl::llm::proto;

constexpr int kEventsPerMessage = 256;

Result<GenerateInput> read_request(const pb::Request& from, std::unordered_set<uint64_t>& ids) {
  if (!ids.insert(from.id()).second) return invalid_argument(cat("id ", from.id(), " is used twice in this call"));
  GenerateInput in;
  in.protocol = "ppl";
  in.wire = Wire::ppl;
  engine::Request& r = in.request;
  r.sampling.logprobs = 0;  // every answer carries its token's
  if (from.has_tokens())
    in.prompt = TokensInput(from.tokens().ids().begin(), from.tokens().ids().end());
  else
    in.prompt = TextInput{from.prompt()};
  r.detokenize = !from.has_tokens();

  const pb::NextTokenChooserParameters& c = from.choosing_parameters();
  if (c.watermark())
    return invalid_argument("watermark is true; this server adds none: leave it unset").with_field("watermark");
  read_parameters(c, in);  // zeros are unset: off, or the default
  if (!c.do_sample() || c.temperature() == 0) r.sampling.temperature = 0;
  read_parameters(from.stopping_parameters(), in);
  return in;
}

class GenerationCall final : public AnswerCall<pb::BatchedRequest, pb::BatchedResponse> {
 public:
  using AnswerCall::AnswerCall;

 protected:
  Status prepare() override {
    KVASIR_TRY(context_.services.check_model(""));
    if (request_->req_size() == 0) return invalid_argument("req is empty; send at least one request").with_field("req");
    if (const int most = context_.services.options().max_streams_per_connection; request_->req_size() > most)
      return invalid_argument(cat("req has ", request_->req_size(), " requests; at most ", most,
                                  " (max_streams_per_connection) are taken in one call: send the others in another"))
          .with_field("req");
    tokenizer_ = context_.services.engine().tokenizer();
    std::unordered_set<uint64_t> ids;
    for (const pb::Request& r : request_->req())
      if (Status status = submit(r, ids); !status.ok()) fail(*refused_.add_rsp(), r.id(), status);
    return {};
  }

  Next next(pb::BatchedResponse& out, bool& last, Status&) override {
    out.Swap(&refused_);
    for (int i = 0; i < kEventsPerMessage; ++i) {
      auto event = feed_.poll();
      if (!event) break;
      write(event->first, event->second, out);
    }
    last = open_ == 0;
    return out.rsp_size() > 0 || last ? Next::message : Next::waiting;
  }

 private:
  Status submit(const pb::Request& r, std::unordered_set<uint64_t>& ids) {
    KVASIR_ASSIGN(GenerateInput in, context_.services.read(caller_, "ppl", read_request(r, ids)));
    const ServerOptions& options = context_.services.options();
    if (r.choosing_parameters().top_p() == 0 && options.said_top_p > 0) in.request.sampling.top_p = options.said_top_p;
    if (r.choosing_parameters().top_k() == 0 && options.said_top_k > 0) in.request.sampling.top_k = options.said_top_k;
    carry(*call_, in.request);
    KVASIR_ASSIGN(Submitted submitted, context_.services.generate(caller_, std::move(in)));
    requests_.push_back(&r);
    feed_.add(std::move(submitted.stream));
    ++open_;
    return {};
  }

  // A failure says why where the client looks for text: the contract has no field for it.
  static void fail(pb::Response& to, uint64_t id, const Status& status) {
    to.set_id(id);
    to.set_status(pb::FAILED);
    to.set_generated(status.to_string());
  }

  void write(size_t i, engine::Event& event, pb::BatchedResponse& out) {
    const pb::Request& request = *requests_[i];
    if (auto* e = std::get_if<engine::Tokens>(&event)) {
      if (request.has_tokens()) {
        for (const engine::TokenOut& token : e->tokens) {
          pb::Response& to = answer(request, token, out);
          to.mutable_tokens()->add_ids(uint32_t(token.id));
        }
      } else if (!e->tokens.empty() || !e->text.empty()) {
        pb::Response& to = answer(request, e->tokens.empty() ? engine::TokenOut{} : e->tokens.back(), out);
        to.set_generated(std::move(e->text));
      }
    } else if (auto* e = std::get_if<engine::Finished>(&event)) {
      if (e->reason == engine::FinishReason::cancelled) {
        fail(*out.add_rsp(), request.id(), Status(Code::cancelled, "the request was cancelled"));
      } else {
        finish(request, *e, out);
      }
      over(i);
    } else if (auto* e = std::get_if<engine::Failed>(&event)) {
      fail(*out.add_rsp(), request.id(), e->status);
      over(i);
    }
  }

  pb::Response& answer(const pb::Request& request, const engine::TokenOut& token, pb::BatchedResponse& out) const {
    pb::Response& to = *out.add_rsp();
    to.set_id(request.id());
    to.set_status(pb::PROCESSING);
    to.mutable_detail()->set_logprobs(token.logprob);
    to.mutable_detail()->set_is_special(tokenizer_ && tokenizer_->is_special(token.id));
    return to;
  }

  // The last token's answer says so itself when it goes with this message.
  static void finish(const pb::Request& request, const engine::Finished& e, pb::BatchedResponse& out) {
    int n = out.rsp_size();
    bool ours = n > 0 && out.rsp(n - 1).id() == request.id() && out.rsp(n - 1).status() == pb::PROCESSING;
    pb::Response& to = ours ? *out.mutable_rsp(n - 1) : *out.add_rsp();
    to.set_id(request.id());
    to.set_status(pb::FINISHED);
    const auto& stops = request.stopping_parameters().stop_tokens().ids();
    bool asked = std::find(stops.begin(), stops.end(), uint32_t(e.stop_token)) != stops.end();
    to.mutable_detail()->set_finish_reason(e.reason == engine::FinishReason::length ? pb::FINISH_REASON_LENGTH
                                           : asked                                  ? pb::FINISH_REASON_STOP_SEQUENCE
                                                                                    : pb::FINISH_REASON_EOS_TOKEN);
  }

  void over(size_t i) {
    feed_.drop(i);
    --open_;
  }

  std::vector<const pb::Request*> requests_;  // by the feed's number
  pb::BatchedResponse refused_;
  int open_ = 0;
  text::TokenizerPtr tokenizer_;
};

}  // namespace

void add_ppl(Door& door) { door.stream<GenerationCall>("/ppl.llm.proto.LLMService/Generation", Role::user, "ppl"); }

}  // namespace kvasir::server::rpc
