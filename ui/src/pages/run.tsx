import { useEffect, useState } from "react";
import { post } from "../api/client.ts";
import type { CancelShown, EventShown, Me, RunShown } from "../api/types.ts";
import { exactUsd, formatCount, formatDuration, formatUsd, toNanos } from "../model/money.ts";
import { elapsedMs, isLive, treeRows, type Call, type NodeState, type RunState, type TreeRow } from "../model/run.ts";
import { setParams, type Route } from "../router.ts";
import { Dialog, Failure, Field, Meter, Money, Status, useAction, Value, when, type Level } from "../ui/parts.tsx";
import { ApprovalCard } from "./approvals.tsx";
import { Bills } from "./bills.tsx";
import { LimitFields, readLimits, type LimitName } from "./limits.tsx";
import { useApprovals } from "./use-approvals.ts";
import { useRun, type LiveRun } from "./use-run.ts";

const TABS = { calls: "Calls", events: "Events", input: "Input and output" } as const;
const SHOWN_EVENTS = 1_000;
const SHOWN_ROWS = 2_000;

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

function Header(props: { run: LiveRun; record: RunShown; status: string; mayAct: boolean }) {
  const { run, record, status, mayAct } = props;
  const [asking, setAsking] = useState<"cancel" | "grant" | null>(null);
  const [busy, error, act] = useAction();
  const live = isLive(status as RunState["status"]);
  const path = `/api/runs/${encodeURIComponent(record.id)}`;
  const canResume = ["parked", "failed", "halted", "cancelled"].includes(status);
  return (
    <>
      <div className="bar">
        <div>
          <h1>
            {record.graph_id} <span className="muted small">version {record.graph_version}</span>
          </h1>
          <p className="small muted">
            <span className="mono">{record.id}</span>, started {when(record.started_ms ?? record.created_ms)} by {record.owner}
            {record.epoch > 1 && `, resumed ${record.epoch - 1} ${record.epoch === 2 ? "time" : "times"}`}
          </p>
        </div>
        <span className="grow" />
        <Status of={status} />
        {mayAct && canResume && (
          <button disabled={busy} onClick={() => void act(async () => (await post(`${path}/resume`), run.refresh()))}>
            Resume
          </button>
        )}
        {mayAct && status !== "completed" && <button onClick={() => setAsking("grant")}>Grant more</button>}
        {mayAct && (live || status === "parked") && (
          <button className="danger" onClick={() => setAsking("cancel")}>
            Cancel run
          </button>
        )}
      </div>
      <Failure error={error} />
      {asking === "cancel" && <CancelDialog path={path} onClose={() => (setAsking(null), run.refresh())} />}
      {asking === "grant" && <GrantDialog record={record} path={path} onClose={() => (setAsking(null), run.refresh())} />}
    </>
  );
}

function CancelDialog({ path, onClose }: { path: string; onClose: () => void }) {
  const [reason, setReason] = useState("");
  const [busy, error, act] = useAction();
  const submit = () =>
    act(async () => {
      await post<CancelShown>(`${path}/cancel`, reason ? { reason } : {});
      onClose();
    });
  return (
    <Dialog title="Cancel this run?" onClose={onClose}>
      <p>
        Calls under way are stopped. What they have used until then may still be billed; finished work is kept, and the run
        can be resumed.
      </p>
      <form className="stack" onSubmit={(event) => (event.preventDefault(), void submit())}>
        <Field label="Reason (optional)">
          {(id) => <input id={id} maxLength={2000} value={reason} onChange={(event) => setReason(event.target.value)} />}
        </Field>
        <Failure error={error} />
        <div className="bar">
          <button className="danger" disabled={busy}>
            Cancel the run
          </button>
          <button type="button" onClick={onClose}>
            Keep it running
          </button>
        </div>
      </form>
    </Dialog>
  );
}

const RAISED_BY: Record<string, LimitName> = {
  budget_exceeded: "max_cost_usd",
  step_limit_exceeded: "max_steps",
  token_limit_exceeded: "max_tokens",
  api_call_limit_exceeded: "max_api_calls",
  retry_budget_exceeded: "max_retries",
  timeout: "timeout_s",
};

