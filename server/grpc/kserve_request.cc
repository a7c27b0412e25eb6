#include "server/grpc/kserve_request.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>

#include "core/cat.h"
#include "server/json_text.h"
#include "server/parameters.h"

namespace kvasir::server::rpc {
namespace {

namespace pb = inference;
using json = nlohmann::ordered_json;

Status bad_tensor(const std::string& name, const std::string& why) {
  return invalid_argument(cat("input ", name, " ", why)).with_field(name);
}

// One element of a BYTES tensor in raw form: a little-endian length, then the bytes.
std::optional<std::string> raw_bytes(const std::string& raw) {
  uint32_t n = 0;
  if (raw.size() < sizeof n) return std::nullopt;
  std::memcpy(&n, raw.data(), sizeof n);
  if (raw.size() - sizeof n != n) return std::nullopt;
  return raw.substr(sizeof n);
}

Status check_one(const pb::ModelInferRequest::InferInputTensor& t, const char* datatype) {
  if (t.datatype() != datatype) return bad_tensor(t.name(), cat("is ", t.datatype(), "; it must be ", datatype));
  for (int64_t d : t.shape())
    if (d != 1) return bad_tensor(t.name(), cat("has a dimension of ", d, "; it must hold one element"));
  return {};
}

// "shared_memory_region", "classification": what a tensor may be told elsewhere.
template <class Tensor>
Status check_no_parameters(const char* kind, const Tensor& t) {
  if (t.parameters().empty()) return {};
  const std::string& name = t.parameters().begin()->first;
  return invalid_argument(cat(kind, ' ', t.name().substr(0, 64), " has the parameter ", name.substr(0, 64),
                              ", which is not served; leave it unset"))
      .with_field(name);
}

Result<std::string> read_bytes(const pb::ModelInferRequest::InferInputTensor& t, const std::string* raw) {
  KVASIR_TRY(check_one(t, "BYTES"));
  if (raw) {
    if (auto value = raw_bytes(*raw)) return std::move(*value);
    return bad_tensor(t.name(), "is not a length of 4 bytes and that many bytes");
  }
  if (t.contents().bytes_contents_size() != 1)
    return bad_tensor(t.name(), cat("has ", t.contents().bytes_contents_size(), " elements; it must have one"));
  return t.contents().bytes_contents(0);
}

Result<bool> read_bool(const pb::ModelInferRequest::InferInputTensor& t, const std::string* raw) {
  KVASIR_TRY(check_one(t, "BOOL"));
  if (raw) {
    if (raw->size() == 1) return (*raw)[0] != 0;
    return bad_tensor(t.name(), cat("has ", raw->size(), " bytes; it must have one"));
  }
  if (t.contents().bool_contents_size() == 1) return t.contents().bool_contents(0);
  return bad_tensor(t.name(), cat("has ", t.contents().bool_contents_size(), " elements; it must have one"));
}

json to_json(const pb::InferParameter& p) {
  switch (p.parameter_choice_case()) {
    case pb::InferParameter::kBoolParam: return p.bool_param();
    case pb::InferParameter::kInt64Param: return p.int64_param();
    case pb::InferParameter::kStringParam: return p.string_param();
    case pb::InferParameter::kDoubleParam: return p.double_param();
    case pb::InferParameter::kUint64Param: return p.uint64_param();
    case pb::InferParameter::PARAMETER_CHOICE_NOT_SET: return nullptr;
  }
  return nullptr;
}

// Text as JSON; discarded when it is none, or so deep that printing it would overflow a stack.
json parse_limited(const std::string& text) {
  if (json_depth(text) > kMostJsonDepth || has_zero_byte(text)) return json(json::value_t::discarded);
  return json::parse(text, nullptr, false);
}

// What is no text may come as the text of it: perf_analyzer sends everything so, and parameters of the call itself have
// neither lists nor objects.
json untexted(const json& v) { return v.is_string() ? parse_limited(v.get_ref<const std::string&>()) : v; }

bool is_texts(const json& v) {
  return v.is_array() && std::all_of(v.begin(), v.end(), [](const json& s) { return s.is_string(); });
}

Status read_parameter(const std::string& name, const json& v, GenerateInput& in) {
  if (name == "triton_enable_empty_final_response") return {};  // the last answer always says that it is
  const FoundParameter found = find_parameter(in.wire, name);
  if (!found.row)
    return invalid_argument(cat("parameter ", name.substr(0, 64), " is not served; leave it unset")).with_field(name);
  if (v.is_null()) return {};
  json value = untexted(v);
  if (takes_text(*found.row) && !is_texts(value)) value = v;  // text that is no list of texts is itself
  if (value.is_discarded()) value = v;
  if (std::string wrong = set_json(*found.row, value, in); !wrong.empty())
    return invalid_argument(cat(name, ' ', wrong)).with_field(name);
  return {};
}

Status read_inputs(const pb::ModelInferRequest& from, InferInput& in) {
  in.raw = from.raw_input_contents_size() > 0;
  if (in.raw && from.raw_input_contents_size() != from.inputs_size())
    return invalid_argument(cat("raw_input_contents has ", from.raw_input_contents_size(), " tensors, inputs has ",
                                from.inputs_size(), "; they must match"))
        .with_field("raw_input_contents");
  bool has_text = false;
  std::optional<bool> exclude_input;
  for (int i = 0; i < from.inputs_size(); ++i) {
    const auto& t = from.inputs(i);
    const std::string* raw = in.raw ? &from.raw_input_contents(i) : nullptr;
    KVASIR_TRY(check_no_parameters("input", t));
    if (t.name() == "text_input") {
      KVASIR_ASSIGN(in.text_input, read_bytes(t, raw));
      has_text = true;
    } else if (t.name() == "stream") {
      KVASIR_ASSIGN(in.stream, read_bool(t, raw));
    } else if (t.name() == "exclude_input_in_output") {
      KVASIR_ASSIGN(exclude_input, read_bool(t, raw));
    } else if (t.name() == "sampling_parameters") {
      KVASIR_ASSIGN(std::string text, read_bytes(t, raw));
      if (int depth = json_depth(text); depth > kMostJsonDepth)
        return bad_tensor(t.name(), cat("nests ", depth, " deep; the limit is ", kMostJsonDepth));
      json all = parse_limited(text);
      if (!all.is_object()) return bad_tensor(t.name(), "is not a JSON object");
      for (const auto& [name, value] : all.items()) KVASIR_TRY(read_parameter(name, value, in.generate));
    } else if (t.name().starts_with("return_")) {  // Triton's vLLM back end: more outputs, each where it is asked
      KVASIR_ASSIGN(const bool asked, read_bool(t, raw));
      if (asked)
        return bad_tensor(
            t.name().substr(0, 64),
            "is true; this server makes text_output alone: the last answer's parameters have finish_reason, "
            "prompt_tokens and completion_tokens");
    } else {
      return bad_tensor(t.name().substr(0, 64),
                        "is not served; send text_input, and stream, sampling_parameters or exclude_input_in_output");
    }
  }
  if (!has_text) return invalid_argument("there is no input text_input").with_field("inputs");
  in.echo = !exclude_input.value_or(in.stream);  // as Triton's back end has it
  in.generate.prompt = TextInput{in.text_input};
  return {};
}

}  // namespace

Result<InferInput> read_infer_request(const pb::ModelInferRequest& from, const ServerOptions& limits) {
  InferInput in;
  in.generate.request.sampling = limits.sampling;
  in.generate.protocol = "kserve";
  in.generate.wire = Wire::kserve;
  in.generate.model = from.model_name();
  in.generate.request.id = from.id();
  for (const auto& output : from.outputs()) {
    if (output.name() != "text_output" && output.name() != "embedding")
      return invalid_argument(
                 cat("output ", output.name().substr(0, 64), " is not made here; ask for text_output or embedding"))
          .with_field("outputs");
    in.embedding |= output.name() == "embedding";
    KVASIR_TRY(check_no_parameters("output", output));
  }
  if (in.embedding && from.outputs_size() > 1)
    return invalid_argument("outputs asks for embedding and text_output; a request has one of them")
        .with_field("outputs");
  if (in.embedding) in.generate.wire = Wire::embeddings;
  KVASIR_TRY(read_inputs(from, in));
  if (in.embedding && in.stream)
    return invalid_argument("stream is true; an embedding is one answer: leave it unset").with_field("stream");
  for (const auto& [name, value] : from.parameters()) KVASIR_TRY(read_parameter(name, to_json(value), in.generate));
  return in;
}

void write_embedding(const std::vector<float>& values, bool raw, pb::ModelInferResponse& to) {
  auto& tensor = *to.add_outputs();
  tensor.set_name("embedding");
  tensor.set_datatype("FP32");
  tensor.add_shape(1);
  tensor.add_shape(int64_t(values.size()));
  if (raw)
    to.add_raw_output_contents()->append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
  else
    tensor.mutable_contents()->mutable_fp32_contents()->Add(values.begin(), values.end());
}

void write_text_output(const std::string& text, bool raw, pb::ModelInferResponse& to) {
  auto& tensor = *to.add_outputs();
  tensor.set_name("text_output");
  tensor.set_datatype("BYTES");
  tensor.add_shape(1);
  if (!raw) {
    tensor.mutable_contents()->add_bytes_contents(text);
    return;
  }
  std::string& bytes = *to.add_raw_output_contents();
  uint32_t n = uint32_t(text.size());
  bytes.append(reinterpret_cast<const char*>(&n), sizeof n);
  bytes += text;
}

}  // namespace kvasir::server::rpc
