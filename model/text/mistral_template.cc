#include "model/text/mistral_template.h"

#include <string_view>

#include "core/cat.h"

namespace kvasir::text {
namespace {

// Messages of one role in a row are one: `run` gathers its text and calls until another role speaks. `all` is what the
// whole conversation says: where its last user speaks, and, up to version 3, all words of the system.
constexpr std::string_view kBegin = R"jinja({%- set takes_parts = true -%}
{%- set all = namespace(last_user=-1, first='', system='', begun=false, ids=[], results=[]) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set all.last_user = loop.index0 -%}{%- endif -%}
  {%- if message.role != 'system' and not all.first -%}{%- set all.first = message.role -%}{%- endif -%}
)jinja";

// Up to version 3 a user says the system's words, and speaks first.
constexpr std::string_view kSystemOfUser = R"jinja(  {%- if message.role == 'system' -%}
    {%- for part in ([message.content] if message.content is string else message.content or []) -%}
      {%- set text = part if part is string else part.text -%}
      {%- if text -%}{%- set all.system = all.system ~ ('\n\n' if all.system else '') ~ text -%}{%- endif -%}
    {%- endfor -%}
  {%- endif -%}
)jinja";

constexpr std::string_view kRuns = R"jinja({%- endfor -%}
{{- bos_token -}}
{%- set run = namespace(text='', open=false, chunks=false, calls=[]) -%}
)jinja";

constexpr std::string_view kEachMessage = R"jinja({%- for message in messages -%}
  {%- if loop.first or loop.previtem.role != message.role or message.role in ('tool', 'system') -%}
    {%- set run.text = '' -%}{%- set run.open = false -%}{%- set run.chunks = false -%}{%- set run.calls = [] -%}
  {%- endif -%}
)jinja";

constexpr std::string_view kThoughts = R"jinja(  {%- set thoughts = message.reasoning_content or message.reasoning -%}
  {%- if thoughts and message.role == 'assistant' -%}
    {%- set run.text = run.text ~ '[THINK]' ~ thoughts ~ '[/THINK]' -%}
    {%- set run.open = false -%}{%- set run.chunks = true -%}
  {%- endif -%}
)jinja";

constexpr std::string_view kParts =
    R"jinja(  {%- for part in ([message.content] if message.content is string else message.content or []) -%}
    {%- if part is string or part.type == 'text' -%}
      {%- set text = part if part is string else part.text -%}
      {%- if text -%}
        {%- set run.text = run.text ~ ('\n\n' if run.open else '') ~ text -%}{%- set run.open = true -%}
      {%- endif -%}
)jinja";

constexpr std::string_view kThinkParts = R"jinja(    {%- elif part.type == 'thinking' -%}
      {%- set thoughts = part.thinking if part.thinking is string else part.thinking | map(attribute='text') | join -%}
      {%- set run.text = run.text ~ '[THINK]' ~ thoughts ~ ('' if part.closed is false else '[/THINK]') -%}
      {%- set run.open = false -%}{%- set run.chunks = true -%}
)jinja";

constexpr std::string_view kPartsEnd = R"jinja(    {%- else -%}
      {{- raise_exception('content has a part of type ' ~ part.type ~ '; only text is taken') -}}
    {%- endif -%}
  {%- endfor -%}
)jinja";

constexpr std::string_view kCalls = R"jinja(  {%- for call in message.tool_calls or [] -%}
    {%- set run.calls = run.calls + [call] -%}
  {%- endfor -%}
)jinja";

constexpr std::string_view kEnd = R"jinja({%- endfor -%})jinja";

