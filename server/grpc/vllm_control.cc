#include "server/grpc/vllm_control.h"

#include <google/protobuf/empty.pb.h>

#include <algorithm>
#include <random>

#include "core/cat.h"
#include "core/log.h"
#include "vllm_control.pb.h"

namespace kvasir::server::rpc {
namespace {

namespace pb = vllm;

// A positive number of its name: adapters have none here, and clients want one that stays.
int64_t number_of(const std::string& name) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (unsigned char c : name) hash = (hash ^ c) * 0x100000001b3;
  return int64_t(hash >> 1) | 1;
}

void write(const engine::AdapterInfo& from, pb::LoraAdapter& to) {
  to.set_lora_id(number_of(from.name));
  to.set_lora_name(from.name);
  to.set_source_path(from.path);
}

void write_server(const Services& services, const std::string& instance, pb::ServerInfo& out) {
  const ServerOptions& o = services.options();
  const engine::Stats s = services.engine().stats();
  const auto ranks = uint32_t(std::max<size_t>(1, s.ranks.size()));
  out.set_engine_version(KVASIR_VERSION);
  out.set_api_version("vllm");  // the contract's name for itself
  out.set_instance_id(instance);
  pb::ParallelismInfo& p = *out.mutable_parallelism();
  p.set_tensor_parallel_size(ranks);
  p.set_pipeline_parallel_size(1);
  p.set_data_parallel_size(1);
  p.set_decode_context_parallel_size(1);
  p.set_world_size(ranks);
  p.set_data_parallel_size_local(1);
  out.set_max_model_len(uint32_t(services.engine().info().context_length));
  out.set_kv_block_size(uint32_t(o.page_size));
  out.set_total_kv_blocks(uint64_t(s.pages_total));
  out.set_max_running_requests(uint64_t(o.max_running));
  out.set_max_batched_tokens(uint64_t(o.max_tokens_per_step));
  out.set_max_loras(uint32_t(o.max_running));  // of a step: one a request at most
  out.mutable_rl_capabilities();               // none of them
  out.set_effective_attention_block_size(uint64_t(o.page_size));
}

void write_model(const Services& services, pb::ModelInfo& out) {
  const ServerOptions& o = services.options();
  const model::ModelInfo& info = services.engine().info();
  out.set_model_id(o.model_source.empty() ? o.model_path : o.model_source);
  out.set_served_model_name(services.model_name());
  if (info.name != services.model_name()) out.add_served_model_aliases(info.name);
  out.set_supports_text_input(services.engine().tokenizer() != nullptr);
  out.set_supports_token_ids_input(true);
  out.set_supports_lora(!info.encoder && info.state_bytes == 0);
  // What vllm.Inference answers is text as it was drawn; these are told where the operator named them.
  if (o.reasoning_parser != "auto") out.set_reasoning_parser(o.reasoning_parser);
  if (o.tool_parser != "auto") out.set_tool_call_parser(o.tool_parser);
}

void write_sources(const ServerOptions& o, pb::GetKvEventSourcesResponse& out) {
  if (o.kv_events.address.empty()) return;
  pb::KvEventSource& to = *out.add_sources();
  to.set_transport("zmq");
  to.set_endpoint(o.kv_events.address);
  to.set_topic(o.kv_events.topic);
  to.set_replay_endpoint(o.kv_events.replay);
  to.set_data_parallel_rank(0);
  to.set_encoding("msgpack");
  to.set_schema_version(1);
  to.set_buffer_steps(o.kv_events.kept);
  to.set_hwm(o.kv_events.waiting);
}

std::string random_name() {
  std::random_device random;
  return cat("kvasir-", random(), '-', random());
}

Status missing(const char* field, const char* what) {
  return invalid_argument(cat(field, " is empty; ", what)).with_field(field);
}

void add_adapters(Door& door, Services& services, const std::string& at) {
  door.unary<pb::LoadLoraRequest, pb::LoadLoraResponse>(
      at + "LoadLora", Role::admin, [&services](const Caller& caller, const auto& in, auto& out) -> Status {
        if (in.lora_name().empty()) return missing("lora_name", "give the adapter a name");
        if (in.source_path().empty()) return missing("source_path", "say where on the server the adapter is");
        KVASIR_ASSIGN(auto loaded, services.load_adapter(caller, in.lora_name(), in.source_path()));
        write(loaded, *out.mutable_adapter());
        return {};
      });
  door.unary<pb::UnloadLoraRequest, pb::UnloadLoraResponse>(
      at + "UnloadLora", Role::admin, [&services](const Caller& caller, const auto& in, auto& out) -> Status {
        if (in.lora_name().empty()) return missing("lora_name", "say which adapter to unload");
        for (const engine::AdapterInfo& a : services.engine().adapters())
          if (a.name == in.lora_name()) write(a, *out.mutable_adapter());
        return services.unload_adapter(caller, in.lora_name());
      });
  door.unary<pb::ListLorasRequest, pb::ListLorasResponse>(
      at + "ListLoras", Role::user, [&services](const Caller& caller, const auto&, auto& out) -> Status {
        for (const engine::AdapterInfo& a : services.engine().adapters())  // by name
          if (caller.may_use(a.name)) write(a, *out.add_adapters());
        return {};
      });
}

// What changes weights, or stops steps, from outside.
void add_not_here(Door& door, const std::string& at) {
  constexpr const char* kWeights = "this server's weights are those it was started with";
  constexpr const char* kPause = "this server does not pause; to send requests elsewhere, drain it (Shutdown)";
  for (const auto& [method, why] :
       std::initializer_list<std::pair<const char*, const char*>>{{"PauseGeneration", kPause},
                                                                  {"ResumeGeneration", kPause},
                                                                  {"Sleep", kPause},
                                                                  {"WakeUp", kPause},
                                                                  {"InitWeightTransferEngine", kWeights},
                                                                  {"StartWeightUpdate", kWeights},
                                                                  {"StartDraftWeightUpdate", kWeights},
                                                                  {"UpdateWeights", kWeights},
                                                                  {"FinishWeightUpdate", kWeights},
                                                                  {"UpdateWeightVersion", kWeights},
                                                                  {"GetWeightVersion", kWeights}})
    door.at_once<google::protobuf::Empty, google::protobuf::Empty>(
        at + method, [why = why](const auto&, auto&) { return grpc::Status(grpc::StatusCode::UNIMPLEMENTED, why); });
}

}  // namespace

