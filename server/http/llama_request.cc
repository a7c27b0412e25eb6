#include "server/http/llama_request.h"

#include <algorithm>
#include <charconv>

#include "core/cat.h"
#include "server/http/fields.h"
#include "server/http/infill.h"
#include "server/http/llama_fields.h"
#include "server/http/openai_chat_fields.h"
#include "server/parameters.h"

namespace kvasir::server::http {
namespace {

// Pairs of an id or a text and a number, or false for never; or an object of the same. It becomes the object of ids
// that every protocol has.
Status read_bias(Json& body, const text::Tokenizer* tokenizer) {
  auto it = body.find("logit_bias");
  if (it == body.end() || it->is_null()) return {};
  Json out = Json::object();
  auto add = [&](const Json& key, const Json& value) -> Status {
    const Json bias = value == Json(false) ? Json(kNeverDrawn) : value;
    if (!bias.is_number()) return wrong("logit_bias", cat("of ", shown(key), " must be a number, or false for never"));
    // As far as a bias goes here: further is never, or always.
    const double most = std::clamp(bias.get<double>(), double(kNeverDrawn), 100.0);
    int64_t id = 0;
    if (whole_number(key, &id)) return out[cat(id)] = most, Status();
    if (!key.is_string()) return wrong("logit_bias", cat("has the key ", shown(key), ", which is no token id or text"));
    const std::string text = key.get<std::string>();
    if (auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), id);
        error == std::errc() && end == text.data() + text.size())
      return out[text] = most, Status();
    if (!tokenizer) return wrong("logit_bias", "has texts, and there is no tokenizer to read them; give token ids");
    KVASIR_ASSIGN(auto ids, tokenizer->encode(text, false, false));
    for (int32_t one : ids) out[cat(one)] = most;
    return {};
  };
  if (it->is_object()) {
    for (const auto& [key, value] : it->items()) KVASIR_TRY(add(Json(key), value));
  } else if (it->is_array()) {
    for (const Json& pair : *it) {
      if (!pair.is_array() || pair.size() != 2)
        return wrong("logit_bias", cat("has ", shown(pair), "; its entries are pairs of a token and a number"));
      KVASIR_TRY(add(pair[0], pair[1]));
    }
  } else {
    return wrong("logit_bias", "must be a list of pairs, or an object");
  }
  *it = std::move(out);
  return {};
}

// A text; ids; or both in turn.
Result<PromptInput> read_prompt(const Json& prompt) {
  if (prompt.is_string()) return PromptInput(TextInput{prompt.get<std::string>()});
  if (prompt.is_object()) {  // as a prompt with pictures is; of text alone it is that text
    Fields f(prompt, "prompt");
    TextInput text;
    if (!f.string("prompt_string", &text.text)) f.fail("prompt_string", "is missing");
    f.unserved("multimodal_data", "this model reads text only", "[]");
    KVASIR_TRY(f.finish());
    return PromptInput(std::move(text));
  }
  if (!prompt.is_array() || prompt.empty()) return wrong("prompt", "must be a text, token ids, or a list of both");
  TokensInput ids;
  PiecesInput mixed;
  for (const Json& one : prompt) {
    int64_t id = 0;
    if (one.is_string())
      mixed.pieces.emplace_back(one.get<std::string>());
    else if (whole_number(one, &id))
      mixed.pieces.emplace_back(id), ids.push_back(id);
    else
      return wrong("prompt", cat("has ", shown(one), "; it must be a text or a token id"));
  }
  if (ids.size() == mixed.pieces.size()) return PromptInput(std::move(ids));
  return PromptInput(std::move(mixed));
}

Status read_prompts(const Json* prompt, const ServerOptions& limits, std::vector<PromptInput>& out) {
  if (!prompt) return wrong("prompt", "is missing; give a text, token ids, or a list of them");
  auto is_number = [](const Json& j) { return j.is_number(); };
  const bool several = prompt->is_array() && std::none_of(prompt->begin(), prompt->end(), is_number);
  if (!several) {
    KVASIR_ASSIGN(PromptInput one, read_prompt(*prompt));
    out.push_back(std::move(one));
    return {};
  }
  if (prompt->empty()) return wrong("prompt", "is empty");
  if (prompt->size() > size_t(limits.max_choices))
    return wrong("prompt", cat("has ", prompt->size(), " entries; the limit is ", limits.max_choices));
  for (const Json& each : *prompt) {
    KVASIR_ASSIGN(PromptInput one, read_prompt(each));
    out.push_back(std::move(one));
  }
  return {};
}

