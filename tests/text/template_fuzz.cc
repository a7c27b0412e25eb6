// A chat template is any text, and so are the messages: a zero byte divides them.
#include "tests/fuzz/seeds.h"
#include "tests/text/small_vocab.h"

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  using std::string_literals::operator""s;
  kvasir::write_seeds(
      *argc, *argv,
      {"{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m.content | trim + '<|im_end|>' }}{% endfor %}"
       "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
       "{%- macro call(c) -%}{{ c.function.name }}({{ c.function.arguments | tojson(indent=2) }}){%- endmacro -%}"
       "{%- set ns = namespace(first=true, n=0) -%}{%- for m in messages if m.role != 'system' -%}"
       "{%- if m.tool_calls is defined and m.tool_calls -%}{%- for c in m.tool_calls -%}{{ call(c) }}{%- endfor -%}"
       "{%- elif loop.first -%}{%- set ns.first = false -%}{{ bos_token }}{%- else -%}{{ m['content'][1:-1] }}{%- "
       "endif -%}"
       "{%- if loop.index0 % 2 == 1 -%}{%- break -%}{%- endif -%}{%- endfor -%}"
       "\0[{\"role\":\"user\",\"content\":\"hi\"},{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{"
       "\"function\":"
       "{\"name\":\"f\",\"arguments\":{\"a\":[1,2.5,true]}}}]}]"s,
       "{{ messages | map(attribute='role') | unique | join(', ') | upper | replace('A', 'b') | length }}"
       "{{ messages | selectattr('role', 'equalto', 'user') | list | tojson(sort_keys=true, ensure_ascii=true) }}"
       "{{ strftime_now('%d %B %Y %-d %j') }}{{ range(3) | sum }}{{ 'a b'.split(' ')[0].strip().startswith('a') }}",
       "{% if messages[0].content is string and messages[0].content is not mapping %}{{ raise_exception('no') }}{% "
       "endif %}"
       "{{ (tools or [])[:2] ~ dict(a=1).items() | list ~ {'k': none}.get('k', 3) }}{% raw %}{{ }}{% endraw %}{# note "
       "#}"});
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace kvasir::text;
  static const TokenizerPtr tokenizer = *Tokenizer::from_gguf(small_byte_level_vocab());
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t at = std::min(input.find('\0'), input.size());
  const std::string_view rest = at < input.size() ? input.substr(at + 1) : std::string_view();
  auto compiled = ChatTemplate::compile(input.substr(0, at), *tokenizer);
  if (!compiled.ok()) return 0;
  (void)(*compiled)->render(rest.empty() ? R"([{"role":"user","content":"hi"}])" : rest, "", true);
  return 0;
}
