// The calls of a run as a tree of rows: only those on the screen are made, so that 100,000 of them scroll.
//
// The arrow keys move through the tree, open and close it, as in a file manager; Enter picks the call.

import { useVirtualizer } from "@tanstack/react-virtual";
import { useEffect, useRef, useState, type KeyboardEvent, type ReactNode } from "react";
import type { Call, CallTable, Tree } from "../../model/calls.ts";
import { visible } from "../../ui/visible.ts";
import { kindOf } from "./words.ts";

const ROW_PX = 33;

export interface Column {
  name: string;
  width: string;
  number?: boolean;
  head?: ReactNode;
  cell: (call: Call, tree: Tree) => ReactNode;
}

export interface RowsProps {
  table: CallTable;
  /** The moment that is looked at; null for now. */
  atMs: number | null;
  rows: Int32Array;
  columns: Column[];
  label: string;
  picked: string | null;
  collapsed: ReadonlySet<number>;
  onToggle: (row: number) => void;
  onPick: (key: string) => void;
}

export function CallRows(props: RowsProps) {
  const { table, atMs, rows, columns, label, picked, collapsed, onToggle, onPick } = props;
  const scroller = useRef<HTMLDivElement>(null);
  const tree = table.tree(atMs);
  const pickedRow = picked?.startsWith(`${table.epoch}:`) ? table.rowOf(picked.slice(String(table.epoch).length + 1)) : -1;
  const [active, setActive] = useState(pickedRow);
  const virtual = useVirtualizer({
    count: rows.length,
    getScrollElement: () => scroller.current,
    estimateSize: () => ROW_PX,
    overscan: 16,
    initialRect: { width: 900, height: 600 },
  });
  const show = (index: number) => {
    setActive(rows[index]!);
    virtual.scrollToIndex(index);
  };
  useEffect(() => {
    // A link to a call shows it.
    const index = pickedRow < 0 ? -1 : rows.indexOf(pickedRow);
    if (index >= 0) show(index);
    // eslint-disable-next-line -- only when another call is picked
  }, [pickedRow]);
  const onKey = (event: KeyboardEvent) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const index = Math.max(0, rows.indexOf(active));
    const row = rows[index]!;
    const isOpen = tree.size[row]! > 1 && !collapsed.has(row);
    const to = moved(event.key, index, rows, table, isOpen);
    if (event.key === "Enter" || event.key === " ") onPick(table.call(row).key);
    else if ((event.key === "ArrowRight" && !isOpen && tree.size[row]! > 1) || (event.key === "ArrowLeft" && isOpen)) onToggle(row);
    else if (to !== null) show(Math.min(rows.length - 1, Math.max(0, to)));
    else return;
    event.preventDefault();
  };
  const template = { gridTemplateColumns: `minmax(200px, 1fr) ${columns.map(({ width }) => width).join(" ")}` };
  return (
    <div
      ref={scroller}
      className="scroll rows"
      role="treegrid"
      aria-label={label}
      aria-rowcount={rows.length + 1}
      aria-activedescendant={active >= 0 ? `call-row-${active}` : undefined}
      tabIndex={0}
      onKeyDown={onKey}
    >
      <div role="rowgroup" className="rows-head">
        <div role="row" className="rows-row" style={template}>
          <span role="columnheader">Node and call</span>
          {columns.map(({ name, number, head }) => (
            <span key={name} role="columnheader" className={number ? "number" : ""}>
              {head ?? name}
            </span>
          ))}
        </div>
      </div>
      <div role="rowgroup" style={{ height: virtual.getTotalSize(), position: "relative" }}>
        {virtual.getVirtualItems().map(({ index, start }) => {
          const row = rows[index]!;
          const call = table.callAt(row, atMs)!;
          const hasMore = tree.size[row]! > 1;
          return (
            <div
              key={row}
              id={`call-row-${row}`}
              role="row"
              className={`rows-row${row === active ? " active" : ""}`}
              aria-level={tree.depth[row]! + 1}
              aria-rowindex={index + 2}
              aria-selected={call.key === picked}
              {...(hasMore ? { "aria-expanded": !collapsed.has(row) } : {})}
              style={{ ...template, transform: `translateY(${start}px)`, position: "absolute", left: 0, right: 0, height: ROW_PX }}
              onClick={() => (setActive(row), onPick(call.key))}
            >
              <span role="gridcell" className="name" style={{ "--depth": Math.min(24, tree.depth[row]!) } as object}>
                <i
                  className={`twist${hasMore ? "" : " none"}`}
                  aria-hidden="true"
                  onClick={(event) => (event.stopPropagation(), hasMore && onToggle(row))}
                >
                  {hasMore ? (collapsed.has(row) ? "▸" : "▾") : ""}
                </i>
                <CallName call={call} name={table.nameBelow(row)} />
              </span>
              {columns.map(({ name, number, cell }) => (
                <span key={name} role="gridcell" className={number ? "number" : ""}>
                  {cell(call, tree)}
                </span>
              ))}
            </div>
          );
        })}
      </div>
    </div>
  );
}

export function CallName({ call, name }: { call: Call; name: string }) {
  const colour = call.nodeType ? "node" : call.kind === "llm" || call.kind === "tool" ? call.kind : "other";
  return (
    <>
      <span className={`kind ${colour}`}>{call.nodeType ?? kindOf(call)}</span>
      <b title={visible(call.node ?? call.name)}>{visible(name)}</b>
      {call.attempt > 1 && <span className="small muted">try {call.attempt}</span>}
      {call.replayed && <span className="small muted">⟲ from the journal</span>}
    </>
  );
}

/** Where a key leads from a row, as an index in the list; null if it leads nowhere. */
function moved(key: string, index: number, rows: Int32Array, table: CallTable, isOpen: boolean): number | null {
  if (key === "ArrowDown" || key === "j" || (key === "ArrowRight" && isOpen)) return index + 1;
  if (key === "ArrowUp" || key === "k") return index - 1;
  if (key === "Home") return 0;
  if (key === "End") return rows.length - 1;
  if (key === "PageDown") return index + 15;
  if (key === "PageUp") return index - 15;
  if (key === "ArrowLeft") {
    const above = rows.indexOf(table.parent[rows[index]!]!);
    return above < 0 ? null : above;
  }
  return null;
}
