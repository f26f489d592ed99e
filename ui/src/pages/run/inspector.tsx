// One call: what it is, who pays for it, why it stopped, its attempts, and what was sent and received.

import type { RunShown } from "../../api/types.ts";
import type { CallTable } from "../../model/calls.ts";
import { exactUsd, formatCount, formatDuration, formatUsd, toNanos } from "../../model/money.ts";
import { budgetsAt, payersOf, type Budget, type Call, type Figures, type RunState } from "../../model/run.ts";
import { Track } from "../../ui/parts.tsx";
import { visible } from "../../ui/visible.ts";
import { CallStatus } from "./calls.tsx";
import { Payload } from "./payload.tsx";
import { exactTime, formatOf, kindOf, ownerOf, WHOSE } from "./words.ts";

interface Props {
  call: Call;
  record: RunShown;
  state: RunState;
  table: CallTable;
  atMs: number | null;
  onPick: (key: string) => void;
  onClose: () => void;
}

export function Inspector({ call, record, state, table, atMs, onPick, onClose }: Props) {
  return (
    <aside className="pad stack inspector" aria-label={`Call ${visible(call.name)}`}>
      <div className="bar">
        <h2>{visible(call.name)}</h2>
        <CallStatus call={call} />
        <span className="grow" />
        <button onClick={onClose}>Close</button>
      </div>
      <Facts call={call} />
      <Attempts call={call} table={table} onPick={onPick} />
      <Payers call={call} record={record} state={state} table={table} atMs={atMs} />
      {call.kind !== "system" && <Payload key={call.key} run={record.id} call={call} />}
    </aside>
  );
}

function Facts({ call }: { call: Call }) {
  const { stop } = call;
  const format = formatOf(stop?.unit ?? "");
  const amount = (value: number | null | undefined) =>
    value == null ? null : format(stop?.unit === "usd" ? toNanos(value) : value);
  const waitedMs = call.startedMs - call.beganMs;
  const facts: [string, string | null][] = [
    ["Kind", call.nodeType ?? kindOf(call)],
    ["Model", call.model],
    ["Node", call.node],
    ["Started", exactTime(call.startedMs)],
    ["Waited for a budget", waitedMs > 0 ? formatDuration(waitedMs) : call.waited ? "yes" : null],
    ["Took", call.endedMs === null ? "still running" : formatDuration(call.endedMs - call.startedMs)],
    ["Held", call.heldNanos ? formatUsd(call.heldNanos) : null],
    ["Tokens in", call.kind === "system" ? null : formatCount(call.tokensIn)],
    ["Tokens out", call.kind === "system" ? null : formatCount(call.tokensOut)],
    ["Cost", call.kind === "system" ? null : call.costUnknown ? "unknown" : exactUsd(call.costNanos)],
    ["From the journal", call.replayed ? "yes: it was paid for before" : null],
    ["Abandoned", call.abandoned ? "yes: nothing waited for its answer any more" : null],
    ["Ended because", call.finishReason],
    ["Error", call.error],
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
    <dl className="facts">
      {facts.map(([name, value]) =>
        value === null ? null : (
          <div key={name} style={{ display: "contents" }}>
            <dt>{name}</dt>
            <dd>{visible(value)}</dd>
          </div>
        ),
      )}
    </dl>
  );
}

/** Calls of the same node for the same thing: one that failed and was tried again, and the one that replaced it. */
function Attempts({ call, table, onPick }: { call: Call; table: CallTable; onPick: (key: string) => void }) {
  const tries: Call[] = [];
  for (let row = 0; row < table.count && call.parent !== null; row += 1) {
    const same = table.parent[row] === table.parent[call.row] && table.name[row] === table.name[call.row];
    if (same && table.kind[row] === table.kind[call.row] && table.node[row] === table.node[call.row]) tries.push(table.call(row));
  }
  if (!tries.some(({ attempt }) => attempt > 1)) return null;
  return (
    <section aria-label="Attempts" className="stack">
      <h2>Attempts</h2>
      <ol className="tries">
        {tries.map((one) => (
          <li key={one.key} value={one.attempt}>
            <button className="plain" disabled={one.key === call.key} onClick={() => onPick(one.key)}>
              {one.key === call.key ? "This call" : `Attempt ${one.attempt}`}
            </button>
            <CallStatus call={one} />
            <span className="muted small">
              {one.endedMs !== null && formatDuration(one.endedMs - one.startedMs)} {one.costNanos > 0 && formatUsd(one.costNanos)}
            </span>
          </li>
        ))}
      </ol>
    </section>
  );
}

/** The chain of budgets above a call, the innermost first: each must have room before the call is made. */
function Payers(props: { call: Call; record: RunShown; state: RunState; table: CallTable; atMs: number | null }) {
  const { call, record, state, table, atMs } = props;
  const isNow = table.epoch === state.epoch;
  const chain = payersOf(budgetsAt(state, isNow ? atMs : (call.endedMs ?? null)), call.node);
  const lines = chain.flatMap((budget) => limited(budget).map((figures) => ({ budget, figures })));
  return (
    <section aria-label="Who pays for this call" className="stack">
      <h2>Who pays for this call</h2>
      {lines.length === 0 ? (
        <p className="muted">
          No budget has a limit above this call{call.node ? ` of ${visible(call.node)}` : ""}. It is counted for the run alone.
        </p>
      ) : (
        <ol className="payers">
          {lines.map(({ budget, figures }) => (
            <Payer key={`${budget.key} ${figures.unit}`} budget={budget} figures={figures} owner={record.owner} call={call} />
          ))}
        </ol>
      )}
    </section>
  );
}

function limited(budget: Budget): Figures[] {
  const found = budget.units.filter(({ limit, unit }) => limit !== null || (unit === "usd" && budget.level === "run"));
  return found.sort((one, other) => Number(other.unit === "usd") - Number(one.unit === "usd"));
}

function Payer({ budget, figures, owner, call }: { budget: Budget; figures: Figures; owner: string; call: Call }) {
  const { unit, spent, held, unresolved, limit } = figures;
  const format = formatOf(unit);
  const name = budget.level === "run" ? "This run" : ownerOf(budget.level, visible(budget.node ?? budget.name), owner);
  const refused = call.stop?.budget === budget.name && call.stop.unit === unit;
  const left = limit === null ? null : Math.max(0, limit - spent - held - unresolved);
  return (
    <li className={refused ? "tripped" : ""}>
      <div className="bar">
        <b>
          {name}
          {unit !== "usd" && `, ${unit}`}
        </b>
        <span className="grow" />
        <span>{left === null ? "no limit" : `${format(left)} left`}</span>
      </div>
      {limit !== null && <Track name={`${name}, ${unit}`} spent={spent} held={held} unresolved={unresolved} limit={limit} format={format} thin />}
      <span className="muted small">
        {format(spent)} spent{held > 0 && `, ${format(held)} held`}
        {unresolved > 0 && `, ${format(unresolved)} unresolved`}
        {limit !== null && ` of ${format(limit)}`}
        {refused && <b className="says-no"> said no to this call</b>}
      </span>
    </li>
  );
}
