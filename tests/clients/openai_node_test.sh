#!/usr/bin/env bash
# The openai package for Node (from tools/clients.sh), unmodified: whole, streamed, refused.
set -euo pipefail
command -v node >/dev/null || { echo "skipped: node is not installed"; exit 77; }
node -e 'require("openai")' 2>/dev/null || { echo "skipped: no openai package for node (tools/clients.sh installs it)"; exit 77; }
node - <<'JS'
const OpenAI = require("openai");
const assert = require("assert");
(async () => {
  const client = new OpenAI({baseURL: process.env.KVASIR_HTTP + "/v1", apiKey: "none"});
  const model = (await client.models.list()).data[0].id;
  const messages = [{role: "user", content: "What is the capital of France?"}];
  const whole = await client.chat.completions.create({model, messages, max_tokens: 16, temperature: 0});
  assert(whole.choices[0].message.content.includes("Paris"));
  assert(whole.usage.completion_tokens > 0);
  let text = "";
  for await (const chunk of await client.chat.completions.create({model, messages, max_tokens: 16, temperature: 0, stream: true}))
    text += chunk.choices[0]?.delta?.content ?? "";
  assert.strictEqual(text, whole.choices[0].message.content);
  await assert.rejects(client.chat.completions.create({model, messages, temperature: -1}), e => e.status === 400);
  console.log("openai for node: all right");
})().catch(e => { console.error(e); process.exit(1); });
JS
