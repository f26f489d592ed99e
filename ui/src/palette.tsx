// Everything by keyboard: a palette that finds pages, graphs and runs by a part of their name, and the list of keys.

import { useEffect, useId, useMemo, useRef, useState, type KeyboardEvent } from "react";
import { get, query } from "./api/client.ts";
import type { GraphPage, Me, RunPage } from "./api/types.ts";
import { PLACES } from "./pages/index.ts";
import { go, runLink } from "./router.ts";
import { Dialog, shortId, usePolled } from "./ui/parts.tsx";
import { visible } from "./ui/visible.ts";

interface Entry {
  label: string;
  detail: string;
  to: string;
}

const SHOWN = 12;

export default function Palette({ me, onClose }: { me: Me; onClose: () => void }) {
  const [text, setText] = useState("");
  const [at, setAt] = useState(0);
  const id = useId();
  const list = useRef<HTMLUListElement>(null);
  const graphs = usePolled("graphs", (signal) => get<GraphPage>("/api/graphs?limit=200", signal), 0);
  const wanted = text.trim().toLowerCase();
  const runs = usePolled(`runs ${wanted}`, (signal) => get<RunPage>(`/api/runs${query({ q: wanted, limit: SHOWN })}`, signal), 0);
  const entries = useMemo(() => {
    const found: Entry[] = Object.entries(PLACES)
      .filter(([, { label, isFor }]) => label && (isFor?.(me) ?? true))
      .map(([name, { label }]) => ({ label: label!, detail: "page", to: `#/${name}` }));
    for (const graph of graphs.value?.graphs ?? []) {
      found.push({ label: graph.id, detail: "graph", to: `#/graphs/${encodeURIComponent(graph.id)}` });
      if (graph.valid && me.role !== "viewer") {
        found.push({ label: `Start a run of ${graph.id}`, detail: "action", to: `#/start?graph=${encodeURIComponent(graph.id)}` });
      }
    }
    const named = found.filter(({ label }) => label.toLowerCase().includes(wanted));
    const matching = (runs.value?.runs ?? []).map((run) => ({
      label: shortId(run.id),
      detail: `run of ${run.graph_id}, ${run.status}`,
      to: runLink(run.id),
    }));
    return [...named.slice(0, SHOWN), ...matching].slice(0, SHOWN);
  }, [me, graphs.value, runs.value, wanted]);
  const chosen = Math.min(at, entries.length - 1);
  useEffect(() => {
    list.current?.children[chosen]?.scrollIntoView({ block: "nearest" });
  }, [chosen]);
  const open = (entry: Entry | undefined) => {
    if (!entry) return;
    onClose();
    go(entry.to);
  };
  const onKey = (event: KeyboardEvent) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) setAt((chosen + step + entries.length) % entries.length);
    else if (event.key === "Enter") open(entries[chosen]);
    else return;
    event.preventDefault();
  };
  return (
    <Dialog title="Go to" onClose={onClose}>
      <input
        type="text"
        role="combobox"
        aria-label="Find a page, a graph or a run"
        aria-expanded="true"
        aria-controls={id}
        aria-activedescendant={entries.length ? `${id}-${chosen}` : undefined}
        placeholder="A page, a graph, or a part of a run's id"
        autoComplete="off"
        maxLength={100}
        value={text}
        onChange={(event) => (setText(event.target.value), setAt(0))}
        onKeyDown={onKey}
      />
      <ul ref={list} id={id} role="listbox" aria-label="Found" className="go-to">
        {entries.map((entry, index) => (
          <li key={entry.to} id={`${id}-${index}`} role="option" aria-selected={index === chosen} onClick={() => open(entry)}>
            <span>{visible(entry.label)}</span>
            <span className="muted small">{visible(entry.detail)}</span>
          </li>
        ))}
      </ul>
      {entries.length === 0 && <p className="muted">Nothing matches.</p>}
    </Dialog>
  );
}

const KEYS: [string, string][] = [
  ["Ctrl K or ⌘ K", "Find a page, a graph or a run"],
  ["/", "Search on this page"],
  ["?", "These keys"],
  ["Tab, arrow keys", "Move; arrow keys walk through a tree, a flame, tabs and menus"],
  ["j k", "Next and previous row of a tree"],
  ["Enter", "Open or pick"],
  ["Escape", "Close"],
  [".", "Cancel the run that is shown, after a question"],
];

export function Keys({ me, onClose }: { me: Me; onClose: () => void }) {
  const pages = Object.values(PLACES).filter(({ label, key, isFor }) => label && key && (isFor?.(me) ?? true));
  return (
    <Dialog title="Keys" onClose={onClose}>
      <dl className="facts keys">
        {[...KEYS, ...pages.map(({ key, label }) => [`g ${key}`, label!] as const)].map(([key, does]) => (
          <div key={key} style={{ display: "contents" }}>
            <dt>
              <kbd>{key}</kbd>
            </dt>
            <dd>{does}</dd>
          </div>
        ))}
      </dl>
      <div className="bar">
        <button onClick={onClose}>Close</button>
      </div>
    </Dialog>
  );
}
