import { useEffect, useState } from "react";
import { get, query, serverNow } from "../api/client.ts";
import type { GraphPage, RunPage, RunSummary } from "../api/types.ts";
import { formatCount, formatDuration, formatUsd, toNanos } from "../model/money.ts";
import { isLive } from "../model/run.ts";
import { diffLink, runLink, setParams } from "../router.ts";
import type { PageProps } from "./index.ts";
import { RunPage as OneRun } from "./run/page.tsx";
import { useNow } from "./run/strip.tsx";
import { useTopic } from "./use-lists.ts";
import { Failure, Money, shortId, Status, Track, usePolled, when } from "../ui/parts.tsx";
import { visible } from "../ui/visible.ts";

const FILTERS: Record<string, { label: string; statuses: string[] }> = {
  all: { label: "All", statuses: [] },
  active: { label: "Active", statuses: ["queued", "running"] },
  waiting: { label: "Needs you", statuses: ["waiting"] },
  stopped: { label: "Stopped", statuses: ["halted", "failed", "cancelled", "parked"] },
  completed: { label: "Completed", statuses: ["completed"] },
};
const SINCE: Record<string, { label: string; ms: number }> = {
  hour: { label: "Last hour", ms: 3_600_000 },
  day: { label: "Last 24 hours", ms: 86_400_000 },
  week: { label: "Last 7 days", ms: 604_800_000 },
};
const REASONS = ["budget_exceeded", "token_limit_exceeded", "step_limit_exceeded", "api_call_limit_exceeded", "retry_budget_exceeded", "timeout", "aborted"];
const CHANGES_MS = 1_000;
/** Lists are also read now and then, for what the server does not report: runs that are not among the newest. */
const POLL_MS = 15_000;
const TYPING_MS = 300;
const PAGE = 50;

export default function RunsPage(props: PageProps) {
  const id = props.route.parts[1];
  return id ? <OneRun key={id} id={id} {...props} /> : <List {...props} />;
}

