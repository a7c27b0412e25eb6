#include "client/grpc_target.h"

#include <grpcpp/grpcpp.h>

#include <atomic>

#include "client/grpc_credentials.h"
#include "kvasir.grpc.pb.h"
#include "ppl_llm.grpc.pb.h"
#include "vllm_engine.grpc.pb.h"

namespace kvasir::client {
namespace {

Status to_status(const grpc::Status& s) {
  return s.ok() ? Status() : Status(static_cast<Code>(s.error_code()), s.error_message());
}

Status ended_early() { return internal_error("the call ended without this request's end"); }

void prepare_call(grpc::ClientContext& context, const TargetOptions& options) {
  context.set_deadline(std::chrono::system_clock::now() + options.timeout);
  if (!options.api_key.empty()) context.AddMetadata("authorization", "Bearer " + options.api_key);
}

// One call. Protocol says how to begin it and what a message means; the call deletes itself at its end.
template <class Protocol>
class Call final : public grpc::ClientReadReactor<typename Protocol::Message> {
 public:
  Call(const TargetOptions& options, const Ask& ask, std::shared_ptr<Sink> sink)
      : protocol_(options, ask), sink_(std::move(sink)) {
    prepare_call(context_, options);
  }
  void begin(typename Protocol::Stub& stub) {
    protocol_.begin(stub, &context_, this);
    this->StartRead(&message_);
    this->StartCall();
  }
  void OnReadDone(bool ok) override {
    if (!ok) return;
    protocol_.take(message_, *sink_);
    this->StartRead(&message_);
  }
  void OnDone(const grpc::Status& status) override {
    Status outcome = status.ok() ? protocol_.outcome : to_status(status);
    if (outcome.ok() && !protocol_.ended) outcome = ended_early();
    sink_->on_done(outcome, protocol_.usage);
    delete this;
  }

 private:
  Protocol protocol_;
  std::shared_ptr<Sink> sink_;
  grpc::ClientContext context_;
  typename Protocol::Message message_;
};

struct Common {
  Status outcome;  // of a call whose transport was fine
  bool ended = false;
  Usage usage;

  void cancelled() { outcome = Status(Code::cancelled, "the server cancelled the request"); }
};

struct Kvasir : Common {
  using Stub = v1::Inference::Stub;
  using Message = v1::GenerateResponse;
  v1::GenerateRequest request;

  Kvasir(const TargetOptions& options, const Ask& ask) {
    request.set_model(options.model);
    request.set_prompt(ask.prompt);
    request.set_max_tokens(ask.max_tokens);
    request.set_ignore_eos(ask.ignore_eos);
    request.mutable_sampling()->set_temperature(static_cast<float>(ask.temperature));
    if (ask.seed) request.mutable_sampling()->set_seed(*ask.seed);
    if (ask.top_two) request.set_logprobs(2);
  }
  void begin(Stub& stub, grpc::ClientContext* context, grpc::ClientReadReactor<Message>* reactor) {
    stub.async()->Generate(context, &request, reactor);
  }
  void take(const Message& m, Sink& sink) {
    if (m.has_delta()) {
      AnswerPiece piece{m.delta().tokens_size(), m.delta().text()};
      for (const v1::Token& t : m.delta().tokens()) {
        std::vector<double> top;
        for (const v1::Logprob& one : t.top()) top.push_back(one.logprob());
        piece.top_gap = lesser_gap(piece.top_gap, top_gap_of(top));
      }
      sink.on_tokens(piece);
    } else if (m.has_finished()) {
      ended = true;
      if (m.finished().reason() == v1::GenerateResponse_Finished_Reason_CANCELLED) cancelled();
      const v1::Usage& u = m.finished().usage();
      usage = {static_cast<int64_t>(u.prompt_tokens()), static_cast<int64_t>(u.completion_tokens()),
               static_cast<int64_t>(u.cached_tokens())};
    }
  }
};

void set_ppl(const Ask& ask, uint64_t id, ppl::llm::proto::Request& r) {
  r.set_id(id);
  r.set_prompt(ask.prompt);
  r.mutable_stopping_parameters()->set_max_new_tokens(ask.max_tokens);
  r.mutable_stopping_parameters()->set_ignore_eos_token(ask.ignore_eos);
  auto* c = r.mutable_choosing_parameters();
  c->set_temperature(static_cast<float>(ask.temperature));
  c->set_do_sample(ask.temperature > 0);
  if (ask.seed) c->set_seed(*ask.seed);
}

AnswerPiece ppl_piece(const ppl::llm::proto::Response& r) {
  AnswerPiece piece{1, r.generated()};
  if (r.has_detail()) piece.logprob = r.detail().logprobs();  // this contract has no others' to compare with
  return piece;
}

// This contract has no count of tokens, and one answer may carry several; but the end of an answer that used up what it
// was allowed says how many there were.
Usage ppl_usage(const ppl::llm::proto::Response& last, const ppl::llm::proto::Request& asked) {
  const auto& stopping = asked.stopping_parameters();
  const bool by_length = stopping.ignore_eos_token() ||
                         (last.has_detail() && last.detail().finish_reason() == ppl::llm::proto::FINISH_REASON_LENGTH);
  Usage usage;
  if (by_length) usage.output_tokens = stopping.max_new_tokens();
  return usage;
}

struct Ppl : Common {
  using Stub = ppl::llm::proto::LLMService::Stub;
  using Message = ppl::llm::proto::BatchedResponse;
  ppl::llm::proto::BatchedRequest request;

