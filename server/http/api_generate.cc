// /v1/chat/completions and /v1/completions: a body in, engine requests out, one reply over all of them.
#include <charconv>
#include <chrono>

#include "core/cat.h"
#include "server/http/api.h"
#include "server/http/error_body.h"
#include "server/http/openai_request.h"

namespace kvasir::server::http {
namespace {

// Calls obey their schemas; an answer without them stays what it was asked to be.
void hold_tools(OpenAiCall& call) {
  using Kind = text::GrammarSpec::Kind;
  text::GrammarSpec& grammar = call.input.request.grammar;
  switch (call.tool_choice) {
    case ToolChoice::none: return;
    case ToolChoice::named: grammar = {Kind::json_schema, call.held_tools[0].parameters_json, {}}; return;
    case ToolChoice::required: grammar = calls_grammar(text::ToolFormat::none, call.held_tools); return;
    case ToolChoice::automatic: break;
  }
  const text::ToolFormat format = call.shape.tools.format;
  if (grammar.kind == Kind::none)
    grammar = calls_grammar(format, call.held_tools);
  else if (grammar.kind == Kind::json_object)
    grammar = calls_grammar(format, call.held_tools, R"({"type":"object"})");
  else if (grammar.kind == Kind::json_schema)
    grammar = calls_grammar(format, call.held_tools, grammar.text);
}

// How calls will be found in the answer.
void prepare_tools(Services& services, OpenAiCall& call) {
  const auto chat_template = services.engine().chat_template();
  if (!chat_template) return;  // still loading, or a model without one: the request will be refused
  switch (call.tool_choice) {
    case ToolChoice::none: return;
    case ToolChoice::automatic: call.shape.tools = free_tools(text::tool_format_of(chat_template->source())); break;
    case ToolChoice::required: call.shape.tools = required_tool(); break;
    case ToolChoice::named: call.shape.tools = named_tool(call.tool_name); break;
  }
  call.shape.tools.one |= call.one_tool;
  if (!call.held_tools.empty()) hold_tools(call);
}

constexpr size_t kMostTraceParent = 128;

// Seconds, as gRPC's deadline is for its callers.
Result<Duration> parse_timeout(std::string_view text) {
  double seconds = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  if (error != std::errc() || end != text.data() + text.size() || !(seconds > 0 && seconds <= 86400))
    return invalid_argument(
               cat("X-Request-Timeout is '", text.substr(0, 40), "'; it must be seconds, above 0 and at most 86400"))
        .with_field("X-Request-Timeout");
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
}

}  // namespace

Reply Api::chat(const Request& request, const Caller& caller) {
  auto call = services_.read(caller, "openai.chat", parse_chat(request.body, services_.options()));
  if (!call.ok()) return error_response(call.status());
  return generate(request, caller, *std::move(call));
}

Reply Api::completions(const Request& request, const Caller& caller) {
  auto call = services_.read(caller, "openai.completions", parse_completion(request.body, services_.options()));
  if (!call.ok()) return error_response(call.status());
  return generate(request, caller, *std::move(call));
}

Reply Api::generate(const Request& request, const Caller& caller, OpenAiCall call) {
  call.input.request.trace_parent = request.header("traceparent").substr(0, kMostTraceParent);
  if (std::string_view text = request.header("x-request-timeout"); !text.empty()) {
    auto limit = services_.read(caller, call.input.protocol, parse_timeout(text));
    if (!limit.ok()) return error_response(limit.status());
    call.input.request.deadline = std::chrono::steady_clock::now() + *limit;
  }
  ReplyShape& shape = call.shape;
  if (!call.tools_json.empty()) prepare_tools(services_, call);
  std::vector<std::unique_ptr<engine::Stream>> streams;
  for (PromptInput& prompt : call.prompts) {
    GenerateInput input = call.input;
    input.prompt = std::move(prompt);
    auto submitted = services_.generate(caller, std::move(input));
    if (!submitted.ok()) return error_response(submitted.status());  // the others are cancelled as they go
    if (call.echo) {
      auto text = services_.engine().tokenizer()->decode(submitted->prompt, false);
      if (!text.ok()) return error_response(text.status());
      shape.echo.push_back(*std::move(text));
    }
    shape.prompts.push_back(static_cast<int64_t>(submitted->prompt.size()));
    streams.push_back(std::move(submitted->stream));
  }
  shape.seed_drawn = !call.input.seed;
  shape.tokenizer = services_.engine().tokenizer();
  shape.model = services_.model_name();
  shape.id = cat(shape.chat ? "chatcmpl-" : "cmpl-", streams[0]->id());
  shape.created =
      std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
  std::vector<std::pair<std::string, std::string>> headers{{"X-Request-Id", streams[0]->id()}};
  Response cors;
  guard_.allow(request, cors);
  headers.insert(headers.end(), cors.headers.begin(), cors.headers.end());
  return openai_reply(std::move(shape), std::move(streams), std::move(headers));
}

}  // namespace kvasir::server::http
