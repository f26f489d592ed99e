// The official openai package of npm.
import assert from "node:assert";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI();
const model = "fake-1";
const messages = (content) => [{ role: "user", content }];
const City = z.object({ city: z.string(), celsius: z.number().int() });
const tools = [{ type: "function", function: { name: "weather", parameters: { type: "object", properties: {} } } }];

const chat = await client.chat.completions.create({ model, messages: messages("hello"), max_tokens: 20 });
console.log("chat:", chat.choices[0].message.content, chat.usage.total_tokens);
let text = "", pieces = 0;
for await (const chunk of await client.chat.completions.create({ model, messages: messages("hello"), stream: true })) {
  text += chunk.choices[0]?.delta.content ?? "";
  assert.ok(!chunk.usage);
  pieces += 1;
}
console.log("chat, streamed:", text, pieces > 5);
const asked = await client.chat.completions.create({ model, messages: messages("weather"), tools });
console.log("tools:", asked.choices[0].message.tool_calls[0].function.arguments);
const typed = await client.chat.completions.parse({
  model, messages: messages("json"), response_format: zodResponseFormat(City, "city"),
});
console.log("structured output:", typed.choices[0].message.parsed.city);
console.log("responses:", (await client.responses.create({ model, input: "hello" })).output_text);
console.log("responses, streamed:", (await client.responses.stream({ model, input: "hello" }).finalResponse()).output_text);
console.log("embeddings:", (await client.embeddings.create({ model, input: ["a", "b"] })).data.length);
console.log("models:", (await client.models.list()).data[0].id);
await assert.rejects(client.chat.completions.create({ model, messages: messages("wrong") }), { status: 400 });
console.log("error of the provider");
console.log("retries:", (await client.chat.completions.create({ model, messages: messages("busy") })).choices.length);
const leaving = await client.chat.completions.create({ model, messages: messages("hang"), stream: true });
for await (const chunk of leaving) if (chunk.choices.length) break;
console.log("disconnect");
if (process.env.PENSTOCK_GATEWAY_URL) {
  const over = client.chat.completions.create({ model: "dear-1", messages: messages("hello") });
  await assert.rejects(over, { status: 402, code: "budget_exceeded" });
}
