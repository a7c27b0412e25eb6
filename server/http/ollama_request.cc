#include "server/http/ollama_request.h"

#include <chrono>

#include "core/cat.h"
#include "server/http/fields.h"
#include "server/http/infill.h"
#include "server/http/llama_fields.h"
#include "server/http/ollama_reply.h"
#include "server/http/openai_chat_fields.h"
#include "server/http/openai_request.h"
#include "server/json_text.h"

namespace kvasir::server::http {
namespace {

// A name without a tag has this one.
std::string without_tag(std::string name) {
  constexpr std::string_view kUsual = ":latest";
  if (name.ends_with(kUsual)) name.resize(name.size() - kUsual.size());
  return name;
}

Status no_images(const Json* images, const std::string& where) {
  if (!images || (images->is_array() && images->empty())) return {};
  return wrong(where, "is not served here: this model reads text only");
}

// Arguments are an object, and a call has no id.
Status read_calls(const Json& calls, const std::string& where, Json& out) {
  if (!calls.is_array()) return wrong(where, "must be a list");
  for (const Json& call : calls) {
    const Json function = call.is_object() ? call.value("function", Json()) : Json();
    if (!function.is_object() || text_of(function, "name").empty())
      return wrong(where, "has an entry without function.name");
    const Json arguments = function.value("arguments", Json::object());
    out.push_back({{"id", cat("call_", out.size())},
                   {"type", "function"},
                   {"function",
                    {{"name", function["name"]}, {"arguments", arguments.is_object() ? arguments : Json::object()}}}});
  }
  return {};
}

Result<Json> read_messages(const Json& list) {
  Json out = Json::array();
  for (size_t i = 0; i < list.size(); ++i) {
    const std::string where = cat("messages[", i, "]");
    Fields f(list[i], where);
    std::string role, content, thoughts, tool;
    if (!f.enumeration("role", &role, {"system", "user", "assistant", "tool"})) f.fail("role", "is missing");
    f.string("content", &content);
    f.string("thinking", &thoughts);
    KVASIR_TRY(no_images(f.raw("images"), where + ".images"));
    Json message{{"role", role}, {"content", content}};
    if (!thoughts.empty()) message["reasoning_content"] = thoughts;
    for (const char* name : {"tool_name", "name"})
      if (f.string(name, &tool)) message["name"] = tool;
    if (f.string("tool_call_id", &tool)) message["tool_call_id"] = tool;
    if (const Json* calls = f.raw("tool_calls")) {
      Json read = Json::array();
      KVASIR_TRY(read_calls(*calls, where + ".tool_calls", read));
      if (!read.empty()) message["tool_calls"] = std::move(read);
    }
    f.pass_over_the_rest();
    KVASIR_TRY(f.finish());
    out.push_back(std::move(message));
  }
  return out;
}

// Parameters, and how a runner was to be started, which is the operator's to say.
Status read_options(const Json* options, GenerateInput& in) {
  if (!options) return {};
  Json said = *options;
  drop_unset(said);
  Fields f(said, "options");
  if (f.ok()) f.parameters(in);
  read_llama_sampling(f, in);
  pass_over(f,
            {"num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "low_vram", "use_mmap",
             "use_mlock", "vocab_only", "f16_kv", "numa", "logits_all", "embedding_only"},
            "the operator has said how the model runs");
  return f.finish();
}

void read_format(Fields& f, text::GrammarSpec& grammar) {
  using Kind = text::GrammarSpec::Kind;
  const Json* format = f.raw("format");
  if (!format || *format == Json("")) return;
  if (*format == Json("json"))
    grammar = {Kind::json_object, "", {}};
  else if (format->is_object())
    grammar = {Kind::json_schema, closed_schema(*format).dump(), {}};
  else
    f.fail("format", "must be \"json\" or a JSON schema");
}

// A switch, or how much.
void read_think(Fields& f, ChatInput& chat) {
  const Json* think = f.raw("think");
  if (!think) return;
  if (think->is_boolean()) {
    chat.variables_json = Json{{"enable_thinking", *think}}.dump();
    return;
  }
  std::string effort;
  if (f.enumeration("think", &effort, {"low", "medium", "high"}))
    chat.variables_json = Json{{"enable_thinking", true}, {"reasoning_effort", effort}}.dump();
}

constexpr struct {
  const char *name, *why;
} kUnserved[] = {
    {"context", "send the conversation to /api/chat; what it shares with the last one is in the cache"},
    {"template", "the operator chooses it (--chat-template); raw sends a text as it is"},
    {"logprobs", "use /v1/completions or /v1/chat/completions"},
    {"top_logprobs", "use /v1/completions or /v1/chat/completions"},
};

void read_common(Fields& f, const ServerOptions& limits, OllamaCall& call) {
  GenerateInput& in = call.input;
  in.wire = Wire::ollama;
  in.request.sampling = limits.sampling;
  if (!f.string("model", &in.model)) f.fail("model", "is missing");
  in.model = without_tag(std::move(in.model));
  f.boolean("stream", &call.stream);
  read_format(f, in.request.grammar);
  for (const auto& [name, why] : kUnserved) f.unserved(name, why, "0");
  pass_over(f, {"keep_alive"}, "the model stays");
  pass_over(f, {"truncate", "shift"}, "a prompt that is too long is refused, and the context is not shifted");
  if (Status s = read_options(f.raw("options"), in); !s.ok()) f.adopt(s);
}

}  // namespace

Result<OllamaCall> parse_ollama_chat(std::string_view body, const ServerOptions& limits) {
  KVASIR_ASSIGN(Json json, parse_json(body));
  Fields f(json);
  OllamaCall call;
  call.chat = true;
  call.input.protocol = "ollama.chat";
  read_common(f, limits, call);
  ChatInput chat;
  read_think(f, chat);
  const Json* messages = f.raw("messages");
  if (messages && !messages->is_array()) f.fail("messages", "must be a list");
  call.nothing = !messages || messages->empty();
  const Json* tools = f.raw("tools");
  if (!f.ok()) return f.finish();
  if (!call.nothing) {
    KVASIR_ASSIGN(Json read, read_messages(*messages));
    chat.messages_json = read.dump();
  }
  if (tools) KVASIR_TRY(check_tools(*tools, limits));
  if (tools && !tools->empty()) {
    call.tools.tools = *tools;
    call.tools.choice = ToolChoice::automatic;
    chat.tools_json = tools->dump();
  }
  KVASIR_TRY(f.finish());
  call.input.prompt = std::move(chat);
  return call;
}

Result<OllamaCall> parse_ollama_generate(std::string_view body, const ServerOptions& limits,
                                         const text::Tokenizer* tokenizer, bool has_template) {
  KVASIR_ASSIGN(Json json, parse_json(body));
  Fields f(json);
  OllamaCall call;
  call.input.protocol = "ollama.generate";
  read_common(f, limits, call);
  ChatInput chat;
  read_think(f, chat);
  std::string prompt, system, suffix;
  f.string("prompt", &prompt);
  f.string("system", &system);
  f.string("suffix", &suffix);
  f.boolean("raw", &call.raw);
  KVASIR_TRY(no_images(f.raw("images"), "images"));
  if (call.raw && !system.empty()) f.fail("system", "needs the template, which raw leaves out");
  KVASIR_TRY(f.finish());
  call.nothing = prompt.empty() && suffix.empty();
  call.raw |= !suffix.empty() || (!has_template && system.empty());
  if (!suffix.empty()) {
    KVASIR_ASSIGN(call.input.prompt, infill_prompt({prompt, suffix, {}}, tokenizer, "suffix"));
  } else if (call.raw) {
    call.input.prompt = TextInput{prompt};
  } else {
    Json messages = Json::array();
    if (!system.empty()) messages.push_back({{"role", "system"}, {"content", system}});
    messages.push_back({{"role", "user"}, {"content", prompt}});
    chat.messages_json = messages.dump();
    call.input.prompt = std::move(chat);
  }
  return call;
}

namespace {

// What both have beside their texts, which stand under `name`.
Result<PooledCall> parse_texts(std::string_view body, const char* name, int most) {
  KVASIR_ASSIGN(Json json, parse_json(body));
  Fields f(json);
  PooledCall call;
  call.refuse = ollama_error;
  GenerateInput& in = call.input;
  in.protocol = "ollama.embed";
  in.wire = Wire::embeddings;
  if (!f.string("model", &in.model)) f.fail("model", "is missing");
  in.model = without_tag(std::move(in.model));
  f.parameters(in);
  f.unserved("truncate", "a text that is too long is refused, not cut: /tokenize says its length");
  pass_over(f, {"keep_alive"}, "the model stays");
  pass_over(f, {"options"}, "nothing is drawn, and the operator has said how the model runs");
  std::vector<PromptInput> inputs;
  read_prompts(f, name, most, inputs);
  KVASIR_TRY(f.finish());
  for (PromptInput& input : inputs) {
    if (auto* text = std::get_if<TextInput>(&input)) text->parse_special = false;
    call.prompts.push_back({std::move(input)});
  }
  return call;
}

}  // namespace

Result<PooledCall> parse_ollama_embed(std::string_view body, const ServerOptions& limits) {
  KVASIR_ASSIGN(PooledCall call, parse_texts(body, "input", limits.max_inputs));
  call.body = [began = std::chrono::steady_clock::now()](const engine::Finished& all, const std::string& model,
                                                         const std::string&) {
    std::string out = cat("{\"model\":", json_string(model), ",\"embeddings\":[");
    for (size_t i = 0; i < all.pooled.size(); ++i) {
      if (i > 0) out += ',';
      append_vector(out, all.pooled[i]);
    }
    const auto took = std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - began);
    return out + cat("],\"total_duration\":", took.count(),
                     ",\"load_duration\":0,\"prompt_eval_count\":", all.usage.prompt_tokens, '}');
  };
  return call;
}

Result<PooledCall> parse_ollama_embeddings(std::string_view body, const ServerOptions&) {
  KVASIR_ASSIGN(PooledCall call, parse_texts(body, "prompt", 1));
  call.body = [](const engine::Finished& all, const std::string&, const std::string&) {
    std::string out = "{\"embedding\":";
    append_vector(out, all.pooled.at(0));
    return out + '}';
  };
  return call;
}

Result<std::string> parse_ollama_name(std::string_view body) {
  KVASIR_ASSIGN(Json json, parse_json(body));
  Fields f(json);
  std::string name;
  bool verbose = false;
  if (!f.string("model", &name) && !f.string("name", &name)) f.fail("model", "is missing");
  f.boolean("verbose", &verbose);  // there is no more to say
  f.unserved("system", "the operator chooses the model");
  f.unserved("template", "the operator chooses the model");
  pass_over(f, {"options"}, "nothing is generated");
  KVASIR_TRY(f.finish());
  return without_tag(std::move(name));
}

}  // namespace kvasir::server::http