// Version 1 has no tokens for its tags, so what follows them begins a text of its own, with a blank as each has.
constexpr std::string_view kOfVersion1 = R"jinja(  {%- if loop.last or loop.nextitem.role != message.role -%}
    {%- if message.role == 'user' -%}
      {{- (' ' if all.begun) ~ '[INST] ' ~ (all.system ~ '\n\n' if all.system) ~ run.text ~ ' [/INST]' -}}
      {%- set all.system = '' -%}{%- set all.begun = true -%}
    {%- elif message.role == 'assistant' -%}
      {{- (' ' if all.begun) ~ run.text ~ eos_token -}}{%- set all.begun = false -%}
    {%- elif message.role != 'system' -%}
      {{- raise_exception('role is ' ~ message.role ~ '; system, user and assistant are known') -}}
    {%- endif -%}
  {%- endif -%}
)jinja";

constexpr std::string_view kFirstOfVersion1 = R"jinja({%- if all.first != 'user' -%}
  {{- '[INST] ' ~ (all.system ~ '\n\n' if all.system) ~ ' [/INST]' -}}
  {%- set all.system = '' -%}{%- set all.begun = true -%}
{%- endif -%}
)jinja";

// A user who says nothing, where another speaks first. Tools stand before the last user, who may be this one.
constexpr std::string_view kTools = R"jinja([AVAILABLE_TOOLS][
        {%- for tool in tools -%}
          {{- ', ' if not loop.first -}}
          {"type": "function", "function": {"name": {{ tool.function.name | tojson }}, "description": {{ (tool.function.description or '') | tojson }}, "parameters": {{ (tool.function.parameters or {}) | tojson }}}}
        {%- endfor -%}
      ][/AVAILABLE_TOOLS]
)jinja";

constexpr std::string_view kResult3 =
    R"jinja(    [TOOL_RESULTS]{"content": {{ (run.text or '{}') | fromjson | tojson }}, "call_id": {{ message.tool_call_id | tojson }}}[/TOOL_RESULTS]
)jinja";

// What tools answered stands in the order of the calls.
constexpr std::string_view kSortedResults =
    R"jinja(    {%- set all.results = all.results + [{'id': message.tool_call_id, 'text': run.text}] -%}
    {%- if loop.last or loop.nextitem.role != 'tool' -%}
      {%- for id in all.ids -%}
        {%- for result in all.results if result.id == id -%}@RESULT@{%- endfor -%}
      {%- endfor -%}
      {%- for result in all.results if result.id not in all.ids -%}@RESULT@{%- endfor -%}
      {%- set all.ids = [] -%}{%- set all.results = [] -%}
    {%- endif -%}
)jinja";

constexpr std::string_view kListedCalls = R"jinja([TOOL_CALLS][
        {%- for call in run.calls -%}
          {{- ', ' if not loop.first -}}
          {"name": {{ call.function.name | tojson }}, "arguments": {{ (call.function.arguments or {}) | tojson -}}
          @ID@}
        {%- endfor -%}
      ])jinja";

std::string replaced(std::string text, std::string_view what, std::string_view with) {
  for (size_t at = 0; (at = text.find(what, at)) != std::string::npos; at += with.size())
    text.replace(at, what.size(), with);
  return text;
}

std::string version1() {
  // It knows no tools, and says so by not naming them.
  const std::string each =
      replaced(std::string(kEachMessage), "message.role in ('tool', 'system')", "message.role == 'system'");
  return cat(kBegin, kSystemOfUser, kRuns, kFirstOfVersion1, each, kParts, kPartsEnd, kOfVersion1, kEnd);
}

std::string user(int version) {
  const std::string when = version < 13 ? "loop.index0 == all.last_user" : "not all.begun";
  const std::string system =
      version < 7 ? "{{- all.system ~ '\\n\\n' if all.system and loop.index0 == all.last_user -}}" : "";
  return cat("    {%- if tools and ", when, " -%}\n      ", kTools,
             "    {%- endif -%}\n    {%- set all.begun = true -%}\n    [INST]", system, "{{- run.text -}}[/INST]\n");
}

std::string first_user() {
  return cat("{%- if all.first != 'user' -%}\n  {%- if tools and all.last_user < 0 -%}\n      ", kTools,
             "  {%- endif -%}\n",
             "  [INST]{{- all.system ~ '\\n\\n' if all.system and all.last_user < 0 -}}[/INST]\n{%- endif -%}\n");
}

