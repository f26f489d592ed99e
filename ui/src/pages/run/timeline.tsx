// The calls of a run on a time axis, in the order of the tree: what waited, what ran beside what, where time went.

import { isLive } from "../../model/run.ts";
import type { Call } from "../../model/calls.ts";
import { formatDuration } from "../../model/money.ts";
import { serverNow } from "../../api/client.ts";
import { CallRows, type Column } from "./rows.tsx";
import { useNow } from "./strip.tsx";
import { Empty, FindCall, Legend, useRows, type ViewProps } from "./views.tsx";

const TICKS = [0, 0.25, 0.5, 0.75, 1];
const STOPPED: ReadonlySet<string> = new Set(["halt", "fail", "interrupted"]);

export function Timeline(props: ViewProps) {
  const { table, state, atMs } = props;
  const found = useRows(props);
  useNow(isLive(state.status));
  const [first, known] = table.span();
  const last = Math.max(first + 1, isLive(state.status) ? Math.max(known, serverNow()) : known);
  const columns: Column[] = [
    {
      name: "When",
      width: "minmax(260px, 2fr)",
      head: <Axis lengthMs={last - first} />,
      cell: (call) => <Bar call={call} first={first} last={last} atMs={atMs} />,
    },
  ];
  return (
    <>
      <FindCall {...props} />
      {found.rows.length === 0 ? (
        <Empty {...props} />
      ) : (
        <CallRows {...found} columns={columns} label="Timeline of this run" picked={props.picked} onPick={props.onPick} />
      )}
      <Legend />
    </>
  );
}

function Axis({ lengthMs }: { lengthMs: number }) {
  return (
    <span className="axis">
      {TICKS.map((share) => (
        <span key={share}>{share === 0 ? "0" : formatDuration(lengthMs * share)}</span>
      ))}
    </span>
  );
}

/** As in the flame: red is what a limit refused, and not what failed or stopped because of it. */
function colourOf(call: Call): string {
  if (call.status === "halt" && call.stop?.cause) return "refused";
  if (STOPPED.has(call.status)) return "stopped";
  return call.nodeType ? "node" : call.kind;
}

function Bar({ call, first, last, atMs }: { call: Call; first: number; last: number; atMs: number | null }) {
  const share = (ms: number) => `${(100 * (ms - first)) / (last - first)}%`;
  const end = call.endedMs ?? Math.max(call.startedMs, atMs ?? last);
  const colour = colourOf(call);
  const waitedMs = call.startedMs - call.beganMs;
  const isLate = call.startedMs - first > (last - first) * 0.65;
  const words = [`after ${formatDuration(call.startedMs - first)}`];
  words.push(call.endedMs === null ? "still running" : `took ${formatDuration(end - call.startedMs)}`);
  if (waitedMs > 0) words.unshift(`waited ${formatDuration(waitedMs)} for a budget`);
  return (
    <span className="lane">
      {waitedMs > 0 && <i className="waited" style={{ left: share(call.beganMs), width: `calc(${share(call.startedMs)} - ${share(call.beganMs)})` }} />}
      <i
        className={`bar-${colour}${call.endedMs === null ? " open" : ""}`}
        style={{ left: share(call.startedMs), width: `calc(${share(end)} - ${share(call.startedMs)})` }}
      />
      <span className={`lane-words${isLate ? " late" : ""}`} style={{ left: share(isLate ? end : call.startedMs) }}>
        {words.join(", ")}
      </span>
    </span>
  );
}