function GrantDialog({ record, path, onClose }: { record: RunShown; path: string; onClose: () => void }) {
  const wanted = RAISED_BY[record.stop_reason ?? ""];
  const [more, setMore] = useState<Record<string, string>>(() => suggestion(record, wanted));
  const [busy, error, act] = useAction();
  const submit = () =>
    act(async () => {
      await post<RunShown>(`${path}/grant`, { limits: readLimits(more) });
      onClose();
    });
  return (
    <Dialog title="Grant more" onClose={onClose}>
      <p>
        Added to the run's limits. {record.status === "halted" ? "It goes on at once, from its finished work." : "It keeps running."}
      </p>
      <form className="stack" onSubmit={(event) => (event.preventDefault(), void submit())}>
        <LimitFields values={more} onChange={setMore} />
        <Failure error={error} />
        <div className="bar">
          <button className="primary" disabled={busy}>
            Grant
          </button>
          <button type="button" onClick={onClose}>
            Close
          </button>
        </div>
      </form>
    </Dialog>
  );
}

/** What the server advises, or as much again as the limit that stopped the run. */
function suggestion(record: RunShown, wanted: LimitName | undefined): Record<string, string> {
  if (!wanted) return {};
  const advised = record.advice.find((advice) => advice.step === "grant")?.amount_usd;
  if (wanted === "max_cost_usd" && advised) return { max_cost_usd: advised.toFixed(9).replace(/0+$/, "") };
  const limit = record.limits[wanted];
  return limit === undefined ? {} : { [wanted]: String(limit) };
}

function Strip({ record, state }: { record: RunShown; state: RunState }) {
  const now = useNow(isLive(state.status));
  const stopped = state.status === "halted" ? record.stop_reason : null;
  const own = record.halted_by === null || record.halted_by.whose === "run";
  const tripped = (name: LimitName) => own && stopped !== null && RAISED_BY[stopped] === name;
  const levels = levelsOf(record, state, elapsedMs(state, now)).map(([name, level]) => ({ ...level, tripped: tripped(name) }));
  const others = outerLevels(record, state);
  return (
    <div className="strips" role="group" aria-label="What the run has used of its limits">
      <div className="strip">
        {[...levels.slice(0, 1), ...others].map((level) => (
          <Meter key={level.name} level={level} />
        ))}
      </div>
      <div className="strip small-strip">
        {levels.slice(1).map((level) => (
          <Meter key={level.name} level={level} small />
        ))}
      </div>
    </div>
  );
}

function levelsOf(record: RunShown, state: RunState, elapsed: number): [LimitName, Level][] {
  const limit = (name: LimitName) => (record.limits[name] === undefined ? null : Number(record.limits[name]));
  const told = [...state.budgets.values()].find((budget) => budget.level === "run");
  const figures = (unit: string) => told?.units.find((one) => one.unit === unit);
  const ended = !isLive(state.status);
  const money: Level = {
    name: "Money of this run",
    ...(ended ? { held: 0, waiting: 0 } : figures("usd")),
    spent: Math.max(ended ? record.cost_nanos : 0, state.spentNanos),
    unresolved: ended ? toNanos(record.unresolved_usd) : (figures("usd")?.unresolved ?? 0),
    limit: record.limits.max_cost_usd === undefined ? null : toNanos(record.limits.max_cost_usd),
    format: formatUsd,
    note: state.unknownCosts ? `at least: ${state.unknownCosts} of unknown cost` : undefined,
  };
  const seconds = limit("timeout_s");
  const time: Level = { name: "Time", spent: elapsed, limit: seconds === null ? null : seconds * 1000, format: formatDuration };
  const levels: [LimitName, Level][] = [["max_cost_usd", money]];
  levels.push(["timeout_s", time]);
  levels.push(["max_tokens", { name: "Tokens", spent: state.tokens, limit: limit("max_tokens"), format: formatCount }]);
  for (const [name, unit, label] of COUNTED) {
    const one = figures(unit);
    if (one) levels.push([name, { ...one, name: label, limit: limit(name), format: formatCount }]);
    else if (name === "max_api_calls") levels.push([name, { name: "Model calls", spent: state.modelCalls, limit: limit(name), format: formatCount }]);
  }
  return levels.filter(([, level], index) => index < 2 || level.limit !== null || level.spent > 0);
}

const COUNTED: [LimitName, string, string][] = [
  ["max_api_calls", "api calls", "API calls"],
  ["max_steps", "steps", "Steps"],
  ["max_retries", "retries", "Retries"],
];

