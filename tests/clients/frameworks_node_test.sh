#!/usr/bin/env bash
# The Vercel AI SDK and Ollama's package for Node (from tools/clients.sh), unmodified.
set -euo pipefail
command -v node >/dev/null || { echo "skipped: node is not installed"; exit 77; }
for package in ai @ai-sdk/openai-compatible ollama; do
  node -e "require('$package')" 2>/dev/null || { echo "skipped: no $package for node (tools/clients.sh installs it)"; exit 77; }
done
node - <<'JS'
const {generateText, streamText, generateObject, jsonSchema, tool} = require("ai");
const {createOpenAICompatible} = require("@ai-sdk/openai-compatible");
const {Ollama} = require("ollama");
const assert = require("assert");
const http = process.env.KVASIR_HTTP;
const ask = "What is the capital of France?";
(async () => {
  const name = (await (await fetch(http + "/v1/models")).json()).data[0].id;
  const served = createOpenAICompatible({name: "kvasir", baseURL: http + "/v1", supportsStructuredOutputs: true})(name);
  const told = {model: served, temperature: 0, maxOutputTokens: 16, maxRetries: 0};
  const whole = await generateText({...told, prompt: ask});
  assert(whole.text.includes("Paris"), whole.text);
  assert(whole.usage.outputTokens > 0);
  let text = "";
  for await (const piece of streamText({...told, prompt: ask}).textStream) text += piece;
  assert.strictEqual(text, whole.text);
  const schema = jsonSchema({type: "object", properties: {name: {type: "string", maxLength: 20}, age: {type: "integer", maximum: 120}},
                             required: ["name", "age"], additionalProperties: false});
  const person = await generateObject({...told, maxOutputTokens: 100, schema, prompt: "Describe a person."});
  assert.deepStrictEqual(Object.keys(person.object).sort(), ["age", "name"]);
  const weather = tool({description: "The weather of a city.", execute: async () => "18 degrees",
                        inputSchema: jsonSchema({type: "object", properties: {city: {type: "string", maxLength: 20}}, required: ["city"]})});
  const called = await generateText({...told, maxOutputTokens: 100, tools: {weather}, toolChoice: "required", prompt: "Weather in Paris?"});
  assert.strictEqual(called.toolCalls[0].toolName, "weather");
  console.log("ai: all right");

  const client = new Ollama({host: http});
  const model = (await client.list()).models[0].model;
  const options = {temperature: 0, num_predict: 16};
  const messages = [{role: "user", content: ask}];
  const answer = await client.chat({model, messages, options});
  assert(answer.message.content.includes("Paris"));
  text = "";
  for await (const piece of await client.chat({model, messages, options, stream: true})) text += piece.message.content;
  assert.strictEqual(text, answer.message.content);
  assert((await client.generate({model, prompt: "The capital of France is", raw: true, options})).response.includes("Paris"));
  assert((await client.show({model})).capabilities.includes("completion"));
  await assert.rejects(client.chat({model: "nobody", messages}), e => e.status_code === 404);
  console.log("ollama for node: all right");
})().catch(e => { console.error(e); process.exit(1); });
JS
