import { useState } from "react";
import { get, query } from "../api/client.ts";
import type { GraphPage, RunPage, RunSummary } from "../api/types.ts";
import { formatDuration, formatUsd, toNanos } from "../model/money.ts";
import { isLive } from "../model/run.ts";
import { runLink, setParams } from "../router.ts";
import type { PageProps } from "./index.ts";
import { RunPage as OneRun } from "./run/page.tsx";
import { Failure, Money, Status, Track, usePolled, when } from "../ui/parts.tsx";

const FILTERS: Record<string, { label: string; statuses: string[] }> = {
  all: { label: "All", statuses: [] },
  active: { label: "Active", statuses: ["queued", "running"] },
  waiting: { label: "Needs you", statuses: ["waiting"] },
  stopped: { label: "Stopped", statuses: ["halted", "failed", "cancelled", "parked"] },
  completed: { label: "Completed", statuses: ["completed"] },
};
const POLL_MS = 2_000;
const PAGE = 50;

export default function RunsPage(props: PageProps) {
  const id = props.route.parts[1];
  return id ? <OneRun key={id} id={id} {...props} /> : <List {...props} />;
}

function List({ route, me }: PageProps) {
  const chosen = route.params.get("show") ?? "all";
  const filter = FILTERS[chosen] ?? FILTERS.all!;
  const graph = route.params.get("graph") ?? "";
  const [pages, setPages] = useState(1);
  const graphs = usePolled("graphs", (signal) => get<GraphPage>("/api/graphs?limit=200", signal), 0);
  const key = `${chosen} ${graph} ${pages}`;
  const runs = usePolled(
    key,
    (signal) => get<RunPage>(`/api/runs${query({ status: filter.statuses, graph_id: graph, limit: PAGE * pages })}`, signal),
    POLL_MS,
  );
  const found = runs.value?.runs;
  return (
    <>
      <div className="bar">
        <h1>Runs</h1>
        <span className="grow" />
        {me.role !== "viewer" && (
          <a className="button primary" href="#/start">
            Start a run
          </a>
        )}
      </div>
      <div className="bar">
        <div className="chips" role="group" aria-label="Show runs">
          {Object.entries(FILTERS).map(([name, { label }]) => (
            <button
              key={name}
              aria-pressed={name === chosen}
              onClick={() => (setPages(1), setParams(route, { show: name === "all" ? null : name }))}
            >
              {label}
            </button>
          ))}
        </div>
        <select
          aria-label="Graph"
          value={graph}
          onChange={(event) => (setPages(1), setParams(route, { graph: event.target.value || null }))}
        >
          <option value="">All graphs</option>
          {graphs.value?.graphs.map((one) => (
            <option key={one.id} value={one.id}>
              {one.id}
            </option>
          ))}
        </select>
      </div>
      <Failure error={runs.error} />
      <div className="panel">
        {found === undefined ? (
          <p className="empty">{runs.error ? "Nothing to show." : "Loading…"}</p>
        ) : found.length === 0 ? (
          <div className="empty">
            <p>{chosen === "all" && !graph ? "No runs yet." : "No runs match these filters."}</p>
            {me.role !== "viewer" && (
              <a className="button primary" href="#/start">
                Start a run
              </a>
            )}
          </div>
        ) : (
          <RunTable runs={found} showOwner={me.role === "admin" && found.some((run) => run.owner !== me.name)} />
        )}
      </div>
      {runs.value?.next && PAGE * pages < 500 && (
        <div>
          <button onClick={() => setPages(pages + 1)}>Show older runs</button>
        </div>
      )}
    </>
  );
}

/** Figures of a run in progress; servers that do not tell them leave the run's record as it was at the start. */
interface Live {
  spent_usd: number;
  held_usd: number;
  unresolved_usd: number;
}

type Listed = RunSummary & { live?: Live | null };

function RunTable({ runs, showOwner }: { runs: RunSummary[]; showOwner: boolean }) {
  return (
    <div className="scroll" style={{ maxHeight: "none" }}>
      <table>
        <thead>
          <tr>
            <th scope="col">Status</th>
            <th scope="col">Run</th>
            <th scope="col">Graph</th>
            {showOwner && <th scope="col">Owner</th>}
            <th scope="col">Started</th>
            <th scope="col" className="number">
              Time
            </th>
            <th scope="col" className="number">
              Cost
            </th>
            <th scope="col">Of its limit</th>
            <th scope="col">Why it stopped</th>
          </tr>
        </thead>
        <tbody>
          {runs.map((run) => (
            <Row key={run.id} run={run} showOwner={showOwner} />
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Row({ run, showOwner }: { run: Listed; showOwner: boolean }) {
  const limit = run.limits.max_cost_usd === undefined ? null : toNanos(run.limits.max_cost_usd);
  const tookMs = run.started_ms === null ? null : (run.ended_ms ?? Date.now()) - run.started_ms;
  const live = run.live ?? null;
  const known = live !== null || !isLive(run.status);
  const spent = live ? toNanos(live.spent_usd) : run.cost_nanos;
  return (
    <tr>
      <td>
        <Status of={run.status} />
      </td>
      <td>
        <a className="mono" href={runLink(run.id)}>
          {run.id.length > 24 ? `${run.id.slice(0, 8)}…${run.id.slice(-6)}` : run.id}
        </a>
      </td>
      <td>{run.graph_id}</td>
      {showOwner && <td>{run.owner}</td>}
      <td className="muted">{when(run.started_ms ?? run.created_ms)}</td>
      <td className="number">{tookMs === null ? "" : formatDuration(tookMs)}</td>
      <td className="number">
        {known ? <Money nanos={spent} unknown={run.unknown_costs > 0} /> : <span className="muted">in progress</span>}
      </td>
      <td>
        {limit !== null && known && (
          <Track
            name={`Money of ${run.id}`}
            spent={spent}
            held={toNanos(live?.held_usd)}
            unresolved={toNanos(live ? live.unresolved_usd : run.unresolved_usd)}
            limit={limit}
            format={formatUsd}
            thin
          />
        )}
      </td>
      <td className="small muted">{run.stop_reason?.replaceAll("_", " ")}</td>
    </tr>
  );
}
