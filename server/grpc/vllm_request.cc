#include "server/grpc/vllm_request.h"

#include <climits>

#include "core/cat.h"
#include "server/grpc/parameters.h"

namespace kvasir::server::rpc {
namespace {

namespace pb = vllm::grpc::engine;

Status refuse(const char* field, const char* why) {
  return invalid_argument(cat(field, " is set; ", why, ": leave it unset")).with_field(field);
}

Status check_not_served(const pb::GenerateRequest& r) {
  const char* text_only = "this engine serves text only";
  const char* no_transfer = "this engine does not move KV caches between machines";
  if (r.has_mm_inputs()) return refuse("mm_inputs", text_only);
  if (r.extra_mm_inputs_size() > 0) return refuse("extra_mm_inputs", text_only);
  if (r.has_media_refs()) return refuse("media_refs", text_only);
  if (r.has_kv_transfer_params()) return refuse("kv_transfer_params", no_transfer);
  if (r.has_kv_transfer_params_json()) return refuse("kv_transfer_params_json", no_transfer);
  if (r.has_data_parallel_rank() && r.data_parallel_rank() != 0)
    return invalid_argument(cat("data_parallel_rank is ", r.data_parallel_rank(), "; this engine has the one rank 0"))
        .with_field("data_parallel_rank");
  return {};
}

Result<text::GrammarSpec> read_constraint(const pb::SamplingParams& s) {
  using Kind = text::GrammarSpec::Kind;
  switch (s.constraint_case()) {
    case pb::SamplingParams::kJsonSchema: return text::GrammarSpec{Kind::json_schema, s.json_schema()};
    case pb::SamplingParams::kRegex: return text::GrammarSpec{Kind::regex, s.regex()};
    case pb::SamplingParams::kGrammar: return text::GrammarSpec{Kind::lark, s.grammar()};
    case pb::SamplingParams::kStructuralTag: return text::GrammarSpec{Kind::structural_tag, s.structural_tag()};
    case pb::SamplingParams::kJsonObject: return text::GrammarSpec{s.json_object() ? Kind::json_object : Kind::none};
    case pb::SamplingParams::kChoice:
      return text::GrammarSpec{Kind::choice, "", {s.choice().choices().begin(), s.choice().choices().end()}};
    case pb::SamplingParams::CONSTRAINT_NOT_SET: return text::GrammarSpec{};
  }
  return text::GrammarSpec{};
}

}  // namespace

Result<GenerateInput> read_vllm_request(const pb::GenerateRequest& from, std::optional<int64_t>& truncate) {
  KVASIR_TRY(check_not_served(from));
  GenerateInput in;
  in.protocol = "vllm";
  in.wire = Wire::vllm;
  engine::Request& r = in.request;
  r.id = from.request_id();
  switch (from.input_case()) {
    case pb::GenerateRequest::kTokenized:
      in.prompt = TokensInput(from.tokenized().input_ids().begin(), from.tokenized().input_ids().end());
      break;
    case pb::GenerateRequest::kText: in.prompt = TextInput{from.text()}; break;
    case pb::GenerateRequest::INPUT_NOT_SET:
      return invalid_argument("there is no input; set tokenized or text").with_field("input");
  }
  const pb::SamplingParams& s = from.sampling_params();
  read_parameters(s, in);
  if (s.top_k() > uint32_t(INT32_MAX)) r.sampling.top_k = 0;  // -1 as a uint32 is off
  r.skip_special = s.skip_special_tokens();
  // Ids are all that were drawn, as vLLM's are: a stop token too. Whether its text is shown
  // (include_stop_str_in_output) is decided where text is made of them.
  r.include_stop = true;
  if (s.has_truncate_prompt_tokens()) {
    truncate = s.truncate_prompt_tokens();
    if (*truncate < 1 && *truncate != -1)
      return invalid_argument(cat("truncate_prompt_tokens is ", *truncate, "; it must be 1 or more, or -1"))
          .with_field("truncate_prompt_tokens");
  }
  // grammar_from_first_token needs nothing: no reasoning parser here delays a grammar.
  KVASIR_ASSIGN(r.grammar, read_constraint(s));
  r.detokenize = !r.stop_strings.empty();  // the answer is ids; only stop strings need the text
  return in;
}

}  // namespace kvasir::server::rpc
