#include "server/grpc/vllm_inference_request.h"

#include <random>

#include "core/cat.h"
#include "server/grpc/parameters.h"
#include "server/parameters.h"

namespace kvasir::server::rpc {
namespace {

namespace pb = vllm;

Status refuse(const char* field, const char* why) {
  return invalid_argument(cat(field, " is set; ", why, ": leave it unset")).with_field(field);
}

Status check_not_served(const pb::GenerateRequest& r, bool streamed) {
  const char* no_transfer = "this engine does not move caches between machines";
  if (r.media_size() > 0) return refuse("media", "this engine serves text only");
  if (r.kv().has_kv_transfer_params()) return refuse("kv_transfer_params", no_transfer);
  if (r.kv().has_ec_transfer_params()) return refuse("ec_transfer_params", no_transfer);
  if (!streamed && r.sampling().num_sequences() > 1)
    return invalid_argument(cat("num_sequences is ", r.sampling().num_sequences(),
                                "; the answer of Generate holds one: call GenerateStream for more"))
        .with_field("num_sequences");
  return {};
}

Result<text::GrammarSpec> read_structure(const pb::DecodingParameters& d) {
  using Kind = text::GrammarSpec::Kind;
  switch (d.structured_output_case()) {
    case pb::DecodingParameters::kJson: return text::GrammarSpec{Kind::json_schema, d.json()};
    case pb::DecodingParameters::kRegex: return text::GrammarSpec{Kind::regex, d.regex()};
    case pb::DecodingParameters::kChoice:
      return text::GrammarSpec{Kind::choice, "", {d.choice().choices().begin(), d.choice().choices().end()}};
    case pb::DecodingParameters::kGrammar: return text::GrammarSpec{Kind::lark, d.grammar()};
    case pb::DecodingParameters::kJsonObject:
      return text::GrammarSpec{d.json_object() ? Kind::json_object : Kind::none};
    case pb::DecodingParameters::kStructuralTag: return text::GrammarSpec{Kind::structural_tag, d.structural_tag()};
    case pb::DecodingParameters::STRUCTURED_OUTPUT_NOT_SET: break;
  }
  return text::GrammarSpec{};
}

// Log-probabilities, and of how many others beside each token: none where it is not said.
Status read_logprobs(bool wanted, bool has_candidates, const pb::CandidateTokens& candidates,
                     const char* parameter_name, GenerateInput& in) {
  const Parameter& p = parameter(parameter_name);
  const char* name = name_on(in.wire, p);
  if (!wanted) {
    if (!has_candidates) return {};
    return invalid_argument(cat(name, " is set, but the log-probabilities it is of are not asked for; set both"))
        .with_field(name);
  }
  switch (candidates.select_case()) {
    case pb::CandidateTokens::kTopN: set_integer(p, candidates.top_n(), in); return {};
    case pb::CandidateTokens::kTokenIds: {
      if (p.to == parameter("prompt_logprobs").to)
        return invalid_argument(cat(name, " names token ids; of a prompt only the likeliest are told: set top_n"))
            .with_field(name);
      const auto& ids = candidates.token_ids().ids();
      set_integer(p, 0, in);
      set_ids(parameter("logprob_token_ids"), {ids.begin(), ids.end()}, in);
      return {};
    }
    case pb::CandidateTokens::kAll: set_integer(p, candidates.all() ? -1 : 0, in); return {};
    case pb::CandidateTokens::SELECT_NOT_SET: set_integer(p, 0, in); return {};
  }
  return {};
}

// Nobody has it, so nothing that is cached is read, nor is what this request leaves read by another.
std::string salt_of_its_own() {
  std::random_device random;
  return cat("bypass ", random(), ' ', random(), ' ', random(), ' ', random());
}

}  // namespace

Result<GenerateInput> read_vllm_inference(const pb::GenerateRequest& from, bool streamed, const ServerOptions& limits) {
  KVASIR_TRY(check_not_served(from, streamed));
  GenerateInput in;
  in.protocol = kVllmInference;
  in.wire = Wire::vllm_inference;
  in.model = from.model();
  in.said.cache_key = from.session_id();
  engine::Request& r = in.request;
  r.id = from.request_id();
  r.adapter = from.lora_name();
  r.sampling = limits.sampling;
  r.sampling.temperature = 0;  // where none is sent, as in vLLM's server
  switch (from.prompt_case()) {
    case pb::GenerateRequest::kText: in.prompt = TextInput{from.text()}; break;
    case pb::GenerateRequest::kTokenIds:
      in.prompt = TokensInput(from.token_ids().ids().begin(), from.token_ids().ids().end());
      break;
    case pb::GenerateRequest::PROMPT_NOT_SET:
      return invalid_argument("there is no prompt; set text or token_ids").with_field("prompt");
  }
  read_parameters(from, in);
  read_parameters(from.sampling(), in);
  read_parameters(from.decoding(), in);
  read_parameters(from.stopping(), in);
  read_parameters(from.kv(), in);
  if (from.kv().bypass_prefix_cache() && r.cache_salt.size() <= 256) r.cache_salt = salt_of_its_own();
  KVASIR_ASSIGN(r.grammar, read_structure(from.decoding()));

  const pb::ResponseOptions& shape = from.response();
  KVASIR_TRY(
      read_logprobs(shape.output_logprobs(), shape.has_output_candidates(), shape.output_candidates(), "logprobs", in));
  KVASIR_TRY(read_logprobs(shape.prompt_logprobs(), shape.has_prompt_candidates(), shape.prompt_candidates(),
                           "prompt_logprobs", in));
  if (shape.has_skip_special_tokens()) r.skip_special = shape.skip_special_tokens();
  // Ids are all that were drawn, as vLLM's are: Dynamo adds them up and fails the answer where the end says otherwise.
  r.every_token = true;
  if (!wants_text(from)) r.detokenize = !r.stop_strings.empty();  // only these need the text
  return in;
}

}  // namespace kvasir::server::rpc
