// One call: what it is, what it cost, and why it stopped.

import { exactUsd, formatCount, formatDuration, formatUsd, toNanos } from "../../model/money.ts";
import type { Call } from "../../model/run.ts";
import { when } from "../../ui/parts.tsx";
import { formatOf, kindOf, WHOSE } from "./words.ts";

export function Inspector({ call, onClose }: { call: Call; onClose: () => void }) {
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