  Ppl(const TargetOptions&, const Ask& ask) { set_ppl(ask, 1, *request.add_req()); }
  void begin(Stub& stub, grpc::ClientContext* context, grpc::ClientReadReactor<Message>* reactor) {
    stub.async()->Generation(context, &request, reactor);
  }
  void take(const Message& m, Sink& sink) {
    for (const auto& r : m.rsp()) {
      if (r.status() == ppl::llm::proto::FAILED) {
        outcome = Status(Code::unknown, r.generated());
      } else {
        sink.on_tokens(ppl_piece(r));
        if (r.status() != ppl::llm::proto::FINISHED) continue;
        ended = true;
        usage = ppl_usage(r, request.req(0));
      }
    }
  }
};

// Many requests in one call: each ends alone, and the call's end ends those that are left.
class PplBatch final : public grpc::ClientReadReactor<ppl::llm::proto::BatchedResponse> {
 public:
  PplBatch(const TargetOptions& options, const std::vector<std::pair<Ask, std::shared_ptr<Sink>>>& asks) {
    for (const auto& [ask, sink] : asks) {
      set_ppl(ask, sinks_.size(), *request_.add_req());
      sinks_.push_back(sink);
    }
    prepare_call(context_, options);
  }
  void begin(Ppl::Stub& stub) {
    stub.async()->Generation(&context_, &request_, this);
    StartRead(&message_);
    StartCall();
  }
  void OnReadDone(bool ok) override {
    if (!ok) return;
    for (const auto& r : message_.rsp()) {
      if (r.id() >= sinks_.size() || !sinks_[r.id()]) continue;
      if (r.status() == ppl::llm::proto::FAILED) {
        end(sinks_[r.id()], Status(Code::unknown, r.generated()));
      } else {
        sinks_[r.id()]->on_tokens(ppl_piece(r));
        if (r.status() == ppl::llm::proto::FINISHED)
          end(sinks_[r.id()], {}, ppl_usage(r, request_.req(static_cast<int>(r.id()))));
      }
    }
    StartRead(&message_);
  }
  void OnDone(const grpc::Status& status) override {
    for (auto& sink : sinks_) {
      if (sink) end(sink, status.ok() ? ended_early() : to_status(status));
    }
    delete this;
  }

 private:
  static void end(std::shared_ptr<Sink>& sink, const Status& status, const Usage& usage = {}) {
    sink->on_done(status, usage);
    sink.reset();
  }
  std::vector<std::shared_ptr<Sink>> sinks_;  // by id; empty when ended
  grpc::ClientContext context_;
  ppl::llm::proto::BatchedRequest request_;
  ppl::llm::proto::BatchedResponse message_;
};

std::atomic<uint64_t> next_id{1};

struct Vllm : Common {
  using Stub = vllm::grpc::engine::VllmEngine::Stub;
  using Message = vllm::grpc::engine::GenerateResponse;
  vllm::grpc::engine::GenerateRequest request;

