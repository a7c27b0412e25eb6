#include "server/grpc/kserve.h"

#include "core/cat.h"
#include "kserve.grpc.pb.h"
#include "server/grpc/kserve_request.h"
#include "server/grpc/stream_call.h"

namespace kvasir::server::rpc {
namespace {

namespace pb = inference;

const char* reason_name(engine::FinishReason reason) {
  switch (reason) {
    case engine::FinishReason::length: return "length";
    case engine::FinishReason::cancelled: return "cancelled";
    default: return "stop";
  }
}

// What the last answer to a request says of it.
void add_end(const engine::Finished& end, pb::ModelInferResponse& to) {
  auto& parameters = *to.mutable_parameters();
  parameters["finish_reason"].set_string_param(reason_name(end.reason));
  parameters["completion_tokens"].set_int64_param(end.usage.completion_tokens);
  parameters["prompt_tokens"].set_int64_param(end.usage.prompt_tokens);
}

Status was_cancelled() { return {Code::cancelled, "the request was cancelled"}; }

// Errors that a stream holds for its reader; a client that reads none of them is read no further.
constexpr size_t kMostErrors = 64;

Status check_version(const std::string& version) {
  if (version.empty() || version == "1") return {};
  return invalid_argument(cat("model_version is ", version.substr(0, 64), "; there is version 1"))
      .with_field("model_version");
}

void name_answer(const Services& services, const std::string& id, pb::ModelInferResponse& out) {
  out.set_model_name(services.model_name());
  out.set_model_version("1");
  out.set_id(id);
}

// One request, one answer with all of the text. The unary reactor and the events' end belong together.
class InferCall final : public std::enable_shared_from_this<InferCall> {
 public:
  InferCall(const Context& context, pb::ModelInferResponse* out, grpc::CallbackServerContext* call)
      : context_(context), out_(out), call_(call) {}

  // Cancels on disconnect; finishes once.
  class Reactor final : public grpc::ServerUnaryReactor {
   public:
    explicit Reactor(std::shared_ptr<InferCall> call) : call_(std::move(call)) {}
    void OnCancel() override { call_->cancelled(); }
    void OnDone() override { delete this; }

   private:
    std::shared_ptr<InferCall> call_;
  };

  Reactor* begin(const pb::ModelInferRequest* in) {
    auto* reactor = reactor_ = new Reactor(shared_from_this());
    auto self = shared_from_this();
    if (!context_.workers.post([self, in] { self->prepare(*in); }))
      finish(resource_exhausted("the server has too many calls to look at; try again")
                 .with_retry_after(std::chrono::seconds(1)));
    return reactor;
  }

 private:
  void prepare(const pb::ModelInferRequest& in) {
    Status status = submit(in);
    if (!status.ok()) return finish(status);
    std::weak_ptr<InferCall> weak = shared_from_this();
    keep_ = shared_from_this();
    feed_.start([weak, &delivery = context_.delivery] {
      if (auto self = weak.lock()) (void)delivery.post([self = std::move(self)] { self->read(); });
    });
    read();  // it may have been cancelled before there was a stream to cancel
  }
  Result<InferInput> read_whole(const pb::ModelInferRequest& in) const {
    KVASIR_ASSIGN(InferInput input, read_infer_request(in, context_.services.options()));
    KVASIR_TRY(check_version(in.model_version()));
    if (input.stream)
      return invalid_argument("stream is true; ModelInfer answers once: call ModelStreamInfer, or leave it unset")
          .with_field("stream");
    return input;
  }
  Status submit(const pb::ModelInferRequest& in) {
    KVASIR_ASSIGN(Caller caller, caller_of(context_.services, *call_));
    KVASIR_TRY(caller.require(Role::user, "ModelInfer"));
    KVASIR_ASSIGN(InferInput input, context_.services.read(caller, "kserve", read_whole(in)));
    carry(*call_, input.generate.request);
    raw_ = input.raw;
    if (input.echo) text_ = std::move(input.text_input);
    KVASIR_ASSIGN(Submitted submitted, context_.services.generate(caller, std::move(input.generate)));
    name_answer(context_.services, submitted.stream->id(), *out_);
    feed_.add(std::move(submitted.stream));
    return {};
  }
  void read() {
    std::shared_ptr<InferCall> last;  // goes after the lock
    std::lock_guard lock(mutex_);
    if (finished_) return;
    if (cancelled_) feed_.cancel();
    while (auto event = feed_.poll()) {
      if (auto* e = std::get_if<engine::Tokens>(&event->second)) {
        text_ += e->text;
      } else if (auto* e = std::get_if<engine::Finished>(&event->second)) {
        add_end(*e, *out_);
        write_text_output(text_, raw_, *out_);
        end(e->reason == engine::FinishReason::cancelled ? was_cancelled() : Status());
      } else if (auto* e = std::get_if<engine::Failed>(&event->second)) {
        end(e->status);
      }
      if (finished_) {
        last = std::move(keep_);
        return;
      }
    }
  }
  void cancelled() {
    {
      std::lock_guard lock(mutex_);
      cancelled_ = true;
    }
    auto self = shared_from_this();
    (void)context_.delivery.post([self] { self->read(); });
  }
  void finish(const Status& status) {
    std::lock_guard lock(mutex_);
    end(status);
  }
  void end(const Status& status) {
    finished_ = true;
    reactor_->Finish(to_grpc(status, call_));
  }

