// Any bytes as the message of each method of one contract (named by the program's name: rpc_ppl_fuzz), sent to a real
// gRPC port over the scripted engine: a status that says what is wrong, never a crash, never a call that stays open.
#include <google/protobuf/descriptor.h>
#include <google/protobuf/dynamic_message.h>
#include <google/protobuf/util/json_util.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "kserve.pb.h"
#include "kvasir.pb.h"
#include "ppl_llm.pb.h"
#include "server/server.h"
#include "tests/fuzz/seeds.h"
#include "tests/server/fake_engine.h"
#include "vllm_control.pb.h"
#include "vllm_engine.pb.h"
#include "vllm_inference.pb.h"

namespace kvasir::server {
namespace {

namespace proto = google::protobuf;

struct Method {
  std::string path;
  const proto::MethodDescriptor* descriptor;
};

std::string contract_of(const std::string& program) {
  static constexpr std::pair<const char*, const char*> kContracts[] = {
      {"kvasir", "kvasir.v1.Inference"},       {"ppl", "ppl.llm.proto.LLMService"},
      {"vllm", "vllm.grpc.engine.VllmEngine"}, {"vllm_inference", "vllm.Inference"},
      {"vllm_control", "vllm.Control"},        {"inference", "inference.GRPCInferenceService"}};
  for (const auto& [name, contract] : kContracts)
    if (program.starts_with(cat("rpc_", name, "_fuzz"))) return contract;
  std::fprintf(stderr,
               "%s does not say which contract: rpc_{kvasir,ppl,vllm,vllm_inference,vllm_control,inference}_fuzz\n",
               program.c_str());
  std::exit(2);
}

struct World {
  explicit World(const std::string& contract) {
    ServerOptions options;
    options.grpc_port = 0;
    options.http_port = -1;
    options.access_log = false;
    options.max_choices = 8;
    engine.floods = false;
    server = *Server::start(options, engine);
    channel = grpc::CreateChannel(cat("127.0.0.1:", server->grpc_port()), grpc::InsecureChannelCredentials());
    auto* service = proto::DescriptorPool::generated_pool()->FindServiceByName(contract);
    for (int i = 0; i < service->method_count(); ++i)
      methods.push_back({cat("/", contract, "/", service->method(i)->name()), service->method(i)});
  }
  FakeEngine engine;
  std::unique_ptr<Server> server;
  std::shared_ptr<grpc::Channel> channel;
  proto::DynamicMessageFactory messages;
  std::vector<Method> methods;
};

World& world(const char* program = "") {
  static World* w = new World(contract_of(std::filesystem::path(program).filename()));
  return *w;
}

grpc::ByteBuffer buffer(std::string_view bytes) {
  grpc::Slice slice(bytes.data(), bytes.size());
  return {&slice, 1};
}

// A call with these messages (one, unless the client's side is a stream).
grpc::Status call(World& w, const Method& method, const std::vector<std::string_view>& messages) {
  grpc::GenericStub stub(w.channel);
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  bool endless = method.descriptor->name() == "SubscribeKvEvents";
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(endless ? 20 : 2000));
  auto done = [&] {
    void* tag;
    bool ok = false;
    return queue.Next(&tag, &ok) && ok;
  };
  auto stream = stub.PrepareCall(&context, method.path, &queue);
  stream->StartCall(nullptr);
  bool open = done();
  for (size_t i = 0; open && i < messages.size(); ++i) {
    stream->Write(buffer(messages[i]), nullptr);
    open = done();
  }
  if (open) {
    stream->WritesDone(nullptr);
    done();
  }
  for (grpc::ByteBuffer answer;;) {
    stream->Read(&answer, nullptr);
    if (!done()) break;
  }
  grpc::Status status;
  stream->Finish(&status, nullptr);
  done();
  queue.Shutdown();
  return status;
}

bool parses(World& w, const Method& method, std::string_view bytes) {
  std::unique_ptr<proto::Message> message(w.messages.GetPrototype(method.descriptor->input_type())->New());
  return message->ParseFromArray(bytes.data(), int(bytes.size()));
}

// For streams: the input is cut where 0xff 0x00 stands.
std::vector<std::string_view> cut(std::string_view bytes) {
  std::vector<std::string_view> out;
  for (size_t end; out.size() < 8 && (end = bytes.find(std::string_view("\xff\0", 2))) != bytes.npos;) {
    out.push_back(bytes.substr(0, end));
    bytes.remove_prefix(end + 2);
  }
  out.push_back(bytes);
  return out;
}

// The seeds, as JSON of each method's message.
const std::vector<std::pair<std::string, std::string>>& seeds() {
  static const std::vector<std::pair<std::string, std::string>> all = {
      {"kvasir.v1.Inference/Generate",
       R"({"prompt":"ab","n":2,"max_tokens":3,"logprobs":2,"prompt_logprobs":1,"echo":true,"stop":["x"],
           "stop_token_ids":[3],"sampling":{"temperature":0.5,"top_k":3,"seed":"7","logit_bias":{"5":1}},
           "grammar":{"json_schema":"{}"},"request_id":"r","cache_salt":"s"})"},
      {"kvasir.v1.Inference/Generate", R"({"chat":{"messages":[{"role":"user","content":"a"}]},"omit_text":true})"},
      {"kvasir.v1.Inference/Generate", R"({"tokens":{"ids":[1,2]},"cache_salt":"fail"})"},
      {"kvasir.v1.Inference/Tokenize", R"({"text":"abc","parse_special":true})"},
      {"kvasir.v1.Inference/Detokenize", R"({"ids":[97,98]})"},
      {"kvasir.v1.Inference/Cancel", R"({"request_id":"r"})"},
      {"ppl.llm.proto.LLMService/Generation",
       R"({"req":[{"id":"1","prompt":"a","choosing_parameters":{"do_sample":true,"temperature":0.5,"top_k":2,
           "repetition_penalty":1.1},"stopping_parameters":{"max_new_tokens":3,"stop_tokens":{"ids":[5]}}},
           {"id":"2","tokens":{"ids":[1,2]}},{"id":"2","prompt":""}]})"},
      {"vllm.grpc.engine.VllmEngine/Generate",
       R"({"request_id":"r","tokenized":{"input_ids":[1,2,3]},"stream":true,"sampling_params":{"n":2,"max_tokens":3,
           "temperature":0,"top_k":4,"logprobs":1,"prompt_logprobs":1,"truncate_prompt_tokens":2,"stop":["x"],
           "logit_bias":{"3":1},"json_schema":"{}","seed":5}})"},
      {"vllm.grpc.engine.VllmEngine/Generate", R"({"text":"ab","kv_transfer_params_json":"{}"})"},
      {"vllm.grpc.engine.VllmEngine/Abort", R"({"request_ids":["r","s"]})"},
      {"vllm.grpc.engine.VllmEngine/GetLoads", R"({"dp_rank":1})"},
      {"vllm.grpc.engine.VllmEngine/SubscribeKvEvents",
       R"({"start_sequence_number":"3","load_records_before_first_batch":true})"},
      {"vllm.Inference/Generate",
       R"({"request_id":"r","text":"ab","temperature":0.5,"sampling":{"top_k":4,"seed":"5"},
           "decoding":{"logit_bias":{"3":1},"allowed_token_ids":[97,256],"json":"{}"},
           "stopping":{"max_new_tokens":3,"stop_strings":["x"]},"kv":{"bypass_prefix_cache":true},
           "truncate_prompt_tokens":1})"},
      {"vllm.Inference/GenerateStream",
       R"({"token_ids":{"ids":[1,2,3]},"sampling":{"num_sequences":2},"kv":{"cache_salt":"fail"},
           "response":{"prompt_logprobs":true,"output_logprobs":true,"output_candidates":{"top_n":2},
           "output_text":false,"output_token_ids":true}})"},
      {"vllm.Control/Abort", R"({"request_ids":["r","s"]})"},
      {"vllm.Control/LoadLora", R"({"lora_name":"a","source_path":"b"})"},
      {"vllm.Control/UnloadLora", R"({"lora_name":"a"})"},
      {"inference.GRPCInferenceService/ModelInfer",
       R"({"model_name":"fake","id":"i","inputs":[{"name":"text_input","datatype":"BYTES","shape":[1],
           "contents":{"bytes_contents":["YWI="]}},{"name":"sampling_parameters","datatype":"BYTES","shape":[1],
           "contents":{"bytes_contents":["eyJ0b3BfayI6Mn0="]}}],"parameters":{"max_tokens":{"int64_param":"3"},
           "stop":{"string_param":"x"}},"outputs":[{"name":"text_output"}]})"},
      {"inference.GRPCInferenceService/ModelStreamInfer",
       R"({"id":"i","inputs":[{"name":"text_input","datatype":"BYTES","shape":[1]},{"name":"stream",
           "datatype":"BOOL","shape":[1]}],"raw_input_contents":["AgAAAGFi","AQ=="]})"},
  };
  return all;
}

}  // namespace
}  // namespace kvasir::server

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  using namespace kvasir::server;
  World& w = world((*argv)[0]);
  std::vector<std::string> all;
  for (size_t i = 0; i < w.methods.size(); ++i) {
    all.push_back(std::string(1, char(i)));
    for (const auto& [method, json] : seeds()) {
      if ("/" + method != w.methods[i].path) continue;
      std::unique_ptr<proto::Message> message(w.messages.GetPrototype(w.methods[i].descriptor->input_type())->New());
      if (!proto::util::JsonStringToMessage(json, message.get()).ok()) abort();
      all.push_back(char(i) + message->SerializeAsString());
    }
  }
  kvasir::write_seeds(*argc, *argv, all);
  return 0;
}

// The first byte chooses the method.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace kvasir::server;
  if (size == 0) return 0;
  World& w = world();
  const Method& method = w.methods[data[0] % w.methods.size()];
  std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  auto messages = method.descriptor->client_streaming() ? cut(bytes) : std::vector{bytes};
  grpc::Status status = call(w, method, messages);

  bool sound = true;
  for (auto m : messages) sound &= parses(w, method, m);
  bool scripted = status.error_message().find("the script says so") != std::string::npos;
  if (sound && !scripted && (status.error_code() == grpc::INTERNAL || status.error_code() == grpc::UNKNOWN)) {
    std::fprintf(stderr, "%s: %d %s\n", method.path.c_str(), int(status.error_code()), status.error_message().c_str());
    abort();
  }
  for (int i = 0; i < 5000 && w.engine.open() > 0; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (w.engine.open() != 0) abort();
  w.engine.forget();
  return 0;
}
