// Two runs beside each other: what they were given, how they ended, what each node used, and what came of it.

import { useMemo } from "react";
import { get } from "../api/client.ts";
import type { RunDiff, RunShown, RunTree } from "../api/types.ts";
import { CallTable } from "../model/calls.ts";
import { diffLines, pairNodes, useByNode, type NodePair, type NodeUse } from "../model/compare.ts";
import { formatCount, formatDuration, formatUsd } from "../model/money.ts";
import { diffLink, go, runLink } from "../router.ts";
import { Failure, Field, Money, shortId, Status, usePolled, Value, when } from "../ui/parts.tsx";
import { visible } from "../ui/visible.ts";
import type { PageProps } from "./index.ts";
import "./diff.css";

const NODE = "node ";
const FIELDS: Record<string, string> = {
  graph_id: "Graph",
  graph_version: "Version",
  stop_reason: "Why it stopped",
  cost_usd: "Cost, US dollars",
};
const MAX_NODES = 500;

export default function DiffPage({ route }: PageProps) {
  const [, one, other] = route.parts;
  if (!one || !other) return <Pick one={one ?? ""} />;
  return <Compare key={`${one} ${other}`} one={one} other={other} />;
}

function Pick({ one }: { one: string }) {
  return (
    <>
      <h1>Compare two runs</h1>
      <form
        className="panel pad stack"
        onSubmit={(event) => {
          event.preventDefault();
          const data = new FormData(event.currentTarget);
          go(diffLink(String(data.get("one")).trim(), String(data.get("other")).trim()));
        }}
      >
        {[
          ["one", "Id of the first run", one],
          ["other", "Id of the second run", ""],
        ].map(([name, label, value]) => (
          <Field key={name} label={label!}>
            {(id) => <input id={id} name={name} required defaultValue={value} />}
          </Field>
        ))}
        <div className="bar">
          <button className="primary">Compare</button>
          <a href="#/runs">Pick them in the list of runs</a>
        </div>
      </form>
    </>
  );
}

function Compare({ one, other }: { one: string; other: string }) {
  const ids = [one, other];
  const loaded = usePolled(ids.join(" "), async (signal) => {
    const path = (id: string, rest = "") => `/api/runs/${encodeURIComponent(id)}${rest}`;
    const [diff, runs, trees] = await Promise.all([
      get<RunDiff>(path(one, `/diff/${encodeURIComponent(other)}`), signal),
      Promise.all(ids.map((id) => get<RunShown>(path(id), signal))),
      Promise.all(ids.map((id) => get<RunTree>(path(id, "/tree"), signal))),
    ]);
    return { diff, runs, tables: trees.map((tree) => CallTable.from(tree)) };
  }, 0);
  return (
    <>
      <div className="bar">
        <h1>Two runs compared</h1>
        <span className="grow" />
        <button onClick={loaded.again}>Compare again</button>
        <a className="button" href={diffLink(other, one)}>
          Swap
        </a>
      </div>
      <Failure error={loaded.error} />
      {loaded.value ? <Differences {...loaded.value} /> : !loaded.error && <p className="muted">Loading…</p>}
    </>
  );
}

function Differences({ diff, runs, tables }: { diff: RunDiff; runs: RunShown[]; tables: CallTable[] }) {
  const [one, other] = runs as [RunShown, RunShown];
  const fields = diff.differences.filter(({ what }) => !what.startsWith(NODE));
  const nodes = diff.differences.filter(({ what }) => what.startsWith(NODE));
  return (
    <>
      <div className="pair">
        {runs.map((run, index) => (
          <Head key={run.id} run={run} letter={"AB"[index]!} />
        ))}
      </div>
      {diff.differences.length === 0 && (
        <div className="note ok">These runs do not differ in their limits, input, nodes, cost or output.</div>
      )}
      {fields.length > 0 && (
        <section className="panel" aria-label="What differs">
          <header>
            <h2>What differs</h2>
          </header>
          <div className="pad stack">
            {fields.map(({ what, one: left, other: right }) => (
              <Difference key={what} name={FIELDS[what] ?? capital(what)} one={left} other={right} />
            ))}
          </div>
        </section>
      )}
      <Nodes one={one} other={other} tables={tables} />
      {nodes.length > 0 && (
        <section className="panel" aria-label="Nodes that ended differently">
          <header>
            <h2>Nodes that ended differently</h2>
            <span className="muted small">{formatCount(nodes.length)}</span>
          </header>
          <div className="pad stack">
            {nodes.slice(0, MAX_NODES).map(({ what, one: left, other: right }) => (
              <Difference key={what} name={what.slice(NODE.length)} one={left} other={right} />
            ))}
            {nodes.length > MAX_NODES && <p className="muted">The first {formatCount(MAX_NODES)} of them.</p>}
          </div>
        </section>
      )}
    </>
  );
}