function List({ route, me }: PageProps) {
  const chosen = route.params.get("show") ?? "all";
  const filter = FILTERS[chosen] ?? FILTERS.all!;
  const [graph, since, stop, sort, wanted] = ["graph", "since", "stop", "sort", "q"].map((name) => route.params.get(name) ?? "");
  const [pages, setPages] = useState(1);
  const [compared, setCompared] = useState<string[]>([]);
  const graphs = usePolled("graphs", (signal) => get<GraphPage>("/api/graphs?limit=200", signal), 0);
  const q = useSettled(wanted!, TYPING_MS);
  const sinceMs = SINCE[since!]?.ms;
  const values = { status: filter.statuses, graph_id: graph, stop_reason: stop, sort, q, limit: PAGE * pages };
  const load = (signal: AbortSignal) =>
    get<RunPage>(`/api/runs${query({ ...values, count: "true", since: sinceMs && Math.max(0, Math.floor(serverNow() - sinceMs)) })}`, signal);
  const runs = usePolled(`${query(values)} ${since}`, load, POLL_MS);
  useTopic("runs", runs.again, CHANGES_MS);
  const found = runs.value?.runs;
  const isFiltered = chosen !== "all" || [graph, since, stop, q].some(Boolean);
  const choose = (changes: Record<string, string | null>) => (setPages(1), setParams(route, changes));
  const compare = (id: string) =>
    setCompared((old) => (old.includes(id) ? old.filter((one) => one !== id) : [...old, id].slice(-2)));
  return (
    <>
      <div className="bar">
        <h1>Runs</h1>
        {!!runs.value?.total && <span className="muted small">{countInWords(runs.value.total)}</span>}
        <span className="grow" />
        {compared.length > 0 && (
          <>
            <span className="muted small">{compared.length === 1 ? "Pick another run to compare with" : "Two runs are picked"}</span>
            {compared.length === 2 && (
              <a className="button" href={diffLink(compared[0]!, compared[1]!)}>
                Compare
              </a>
            )}
          </>
        )}
        {me.role !== "viewer" && (
          <a className="button primary" href="#/start">
            Start a run
          </a>
        )}
      </div>
      <div className="bar">
        <div className="chips" role="group" aria-label="Show runs">
          {Object.entries(FILTERS).map(([name, { label }]) => (
            <button key={name} aria-pressed={name === chosen} onClick={() => choose({ show: name === "all" ? null : name })}>
              {label}
            </button>
          ))}
        </div>
        <Choice label="Graph" value={graph!} none="All graphs" onChange={(value) => choose({ graph: value })}>
          {(graphs.value?.graphs ?? []).map(({ id }) => [id, id])}
        </Choice>
        <Choice label="Time" value={since!} none="Any time" onChange={(value) => choose({ since: value })}>
          {Object.entries(SINCE).map(([name, { label }]) => [name, label])}
        </Choice>
        <Choice label="Why it stopped" value={stop!} none="Any reason" onChange={(value) => choose({ stop: value })}>
          {REASONS.map((reason) => [reason, reason.replaceAll("_", " ")])}
        </Choice>
        <Choice label="Order" value={sort!} none="Newest first" onChange={(value) => choose({ sort: value })}>
          {[["cost", "Most expensive first"]]}
        </Choice>
        <input
          type="search"
          className="find"
          aria-label="Find a run"
          placeholder="Part of a run's or graph's id"
          maxLength={100}
          value={wanted}
          onChange={(event) => choose({ q: event.target.value || null })}
        />
      </div>
      <Failure error={runs.error} />
      <div className="panel">
        {found === undefined ? (
          <p className="empty">{runs.error ? "Nothing to show." : "Loading…"}</p>
        ) : found.length === 0 ? (
          <div className="empty">
            <p>{isFiltered ? "No runs match these filters." : "No runs yet."}</p>
            {me.role !== "viewer" && (
              <a className="button primary" href="#/start">
                Start a run
              </a>
            )}
          </div>
        ) : (
          <RunTable
            runs={found}
            showOwner={me.role === "admin" && found.some((run) => run.owner !== me.name)}
            compared={compared}
            onCompare={compare}
          />
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

/** The server stops counting at 10,000. */
function countInWords(total: number): string {
  if (total === 1) return "1 run";
  return `${formatCount(total)} ${total >= 10_000 ? "or more runs" : "runs"}`;
}

function Choice(props: { label: string; value: string; none: string; onChange: (value: string | null) => void; children: string[][] }) {
  const { label, value, none, onChange, children } = props;
  return (
    <select aria-label={label} value={value} onChange={(event) => onChange(event.target.value || null)}>
      <option value="">{none}</option>
      {children.map(([name, word]) => (
        <option key={name} value={name}>
          {visible(word!)}
        </option>
      ))}
    </select>
  );
}

/** The newest value that has not changed for a moment, so that each letter is not a request. */
function useSettled(value: string, afterMs: number): string {
  const [settled, setSettled] = useState(value);
  useEffect(() => {
    const timer = setTimeout(() => setSettled(value), afterMs);
    return () => clearTimeout(timer);
  }, [value, afterMs]);
  return settled;
}

interface Listing {
  showOwner: boolean;
  compared: string[];
  onCompare: (id: string) => void;
}

function RunTable({ runs, ...listing }: Listing & { runs: RunSummary[] }) {
  const now = useNow(runs.some((run) => isLive(run.status)));
  return (
    <div className="scroll" style={{ maxHeight: "none" }}>
      <table>
        <thead>
          <tr>
            <th scope="col">
              <span className="hidden">Compare</span>
            </th>
            <th scope="col">Status</th>
            <th scope="col">Run</th>
            <th scope="col">Graph</th>
            {listing.showOwner && <th scope="col">Owner</th>}
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
            <Row key={run.id} run={run} now={now} {...listing} />
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Row({ run, now, showOwner, compared, onCompare }: Listing & { run: RunSummary; now: number }) {
  const limit = run.limits.max_cost_usd === undefined ? null : toNanos(run.limits.max_cost_usd);
  const tookMs = run.started_ms === null ? null : Math.max(0, (run.ended_ms ?? now) - run.started_ms);
  const live = run.live ?? null;
  const known = live !== null || !isLive(run.status);
  const spent = live ? toNanos(live.spent_usd) : run.cost_nanos;
  return (
    <tr>
      <td>
        <input
          type="checkbox"
          aria-label={`Compare ${run.id}`}
          checked={compared.includes(run.id)}
          onChange={() => onCompare(run.id)}
        />
      </td>
      <td>
        <Status of={run.status} />
      </td>
      <td>
        <a className="mono" href={runLink(run.id)}>
          {shortId(run.id)}
        </a>
      </td>
      <td>{visible(run.graph_id)}</td>
      {showOwner && <td>{visible(run.owner)}</td>}
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
