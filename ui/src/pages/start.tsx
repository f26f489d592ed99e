import { useState } from "react";
import { get, post } from "../api/client.ts";
import type { GraphPage, Limits, NewRun, RunShown } from "../api/types.ts";
import { go, runLink, setParams } from "../router.ts";
import { Failure, Field, useAction, usePolled } from "../ui/parts.tsx";
import { visible } from "../ui/visible.ts";
import type { PageProps } from "./index.ts";
import { LimitFields, limitsInWords, readLimits } from "./limits.tsx";

export default function StartPage({ route, me }: PageProps) {
  const graphs = usePolled("graphs", (signal) => get<GraphPage>("/api/graphs?limit=200", signal), 0);
  const runnable = graphs.value?.graphs.filter((graph) => graph.valid) ?? [];
  const picked = route.params.get("graph") ?? "";
  const [input, setInput] = useState("");
  const [asJson, setAsJson] = useState(false);
  const [limits, setLimits] = useState<Record<string, string>>({});
  const [busy, error, act] = useAction();
  const graph = picked || runnable[0]?.id || "";
  const isListed = runnable.some(({ id }) => id === graph);
  const submit = () =>
    act(async () => {
      const body: NewRun = { graph_id: graph, input: asJson ? parseJson(input) : input };
      const given: Limits = readLimits(limits);
      if (Object.keys(given).length) body.limits = given;
      go(runLink((await post<RunShown>("/api/runs", body)).id));
    });
  return (
    <>
      <h1>Start a run</h1>
      <Failure error={graphs.error} />
      {graphs.value && runnable.length === 0 ? (
        <div className="panel empty">
          No graph can run yet. <a href="#/graphs">Build one</a>, or save one with <code>PUT /api/graphs/ID</code>.
        </div>
      ) : (
        <form className="panel pad stack" onSubmit={(event) => (event.preventDefault(), void submit())}>
          <Field label="Graph">
            {(id) => (
              <select id={id} value={graph} onChange={(event) => setParams(route, { graph: event.target.value })}>
                {!isListed && <option value={graph}>{visible(graph)}</option>}
                {runnable.map((one) => (
                  <option key={one.id} value={one.id}>
                    {one.id === one.name ? one.id : `${one.id}: ${one.name}`}
                  </option>
                ))}
              </select>
            )}
          </Field>
          <Field label="Input" hint={asJson ? "Any JSON value." : "Sent as text."}>
            {(id) => <textarea id={id} rows={5} value={input} onChange={(event) => setInput(event.target.value)} />}
          </Field>
          <label className="choice">
            <input type="checkbox" checked={asJson} onChange={(event) => setAsJson(event.target.checked)} />
            The input is JSON
          </label>
          <h2>Limits</h2>
          <p className="muted small">
            Where you leave a field empty, the server's own limits apply: {limitsInWords(me.default_limits)}.{" "}
            {Object.keys(me.ceilings).length > 0 && `The highest that a run may have here: ${limitsInWords(me.ceilings)}. `}
            0 allows nothing.
          </p>
          <LimitFields values={limits} onChange={setLimits} />
          <Failure error={error} />
          <div className="bar">
            <button className="primary" disabled={busy || !graph}>
              Start
            </button>
            <a href="#/runs">Cancel</a>
          </div>
        </form>
      )}
    </>
  );
}

export function parseJson(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`this is not JSON: ${error instanceof Error ? error.message : error}`);
  }
}
