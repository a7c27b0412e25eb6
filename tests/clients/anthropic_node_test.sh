#!/usr/bin/env bash
# Anthropic's package for Node, unmodified: whole, streamed, a call, refused.
set -euo pipefail
command -v node >/dev/null || { echo "skipped: node is not installed"; exit 77; }
node -e 'require("@anthropic-ai/sdk")' 2>/dev/null || { echo "skipped: no @anthropic-ai/sdk for node (tools/clients.sh installs it)"; exit 77; }
node - <<'JS'
const Anthropic = require("@anthropic-ai/sdk");
const assert = require("assert");
(async () => {
  const client = new Anthropic({baseURL: process.env.KVASIR_HTTP, apiKey: "none", maxRetries: 0});
  const model = (await (await fetch(process.env.KVASIR_HTTP + "/v1/models")).json()).data[0].id;
  const messages = [{role: "user", content: "What is the capital of France?"}];
  const whole = await client.messages.create({model, messages, max_tokens: 16, temperature: 0});
  assert(whole.content[0].text.includes("Paris"));
  const stream = client.messages.stream({model, messages, max_tokens: 16, temperature: 0});
  let text = "";
  stream.on("text", piece => text += piece);
  const last = await stream.finalMessage();
  assert.strictEqual(text, whole.content[0].text);
  assert.strictEqual(last.content[0].text, text);
  const tools = [{name: "get_weather", input_schema: {type: "object", properties: {city: {type: "string", maxLength: 20}}, required: ["city"]}}];
  const called = await client.messages.stream({model, messages, tools, tool_choice: {type: "any"}, max_tokens: 100, temperature: 0}).finalMessage();
  assert.strictEqual(called.stop_reason, "tool_use");
  assert("city" in called.content.at(-1).input);
  assert((await client.messages.countTokens({model, messages})).input_tokens > 5);
  await assert.rejects(client.messages.create({model, messages, max_tokens: 4, temperature: -1}), e => e.status === 400);
  console.log("@anthropic-ai/sdk: all right");
})().catch(e => { console.error(e); process.exit(1); });
JS
