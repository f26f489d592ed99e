// The page of one run: its header, what it has used, why it stopped, and its views.
//
// What is looked at is in the address: `?view=flame&call=1:n000004`, so a link opens the same call in the same view.

import type { ComponentType, KeyboardEvent } from "react";
import type { Me } from "../../api/types.ts";
import { formatCount, formatDuration } from "../../model/money.ts";
import { statusAt, tableOf } from "../../model/run.ts";
import { setParams, type Route } from "../../router.ts";
import { later } from "../../ui/later.tsx";
import { Failure, Value } from "../../ui/parts.tsx";
import { visible } from "../../ui/visible.ts";
import { Bills } from "../bills.tsx";
import { Calls } from "./calls.tsx";
import { Events } from "./events.tsx";
import { Header } from "./header.tsx";
import { Inspector } from "./inspector.tsx";
import { Refusals } from "./refusals.tsx";
import { momentOf, Scrubber } from "./scrubber.tsx";
import { Stopped, Waiting } from "./stopped.tsx";
import { Strip } from "./strip.tsx";
import { Timeline } from "./timeline.tsx";
import { useRun, type LiveRun } from "./use-run.ts";
import type { ViewProps } from "./views.tsx";
import "./run.css";

const LOADING = <p className="empty">Loading…</p>;
const Flame = later(() => import("./flame.tsx"), LOADING);
const Graph = later(() => import("./graph.tsx"), LOADING);

const VIEWS = {
  tree: "Calls",
  flame: "Flame",
  timeline: "Timeline",
  graph: "Graph",
  events: "Events",
  data: "Input and output",
} as const;
type View = keyof typeof VIEWS;

const OF_CALLS: Partial<Record<View, ComponentType<ViewProps>>> = { tree: Calls, flame: Flame, timeline: Timeline, graph: Graph };

export function RunPage({ id, route, me }: { id: string; route: Route; me: Me }) {
  const run = useRun(id);
  const { record, state } = run;
  if (!record) {
    return (
      <>
        <h1>Run {visible(id)}</h1>
        {run.error ? <Failure error={run.error} /> : <p className="muted">Loading…</p>}
        <p>
          <a href="#/runs">All runs</a>
        </p>
      </>
    );
  }
  const status = state.lastSeq >= record.last_seq && state.lastSeq > 0 ? state.status : record.status;
  const mayAct = me.role !== "viewer";
  const atMs = momentOf(state, route);
  return (
    <>
      <Header run={run} record={record} status={status} mayAct={mayAct} />
      {run.connection === "lost" && (
        <div className="note warn" role="status">
          Not connected: {run.message}. What you see is as of event {state.lastSeq}.
        </div>
      )}
      {run.restored && (
        <div className="note warn" role="status">
          The server no longer has events that this page had shown: its database may have been restored. This is the run as it
          is there now.
        </div>
      )}
      {atMs !== null && (
        <div className="note warn" role="status">
          This is the run as it was {formatDuration(atMs - (state.startedMs ?? atMs))} after its start, {statusAt(state, atMs)} at
          that time.
          <div>
            <button onClick={() => setParams(route, { t: null })}>Back to now</button>
          </div>
        </div>
      )}
      <Strip record={record} state={state} atMs={atMs} />
      {status === "waiting" && <Waiting run={record} mayAct={mayAct} onAnswered={run.refresh} />}
      <Stopped record={record} status={status} run={run} mayAct={mayAct} />
      {record.unresolved_usd > 0 && <Bills run={record} mayAct={mayAct} onResolved={run.refresh} />}
      <Refusals state={state} route={route} atMs={atMs} />
      <Views run={run} route={route} atMs={atMs} />
      <p className="hidden" role="status">{`The run is ${status}`}</p>
    </>
  );
}

interface Looked {
  run: LiveRun;
  route: Route;
  atMs: number | null;
}

