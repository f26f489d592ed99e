// The official @google/genai package of npm.
import assert from "node:assert";
import { GoogleGenAI } from "@google/genai";

// It retries only if that is wanted.
const client = new GoogleGenAI({ httpOptions: { retryOptions: { attempts: 3 } } });
const model = "fake-1";
const tools = [{ functionDeclarations: [{ name: "weather", parametersJsonSchema: { type: "object", properties: {} } }] }];

const answer = await client.models.generateContent({ model, contents: "hello" });
console.log("generateContent:", answer.text, answer.usageMetadata.totalTokenCount);
let text = "";
for await (const chunk of await client.models.generateContentStream({ model, contents: "hello" })) text += chunk.text ?? "";
console.log("generateContentStream:", text);
const asked = await client.models.generateContent({ model, contents: "weather", config: { tools } });
console.log("tools:", JSON.stringify(asked.functionCalls[0].args));
const config = { responseMimeType: "application/json", responseJsonSchema: { type: "object" } };
console.log("structured output:", JSON.parse((await client.models.generateContent({ model, contents: "json", config })).text).city);
console.log("countTokens:", (await client.models.countTokens({ model, contents: "hello" })).totalTokens > 0);
console.log("embedContent:", (await client.models.embedContent({ model, contents: ["a"] })).embeddings.length);
await assert.rejects(client.models.generateContent({ model, contents: "wrong" }), { status: 400 });
console.log("error of the provider");
console.log("retries:", (await client.models.generateContent({ model, contents: "busy" })).candidates.length);
const leaving = new AbortController();
const left = { model, contents: "hang", config: { abortSignal: leaving.signal } };
for await (const chunk of await client.models.generateContentStream(left)) if (chunk.text) break;
leaving.abort();
console.log("disconnect");
if (process.env.PENSTOCK_GATEWAY_URL) {
  await assert.rejects(client.models.generateContent({ model: "dear-1", contents: "hello" }), { status: 402 });
}
