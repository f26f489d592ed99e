// The official @anthropic-ai/sdk package of npm.
import assert from "node:assert";
import Anthropic from "@anthropic-ai/sdk";
import { jsonSchemaOutputFormat } from "@anthropic-ai/sdk/helpers/json-schema";

const client = new Anthropic();
const body = (content, more = {}) => ({ model: "fake-1", max_tokens: 50, messages: [{ role: "user", content }], ...more });
const tools = [{ name: "weather", input_schema: { type: "object", properties: {} } }];

const message = await client.messages.create(body("hello"));
console.log("messages:", message.content[0].text, message.usage.output_tokens);
console.log("messages, streamed:", await client.messages.stream(body("hello")).finalText());
const asked = await client.messages.create(body("weather", { tools }));
console.log("tools:", JSON.stringify(asked.content.find((block) => block.type === "tool_use").input));
const streamed = await client.messages.stream(body("weather", { tools })).finalMessage();
console.log("tools, streamed:", JSON.stringify(streamed.content.find((block) => block.type === "tool_use").input));
const format = jsonSchemaOutputFormat({
  type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: true,
});
const typed = await client.messages.parse(body("json", { output_config: { format } }));
console.log("structured output:", typed.parsed_output.city);
const { max_tokens, ...counted } = body("hello");
console.log("count_tokens:", (await client.messages.countTokens(counted)).input_tokens);
await assert.rejects(client.messages.create(body("wrong")), { status: 400 });
console.log("error of the provider");
console.log("retries:", (await client.messages.create(body("busy"))).content.length);
for await (const event of await client.messages.create(body("hang", { stream: true }))) {
  if (event.type === "content_block_delta") break;
}
console.log("disconnect");
if (process.env.PENSTOCK_GATEWAY_URL) {
  await assert.rejects(client.messages.create(body("hello", { model: "dear-1" })), { status: 402, type: "billing_error" });
}