/** Budgets above and below the run: of days and of nodes; without budget events, the one that stopped the run. */
function outerLevels(record: RunShown, state: RunState): Level[] {
  const halt = record.halted_by;
  const stopper = halt && halt.whose !== "run" ? halt : null;
  const levels: Level[] = [];
  let stopperShown = false;
  for (const budget of state.budgets.values()) {
    if (budget.level === "run") continue;
    for (const figures of budget.units) {
      if (figures.limit === null) continue;
      const tripped = stopper?.budget === budget.name && stopper.unit === figures.unit;
      stopperShown ||= tripped;
      const unit = figures.unit === "usd" ? "" : `, ${figures.unit}`;
      const name = `${ownerOf(budget.level, budget.node ?? budget.name, record.owner)}${unit}`;
      const note = budget.level === "node" || isLive(state.status) ? undefined : "when the run ended";
      levels.push({ ...figures, name, format: formatOf(figures.unit), tripped, note });
    }
  }
  if (stopper?.limit != null && !stopperShown) {
    const amount = (value: number | null | undefined) => (stopper.unit === "usd" ? toNanos(value) : (value ?? 0));
    const name = ownerOf(stopper.whose, stopper.node_id ?? stopper.budget, record.owner);
    const format = formatOf(stopper.unit ?? "");
    levels.push({ name, spent: amount(stopper.used), limit: amount(stopper.limit), format, tripped: true });
  }
  return levels;
}

function ownerOf(level: string, node: string, owner: string): string {
  return { owner: `Daily budget of ${owner}`, all: "Daily budget of everyone" }[level] ?? `Budget of ${node}`;
}

function formatOf(unit: string): (value: number) => string {
  if (unit === "usd") return formatUsd;
  return unit === "seconds" ? (value) => formatDuration(value * 1000) : formatCount;
}

function useNow(ticking: boolean): number {
  const [now, setNow] = useState(Date.now);
  useEffect(() => {
    if (!ticking) return;
    const timer = setInterval(() => setNow(Date.now()), 1000);
    return () => clearInterval(timer);
  }, [ticking]);
  return now;
}

const WHOSE: Record<string, string> = {
  run: "this run's own limit",
  owner: "the daily budget of its owner",
  all: "the daily budget of everyone",
  node: "the budget of a node",
};

const TITLES: Record<string, string> = {
  halted: "Stopped by a limit",
  failed: "Failed",
  cancelled: "Cancelled",
  parked: "Parked",
};

function Stopped({ record, status, run, mayAct }: { record: RunShown; status: string; run: LiveRun; mayAct: boolean }) {
  const [granting, setGranting] = useState(false);
  const title = TITLES[status];
  if (!title || record.status !== status) return null;
  const halt = record.halted_by;
  const path = `/api/runs/${encodeURIComponent(record.id)}`;
  const canGrant = mayAct && record.advice.some((advice) => advice.step === "grant");
  return (
    <section className={`note ${status === "failed" || status === "halted" ? "bad" : "warn"}`} aria-label="Why it stopped">
      <h2>
        {title}
        {halt ? `: ${WHOSE[halt.whose]}` : ""}
      </h2>
      {record.error && <p>{record.error}</p>}
      {halt?.node_id && (
        <p className="muted">
          Reached in the node <code>{halt.node_id}</code>
          {record.stop_reason && ` (${record.stop_reason.replaceAll("_", " ")})`}
        </p>
      )}
      {record.advice.length > 0 && (
        <>
          <b>What helps</b>
          <ul>
            {record.advice.map((advice) => (
              <li key={advice.step}>{sentence(advice.message)}</li>
            ))}
          </ul>
        </>
      )}
      {canGrant && (
        <div>
          <button className="primary" onClick={() => setGranting(true)}>
            Grant more and go on
          </button>
        </div>
      )}
      {granting && <GrantDialog record={record} path={path} onClose={() => (setGranting(false), run.refresh())} />}
    </section>
  );
}

function sentence(text: string): string {
  const plain = Object.entries(PLAIN).reduce((all, [name, word]) => all.replaceAll(name, word), text);
  return plain.charAt(0).toUpperCase() + plain.slice(1);
}

const PLAIN: Record<LimitName, string> = {
  max_cost_usd: "more money",
  max_steps: "more steps",
  max_tokens: "more tokens",
  max_api_calls: "more API calls",
  max_retries: "more retries",
  timeout_s: "more time",
};