std::string calls(int version) {
  if (version < 11) {
    constexpr std::string_view kId =
        R"jinja({%- if call.id and call.id != 'null' -%}, "id": {{ call.id | tojson }}{%- endif -%})jinja";
    return replaced(std::string(kListedCalls), "@ID@", version < 3 ? "" : kId);
  }
  const char* id = version < 13 ? "{%- if call.id and call.id != 'null' -%}[CALL_ID]{{- call.id -}}{%- endif -%}" : "";
  return cat("{%- for call in run.calls -%}[TOOL_CALLS]{{- call.function.name -}}", id,
             "[ARGS]{{- (call.function.arguments or {}) | tojson -}}{%- endfor -%}");
}

// Up to version 3 a message is of calls or says something.
std::string assistant(int version) {
  const char* said = "{{- run.text if run.chunks else run.text.rstrip(' ') -}}";
  if (version < 7) {
    const char* when = version < 3 ? "{%- if not run.calls or loop.index0 > all.last_user -%}" : "{%- if true -%}";
    return cat("    ", when, "\n      {%- if run.calls -%}\n      ", calls(version), "\n      {%- else -%}", said,
               "{%- endif -%}\n      {{- eos_token -}}\n    {%- endif -%}\n");
  }
  const char* ids =
      version < 11 ? "" : "{%- for call in run.calls -%}{%- set all.ids = all.ids + [call.id] -%}{%- endfor -%}";
  return cat("    ", said, "\n    {%- if run.calls -%}\n      ", calls(version), "\n      ", ids,
             "\n    {%- endif -%}\n    {{- eos_token -}}\n");
}

std::string results(int version) {
  if (version == 2)
    return R"jinja(    {%- if loop.index0 > all.last_user -%}
    [TOOL_RESULTS][{"name": {{ message.name | tojson }}, "content": {{ (run.text or '{}') | fromjson | tojson }}}][/TOOL_RESULTS]
    {%- endif -%}
)jinja";
  if (version == 3) return std::string(kResult3);
  if (version == 7)
    return "    [TOOL_RESULTS]{{- message.tool_call_id -}}[TOOL_CONTENT]{{- run.text -}}[/TOOL_RESULTS]\n";
  return replaced(std::string(kSortedResults), "@RESULT@",
                  version < 13 ? "[TOOL_RESULTS]{{- result.id -}}[TOOL_CONTENT]{{- result.text -}}[/TOOL_RESULTS]"
                               : "[TOOL_RESULTS]{{- result.text -}}[/TOOL_RESULTS]");
}

}  // namespace

std::string mistral_template(int version, bool thinks) {
  if (version == 1) return version1();
  if (version != 2 && version != 3 && version != 7 && version != 11 && version != 13) return "";
  const bool of_user = version < 7;
  thinks &= version >= 13;
  return cat(kBegin, of_user ? kSystemOfUser : "", kRuns, of_user ? first_user() : "", kEachMessage,
             thinks ? kThoughts : "", kParts, thinks ? kThinkParts : "", kPartsEnd, kCalls,
             "  {%- if message.role == 'tool' -%}\n", results(version), "  {%- elif message.role == 'system' -%}\n",
             of_user ? "" : "    [SYSTEM_PROMPT]{{- run.text -}}[/SYSTEM_PROMPT]\n",
             "  {%- elif loop.last or loop.nextitem.role != message.role -%}\n",
             "    {%- if message.role == 'user' -%}\n", user(version), "    {%- elif message.role == 'assistant' -%}\n",
             assistant(version),
             "    {%- else -%}\n      {{- raise_exception('role is ' ~ message.role ~ '; system, user, assistant and "
             "tool are ",
             "known') -}}\n    {%- endif -%}\n  {%- endif -%}\n", kEnd);
}

}  // namespace kvasir::text
