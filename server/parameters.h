// The parameters of a generation request: one table that readers of every protocol, the checks and docs/api.md go by.
// A number the sampler takes (kSamplingNumbers in model/sampling.h) is a row by itself; everything else is one here.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "server/generate.h"

namespace kvasir::server {

// Of logprobs and prompt_logprobs: each id of the vocabulary, which clients say as -1.
constexpr int32_t kAllLogprobs = INT32_MAX;

using SamplingMember =
    std::variant<float model::SamplingParams::*, int32_t model::SamplingParams::*, uint64_t model::SamplingParams::*,
                 std::vector<std::pair<int32_t, float>> model::SamplingParams::*,
                 std::vector<int32_t> model::SamplingParams::*, bool model::SamplingParams::*>;
using RequestMember =
    std::variant<int32_t engine::Request::*, std::optional<int64_t> engine::Request::*, bool engine::Request::*,
                 std::string engine::Request::*, std::vector<std::string> engine::Request::*,
                 std::vector<int32_t> engine::Request::*, std::optional<bool> engine::Request::*>;

struct Parameter {
  const char* name;
  std::variant<SamplingMember, RequestMember> to;
  const char* what;                           // for docs/api.md
  const char* limit = "";                     // what a refusal says it must be, and docs/api.md
  std::optional<int64_t> least;               // of a number
  int ServerOptions::*most_option = nullptr;  // where an operator says the most, for numbers and lists
  // Also where a protocol has one answer of text alone. (gRPC contracts take it where their messages have the field.)
  bool of_text = true;
  // Which requests have it: those for an answer, those for an embedding.
  bool of_answers = true, of_embeddings = false;
  const model::SamplingNumber* number = nullptr;  // where the range is the sampler's
};

std::span<const Parameter> parameters();
// By what the protocol calls it.
struct FoundParameter {
  const Parameter* row = nullptr;  // null: the protocol has none such
  const char* name = "";
};
FoundParameter find_parameter(Wire wire, std::string_view name);
bool of_text_alone(Wire wire);
const Parameter& parameter(std::string_view name);   // there must be one
const char* name_on(Wire wire, const Parameter& p);  // null: it has none such
// The one that any protocol calls so, or null.
const Parameter* parameter_of_any(std::string_view name);
std::vector<const char*> also_named(Wire wire, const Parameter& p);  // beside that
// What the client called it; `took_as` is told so where it was not the usual name.
void took_as(const FoundParameter& found, GenerateInput& in);
const char* name_of(const GenerateInput& in, const Parameter& p);

// A value goes to its member, as the client's.
void set_integer(const Parameter& p, int64_t value, GenerateInput& in);
// Empty, or what is wrong with its type ("must be true or false").
std::string set_json(const Parameter& p, const nlohmann::ordered_json& value, GenerateInput& in);
void set_ids(const Parameter& p, std::vector<int64_t> ids, GenerateInput& in);
void set_bias(std::vector<std::pair<int64_t, float>> bias, GenerateInput& in);

bool takes_text(const Parameter& p);

// A whole number that fits; 3.0 is one too.
bool whole_number(const nlohmann::ordered_json& v, int64_t* out);
// A value as it may stand in a message: short, on one line.
std::string shown(const nlohmann::ordered_json& value);

// The first of them whose value is not what it may be.
Status check_parameters(const GenerateInput& in, const ServerOptions& limits, const model::ModelInfo& info);

// docs/api.md's table of them.
std::string parameters_markdown();

}  // namespace kvasir::server