function Views({ run, route, atMs }: Looked) {
  const { state } = run;
  const given = route.params.get("view") ?? "tree";
  const view: View = given in VIEWS ? (given as View) : "tree";
  const names = Object.keys(VIEWS) as View[];
  const choose = (name: View) => setParams(route, { view: name === "tree" ? null : name });
  const onKey = (event: KeyboardEvent) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = names[(names.indexOf(view) + step + names.length) % names.length]!;
    choose(next);
    document.getElementById(`tab-${next}`)?.focus();
  };
  return (
    <div className="panel">
      <div className="tabs" role="tablist" aria-label="What to look at" onKeyDown={onKey}>
        {names.map((name) => (
          <button
            key={name}
            role="tab"
            id={`tab-${name}`}
            aria-controls="tab-panel"
            aria-selected={name === view}
            tabIndex={name === view ? 0 : -1}
            onClick={() => choose(name)}
          >
            {VIEWS[name]}
            {name === "events" && ` (${formatCount(state.log.lastSeq)})`}
          </button>
        ))}
      </div>
      <div role="tabpanel" id="tab-panel" aria-labelledby={`tab-${view}`}>
        <Panel run={run} route={route} atMs={atMs} view={view} />
      </div>
      {OF_CALLS[view] && <Scrubber state={state} route={route} atMs={atMs} />}
    </div>
  );
}

function Panel({ run, route, atMs, view }: Looked & { view: View }) {
  const { state } = run;
  const record = run.record!;
  const OfCalls = OF_CALLS[view];
  if (OfCalls) return <CallView run={run} route={route} atMs={atMs} View={OfCalls} />;
  if (view === "events") return <Events id={record.id} state={state} route={route} />;
  return (
    <div className="pad stack">
      <h2>Input</h2>
      <Value of={record.input} label="Input" />
      <h2>Output</h2>
      {record.output === null ? <p className="muted">None yet.</p> : <Value of={record.output} label="Output" />}
    </div>
  );
}

/** A view of the calls of one attempt, with the picked one beside it. */
function CallView({ run, route, atMs, View }: Looked & { View: ComponentType<ViewProps> }) {
  const { state } = run;
  const record = run.record!;
  const attempts = [...state.attempts.keys()].filter((epoch) => epoch <= state.epoch);
  const epoch = Number(route.params.get("attempt")) || state.epoch;
  const table = tableOf(state, state.attempts.has(epoch) ? epoch : state.epoch);
  const picked = route.params.get("call");
  const found = picked?.startsWith(`${table.epoch}:`) ? table.rowOf(picked.slice(picked.indexOf(":") + 1)) : -1;
  const row = found >= 0 && table.hasBegun(found, atMs) ? found : -1;
  const pick = (key: string) => setParams(route, { call: key === picked ? null : key });
  return (
    <>
      {state.epoch > 1 && (
        <Attempts
          known={attempts}
          newest={state.epoch}
          chosen={table.epoch}
          onChoose={(one) => setParams(route, { attempt: one, call: null })}
        />
      )}
      <div className={row >= 0 ? "columns" : ""}>
        <div className="view">
          <View record={record} state={state} table={table} route={route} atMs={atMs} picked={picked} onPick={pick} />
        </div>
        {row >= 0 && (
          <Inspector
            call={table.callAt(row, atMs)!}
            record={record}
            state={state}
            table={table}
            atMs={atMs}
            onPick={pick}
            onClose={() => pick(picked!)}
          />
        )}
      </div>
    </>
  );
}

function Attempts(props: { known: number[]; newest: number; chosen: number; onChoose: (one: string | null) => void }) {
  const { known, newest, chosen, onChoose } = props;
  return (
    <div className="bar pad-bar">
      <span>This run was resumed.</span>
      <select
        aria-label="Attempt"
        value={chosen}
        onChange={(event) => onChoose(Number(event.target.value) === newest ? null : event.target.value)}
      >
        {known.map((epoch) => (
          <option key={epoch} value={epoch}>
            Attempt {epoch} of {newest}
          </option>
        ))}
      </select>
      <span className="muted small">
        Finished work comes back from the journal, and is not paid for again.
        {known.length < newest && " Earlier attempts of a long run are in its events."}
      </span>
    </div>
  );
}
