// The calls of a run as a tree, with what each cost.

import { formatCount, formatDuration, formatUsd } from "../../model/money.ts";
import type { Call, Tree } from "../../model/calls.ts";
import { Money, Status } from "../../ui/parts.tsx";
import { CallRows, type Column } from "./rows.tsx";
import { Empty, FindCall, useRows, type ViewProps } from "./views.tsx";

const COLUMNS: Column[] = [
  { name: "State", width: "118px", cell: (call) => <CallStatus call={call} /> },
  { name: "Time", width: "64px", number: true, cell: timeOf },
  { name: "Tokens", width: "58px", number: true, cell: ({ row }, { tokens }) => (tokens[row] ? formatCount(tokens[row]!) : "") },
  { name: "Cost", width: "90px", number: true, cell: (call, tree) => <Cost call={call} tree={tree} /> },
];

/** Beside the picked call, which has its tokens, names need the room. */
const COLUMNS_BESIDE = COLUMNS.filter(({ name }) => name !== "Tokens");

export function Calls(props: ViewProps) {
  const found = useRows(props);
  const columns = props.picked === null ? COLUMNS : COLUMNS_BESIDE;
  return (
    <>
      <FindCall {...props} />
      {found.rows.length === 0 ? (
        <Empty {...props} />
      ) : (
        <CallRows {...found} columns={columns} label="Calls of this run" picked={props.picked} onPick={props.onPick} />
      )}
    </>
  );
}

function timeOf({ startedMs, endedMs }: Call): string {
  return endedMs === null ? "" : formatDuration(endedMs - startedMs);
}

/** Only the call that a limit refused is red; what stopped because of it is not. */
export function CallStatus({ call }: { call: Call }) {
  if (call.status === "halt" && call.stop?.cause) return <Status of="refused" />;
  if (call.status === "running" && call.nodeType === "approval") return <Status of="waiting" />;
  return <Status of={call.status} {...(call.status === "waiting" ? { word: "waits for a budget" } : {})} />;
}

function Cost({ call, tree }: { call: Call; tree: Tree }) {
  const cost = tree.costNanos[call.row]!;
  const unknown = tree.unknown[call.row] !== 0;
  if (tree.heldNanos[call.row]! > 0) return <span className="muted">{formatUsd(tree.heldNanos[call.row]!)} held</span>;
  if (call.replayed && cost === 0) return call.costNanos ? <span className="muted">paid before</span> : null;
  if (unknown && cost === 0) return "unknown";
  if (call.kind === "system" && cost === 0) return null;
  if (call.endedMs === null && cost === 0) return <span className="muted">not settled</span>;
  return <Money nanos={cost} unknown={unknown} />;
}