function Waiting({ run, mayAct, onAnswered }: { run: RunShown; mayAct: boolean; onAnswered: () => void }) {
  const approvals = useApprovals(run.id);
  return (
    <>
      {approvals.value?.approvals.map((approval) => (
        <ApprovalCard
          key={approval.id}
          approval={approval}
          mayAct={mayAct}
          onAnswered={() => (approvals.again(), onAnswered())}
          inRun
        />
      ))}
    </>
  );
}

function Calls({ state, route }: { state: RunState; route: Route }) {
  const epoch = Number(route.params.get("attempt")) || state.epoch;
  const rows = treeRows(state, epoch);
  const shown = rows.slice(0, SHOWN_ROWS);
  const picked = route.params.get("call");
  const call = picked ? state.calls.get(picked) : undefined;
  const pick = (key: string) => setParams(route, { call: key === picked ? null : key });
  return (
    <>
      {state.epoch > 1 && <Attempts newest={state.epoch} chosen={epoch} onChoose={(one) => setParams(route, { attempt: one, call: null })} />}
      {rows.length === 0 && <p className="empty">Nothing has started yet.</p>}
      <div className={call ? "columns" : ""}>
        {rows.length > 0 && (
          <div className="scroll" tabIndex={0} role="region" aria-label="Calls of this run">
            <table className="tree">
              <thead>
                <tr>
                  <th scope="col">Node and call</th>
                  <th scope="col">State</th>
                  <th scope="col" className="number">
                    Time
                  </th>
                  <th scope="col" className="number">
                    Tokens
                  </th>
                  <th scope="col" className="number">
                    Cost
                  </th>
                </tr>
              </thead>
              <tbody>
                {shown.map((row) => (
                  <Row key={row.key} row={row} picked={picked} onPick={pick} />
                ))}
              </tbody>
            </table>
            {rows.length > shown.length && (
              <p className="pad muted">
                The first {formatCount(shown.length)} of {formatCount(rows.length)} rows. The export has all of them.
              </p>
            )}
          </div>
        )}
        {call && <Inspector call={call} onClose={() => pick(call.key)} />}
      </div>
    </>
  );
}

function Attempts({ newest, chosen, onChoose }: { newest: number; chosen: number; onChoose: (one: string | null) => void }) {
  return (
    <div className="bar pad">
      <span>This run was resumed.</span>
      <select
        aria-label="Attempt"
        value={chosen}
        onChange={(event) => onChoose(Number(event.target.value) === newest ? null : event.target.value)}
      >
        {Array.from({ length: newest }, (_, index) => (
          <option key={index} value={index + 1}>
            Attempt {index + 1} of {newest}
          </option>
        ))}
      </select>
      <span className="muted small">Finished work comes back from the journal, and is not paid for again.</span>
    </div>
  );
}

function Row({ row, picked, onPick }: { row: TreeRow; picked: string | null; onPick: (key: string) => void }) {
  const { node, call } = row;
  const tag = call?.nodeType ?? node?.type ?? kindOf(call!);
  const name = call?.nodeType ? (call.node ?? call.name) : (node?.id ?? call!.name);
  const colour = call?.nodeType || !call ? "node" : call.kind === "llm" || call.kind === "tool" ? call.kind : "other";
  const tookMs = spanOf(call ?? node!);
  return (
    <tr className={call ? "call" : ""} aria-selected={call !== null && call.key === picked}>
      <td>
        <div className="name" style={{ "--depth": row.depth } as object}>
          <span className={`kind ${colour}`}>{tag}</span>
          {call ? (
            <button onClick={() => onPick(call.key)} aria-expanded={call.key === picked}>
              {name}
            </button>
          ) : (
            <b>{name}</b>
          )}
          {call && call.attempt > 1 && <span className="small muted">try {call.attempt}</span>}
          {(call ?? node)?.replayed && <span className="small muted">⟲ from the journal</span>}
        </div>
      </td>
      <td>{call ? <CallStatus call={call} /> : <NodeStatus node={node!} />}</td>
      <td className="number">{tookMs === null ? "" : formatDuration(tookMs)}</td>
      <td className="number">{row.tokens ? formatCount(row.tokens) : ""}</td>
      <td className="number">
        <Cost row={row} />
      </td>
    </tr>
  );
}