  const Context context_;
  pb::ModelInferResponse* const out_;
  grpc::CallbackServerContext* const call_;
  Reactor* reactor_ = nullptr;
  std::shared_ptr<InferCall> keep_;  // while the engine works
  Feed feed_;
  std::mutex mutex_;
  std::string text_;
  bool raw_ = false, cancelled_ = false, finished_ = false;
};

// Many requests on one stream; their answers come as they are made, with the request's id. The messages are taken as
// bytes: to gRPC one that does not parse is the same as the end of the stream, and here it fails alone.
class StreamInferCall final
    : public StreamCall<grpc::ByteBuffer, grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>> {
 public:
  using StreamCall::StreamCall;
  void OnReadDone(bool ok) override {
    if (!ok) {
      locked([&] { reading_ = false; });
      return pump();
    }
    auto self = shared_from_this();
    bool queued = context_.workers.post([self, this] {
      submit();
      pump();
      read();
    });
    if (queued) return;
    locked([&] { errors_.push_back({"", "the server has too many calls to look at; try again"}); });
    pump();
    read();
  }

 protected:
  Status prepare() override {
    KVASIR_ASSIGN(caller_, caller_of(context_.services, *call_));
    KVASIR_TRY(caller_.require(Role::user, "ModelStreamInfer"));
    StartRead(&received_);
    return {};
  }

  Next next(grpc::ByteBuffer& out, bool& last, Status& status) override {
    pb::ModelStreamInferResponse answer;
    Next what = next(answer, last, status);
    bool own = false;
    if (what == Next::message) grpc::SerializationTraits<pb::ModelStreamInferResponse>::Serialize(answer, &out, &own);
    return what;
  }

 private:
  struct Job {
    std::string id, text;
    bool stream = false, raw = false;
  };

  Next next(pb::ModelStreamInferResponse& out, bool& last, Status& status) {
    if (!errors_.empty()) {
      out.set_error_message(errors_.front().second);
      out.mutable_infer_response()->set_id(errors_.front().first);
      errors_.pop_front();
      if (held_) read_on();
      return Next::message;
    }
    while (auto event = feed_.poll())
      if (write(event->first, event->second, out)) return Next::message;
    if (reading_ || open_ > 0) return Next::waiting;
    last = false;
    status = {};
    return Next::end;
  }

  void read() {
    locked([&] { read_on(); });
  }
  // Under the lock.
  void read_on() {
    held_ = errors_.size() >= kMostErrors;
    if (!held_ && !finished()) StartRead(&received_);
  }
  void submit() {
    request_.Clear();  // what does not parse has no id
    Status status = try_submit();
    if (!status.ok()) locked([&] { errors_.push_back({request_.id(), status.to_string()}); });
  }
  Result<InferInput> read_received() {
    if (!grpc::SerializationTraits<pb::ModelInferRequest>::Deserialize(&received_, &request_).ok()) {
      request_.Clear();
      return invalid_argument(
          "what was sent is no inference.ModelInferRequest: its bytes do not parse, or a string in "
          "it is not UTF-8");
    }
    KVASIR_TRY(check_version(request_.model_version()));
    return read_infer_request(request_, context_.services.options());
  }
  Status try_submit() {
    KVASIR_ASSIGN(InferInput input, context_.services.read(caller_, "kserve", read_received()));
    carry(*call_, input.generate.request);
    bool full = false;
    locked([&] { full = open_ >= context_.services.options().max_streams_per_connection; });
    if (full)
      return resource_exhausted(cat("this stream has ", context_.services.options().max_streams_per_connection,
                                    " requests open; wait for one to end"));
    KVASIR_ASSIGN(Submitted submitted, context_.services.generate(caller_, std::move(input.generate)));
    locked([&] {  // next() may only see its number together with what is kept under it
      const size_t i = feed_.add(std::move(submitted.stream));
      if (i >= jobs_.size()) jobs_.resize(i + 1);
      jobs_[i] = {request_.id(), input.echo ? input.text_input : "", input.stream, input.raw};
      ++open_;
    });
    return {};
  }

  bool write(size_t i, engine::Event& event, pb::ModelStreamInferResponse& out) {
    Job& job = jobs_[i];
    if (auto* e = std::get_if<engine::Tokens>(&event)) {
      job.text += e->text;
      if (!job.stream || job.text.empty()) return false;
      answer(job, false, out);
      return true;
    }
    if (std::holds_alternative<engine::Started>(event)) return false;
    const auto* ended = std::get_if<engine::Finished>(&event);
    if (ended && ended->reason != engine::FinishReason::cancelled) {
      add_end(*ended, answer(job, true, out));
    } else {  // half an answer must not look like a whole one
      out.set_error_message((ended ? was_cancelled() : std::get<engine::Failed>(event).status).to_string());
      out.mutable_infer_response()->set_id(job.id);
    }
    feed_.drop(i);
    job = {};
    --open_;
    return true;
  }
  pb::ModelInferResponse& answer(Job& job, bool final, pb::ModelStreamInferResponse& out) {
    pb::ModelInferResponse& to = *out.mutable_infer_response();
    name_answer(context_.services, job.id, to);
    write_text_output(job.text, job.raw, to);
    (*to.mutable_parameters())["triton_final_response"].set_bool_param(final);
    job.text.clear();
    return to;
  }

  Caller caller_;
  grpc::ByteBuffer received_;
  pb::ModelInferRequest request_;
  std::deque<Job> jobs_;  // by the feed's number
  std::deque<std::pair<std::string, std::string>> errors_;
  bool reading_ = true, held_ = false;  // held_: no read is under way until errors have gone out
  int open_ = 0;
};

struct Tensor {
  const char* name;
  pb::DataType type;
  bool optional;
};
constexpr Tensor kInputs[] = {{"text_input", pb::TYPE_STRING, false},
                              {"stream", pb::TYPE_BOOL, true},
                              {"sampling_parameters", pb::TYPE_STRING, true},
                              {"exclude_input_in_output", pb::TYPE_BOOL, true}};
constexpr Tensor kOutput{"text_output", pb::TYPE_STRING, false};

using S = pb::GRPCInferenceService;
using UnaryMethods =
    S::WithCallbackMethod_ServerLive<S::WithCallbackMethod_ServerReady<S::WithCallbackMethod_ModelReady<
        S::WithCallbackMethod_ServerMetadata<S::WithCallbackMethod_ModelMetadata<S::WithCallbackMethod_ModelInfer<
            S::WithCallbackMethod_ModelConfig<S::WithCallbackMethod_ModelStatistics<S::Service>>>>>>>>;
using Methods = S::WithRawCallbackMethod_ModelStreamInfer<UnaryMethods>;

class KServe final : public Methods {
 public:
  explicit KServe(const Context& context) : c_(context) {}

