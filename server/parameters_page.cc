// docs/api.md's table of parameters, from the table itself and from the messages of the gRPC contracts.
#include <google/protobuf/descriptor.h>

#include "core/cat.h"
#include "server/parameters.h"

namespace kvasir::server {
namespace {

bool has_field(std::initializer_list<const char*> messages, const char* name) {
  for (const char* message : messages)
    if (const auto* m = google::protobuf::DescriptorPool::generated_pool()->FindMessageTypeByName(message);
        m && m->FindFieldByName(name))
      return true;
  return false;
}

// What the protocol calls it, if it has it.
std::string cell(Wire wire, const Parameter& p) {
  const char* name = name_on(wire, p);
  if (!name) return "-";
  const bool named = name != p.name;  // it has this one by a name of its own
  bool has = wire == Wire::embeddings ? p.of_embeddings : p.of_answers && (p.of_text || named || !of_text_alone(wire));
  if (!has) return "-";
  switch (wire) {
    case Wire::v1: has = has_field({"kvasir.v1.Sampling", "kvasir.v1.GenerateRequest"}, name); break;
    case Wire::vllm: has = has_field({"vllm.grpc.engine.SamplingParams"}, name); break;
    case Wire::vllm_inference:
      has = has_field({"vllm.GenerateRequest", "vllm.RandomSampling", "vllm.DecodingParameters",
                       "vllm.StoppingCriteria", "vllm.ResponseOptions", "vllm.KVCacheParameters"},
                      name);
      break;
    case Wire::ppl:
      has = has_field({"ppl.llm.proto.NextTokenChooserParameters", "ppl.llm.proto.StoppingCriteriaParameters"}, name);
      break;
    default: break;
  }
  if (!has) return "-";
  std::string out = named ? cat('`', name, '`') : "yes";
  for (const char* also : also_named(wire, p)) out += cat(", `", also, '`');
  return out;
}

std::string values(const Parameter& p) {
  if (p.number) return p.number->limits();
  if (!p.most_option) return p.limit;
  const ServerOptions usual;
  return cat(p.limit, p.least ? " to " : ", at most ", usual.*p.most_option);
}

}  // namespace

std::string parameters_markdown() {
  std::string out =
      "| parameter | chat | completions | messages | responses | llama-server | Ollama | SGLang | kvasir.v1 | KServe | "
      "VllmEngine | vllm.Inference | ppl | embeddings | values | what "
      "|\n"
      "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n";
  for (const Parameter& p : parameters()) {
    out += cat("| `", p.name, "` |");
    for (Wire wire :
         {Wire::chat, Wire::completions, Wire::messages, Wire::responses, Wire::llama, Wire::ollama, Wire::sglang,
          Wire::v1, Wire::kserve, Wire::vllm, Wire::vllm_inference, Wire::ppl, Wire::embeddings})
      out += cat(' ', cell(wire, p), " |");
    out += cat(' ', values(p), " | ", p.what, " |\n");
  }
  return out;
}

}  // namespace kvasir::server
