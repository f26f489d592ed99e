// The official openai package of npm: tools and structured output, by both APIs, streamed and not.
import assert from "node:assert";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "none" });
const model = process.env.MODEL;
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "weather", parameters } }];
const flat = [{ type: "function", name: "weather", parameters, strict: false }];
const Weather = z.object({ city: z.string(), celsius: z.number().int() });
const asked = [{ role: "user", content: "How is the weather?" }];

for (const streamed of [false, true]) {
  const first = streamed
    ? await client.chat.completions.stream({ model, messages: asked, tools }).finalChatCompletion()
    : await client.chat.completions.create({ model, messages: asked, tools });
  const { message, finish_reason } = first.choices[0];
  assert.equal(finish_reason, "tool_calls");
  const results = message.tool_calls.map((call) => ({
    role: "tool", tool_call_id: call.id, content: `sunny in ${JSON.parse(call.function.arguments).city}`,
  }));
  const answer = await client.chat.completions.create({ model, messages: [...asked, message, ...results], tools });
  assert.equal(answer.choices[0].message.content, "In Rome: sunny in Rome.");
  console.log(`tools, chat, ${streamed ? "streamed" : "whole"}`);

  const response = streamed
    ? await client.responses.stream({ model, input: asked, tools: flat }).finalResponse()
    : await client.responses.create({ model, input: asked, tools: flat });
  const outputs = response.output.filter((item) => item.type === "function_call").map((item) => ({
    type: "function_call_output", call_id: item.call_id, output: `sunny in ${JSON.parse(item.arguments).city}`,
  }));
  const next = await client.responses.create({
    model, input: outputs, previous_response_id: response.id, tools: flat,
  });
  assert.equal(next.output_text, "In Rome: sunny in Rome.");
  console.log(`tools, responses, ${streamed ? "streamed" : "whole"}`);
}

const runner = client.chat.completions.runTools({
  model,
  messages: asked,
  tools: [{
    type: "function",
    function: { name: "weather", parameters, parse: JSON.parse, function: ({ city }) => `sunny in ${city}` },
  }],
});
assert.equal(await runner.finalContent(), "In Rome: sunny in Rome.");
console.log("runTools, chat");

const parsed = await client.chat.completions.parse({
  model, messages: asked, response_format: zodResponseFormat(Weather, "weather"),
});
assert.deepEqual(parsed.choices[0].message.parsed, { city: "Rome", celsius: 21 });
console.log("structured output, chat");
const typed = await client.responses.parse({
  model, input: asked, text: { format: zodTextFormat(Weather, "weather") },
});
assert.deepEqual(typed.output_parsed, { city: "Rome", celsius: 21 });
console.log("structured output, responses");
await assert.rejects(
  client.chat.completions.create({ model, messages: asked, logit_bias: { 50256: -100 } }),
  (error) => error.status === 400 && error.code === "unsupported_parameter" && error.param === "logit_bias",
);
console.log("refused parameters are named");

const hello = [{ role: "user", content: "hello" }];
const loud = await client.chat.completions.create({ model: "shouter", messages: hello });
assert.equal(loud.choices[0].message.content, "HELLO");
const streamed = await client.chat.completions.stream({ model: "shouter", messages: hello }).finalContent();
assert.equal(streamed, "HELLO");
assert.equal((await client.responses.create({ model: "shouter", input: "hello" })).output_text, "HELLO");
console.log("a graph in Python");