void read_shape(Fields& f, LlamaShape& shape) {
  f.boolean("stream", &shape.stream);
  f.boolean("return_tokens", &shape.tokens);
  f.boolean("timings_per_token", &shape.timings);
  f.boolean("return_progress", &shape.progress);
  f.strings("response_fields", &shape.fields, 64);
}

constexpr struct {
  const char *name, *why, *usual = "false";
} kUnserved[] = {
    {"lora", "name an adapter as model (/v1/models lists them)"},
    {"n_indent", "use stop", "0"},
    {"t_max_predict_ms", "use the header X-Request-Timeout", "0"},
    {"t_max_prompt_ms", "use the header X-Request-Timeout", "0"},
    {"image_data", "this model reads text only"},
};

// All but what is to be read.
Status read_common(Fields& f, const ServerOptions& limits, const text::Tokenizer* tokenizer, LlamaCall& call) {
  GenerateInput& in = call.input;
  in.request.sampling = limits.sampling;
  f.string("model", &in.model);
  f.parameters(in);
  read_llama_sampling(f, in);
  read_llama_cache(f, in);
  if (in.request.ignore_eos && tokenizer)  // that server draws no end then, where others go on behind one
    for (int32_t id : tokenizer->end_of_generation()) in.request.sampling.logit_bias.emplace_back(id, kNeverDrawn);
  read_grammar(f, in.request.grammar);
  read_shape(f, call.shape);
  for (const auto& [name, why, usual] : kUnserved) f.unserved(name, why, usual);
  KVASIR_TRY(f.finish());
  call.shape.choices = in.request.n;
  call.shape.asked = in.request;
  in.choices_of_call = int64_t(in.request.n) * int64_t(call.prompts.size());
  return {};
}

}  // namespace

Result<LlamaCall> parse_llama(std::string_view body, const ServerOptions& limits, const text::Tokenizer* tokenizer) {
  KVASIR_ASSIGN(Json json, parse_json(body));
  drop_unset(json);
  if (json.is_object()) KVASIR_TRY(read_bias(json, tokenizer));
  Fields f(json);
  LlamaCall call;
  call.input.protocol = "llama.completion";
  call.input.wire = Wire::llama;
  if (f.ok()) KVASIR_TRY(read_prompts(f.raw("prompt"), limits, call.prompts));
  KVASIR_TRY(read_common(f, limits, tokenizer, call));
  return call;
}

Result<LlamaCall> parse_infill(std::string_view body, const ServerOptions& limits, const text::Tokenizer* tokenizer) {
  KVASIR_ASSIGN(Json json, parse_json(body));
  drop_unset(json);
  if (json.is_object()) KVASIR_TRY(read_bias(json, tokenizer));
  Fields f(json);
  LlamaCall call;
  call.input.protocol = "llama.infill";
  call.input.wire = Wire::llama;
  Gap gap;
  std::string more;
  if (!f.string("input_prefix", &gap.prefix)) f.fail("input_prefix", "is missing; say what stands before the gap");
  if (!f.string("input_suffix", &gap.suffix)) f.fail("input_suffix", "is missing; say what stands after the gap");
  if (f.string("prompt", &more)) gap.prefix += more;  // what is written of the gap already
  if (const Json* files = f.raw("input_extra")) {
    if (!files->is_array()) f.fail("input_extra", "must be a list of files");
    for (size_t i = 0; f.ok() && i < files->size(); ++i) {
      Fields file((*files)[i], cat("input_extra[", i, ']'));
      auto& [name, text] = gap.files.emplace_back("file", "");
      file.string("filename", &name);
      if (!file.string("text", &text)) file.fail("text", "is missing");
      KVASIR_TRY(file.finish());
    }
  }
  KVASIR_TRY(f.ok() ? Status() : f.finish());
  KVASIR_ASSIGN(PromptInput prompt, infill_prompt(gap, tokenizer, "input_suffix"));
  call.prompts.push_back(std::move(prompt));
  KVASIR_TRY(read_common(f, limits, tokenizer, call));
  return call;
}

}  // namespace kvasir::server::http
