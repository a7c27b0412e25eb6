#include "server/http/responses_request.h"

#include <algorithm>

#include "core/cat.h"
#include "server/http/changing_line.h"
#include "server/http/llama_fields.h"

namespace kvasir::server::http {
namespace {

constexpr const char* kIncludeLogprobs = "message.output_text.logprobs";

// As chat's functions, which templates know.
Status read_tools(const Json& tools, const ServerOptions& limits, ToolUse& use) {
  if (!tools.is_array()) return wrong("tools", "must be a list");
  if (tools.size() > static_cast<size_t>(limits.max_tools))
    return wrong("tools", cat("has ", tools.size(), " entries; the limit is ", limits.max_tools));
  use.tools = Json::array();
  for (size_t i = 0; i < tools.size(); ++i) {
    const Json& t = tools[i];
    const std::string where = cat("tools[", i, "]");
    if (!t.is_object() || t.value("type", Json()) != "function")
      return wrong(where + ".type", "must be function; this server has no tools of its own");
    if (!t.value("name", Json()).is_string() || t["name"] == "") return wrong(where + ".name", "is missing");
    const Json schema = t.value("parameters", Json());
    if (!schema.is_null() && !schema.is_object()) return wrong(where + ".parameters", "must be a JSON schema");
    Json function{{"name", t["name"]}};
    for (const char* key : {"description", "parameters", "strict"})
      if (t.contains(key) && !t[key].is_null()) function[key] = t[key];
    use.tools.push_back({{"type", "function"}, {"function", std::move(function)}});
  }
  return {};
}

void read_tool_choice(Fields& f, ToolUse& use) {
  const bool some = use.tools.is_array() && !use.tools.empty();
  use.choice = some ? ToolChoice::automatic : ToolChoice::none;
  const Json* choice = f.raw("tool_choice");
  if (!choice) return;
  if (choice->is_string()) {
    std::string kind;
    if (!f.enumeration("tool_choice", &kind, {"none", "auto", "required"})) return;
    if (kind == "none") use.choice = ToolChoice::none;
    if (kind == "required") use.choice = ToolChoice::required;
  } else if (choice->is_object() && choice->value("type", Json()) == "function" &&
             choice->value("name", Json()).is_string()) {
    use.choice = ToolChoice::named;
    use.name = (*choice)["name"].get<std::string>();
  } else {
    return f.fail("tool_choice", "must be none, auto, required, or {\"type\":\"function\",\"name\":...}");
  }
  check_tool_choice(f, use);
}

void read_text_format(Fields& f, text::GrammarSpec& grammar) {
  using Kind = text::GrammarSpec::Kind;
  const Json* text = f.raw("text");
  if (!text) return;
  Fields inner(*text, "text");
  inner.unserved("verbosity", "the model has no such switch; say it in a message", "\"medium\"");
  if (const Json* format = inner.raw("format")) {
    Fields one(*format, "text.format");
    std::string type;
    if (!one.enumeration("type", &type, {"text", "json_object", "json_schema"})) one.fail("type", "is missing");
    if (type == "json_object") grammar = {Kind::json_object, "", {}};
    if (type == "json_schema") {
      const Json* schema = one.raw("schema");
      bool strict = false;
      one.boolean("strict", &strict);
      if (!schema || !schema->is_object())
        one.fail("schema", "must be a JSON schema");
      else
        grammar = {Kind::json_schema, (strict ? closed_schema(*schema) : *schema).dump(), {}};
    }
    for (const char* name : {"name", "description", "schema", "strict"}) one.note(name);
    if (Status s = one.finish(); !s.ok()) inner.fail("format", "is wrong: " + s.message());
  }
  if (Status s = inner.finish(); !s.ok()) f.fail("text", "is wrong: " + s.message());
}

// The template's variables: how much is to be thought, unless they say it themselves (vLLM's chat_template_kwargs).
void read_reasoning(Fields& f, ChatInput& chat) {
  Json variables = Json::object();
  if (const Json* extra = f.raw("chat_template_kwargs")) {
    if (!extra->is_object()) return f.fail("chat_template_kwargs", "must be an object");
    variables = *extra;
  }
  const Json reasoning = f.has("reasoning") ? *f.raw("reasoning") : Json::object();
  Fields inner(reasoning, "reasoning");
  std::string effort;
  if (inner.enumeration("effort", &effort, {"none", "minimal", "low", "medium", "high", "xhigh"})) {
    variables.emplace("reasoning_effort", effort);
    if (effort == "none") variables.emplace("enable_thinking", false);
  }
  if (!variables.empty()) chat.variables_json = variables.dump();
  for (const char* name : {"summary", "generate_summary"}) inner.note(name);  // the thoughts themselves are shown
  if (Status s = inner.finish(); !s.ok()) f.fail("reasoning", "is wrong: " + s.message());
}

void read_items(Fields& f, ResponsesCall& call) {
  const Json* input = f.raw("input");
  if (input && input->is_string())
    call.items = Json::array({{{"type", "message"},
                               {"role", "user"},
                               {"content", Json::array({{{"type", "input_text"}, {"text", *input}}})}}});
  else if (input && input->is_array() && !input->empty())
    call.items = *input;
  else
    f.fail("input", "must be a string or a list with at least one item");
}

void read_said(Fields& f, GenerateInput::Said& said) {
  f.string("user", &said.user);
  f.string("safety_identifier", &said.user);
  f.string("prompt_cache_key", &said.cache_key);
  std::string retention;
  f.enumeration("prompt_cache_retention", &retention, {"in_memory", "in-memory"});
  const Json* metadata = f.raw("metadata");
  if (!metadata) return;
  if (!metadata->is_object() || metadata->size() > 16)
    return f.fail("metadata", "must be an object of at most 16 strings");
  for (const auto& [key, value] : metadata->items())
    if (key.size() > 64 || !value.is_string() || value.get_ref<const std::string&>().size() > 512)
      return f.fail("metadata", cat("has the key '", key.substr(0, 64),
                                    "'; keys have at most 64 bytes, values are strings of at most 512"));
  said.metadata = metadata->dump();
  for (std::string* text : {&said.user, &said.cache_key}) *text = text->substr(0, 512);
}

// More of an item than its text: of what may be named there only log-probabilities are there to be shown.
void read_include(Fields& f, GenerateInput& in) {
  std::vector<std::string> names;
  f.strings("include", &names, 64);
  int32_t& logprobs = in.request.sampling.logprobs;
  if (std::find(names.begin(), names.end(), kIncludeLogprobs) != names.end())
    logprobs = std::max(logprobs, 0);
  else if (logprobs > 0)
    f.fail("top_logprobs", cat("is shown where include has \"", kIncludeLogprobs, '"'));
  else
    logprobs = -1;
}

constexpr struct {
  const char *name, *why, *usual = "false";
} kUnserved[] = {
    {"conversation", "use previous_response_id, or send the items again"},
    {"prompt", "there are no stored prompts; send instructions"},
    {"max_tool_calls", "this server calls no tools itself"},
    {"moderation", "this server judges no content"},
    {"truncation", "a prompt that is too long is refused, not cut; send fewer items", "\"disabled\""},
    {"context_management", "items are read as they come; send fewer"},
};

}  // namespace

Result<ResponsesCall> parse_responses(std::string_view body, const ServerOptions& limits) {
  KVASIR_ASSIGN(Json json, parse_json(body));
  drop_unset_length(json);
  Fields f(json);
  ResponsesCall call;
  GenerateInput& in = call.input;
  in.protocol = "openai.responses";
  in.wire = Wire::responses;
  in.request.sampling = limits.sampling;
  f.string("model", &in.model);
  f.parameters(in);
  f.boolean("stream", &call.stream);
  f.boolean("store", &call.store);
  f.string("previous_response_id", &call.previous);
  std::string instructions;
  if (f.string("instructions", &instructions)) call.instructions = without_changing_line(std::move(instructions));
  read_items(f, call);
  if (const Json* tools = f.raw("tools"))
    if (Status s = read_tools(*tools, limits, call.tools); !s.ok()) f.fail("tools", "is wrong: " + s.message());
  read_tool_choice(f, call.tools);
  bool parallel = true;
  if (f.boolean("parallel_tool_calls", &parallel) && !parallel) call.tools.one = true;
  read_text_format(f, in.request.grammar);
  read_reasoning(f, call.chat);
  read_said(f, in.said);
  std::string tier;
  f.enumeration("service_tier", &tier, {"auto", "default"});
  read_include(f, in);
  f.boolean("enable_response_messages", &call.messages);
  in.request.every_token = call.messages;
  f.boolean("timings_per_token", &call.timings);
  f.boolean("return_progress", &call.progress);
  if (const Json* options = f.raw("stream_options")) {
    Fields inner(*options, "stream_options");
    inner.unserved("include_obfuscation", "nothing is added to events");
    if (Status s = inner.finish(); !s.ok()) f.fail("stream_options", "is wrong: " + s.message());
  }
  for (const auto& [name, why, usual] : kUnserved) f.unserved(name, why, usual);
  if (limits.response_store.bytes == 0) {
    constexpr const char* kNothingKept =
        "this server keeps nothing; start it with --response-store, or send all items again";
    f.unserved("store", kNothingKept);
    f.unserved("previous_response_id", kNothingKept);
    f.unserved("background", "keep the call open, or stream it; with --response-store a server goes on without you");
  } else {
    f.boolean("background", &call.background);
    if (!f.has("store")) call.store = true;  // OpenAI's default, where it can be
    if (call.background && !call.store)
      f.fail("background", "can only be used when `store` is true, for what is made without you is asked for later");
  }
  KVASIR_TRY(f.finish());
  // Also where none may be called now: the prompt begins as it did before.
  if (call.tools.tools.is_array()) call.chat.tools_json = call.tools.tools.dump();
  auto shown = [&](const char* name, Json usual) {
    call.echoed[name] = json.value(name, Json()).is_null() ? std::move(usual) : json[name];
  };
  shown("instructions", nullptr);
  shown("metadata", Json::object());
  shown("max_output_tokens", nullptr);
  shown("parallel_tool_calls", true);
  shown("previous_response_id", nullptr);
  shown("reasoning", {{"effort", nullptr}, {"summary", nullptr}});
  shown("text", {{"format", {{"type", "text"}}}});
  shown("tool_choice", "auto");
  shown("tools", Json::array());
  shown("top_logprobs", 0);
  shown("truncation", "disabled");
  shown("user", nullptr);
  call.echoed["store"] = call.store;
  call.echoed["background"] = call.background;
  call.echoed["temperature"] =
      json.value("temperature", Json()).is_null() ? Json(in.request.sampling.temperature) : json["temperature"];
  call.echoed["top_p"] = json.value("top_p", Json()).is_null() ? Json(in.request.sampling.top_p) : json["top_p"];
  return call;
}

}  // namespace kvasir::server::http
