// How programs use this server: snippets with its address and one of its graphs, to be pasted as they are.

import { get, hasToken } from "../../api/client.ts";
import type { AgentPage } from "../../api/types.ts";
import { setParams } from "../../router.ts";
import { Copy } from "../../ui/copy.tsx";
import { Failure, usePolled } from "../../ui/parts.tsx";
import { visible } from "../../ui/visible.ts";
import type { PageProps } from "../index.ts";
import { CONTAINED, snippets, TOKEN, type Snippet } from "./snippets.ts";
import "./connect.css";

export default function ConnectPage({ route, me }: PageProps) {
  const agents = usePolled("agents", (signal) => get<AgentPage>("/api/agents?limit=500", signal), 0);
  const ids = agents.value?.agents.map((agent) => agent.id) ?? [];
  const first = agents.value?.agents.find((agent) => agent.made_for_chat)?.id ?? ids[0];
  const graph = ids.find((id) => id === route.params.get("graph")) ?? first;
  const url = new URL(".", location.href.split("#")[0]).href.replace(/\/$/, "");
  const needsToken = hasToken();
  return (
    <>
      <h1>Connect</h1>
      <p className="muted">
        Programs use this server at <code>{url}</code>. What they start is yours ({visible(me.name)}), with the limits of this server.
      </p>
      <Failure error={agents.error} />
      {needsToken && (
        <div className="note">
          <h2>First, your token</h2>
          <p>The snippets read it from the environment. Put yours in once:</p>
          <Code snippet={{ id: "token", title: "Your token", note: "", text: `export ${TOKEN}=pen_…` }} />
          {me.role === "admin" && (
            <p className="small">
              <a href="#/admin/tokens">Create a token</a> for each program, so that you can revoke it alone.
            </p>
          )}
        </div>
      )}
      {agents.value && graph === undefined && (
        <p className="panel empty">
          <span>
            There is no graph that answers messages yet. <a href="#/graphs">Make one</a>, with a chat start or an input.
          </span>
        </p>
      )}
      {graph !== undefined && (
        <>
          <label className="choice of-graph">
            Graph
            <select value={graph} onChange={(event) => setParams(route, { graph: event.target.value })}>
              {ids.map((id) => (
                <option key={id} value={id}>
                  {visible(id)}
                </option>
              ))}
            </select>
          </label>
          {snippets({ url, graph, needsToken }).map((snippet) => (
            <Part key={snippet.id} snippet={snippet} />
          ))}
        </>
      )}
      <h2 className="apart">Programs that call models themselves</h2>
      {CONTAINED.map((snippet) => (
        <Part key={snippet.id} snippet={snippet} />
      ))}
      <p className="muted">
        Everything else: <a href="docs">the documentation of this API</a>. Graphs are tools of MCP clients, too, at <code>{url}/mcp</code>.
      </p>
    </>
  );
}

function Part({ snippet }: { snippet: Snippet }) {
  return (
    <section className="panel" aria-label={snippet.title}>
      <header>
        <h2>{snippet.title}</h2>
        <span className="muted small">{snippet.note}</span>
      </header>
      <Code snippet={snippet} />
    </section>
  );
}

function Code({ snippet }: { snippet: Snippet }) {
  return (
    <div className="snippet">
      <pre id={`snippet-${snippet.id}`} tabIndex={0} role="region" aria-label={`${snippet.title}: text`}>
        {snippet.text}
      </pre>
      <Copy text={snippet.text} what={snippet.title} />
    </div>
  );
}
