// Vercel's ai package, over the providers of OpenAI, Anthropic and Google.
import assert from "node:assert";
import { embedMany, generateObject, generateText, streamText, tool } from "ai";
import { openai } from "@ai-sdk/openai";
import { anthropic as fromEnvironment, createAnthropic } from "@ai-sdk/anthropic";
import { createGoogleGenerativeAI } from "@ai-sdk/google";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false;
// It adds no version to the address of the environment, which other clients do: the gateway serves both.
const anthropic = process.env.PENSTOCK_GATEWAY_URL
  ? fromEnvironment
  : createAnthropic({ baseURL: `${process.env.ANTHROPIC_BASE_URL}/v1` });
// It reads no address from the environment.
const google = createGoogleGenerativeAI({
  baseURL: `${process.env.GOOGLE_GEMINI_BASE_URL}/v1beta`, apiKey: process.env.GOOGLE_API_KEY,
});
const models = {
  chat: (id) => openai.chat(id), responses: (id) => openai.responses(id), anthropic: (id) => anthropic(id),
  google: (id) => google(id),
};
// It knows which models of Anthropic take a schema, and this is none of them.
const providerOptions = { anthropic: { structuredOutputMode: "outputFormat" } };
const tools = { weather: tool({ description: "weather", inputSchema: z.object({}).loose() }) };

for (const [name, of] of Object.entries(models)) {
  const model = of("fake-1");
  console.log(`generateText, ${name}:`, (await generateText({ model, prompt: "hello" })).text);
  console.log(`streamText, ${name}:`, await streamText({ model, prompt: "hello" }).text);
  const { toolCalls } = await generateText({ model, prompt: "weather", tools });
  console.log(`tools, ${name}:`, JSON.stringify(toolCalls[0].input));
  const schema = z.object({ city: z.string(), celsius: z.number().int() });
  const typed = await generateObject({ model, prompt: "json", schema, providerOptions });
  console.log(`generateObject, ${name}:`, typed.object.city);
  await assert.rejects(generateText({ model, prompt: "wrong" }), { statusCode: 400 });
  console.log(`error of the provider, ${name}`);
  console.log(`retries, ${name}:`, (await generateText({ model, prompt: `busy, ${name}` })).text);
  const leaving = new AbortController();
  const streamed = streamText({ model, prompt: "hang", abortSignal: leaving.signal });
  for await (const text of streamed.textStream) if (text) break;
  leaving.abort();
  console.log(`disconnect, ${name}`);
  if (process.env.PENSTOCK_GATEWAY_URL) {
    await assert.rejects(generateText({ model: of("dear-1"), prompt: "hello" }), { statusCode: 402 });
  }
}
const { embeddings } = await embedMany({ model: openai.embedding("fake-1"), values: ["a", "b"] });
console.log("embedMany:", embeddings.length);