void add_vllm_control(Door& door, Services& services) {
  const std::string at = "/vllm.Control/";
  door.unary<pb::GetServerInfoRequest, pb::ServerInfo>(
      at + "GetServerInfo", Role::user,
      [&services, instance = random_name()](const Caller&, const auto&, auto& out) -> Status {
        KVASIR_TRY(services.check_model(""));
        write_server(services, instance, out);
        return {};
      });
  door.unary<pb::GetModelInfoRequest, pb::ModelInfo>(at + "GetModelInfo", Role::user,
                                                     [&services](const Caller&, const auto&, auto& out) -> Status {
                                                       KVASIR_TRY(services.check_model(""));
                                                       write_model(services, out);
                                                       return {};
                                                     });
  // Acknowledged once it has begun: what runs is finished, and the process ends.
  door.unary<pb::ShutdownRequest, pb::ShutdownResponse>(
      at + "Shutdown", Role::admin, [&services](const Caller& caller, const auto&, auto&) -> Status {
        if (!services.options().on_drain) return unimplemented("this server is not drained from outside");
        log_info("asked to drain", {{"tenant", caller.tenant}, {"key", caller.key_id}});
        services.options().on_drain();
        return {};
      });
  // What is gone, or never was, is no error.
  door.unary<pb::AbortRequest, pb::AbortResponse>(at + "Abort", Role::user,
                                                  [&services](const Caller& caller, const auto& in, auto&) -> Status {
                                                    for (const std::string& id : in.request_ids())
                                                      services.cancel(caller, id);
                                                    return {};
                                                  });
  // They carry prompts' token ids and ask for no key, so only an admin learns where they are.
  door.unary<pb::GetKvEventSourcesRequest, pb::GetKvEventSourcesResponse>(
      at + "GetKvEventSources", Role::admin, [&services](const Caller&, const auto&, auto& out) -> Status {
        write_sources(services.options(), out);
        return {};
      });
  // Never: neither is offered.
  door.unary<pb::IsPausedRequest, pb::IsPausedResponse>(at + "IsPaused", Role::user,
                                                        [](const Caller&, const auto&, auto&) { return Status(); });
  door.unary<pb::IsSleepingRequest, pb::IsSleepingResponse>(at + "IsSleeping", Role::user,
                                                            [](const Caller&, const auto&, auto&) { return Status(); });
  add_adapters(door, services, at);
  add_not_here(door, at);
}

}  // namespace kvasir::server::rpc
