// Vercel's ai package: generateObject, and tools in several steps, over three of its providers' APIs.
import assert from "node:assert";
import { generateObject, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { z } from "zod";

const baseURL = process.env.BASE_URL;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "penstock", baseURL, supportsStructuredOutputs: true });
const models = {
  chat: openai.chat(process.env.MODEL),
  responses: openai.responses(process.env.MODEL),
  compatible: compatible(process.env.MODEL),
};
const schema = z.object({ city: z.string(), celsius: z.number().int() });
const tools = {
  weather: tool({
    description: "The weather in a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => `sunny in ${city}`,
  }),
};
const prompt = "How is the weather?";

for (const [name, model] of Object.entries(models)) {
  const { object } = await generateObject({ model, schema, prompt });
  assert.deepEqual(object, { city: "Rome", celsius: 21 });
  console.log(`generateObject, ${name}`);
  const { text, steps } = await generateText({ model, tools, prompt, stopWhen: stepCountIs(5) });
  assert.equal(text, "In Rome: sunny in Rome.");
  assert.equal(steps.length, 2);
  console.log(`generateText with tools, ${name}`);
  const typed = await generateText({
    model, tools, prompt, output: Output.object({ schema }), stopWhen: stepCountIs(5),
  });
  assert.deepEqual(typed.output, { city: "Rome", celsius: 21 });
  assert.equal(typed.steps.length, 2);
  console.log(`an object with tools, ${name}`);
  const stream = streamText({ model, tools, prompt, stopWhen: stepCountIs(5) });
  assert.equal(await stream.text, "In Rome: sunny in Rome.");
  console.log(`streamText with tools, ${name}`);
}