  grpc::ServerUnaryReactor* ServerLive(grpc::CallbackServerContext* call, const pb::ServerLiveRequest*,
                                       pb::ServerLiveResponse* out) override {
    out->set_live(c_.services.health().live);
    return done(call);
  }
  grpc::ServerUnaryReactor* ServerReady(grpc::CallbackServerContext* call, const pb::ServerReadyRequest*,
                                        pb::ServerReadyResponse* out) override {
    out->set_ready(c_.services.health().ready);
    return done(call);
  }
  grpc::ServerUnaryReactor* ModelReady(grpc::CallbackServerContext* call, const pb::ModelReadyRequest* in,
                                       pb::ModelReadyResponse* out) override {
    out->set_ready(c_.services.health().ready && c_.services.check_model(in->name()).ok() &&
                   check_version(in->version()).ok());
    return done(call);
  }
  grpc::ServerUnaryReactor* ServerMetadata(grpc::CallbackServerContext* call, const pb::ServerMetadataRequest*,
                                           pb::ServerMetadataResponse* out) override {
    out->set_name("kvasir");
    out->set_version(KVASIR_VERSION);
    return done(call);
  }
  grpc::ServerUnaryReactor* ModelMetadata(grpc::CallbackServerContext* call, const pb::ModelMetadataRequest* in,
                                          pb::ModelMetadataResponse* out) override {
    return unary(c_, call, Role::user, "ModelMetadata", [this, in, out](const Caller&) -> Status {
      KVASIR_TRY(c_.services.check_model(in->name()));
      KVASIR_TRY(check_version(in->version()));
      out->set_name(c_.services.model_name());
      out->add_versions("1");
      out->set_platform("kvasir");
      auto tensor = [](auto& t, const Tensor& from) {
        t.set_name(from.name);
        t.set_datatype(from.type == pb::TYPE_BOOL ? "BOOL" : "BYTES");
        t.add_shape(1);
      };
      for (const Tensor& input : kInputs) tensor(*out->add_inputs(), input);
      tensor(*out->add_outputs(), kOutput);
      return {};
    });
  }
  grpc::ServerUnaryReactor* ModelConfig(grpc::CallbackServerContext* call, const pb::ModelConfigRequest* in,
                                        pb::ModelConfigResponse* out) override {
    return unary(c_, call, Role::user, "ModelConfig", [this, in, out](const Caller&) -> Status {
      KVASIR_TRY(c_.services.check_model(in->name()));
      KVASIR_TRY(check_version(in->version()));
      pb::ModelConfig& config = *out->mutable_config();
      config.set_name(c_.services.model_name());
      config.set_platform("kvasir");
      config.set_backend("kvasir");
      config.mutable_model_transaction_policy()->set_decoupled(true);  // an answer may be many
      for (const Tensor& tensor : kInputs) {
        pb::ModelInput& input = *config.add_input();
        input.set_name(tensor.name);
        input.set_data_type(tensor.type);
        input.add_dims(1);
        input.set_optional(tensor.optional);
      }
      pb::ModelOutput& output = *config.add_output();
      output.set_name(kOutput.name);
      output.set_data_type(kOutput.type);
      output.add_dims(1);
      return {};
    });
  }
  grpc::ServerUnaryReactor* ModelStatistics(grpc::CallbackServerContext* call, const pb::ModelStatisticsRequest* in,
                                            pb::ModelStatisticsResponse* out) override {
    return unary(c_, call, Role::metrics, "ModelStatistics", [this, in, out](const Caller&) -> Status {
      KVASIR_TRY(c_.services.check_model(in->name()));
      KVASIR_TRY(check_version(in->version()));
      const engine::Stats stats = c_.services.engine().stats();
      pb::ModelStatistics& to = *out->add_model_stats();
      to.set_name(c_.services.model_name());
      to.set_version("1");
      to.set_inference_count(uint64_t(stats.finished));
      to.set_execution_count(uint64_t(stats.steps));
      auto duration = [](pb::StatisticDuration& d, int64_t count, double seconds) {
        d.set_count(uint64_t(count));
        d.set_ns(uint64_t(seconds * 1e9));
      };
      pb::InferStatistics& all = *to.mutable_inference_stats();
      duration(*all.mutable_success(), stats.finished, stats.whole.sum);
      duration(*all.mutable_fail(), stats.failed, 0);
      duration(*all.mutable_queue(), stats.queued.count, stats.queued.sum);
      duration(*all.mutable_compute_input(), stats.prefill.count, stats.prefill.sum);
      duration(*all.mutable_compute_infer(), stats.decode.count, stats.decode.sum);
      return {};
    });
  }
  grpc::ServerUnaryReactor* ModelInfer(grpc::CallbackServerContext* call, const pb::ModelInferRequest* in,
                                       pb::ModelInferResponse* out) override {
    return std::make_shared<InferCall>(c_, out, call)->begin(in);
  }
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ModelStreamInfer(
      grpc::CallbackServerContext* call) override {
    auto reactor = std::make_shared<StreamInferCall>(c_, call);
    reactor->begin();
    return reactor.get();
  }

 private:
  static grpc::ServerUnaryReactor* done(grpc::CallbackServerContext* call) {
    grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }
  const Context c_;
};

}  // namespace

std::unique_ptr<grpc::Service> kserve_service(const Context& context) { return std::make_unique<KServe>(context); }

}  // namespace kvasir::server::rpc
