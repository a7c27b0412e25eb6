#include "server/grpc/kserve.h"

#include "core/cat.h"
#include "kserve.pb.h"
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

void name_answer(const std::string& model, const std::string& id, pb::ModelInferResponse& out) {
  out.set_model_name(model);
  out.set_model_version("1");
  out.set_id(id);
}

// One request, one answer with all of the text.
class InferCall final : public AnswerCall<pb::ModelInferRequest, pb::ModelInferResponse> {
 public:
  using AnswerCall::AnswerCall;

 protected:
  Status prepare() override {
    Services& services = context_.services;
    KVASIR_ASSIGN(InferInput input, services.read(caller_, "kserve", read_whole()));
    forget_request();
    carry(*call_, input.generate.request);
    raw_ = input.raw;
    if (input.embedding) {
      std::vector<PooledPrompt> prompts;
      prompts.push_back({TextInput{std::move(input.text_input), true, false}});
      KVASIR_ASSIGN(Submitted submitted, services.pool(caller_, std::move(input.generate), std::move(prompts)));
      id_ = submitted.stream->id(), model_ = std::move(submitted.model);
      feed_.add(std::move(submitted.stream));
      return {};
    }
    if (input.echo) text_ = std::move(input.text_input);
    KVASIR_ASSIGN(Submitted submitted, services.generate(caller_, std::move(input.generate)));
    id_ = submitted.stream->id(), model_ = std::move(submitted.model);
    feed_.add(std::move(submitted.stream));
    return {};
  }
  Next next(pb::ModelInferResponse& out, bool& last, Status& status) override {
    while (auto event = feed_.poll()) {
      if (auto* e = std::get_if<engine::Tokens>(&event->second)) {
        text_ += e->text;
      } else if (auto* e = std::get_if<engine::Failed>(&event->second)) {
        status = e->status;
        return Next::end;
      } else if (auto* e = std::get_if<engine::Finished>(&event->second)) {
        if (e->reason == engine::FinishReason::cancelled) {
          status = was_cancelled();
          return Next::end;
        }
        name_answer(model_, id_, out);
        add_end(*e, out);
        if (e->pooled.empty())
          write_text_output(text_, raw_, out);
        else
          write_embedding(e->pooled[0], raw_, out);
        last = true;
        return Next::message;
      }
    }
    return Next::waiting;
  }

 private:
  Result<InferInput> read_whole() const {
    KVASIR_ASSIGN(InferInput input, read_infer_request(*request_, context_.services.options()));
    KVASIR_TRY(check_version(request_->model_version()));
    if (input.stream)
      return invalid_argument("stream is true; ModelInfer answers once: call ModelStreamInfer, or leave it unset")
          .with_field("stream");
    return input;
  }

  std::string text_, id_, model_;
  bool raw_ = false;
};

// Many requests on one stream; their answers come as they are made, with the request's id. One that does not parse
// fails alone.
class StreamInferCall final : public StreamCall<pb::ModelStreamInferResponse, Incoming> {
 public:
  using StreamCall::StreamCall;

