#include "server/grpc/vllm.h"

#include <algorithm>
#include <ctime>

#include "core/cat.h"
#include "server/grpc/kv_events.h"
#include "server/grpc/tokenizer_zip.h"
#include "server/grpc/vllm_generate.h"
#include "vllm_engine.grpc.pb.h"

namespace kvasir::server::rpc {
namespace {

namespace pb = vllm::grpc::engine;
namespace smg = ::smg::grpc::common;

std::string utc_now() {
  std::time_t now = std::time(nullptr);
  std::tm parts;
  gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

// This contract's answer has the section "core" and no other; those of its sisters may be asked for all the same.
Status check_section(const std::string& section) {
  constexpr std::string_view kSections[] = {"all", "core", "memory", "spec", "lora", "disagg", "queues"};
  if (std::find(std::begin(kSections), std::end(kSections), section) != std::end(kSections)) return {};
  return invalid_argument(cat("include names '", section.substr(0, 64),
                              "'; it must be all, core, memory, spec, lora, disagg or queues (core is always there)"))
      .with_field("include");
}

// The tokenizer as a zip, in pieces that any client's message limit takes.
class TokenizerCall final : public StreamCall<smg::GetTokenizerChunk> {
 public:
  using StreamCall::StreamCall;

 protected:
  Status prepare() override {
    KVASIR_ASSIGN(Caller caller, caller_of(context_.services, *call_));
    KVASIR_TRY(caller.require(Role::user, "GetTokenizer"));
    KVASIR_TRY(context_.services.check_model(""));
    KVASIR_ASSIGN(zip_, tokenizer_zip(context_.services.engine()));
    return {};
  }
  Next next(smg::GetTokenizerChunk& out, bool& last, Status&) override {
    constexpr size_t kPiece = 1 << 20;
    out.set_data(zip_.substr(sent_, kPiece));
    sent_ += out.data().size();
    last = sent_ == zip_.size();
    if (last) out.set_sha256(sha256_hex(zip_));
    return Next::message;
  }

 private:
  std::string zip_;
  size_t sent_ = 0;
};

class VllmEngine final : public pb::VllmEngine::CallbackService {
 public:
  explicit VllmEngine(const Context& context) : c_(context), kv_events_(context) {}

  grpc::ServerWriteReactor<pb::GenerateResponse>* Generate(grpc::CallbackServerContext* call,
                                                           const pb::GenerateRequest* in) override {
    auto reactor = vllm_generate(c_, call, in);
    reactor->begin();
    return reactor.get();
  }

  // Aborting what is gone, or came as a disconnect too, is no error.
  grpc::ServerUnaryReactor* Abort(grpc::CallbackServerContext* call, const pb::AbortRequest* in,
                                  pb::AbortResponse*) override {
    return unary(c_, call, Role::user, "Abort", [this, in](const Caller& caller) -> Status {
      for (const std::string& id : in->request_ids()) c_.services.cancel(caller, id);
      return {};
    });
  }

  grpc::ServerUnaryReactor* HealthCheck(grpc::CallbackServerContext* call, const pb::HealthCheckRequest*,
                                        pb::HealthCheckResponse* out) override {
    Health h = c_.services.health();
    out->set_healthy(h.ready);
    out->set_message(h.message.empty() ? "serving" : h.message);
    grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }

  grpc::ServerUnaryReactor* GetModelInfo(grpc::CallbackServerContext* call, const pb::GetModelInfoRequest*,
                                         pb::GetModelInfoResponse* out) override {
    return unary(c_, call, Role::user, "GetModelInfo", [this, out](const Caller&) -> Status {
      KVASIR_TRY(c_.services.check_model(""));
      const model::ModelInfo& info = c_.services.engine().info();
      out->set_model_path(c_.services.options().model_path);
      out->set_is_generation(true);
      out->set_max_context_length(uint32_t(info.context_length));
      out->set_vocab_size(uint32_t(info.vocab_size));
      out->set_served_model_name(c_.services.model_name());
      out->set_tokenizer_path(c_.services.options().model_path);
      out->set_model_type(info.architecture);
      out->add_architectures(info.architecture);
      out->set_max_req_input_len(info.context_length - 1);
      out->set_default_sampling_params_json(c_.services.options().sampling_json);
      if (text::TokenizerPtr tokenizer = c_.services.engine().tokenizer()) {
        for (int32_t id : tokenizer->end_of_generation()) out->add_eos_token_ids(id);
        out->set_bos_token_id(tokenizer->bos());
      }
      return {};
    });
  }

  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* call, const pb::GetServerInfoRequest*,
                                          pb::GetServerInfoResponse* out) override {
    return unary(c_, call, Role::user, "GetServerInfo", [this, out](const Caller&) -> Status {
      engine::Stats s = c_.services.engine().stats();
      const ServerOptions& o = c_.services.options();
      out->set_active_requests(uint32_t(s.running + s.waiting + s.paused));
      out->set_uptime_seconds(
          std::chrono::duration<double>(std::chrono::steady_clock::now() - c_.services.started()).count());
      out->set_server_type("vllm-grpc");  // the contract's name for who speaks it
      out->set_data_parallel_size(1);
      out->set_block_size(o.page_size);
      out->set_max_num_seqs(o.max_running);
      out->set_constrained_decoding_start("first_token");
      return {};
    });
  }

  grpc::ServerUnaryReactor* GetLoads(grpc::CallbackServerContext* call, const pb::GetLoadsRequest* in,
                                     pb::GetLoadsResponse* out) override {
    return unary(c_, call, Role::metrics, "GetLoads", [this, in, out](const Caller&) -> Status {
      if (in->has_dp_rank() && in->dp_rank() != 0)
        return invalid_argument(cat("dp_rank is ", in->dp_rank(), "; this engine has the one rank 0"));
      for (const std::string& section : in->include()) KVASIR_TRY(check_section(section));
      engine::Stats s = c_.services.engine().stats();
      const ServerOptions& o = c_.services.options();
      int64_t used = s.pages_total - s.pages_free - s.pages_cached;
      out->set_timestamp(utc_now());
      out->set_version(KVASIR_VERSION);
      out->set_dp_rank_count(1);
      pb::SchedulerLoad& load = *out->add_loads();
      load.set_num_running_reqs(int32_t(s.running));
      load.set_num_waiting_reqs(int32_t(s.waiting + s.paused));
      load.set_num_total_reqs(int32_t(s.running + s.waiting + s.paused));
      auto tokens = [&](int64_t pages) { return int32_t(std::min<int64_t>(pages * o.page_size, INT32_MAX)); };
      load.set_num_used_tokens(tokens(used));
      load.set_max_total_num_tokens(tokens(s.pages_total));
      if (s.pages_total > 0) load.set_token_usage(double(used) / double(s.pages_total));
      load.set_gen_throughput(s.outputs_per_second);
      load.set_cache_hit_rate(s.cache_hit_rate());
      load.set_num_waiting_uncached_tokens(int32_t(std::min<int64_t>(s.waiting_uncached_tokens(), INT32_MAX)));
      load.set_utilization(std::min(1.0, double(s.running) / std::max(1, o.max_running)));
      load.set_max_running_requests(o.max_running);
      return {};
    });
  }

  grpc::ServerUnaryReactor* FlushCache(grpc::CallbackServerContext* call, const smg::FlushCacheRequest*,
                                       smg::FlushCacheResponse* out) override {
    return unary(c_, call, Role::admin, "FlushCache", [this, out](const Caller&) -> Status {
      Status status = c_.services.engine().flush_prefix_cache();
      out->set_success(status.ok());
      out->set_message(status.ok() ? "prefixes no request uses are gone" : status.message());
      return {};
    });
  }

  grpc::ServerWriteReactor<smg::GetTokenizerChunk>* GetTokenizer(grpc::CallbackServerContext* call,
                                                                 const smg::GetTokenizerRequest*) override {
    auto reactor = std::make_shared<TokenizerCall>(c_, call);
    reactor->begin();
    return reactor.get();
  }

  grpc::ServerWriteReactor<smg::KvEventBatch>* SubscribeKvEvents(grpc::CallbackServerContext* call,
                                                                 const smg::SubscribeKvEventsRequest* in) override {
    return kv_events_.subscribe(call, in);
  }

  grpc::ServerUnaryReactor* Embed(grpc::CallbackServerContext* call, const pb::EmbedRequest*,
                                  pb::EmbedResponse*) override {
    return not_here(call, "Embed: this engine makes no embeddings");
  }
  grpc::ServerUnaryReactor* StartProfile(grpc::CallbackServerContext* call, const smg::StartProfileRequest*,
                                         smg::ProfileResponse*) override {
    return not_here(call, "StartProfile: start the server with --step-trace FILE instead");
  }
  grpc::ServerUnaryReactor* StopProfile(grpc::CallbackServerContext* call, const smg::StopProfileRequest*,
                                        smg::ProfileResponse*) override {
    return not_here(call, "StopProfile: start the server with --step-trace FILE instead");
  }

 private:
  static grpc::ServerUnaryReactor* not_here(grpc::CallbackServerContext* call, const char* why) {
    grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
    reactor->Finish(grpc::Status(grpc::StatusCode::UNIMPLEMENTED, why));
    return reactor;
  }
  const Context c_;
  KvEvents kv_events_;
};

}  // namespace

std::unique_ptr<grpc::Service> vllm_service(const Context& context) { return std::make_unique<VllmEngine>(context); }

}  // namespace kvasir::server::rpc