function kindOf(call: Call): string {
  if (call.kind === "llm") return "model";
  if (call.kind !== "system") return call.kind;
  return call.parent === null ? "run" : "context";
}

function spanOf({ startedMs, endedMs }: { startedMs: number; endedMs: number | null }): number | null {
  return endedMs === null ? null : endedMs - startedMs;
}

/** Only the call that a limit refused is red; what stopped because of it is not. */
function CallStatus({ call }: { call: Call }) {
  if (call.status === "halt" && call.stop?.cause) return <Status of="refused" />;
  return <Status of={call.status} {...(call.status === "waiting" ? { word: "waits for a budget" } : {})} />;
}

function NodeStatus({ node }: { node: NodeState }) {
  return node.status === "error" ? <Status of="halted" word="stopped" /> : <Status of={node.status} />;
}

function Cost({ row }: { row: TreeRow }) {
  const { call } = row;
  if (!call) return null;
  if (row.heldNanos > 0) return <span className="muted">{formatUsd(row.heldNanos)} held</span>;
  if (call.replayed && row.costNanos === 0) return call.costNanos ? <span className="muted">paid before</span> : null;
  if (row.costUnknown && row.costNanos === 0) return "unknown";
  if (call.kind === "system" && row.costNanos === 0) return null;
  if (call.endedMs === null && row.costNanos === 0) return <span className="muted">not settled</span>;
  return <Money nanos={row.costNanos} unknown={row.costUnknown} />;
}

function Inspector({ call, onClose }: { call: Call; onClose: () => void }) {
  const { stop } = call;
  const format = formatOf(stop?.unit ?? "");
  const amount = (value: number | null | undefined) =>
    value == null ? null : format(stop?.unit === "usd" ? toNanos(value) : value);
  const facts: [string, string | null][] = [
    ["Kind", call.nodeType ?? kindOf(call)],
    ["Model", call.model],
    ["Node", call.node],
    ["State", call.status],
    ["Attempt", call.attempt > 1 ? String(call.attempt) : null],
    ["Started", when(call.startedMs)],
    ["Took", call.endedMs === null ? "still running" : formatDuration(call.endedMs - call.startedMs)],
    ["Held", call.heldNanos ? formatUsd(call.heldNanos) : null],
    ["Tokens in", call.kind === "system" ? null : formatCount(call.tokensIn)],
    ["Tokens out", call.kind === "system" ? null : formatCount(call.tokensOut)],
    ["Cost", call.kind === "system" ? null : call.costUnknown ? "unknown" : exactUsd(call.costNanos)],
    ["Ended because", call.finishReason],
    ["Stopped because", stop && stop.message],
    ["Whose limit", stop?.whose ? (WHOSE[stop.whose] ?? stop.whose) : null],
    ["It asked for", amount(stop?.asked)],
    ["Used by then", amount(stop?.used)],
    ["Held by others", amount(stop?.held || null)],
    ["Of", amount(stop?.limit)],
    ["Call", call.id],
    ["Made by call", call.parent],
  ];
  return (
    <aside className="pad stack" aria-label={`Call ${call.name}`}>
      <div className="bar">
        <h2>{call.name}</h2>
        <span className="grow" />
        <button onClick={onClose}>Close</button>
      </div>
      <dl className="facts">
        {facts.map(([name, value]) =>
          value === null ? null : (
            <div key={name} style={{ display: "contents" }}>
              <dt>{name}</dt>
              <dd>{value}</dd>
            </div>
          ),
        )}
      </dl>
    </aside>
  );
}

function Events({ events }: { events: EventShown[] }) {
  const shown = events.slice(-SHOWN_EVENTS).toReversed();
  return (
    <div className="scroll" tabIndex={0} role="region" aria-label="Events, newest first">
      {events.length > shown.length && (
        <p className="pad muted">
          The newest {formatCount(shown.length)} of {formatCount(events.length)} events. The export has all of them.
        </p>
      )}
      <ol className="events" reversed>
        {shown.map((event) => (
          <li key={event.seq}>
            <span className="muted">{event.seq}</span>
            <span className="muted">{new Date(event.at_ms).toLocaleTimeString()}</span>
            <b>{event.type}</b>
            <code>{Object.keys(event.data).length ? JSON.stringify(event.data) : ""}</code>
          </li>
        ))}
      </ol>
    </div>
  );
}