 protected:
  void start() override {
    prepared({});
    listen();
  }
  void message() override {
    auto self = shared_from_this();
    bool queued = context_.workers.post(
        [self, this] {
          submit();
          pump();
          read();
        },
        caller_.tenant, received_.Length());
    if (queued) return;
    locked([&] { errors_.push_back({"", "the server has too many calls to look at; try again"}); });
    pump();
    read();
  }
  void no_message() override {
    locked([&] { reading_ = false; });
    pump();
  }
  Next next(pb::ModelStreamInferResponse& out, bool& last, Status& status) override {
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

 private:
  struct TextRequest {
    std::string id, text;
    bool stream = false, raw = false;
    std::string model;
  };

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
    ByteBudget::Share share(&context_.services.budget(), caller_.tenant);
    KVASIR_TRY(share.hold(received_.Length()));
    if (Status parsed = parse(received_, request_); !parsed.ok()) {
      request_.Clear();
      return invalid_argument(parsed.message());
    }
    KVASIR_TRY(check_version(request_.model_version()));
    KVASIR_ASSIGN(InferInput input, read_infer_request(request_, context_.services.options()));
    if (input.embedding)
      return invalid_argument("output embedding is not made on a stream; call ModelInfer for it").with_field("outputs");
    return input;
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
      jobs_[i] = {request_.id(), input.echo ? input.text_input : "", input.stream, input.raw,
                  std::move(submitted.model)};
      ++open_;
    });
    return {};
  }

  bool write(size_t i, engine::Event& event, pb::ModelStreamInferResponse& out) {
    TextRequest& job = jobs_[i];
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
  pb::ModelInferResponse& answer(TextRequest& job, bool final, pb::ModelStreamInferResponse& out) {
    pb::ModelInferResponse& to = *out.mutable_infer_response();
    name_answer(job.model, job.id, to);
    write_text_output(job.text, job.raw, to);
    (*to.mutable_parameters())["triton_final_response"].set_bool_param(final);
    job.text.clear();
    return to;
  }

  pb::ModelInferRequest request_;
  std::deque<TextRequest> jobs_;  // by the feed's number
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

void write_metadata(Services& services, pb::ModelMetadataResponse& out) {
  out.set_name(services.model_name());
  out.add_versions("1");
  out.set_platform("kvasir");
  auto tensor = [](auto& t, const Tensor& from) {
    t.set_name(from.name);
    t.set_datatype(from.type == pb::TYPE_BOOL ? "BOOL" : "BYTES");
    t.add_shape(1);
  };
  for (const Tensor& input : kInputs) tensor(*out.add_inputs(), input);
  tensor(*out.add_outputs(), kOutput);
}

void write_config(Services& services, pb::ModelConfig& config) {
  config.set_name(services.model_name());
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
}

void write_statistics(Services& services, pb::ModelStatistics& to) {
  const engine::Stats stats = services.engine().stats();
  to.set_name(services.model_name());
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
}

}  // namespace

void add_kserve(Door& door, Services& services) {
  const std::string at = "/inference.GRPCInferenceService/";
  door.at_once<pb::ServerLiveRequest, pb::ServerLiveResponse>(at + "ServerLive", [&services](const auto&, auto& out) {
    out.set_live(services.health().live);
    return grpc::Status::OK;
  });
  door.at_once<pb::ServerReadyRequest, pb::ServerReadyResponse>(at + "ServerReady",
                                                                [&services](const auto&, auto& out) {
                                                                  out.set_ready(services.health().ready);
                                                                  return grpc::Status::OK;
                                                                });
  door.at_once<pb::ModelReadyRequest, pb::ModelReadyResponse>(at + "ModelReady", [&services](const auto& in,
                                                                                             auto& out) {
    out.set_ready(services.health().ready && services.check_model(in.name()).ok() && check_version(in.version()).ok());
    return grpc::Status::OK;
  });
  door.at_once<pb::ServerMetadataRequest, pb::ServerMetadataResponse>(at + "ServerMetadata",
                                                                      [](const auto&, auto& out) {
                                                                        out.set_name("kvasir");
                                                                        out.set_version(KVASIR_VERSION);
                                                                        return grpc::Status::OK;
                                                                      });
  auto about_the_model = [&services](const auto& in) -> Status {
    KVASIR_TRY(services.check_model(in.name()));
    return check_version(in.version());
  };
  door.unary<pb::ModelMetadataRequest, pb::ModelMetadataResponse>(
      at + "ModelMetadata", Role::user, [=, &services](const Caller&, const auto& in, auto& out) -> Status {
        KVASIR_TRY(about_the_model(in));
        write_metadata(services, out);
        return {};
      });
  door.unary<pb::ModelConfigRequest, pb::ModelConfigResponse>(
      at + "ModelConfig", Role::user, [=, &services](const Caller&, const auto& in, auto& out) -> Status {
        KVASIR_TRY(about_the_model(in));
        write_config(services, *out.mutable_config());
        return {};
      });
  door.unary<pb::ModelStatisticsRequest, pb::ModelStatisticsResponse>(
      at + "ModelStatistics", Role::metrics, [=, &services](const Caller&, const auto& in, auto& out) -> Status {
        KVASIR_TRY(about_the_model(in));
        write_statistics(services, *out.add_model_stats());
        return {};
      });
  door.stream<InferCall>(at + "ModelInfer", Role::user, "kserve");
  door.stream<StreamInferCall>(at + "ModelStreamInfer", Role::user);
}

}  // namespace kvasir::server::rpc
