// The page of one run: its header, what it has used, why it stopped, and its views.

import type { Me } from "../../api/types.ts";
import { formatCount } from "../../model/money.ts";
import { setParams, type Route } from "../../router.ts";
import { Failure, Value } from "../../ui/parts.tsx";
import { Bills } from "../bills.tsx";
import { Calls } from "./calls.tsx";
import { Events } from "./events.tsx";
import { Header } from "./header.tsx";
import { Stopped, Waiting } from "./stopped.tsx";
import { Strip } from "./strip.tsx";
import { useRun } from "./use-run.ts";

const TABS = { calls: "Calls", events: "Events", input: "Input and output" } as const;

export function RunPage({ id, route, me }: { id: string; route: Route; me: Me }) {
  const run = useRun(id);
  const { record, state } = run;
  const tab = (route.params.get("tab") ?? "calls") as keyof typeof TABS;
  if (!record) {
    return (
      <>
        <h1>Run {id}</h1>
        {run.error ? <Failure error={run.error} /> : <p className="muted">Loading…</p>}
        <p>
          <a href="#/runs">All runs</a>
        </p>
      </>
    );
  }
  const status = state.lastSeq >= record.last_seq && state.lastSeq > 0 ? state.status : record.status;
  const mayAct = me.role !== "viewer";
  return (
    <>
      <Header run={run} record={record} status={status} mayAct={mayAct} />
      {run.connection === "lost" && (
        <div className="note warn" role="status">
          Not connected: {run.message}. What you see is as of event {state.lastSeq}.
        </div>
      )}
      <Strip record={record} state={state} />
      {status === "waiting" && <Waiting run={record} mayAct={mayAct} onAnswered={run.refresh} />}
      <Stopped record={record} status={status} run={run} mayAct={mayAct} />
      {record.unresolved_usd > 0 && <Bills run={record} mayAct={mayAct} onResolved={run.refresh} />}
      <div className="panel">
        <div className="tabs" role="tablist" aria-label="What to look at">
          {Object.entries(TABS).map(([name, label]) => (
            <button
              key={name}
              role="tab"
              id={`tab-${name}`}
              aria-controls="tab-panel"
              aria-selected={name === tab}
              onClick={() => setParams(route, { tab: name === "calls" ? null : name, call: null })}
            >
              {label}
              {name === "events" && ` (${formatCount(state.events.length)})`}
            </button>
          ))}
        </div>
        <div role="tabpanel" id="tab-panel" aria-labelledby={`tab-${tab}`}>
          {tab === "events" ? (
            <Events events={state.events} />
          ) : tab === "input" ? (
            <div className="pad stack">
              <h2>Input</h2>
              <Value of={record.input} label="Input" />
              <h2>Output</h2>
              {record.output === null ? <p className="muted">None yet.</p> : <Value of={record.output} label="Output" />}
            </div>
          ) : (
            <Calls state={state} route={route} />
          )}
        </div>
      </div>
      <p className="hidden" role="status">{`The run is ${status}`}</p>
    </>
  );
}