function Head({ run, letter }: { run: RunShown; letter: string }) {
  const tookMs = run.started_ms !== null && run.ended_ms !== null ? run.ended_ms - run.started_ms : null;
  return (
    <section className="panel pad stack" aria-label={`Run ${letter}`}>
      <div className="bar">
        <b className="letter">{letter}</b>
        <a className="mono" href={runLink(run.id)} title={run.id}>
          {visible(shortId(run.id))}
        </a>
        <span className="grow" />
        <Status of={run.status} />
      </div>
      <p className="small muted">
        {visible(run.graph_id)} version {run.graph_version}, {when(run.started_ms ?? run.created_ms)}
      </p>
      <p>
        <Money nanos={run.cost_nanos} unknown={run.unknown_costs > 0} />
        {tookMs !== null && <span className="muted">, {formatDuration(tookMs)}</span>}
        <span className="muted">, {formatCount(run.tokens_in + run.tokens_out)} tokens</span>
      </p>
    </section>
  );
}

function capital(name: string): string {
  return name.charAt(0).toUpperCase() + name.slice(1).replaceAll("_", " ");
}

function asText(value: unknown): string {
  return typeof value === "string" ? value : JSON.stringify(value, null, 2);
}

function Difference({ name, one, other }: { name: string; one: unknown; other: unknown }) {
  const [left, right] = [asText(one), asText(other)];
  const lines = useMemo(() => (left.includes("\n") || right.includes("\n") ? diffLines(left, right) : null), [left, right]);
  return (
    <div className="stack difference">
      <h3>{visible(name)}</h3>
      {lines ? (
        <pre className="value lines" tabIndex={0} role="region" aria-label={`${visible(name)}: lines that differ`}>
          {lines.map(({ kind, text }, index) => (
            <span key={index} className={kind}>
              {{ same: "  ", removed: "− ", added: "+ " }[kind]}
              {text}
              {"\n"}
            </span>
          ))}
        </pre>
      ) : (
        <div className="pair">
          <Value of={one} label={`${visible(name)} of run A`} />
          <Value of={other} label={`${visible(name)} of run B`} />
        </div>
      )}
    </div>
  );
}

function Nodes({ one, other, tables }: { one: RunShown; other: RunShown; tables: CallTable[] }) {
  const pairs = useMemo(() => pairNodes(useByNode(tables[0]!), useByNode(tables[1]!)), [tables]);
  if (pairs.length === 0) return null;
  const again = [one, other].filter(({ epoch }) => epoch > 1).length > 0;
  return (
    <section className="panel" aria-label="What each node used">
      <header>
        <h2>What each node used</h2>
        {again && <span className="muted small">Of a run that was resumed: the newest attempt.</span>}
      </header>
      <div className="scroll" tabIndex={0} role="region" aria-label="Nodes of both runs">
        <table>
          <thead>
            <tr>
              <th scope="col">Node</th>
              {["Calls", "Cost", "Tokens", "Time"].map((name) => (
                <th key={name} scope="col" className="number" colSpan={3}>
                  {name} A, B, change
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {pairs.slice(0, MAX_NODES).map((pair) => (
              <NodeRow key={pair.node} {...pair} />
            ))}
          </tbody>
        </table>
      </div>
      {pairs.length > MAX_NODES && <p className="pad muted">The first {formatCount(MAX_NODES)} of {formatCount(pairs.length)} nodes.</p>}
    </section>
  );
}

const COLUMNS: [keyof NodeUse, (value: number) => string][] = [
  ["calls", formatCount],
  ["costNanos", formatUsd],
  ["tokens", formatCount],
  ["ms", formatDuration],
];

function NodeRow({ node, one, other }: NodePair) {
  return (
    <tr>
      <td className="mono">{visible(node)}</td>
      {COLUMNS.map(([name, format]) => {
        const change = (other?.[name] ?? 0) - (one?.[name] ?? 0);
        const sign = change > 0 ? "+" : "−";
        return [
          <td key={`${name} a`} className="number">{one ? format(one[name]) : "–"}</td>,
          <td key={`${name} b`} className="number">{other ? format(other[name]) : "–"}</td>,
          <td key={`${name} c`} className={`number change${change === 0 ? " muted" : ""}`}>
            {change === 0 ? "=" : `${sign}${format(Math.abs(change))}`}
          </td>,
        ];
      })}
    </tr>
  );
}