  Vllm(const TargetOptions&, const Ask& ask) {
    request.set_request_id("bench-" + std::to_string(next_id++));
    request.set_text(ask.prompt);
    request.set_stream(true);
    auto* s = request.mutable_sampling_params();
    s->set_temperature(static_cast<float>(ask.temperature));
    s->set_max_tokens(ask.max_tokens);
    s->set_ignore_eos(ask.ignore_eos);
    if (ask.seed) s->set_seed(static_cast<int32_t>(*ask.seed));
    if (ask.top_two) s->set_logprobs(2);
  }
  void begin(Stub& stub, grpc::ClientContext* context, grpc::ClientReadReactor<Message>* reactor) {
    stub.async()->Generate(context, &request, reactor);
  }
  void take(const Message& m, Sink& sink) {
    if (m.has_chunk()) {
      std::string ids;
      for (const auto id : m.chunk().token_ids()) ids += std::to_string(id) + " ";
      AnswerPiece piece{m.chunk().token_ids_size(), ids};
      for (const auto& top : m.chunk().output_logprobs().top_logprobs()) {
        piece.top_gap = lesser_gap(piece.top_gap, top_gap_of({top.values().begin(), top.values().end()}));
      }
      sink.on_tokens(piece);
    } else if (m.has_complete()) {
      ended = true;
      if (m.complete().finish_reason() == "abort") cancelled();
      usage = {static_cast<int64_t>(m.complete().prompt_tokens()),
               static_cast<int64_t>(m.complete().completion_tokens()),
               static_cast<int64_t>(m.complete().cached_tokens())};
    }
  }
};

ServerFigures figures_of_stats(const v1::GetStatsResponse& r) {
  const std::pair<const char*, int64_t> all[] = {{"running", r.running()},
                                                 {"waiting", r.waiting()},
                                                 {"pages_total", r.pages_total()},
                                                 {"pages_free", r.pages_free()},
                                                 {"pages_cached", r.pages_cached()},
                                                 {"prompt_tokens", r.prompt_tokens()},
                                                 {"cached_tokens", r.cached_tokens()},
                                                 {"output_tokens", r.output_tokens()},
                                                 {"requests", r.requests()},
                                                 {"finished", r.finished()},
                                                 {"failed", r.failed()},
                                                 {"cancelled", r.cancelled()},
                                                 {"preemptions", r.preemptions()},
                                                 {"steps", r.steps()}};
  ServerFigures out;
  for (const auto& [name, value] : all) out[name] = static_cast<double>(value);
  return out;
}

ServerFigures figures_of_loads(const vllm::grpc::engine::GetLoadsResponse& r) {
  ServerFigures out;
  for (const auto& load : r.loads()) {
    out["running"] += load.num_running_reqs();
    out["waiting"] += load.num_waiting_reqs();
    out["used_tokens"] += load.num_used_tokens();
    out["generated_per_second"] += load.gen_throughput();
  }
  return out;
}

template <class Protocol>
class GrpcTarget final : public Target {
 public:
  GrpcTarget(const TargetOptions& options, const std::shared_ptr<grpc::ChannelCredentials>& credentials)
      : options_(options) {
    for (int i = 0; i < options.connections; ++i) {
      grpc::ChannelArguments args;
      args.SetInt("kvasir.channel", i);  // equal arguments would share one connection
      args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
      args.SetMaxReceiveMessageSize(64 << 20);
      channels_.push_back(grpc::CreateCustomChannel(options.address, credentials, args));
      stubs_.push_back(std::make_unique<typename Protocol::Stub>(channels_.back()));
    }
    own_ = v1::Inference::NewStub(channels_[0]);
    // gRPC 1.51 may abort when the last channel of its callback queue goes, so the first one stays.
    static const auto* const kept = new std::shared_ptr<grpc::Channel>(channels_[0]);
    (void)kept;
  }
  void start(const Ask& ask, std::shared_ptr<Sink> sink) override {
    auto* call = new Call<Protocol>(options_, ask, std::move(sink));
    call->begin(*stubs_[next_++ % stubs_.size()]);
  }
  void start_together(std::vector<std::pair<Ask, std::shared_ptr<Sink>>> asks) override {
    if constexpr (std::is_same_v<Protocol, Ppl>) {
      auto* call = new PplBatch(options_, asks);
      call->begin(*stubs_[next_++ % stubs_.size()]);
    } else {
      Target::start_together(std::move(asks));
    }
  }
  // A server of ours says most by its own contract, whatever it is loaded through.
  ServerFigures server_figures() override {
    grpc::ClientContext context;
    prepare(context);
    v1::GetStatsResponse r;
    if (own_->GetStats(&context, {}, &r).ok()) return figures_of_stats(r);
    if constexpr (std::is_same_v<Protocol, Vllm>) {
      grpc::ClientContext again;
      prepare(again);
      vllm::grpc::engine::GetLoadsResponse loads;
      if (stubs_[0]->GetLoads(&again, {}, &loads).ok()) return figures_of_loads(loads);
    }
    return {};
  }

 private:
  void prepare(grpc::ClientContext& context) const {
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(1));
    if (!options_.api_key.empty()) context.AddMetadata("authorization", "Bearer " + options_.api_key);
  }

  TargetOptions options_;
  std::vector<std::shared_ptr<grpc::Channel>> channels_;
  std::vector<std::unique_ptr<typename Protocol::Stub>> stubs_;
  std::unique_ptr<v1::Inference::Stub> own_;
  std::atomic<size_t> next_{0};
};

template <class Protocol>
Result<std::unique_ptr<Target>> make(const TargetOptions& options) {
  KVASIR_ASSIGN(auto credentials, grpc_credentials(options.tls));
  return std::unique_ptr<Target>(std::make_unique<GrpcTarget<Protocol>>(options, credentials));
}

}  // namespace

Result<std::unique_ptr<Target>> make_kvasir_target(const TargetOptions& o) { return make<Kvasir>(o); }
Result<std::unique_ptr<Target>> make_ppl_target(const TargetOptions& o) { return make<Ppl>(o); }
Result<std::unique_ptr<Target>> make_vllm_target(const TargetOptions& o) { return make<Vllm>(o); }

}  // namespace kvasir::client
