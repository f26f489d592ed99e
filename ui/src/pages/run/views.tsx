// What the views of a run share: which calls they show, which one is picked, and how to find one.

import { useMemo, useState } from "react";
import type { RunShown } from "../../api/types.ts";
import type { CallTable } from "../../model/calls.ts";
import { formatCount } from "../../model/money.ts";
import { visibleRows, type RunState } from "../../model/run.ts";
import { setParams, type Route } from "../../router.ts";

export interface ViewProps {
  record: RunShown;
  state: RunState;
  table: CallTable;
  route: Route;
  /** The moment that is looked at; null for now. */
  atMs: number | null;
  /** Key of the call in the address, and a function that changes it; the same call again puts it back. */
  picked: string | null;
  onPick: (key: string) => void;
}

const NONE: ReadonlySet<number> = new Set();

/** The rows to show: without what is collapsed, or those that match what is searched for and what is above them. */
export function useRows({ table, route, atMs }: ViewProps) {
  const [closed, setClosed] = useState<{ table: CallTable; rows: ReadonlySet<number> }>({ table, rows: NONE });
  const collapsed = closed.table === table ? closed.rows : NONE;
  const wanted = route.params.get("q") ?? "";
  const rows = useMemo(
    () => visibleRows(table, atMs, collapsed, wanted ? matcher(table, wanted) : null),
    // eslint-disable-next-line -- the table changes in place, and its version with it
    [table, table.version, atMs, collapsed, wanted],
  );
  const onToggle = (row: number) => {
    const next = new Set(collapsed);
    if (!next.delete(row)) next.add(row);
    setClosed({ table, rows: next });
  };
  return { table, atMs, rows, collapsed, onToggle };
}

function matcher(table: CallTable, wanted: string): (row: number) => boolean {
  const text = wanted.toLowerCase();
  const matching = table.strings.map((one) => one.toLowerCase().includes(text));
  const has = (column: Int32Array, row: number) => matching[column[row]!] === true;
  return (row) =>
    has(table.name, row) || has(table.node, row) || has(table.model, row) || has(table.nodeType, row) || table.ids[row] === wanted;
}

export function FindCall({ table, route }: ViewProps) {
  return (
    <div className="bar pad-bar">
      <input
        type="search"
        className="find"
        aria-label="Find a call"
        placeholder="Find a node, a model, a tool or a call"
        value={route.params.get("q") ?? ""}
        onChange={(event) => setParams(route, { q: event.target.value || null })}
      />
      <span className="muted small">
        {formatCount(table.count)} {table.count === 1 ? "call" : "calls"}
        {table.leftOut > 0 && `; ${formatCount(table.leftOut)} more are only in the export`}
      </span>
    </div>
  );
}

export function Empty({ route, record, state }: ViewProps) {
  if (state.lastSeq === 0 && record.last_seq > 0) return <p className="empty">Loading…</p>;
  return <p className="empty">{route.params.get("q") ? "No call matches." : "Nothing has started yet."}</p>;
}

/** What the colours of calls stand for. */
export function Legend() {
  return (
    <dl className="legend pad-bar">
      {[["node", "node"], ["llm", "model"], ["tool", "tool"], ["refused", "refused by a limit"], ["stopped", "failed or stopped"]].map(([name, word]) => (
        <div key={name} className={`k-${name}`}>
          <dt>{word}</dt>
          <dd />
        </div>
      ))}
    </dl>
  );
}
