// An agent loop as any Node program has one: it reads the address and the key from its environment, and never ends.
if (process.env.OPENAI_API_KEY.includes("provider")) throw new Error("the provider's key is in the environment");

for (let turn = 1; ; turn += 1) {
  const answer = await fetch(`${process.env.OPENAI_BASE_URL}/chat/completions`, {
    method: "POST",
    headers: { "content-type": "application/json", authorization: `Bearer ${process.env.OPENAI_API_KEY}` },
    body: JSON.stringify({ model: "fake-1", max_tokens: 100, messages: [{ role: "user", content: `turn ${turn}` }] }),
  });
  const body = await answer.json();
  if (!answer.ok) {
    console.log(`turn ${turn}: ${answer.status} ${body.error.message}`);
    process.exit(1);
  }
  console.log(`turn ${turn}: ${body.usage.completion_tokens} tokens`);
}
