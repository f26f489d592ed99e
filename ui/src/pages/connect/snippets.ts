// Programs and commands that use this server, ready to be pasted.
//
// A token is never part of a snippet: it comes from the environment, as in the first lines of the page.

export interface Place {
  /** Address of the server, without a slash at its end. */
  url: string;
  graph: string;
  needsToken: boolean;
}

export interface Snippet {
  id: string;
  title: string;
  note: string;
  text: string;
}

export const TOKEN = "PENSTOCK_TOKEN";

export function snippets({ url, graph, needsToken }: Place): Snippet[] {
  const header = needsToken ? ` -H "Authorization: Bearer $${TOKEN}"` : "";
  const python = needsToken ? `os.environ["${TOKEN}"]` : '"none"';
  const js = needsToken ? `process.env.${TOKEN}` : '"none"';
  const os = needsToken ? "import os\n\n" : "";
  return [
    {
      id: "curl",
      title: "curl",
      note: "Starts a run and prints its events as they happen.",
      text: `curl -N${header} -H "Content-Type: application/json" \\
  -d '{"content": "count to 5"}' \\
  "${url}/api/agents/${graph}/chat?stream=true"`,
    },
    {
      id: "openai-python",
      title: "OpenAI, Python",
      note: "Each graph is a model. Needs pip install openai.",
      text: `${os}from openai import OpenAI

client = OpenAI(base_url="${url}/v1", api_key=${python})
answer = client.chat.completions.create(
    model="${graph}",
    messages=[{"role": "user", "content": "count to 5"}],
)
print(answer.choices[0].message.content)`,
    },
    {
      id: "openai-js",
      title: "OpenAI, JavaScript",
      note: "For Node, as a file that ends in .mjs. Needs npm install openai.",
      text: `import OpenAI from "openai";

const client = new OpenAI({ baseURL: "${url}/v1", apiKey: ${js} });
const answer = await client.chat.completions.create({
  model: "${graph}",
  messages: [{ role: "user", content: "count to 5" }],
});
console.log(answer.choices[0].message.content);`,
    },
    {
      id: "langchain",
      title: "LangChain",
      note: "Needs pip install langchain-openai.",
      text: `${os}from langchain_openai import ChatOpenAI

model = ChatOpenAI(base_url="${url}/v1", api_key=${python}, model="${graph}")
print(model.invoke("count to 5").content)`,
    },
    {
      id: "cli",
      title: "Penstock, in a terminal",
      note: "Needs pip install 'penstock[cli,http]'. The cost is printed after each answer; Ctrl-D ends it.",
      text: `penstock chat ${graph} --url ${url}`,
    },
  ];
}

/** What contains programs that call models themselves; it does not use this server. */
export const CONTAINED: Snippet[] = [
  {
    id: "exec",
    title: "One program: penstock exec",
    note: "Runs a program of any language under a limit, without a change to it. At the end it prints what each call cost.",
    text: "penstock exec --max-cost 0.50 -- python agent.py",
  },
  {
    id: "gateway",
    title: "A team: penstock gateway",
    note: "Serves the APIs of OpenAI, Anthropic and Google to many programs, with a budget for each key. Put the database of your server in.",
    text: `penstock gateway --db sqlite:///penstock.db --user-daily 20 &
penstock tokens create ann --gateway --daily 5 --db sqlite:///penstock.db
export OPENAI_BASE_URL=http://127.0.0.1:8643/openai/v1
export OPENAI_API_KEY=pen_…  # the key that was printed`,
  },
];
