#include "server/grpc/vllm.h"

#include <google/protobuf/empty.pb.h>

#include <algorithm>
#include <ctime>

#include "core/cat.h"
#include "server/grpc/kv_events.h"
#include "server/grpc/pooled_call.h"
#include "server/grpc/stream_call.h"
#include "server/grpc/tokenizer_zip.h"
#include "server/grpc/vllm_generate.h"
#include "vllm_engine.pb.h"

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
class TokenizerCall final : public AnswerCall<smg::GetTokenizerRequest, smg::GetTokenizerChunk> {
 public:
  using AnswerCall::AnswerCall;

 protected:
  Status prepare() override {
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

// The text of `tokenized` is for people; its ids are what is embedded.
class EmbedCall final : public PooledCall<pb::EmbedRequest, pb::EmbedResponse> {
 public:
  using PooledCall::PooledCall;

 protected:
  const char* protocol() const override { return "vllm"; }
  Result<PooledAsk> read(const pb::EmbedRequest& from) override {
    const auto& ids = from.tokenized().input_ids();
    if (ids.empty())
      return invalid_argument("tokenized.input_ids is empty; send the input's token ids").with_field("tokenized");
    PooledAsk ask;
    ask.input.protocol = protocol();
    ask.input.wire = Wire::embeddings;
    ask.input.request.id = from.request_id();
    ask.prompts.push_back({TokensInput(ids.begin(), ids.end())});
    return ask;
  }
  void write(const engine::Finished& all, pb::EmbedResponse& out) override {
    out.mutable_embedding()->Add(all.pooled[0].begin(), all.pooled[0].end());
    out.set_prompt_tokens(uint32_t(all.usage.prompt_tokens));
    out.set_embedding_dim(uint32_t(all.pooled[0].size()));
  }
};

void write_model_info(Services& services, pb::GetModelInfoResponse& out) {
  const model::ModelInfo& info = services.engine().info();
  out.set_model_path(services.options().model_path);
  out.set_is_generation(!info.encoder);
  out.set_max_context_length(uint32_t(info.context_length));
  out.set_vocab_size(uint32_t(info.vocab_size));
  out.set_served_model_name(services.model_name());
  out.set_tokenizer_path(services.options().model_path);
  out.set_model_type(info.architecture);
  out.add_architectures(info.architecture);
  out.set_max_req_input_len(info.context_length - 1);
  out.set_default_sampling_params_json(services.options().sampling_json);
  if (text::TokenizerPtr tokenizer = services.engine().tokenizer()) {
    for (int32_t id : tokenizer->end_of_generation()) out.add_eos_token_ids(id);
    out.set_bos_token_id(tokenizer->bos());
  }
}

void write_server_info(Services& services, pb::GetServerInfoResponse& out) {
  engine::Stats s = services.engine().stats();
  const ServerOptions& o = services.options();
  out.set_active_requests(uint32_t(s.running + s.waiting + s.paused));
  out.set_uptime_seconds(std::chrono::duration<double>(std::chrono::steady_clock::now() - services.started()).count());
  out.set_server_type("vllm-grpc");  // the contract's name for who speaks it
  out.set_data_parallel_size(1);
  out.set_block_size(o.page_size);
  out.set_max_num_seqs(o.max_running);
  out.set_constrained_decoding_start("first_token");
}

Status write_loads(Services& services, const pb::GetLoadsRequest& in, pb::GetLoadsResponse& out) {
  if (in.has_dp_rank() && in.dp_rank() != 0)
    return invalid_argument(cat("dp_rank is ", in.dp_rank(), "; this engine has the one rank 0"));
  for (const std::string& section : in.include()) KVASIR_TRY(check_section(section));
  engine::Stats s = services.engine().stats();
  const ServerOptions& o = services.options();
  int64_t used = s.pages_total - s.pages_free - s.pages_cached;
  out.set_timestamp(utc_now());
  out.set_version(KVASIR_VERSION);
  out.set_dp_rank_count(1);
  pb::SchedulerLoad& load = *out.add_loads();
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
}

}  // namespace

void add_vllm(Door& door, Services& services, KvEvents& kv_events) {
  const std::string at = "/vllm.grpc.engine.VllmEngine/";
  door.add(at + "Generate", Role::user, vllm_generate, "vllm");
  door.stream<EmbedCall>(at + "Embed", Role::user, "vllm");
  door.stream<TokenizerCall>(at + "GetTokenizer", Role::user);
  door.add(at + "SubscribeKvEvents", Role::admin,
           [&kv_events](Opening o) { return kv_events.subscribe(std::move(o)); });

  // Aborting what is gone, or came as a disconnect too, is no error.
  door.unary<pb::AbortRequest, pb::AbortResponse>(at + "Abort", Role::user,
                                                  [&services](const Caller& caller, const auto& in, auto&) -> Status {
                                                    for (const std::string& id : in.request_ids())
                                                      services.cancel(caller, id);
                                                    return {};
                                                  });
  door.at_once<pb::HealthCheckRequest, pb::HealthCheckResponse>(
      at + "HealthCheck", [&services](const auto&, auto& out) {
        Health h = services.health();
        out.set_healthy(h.ready);
        out.set_message(h.message.empty() ? "serving" : h.message);
        return grpc::Status::OK;
      });
  door.unary<pb::GetModelInfoRequest, pb::GetModelInfoResponse>(
      at + "GetModelInfo", Role::user, [&services](const Caller&, const auto&, auto& out) -> Status {
        KVASIR_TRY(services.check_model(""));
        write_model_info(services, out);
        return {};
      });
  door.unary<pb::GetServerInfoRequest, pb::GetServerInfoResponse>(
      at + "GetServerInfo", Role::user, [&services](const Caller&, const auto&, auto& out) -> Status {
        write_server_info(services, out);
        return {};
      });
  door.unary<pb::GetLoadsRequest, pb::GetLoadsResponse>(
      at + "GetLoads", Role::metrics,
      [&services](const Caller&, const auto& in, auto& out) { return write_loads(services, in, out); });
  door.unary<smg::FlushCacheRequest, smg::FlushCacheResponse>(
      at + "FlushCache", Role::admin, [&services](const Caller&, const auto&, auto& out) -> Status {
        Status status = services.engine().flush_prefix_cache();
        out.set_success(status.ok());
        out.set_message(status.ok() ? "prefixes no request uses are gone" : status.message());
        return {};
      });

  auto not_here = [&]<class Request>(const char* method, const char* why) {
    door.at_once<Request, google::protobuf::Empty>(
        at + method, [why](const auto&, auto&) { return grpc::Status(grpc::StatusCode::UNIMPLEMENTED, why); });
  };
  constexpr const char* kNoProfile = "start the server with --step-trace FILE instead of a profile";
  not_here.operator()<google::protobuf::Empty>("StartProfile", kNoProfile);
  not_here.operator()<google::protobuf::Empty>("StopProfile", kNoProfile);
}

}  // namespace kvasir::server::rpc
