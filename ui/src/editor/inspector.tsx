// One node: its name, its settings as a form, its connections, and what happens when it fails or costs too much.

import { useEffect, useMemo, useState } from "react";
import type { GraphPage, GraphShown, NodeTypeShown } from "../api/types.ts";
import { get } from "../api/client.ts";
import { Draft, SchemaForm, type Pickers, type Problems, type Schema } from "../forms/schema-form.tsx";
import { Failure, useAction, usePolled, Value } from "../ui/parts.tsx";
import { visible } from "../ui/visible.ts";
import type { Overlay } from "./canvas.tsx";
import { isGraph, isObject, sourceOf, targetOf, type Data, type End, type Graph, type GraphEdge, type GraphNode } from "./document.ts";
import { graphField, handlesOf, partners, propertiesOf, type Catalog, type PlacedProblem, type Side } from "./types.ts";

export interface InspectorProps {
  catalog: Catalog;
  graph: Graph;
  root: Graph;
  node: GraphNode;
  problems: PlacedProblem[];
  pickers: Pickers;
  overlay: Overlay | null;
  isReadOnly: boolean;
  onData: (data: Data) => void;
  onRename: (name: string) => void;
  onConnect: (source: End, target: End) => void;
  onDisconnect: (edge: string) => void;
  onOpen: () => void;
  onRemove: () => void;
}

const OPTIONS = ["error_policy", "budget"];

export function Inspector(props: InspectorProps) {
  const { catalog, node, problems, isReadOnly, overlay } = props;
  const type = catalog.types.get(node.type);
  const elsewhere = problems.filter((problem) => problem.field === null);
  return (
    <section className="node-settings" aria-label={`Settings of ${node.id}`}>
      <NodeName key={`name of ${node.id}`} {...props} />
      <p className="muted small">
        {type ? (
          <>
            <b>{type.title}.</b> {type.description}
          </>
        ) : (
          <>
            This server has no node type <code>{visible(node.type)}</code>. The node is kept as it is, with everything in it.
          </>
        )}
      </p>
      {overlay?.state.message && (
        <div className={overlay.state.status === "error" ? "note bad" : "note"} role="status">
          {visible(overlay.state.message)}
        </div>
      )}
      {elsewhere.length > 0 && (
        <ul className="form-errors">
          {elsewhere.map((problem) => (
            <li key={problem.path + problem.message}>{visible(problem.message)}</li>
          ))}
        </ul>
      )}
      {type ? <Settings key={`settings of ${node.id}`} {...props} type={type} /> : <Value of={node.data ?? {}} label="Data" />}
      <Connections {...props} />
      {!isReadOnly && (
        <div className="bar">
          <button className="danger" onClick={props.onRemove}>
            Remove node
          </button>
        </div>
      )}
    </section>
  );
}

function NodeName({ node, graph, isReadOnly, onRename }: InspectorProps) {
  const [name, setName] = useState(node.id);
  const isTaken = name !== node.id && graph.nodes.some((other) => other.id === name);
  const done = () => (name && !isTaken ? onRename(name) : setName(node.id));
  return (
    <div className="field">
      <label htmlFor="node-name">Name of the node</label>
      <input
        id="node-name"
        value={name}
        disabled={isReadOnly}
        aria-invalid={isTaken}
        maxLength={200}
        onChange={(event) => setName(event.target.value)}
        onBlur={done}
        onKeyDown={(event) => event.key === "Enter" && done()}
      />
      {isTaken && (
        <span className="form-error small" role="alert">
          Another node has this name.
        </span>
      )}
    </div>
  );
}

function Settings({ type, node, root, catalog, problems, pickers, isReadOnly, onData, onOpen }: InspectorProps & { type: NodeTypeShown }) {
  const [value, setValue] = useState<unknown>(node.data ?? {});
  useEffect(() => setValue((old: unknown) => (hasDraft(old) ? old : (node.data ?? {}))), [node.data]);
  const field = graphField(type);
  const schema = type.data_schema as Schema | null;
  const errors: Problems = useMemo(() => {
    const found: Problems = {};
    for (const { field: path, message } of problems) if (path !== null && path !== "$") found[path] ??= message;
    return found;
  }, [problems]);
  if (!schema) return <Value of={node.data ?? {}} label="Data" />;
  const names = Object.keys(propertiesOf(type));
  const change = (next: unknown) => {
    setValue(next);
    if (!hasDraft(next) && isObject(next)) onData(next);
  };
  const own = names.filter((name) => !OPTIONS.includes(name) && name !== field);
  const options = names.filter((name) => OPTIONS.includes(name));
  const inOptions = (path: string) => OPTIONS.some((name) => path === `$.${name}` || path.startsWith(`$.${name}.`));
  const pick = (keep: boolean) => Object.fromEntries(Object.entries(errors).filter(([path]) => inOptions(path) === keep));
  const hasOptions = options.some((name) => isObject(node.data?.[name]));
  const form = { schema, value, onChange: change, pickers, disabled: isReadOnly, showAll: true };
  return (
    <>
      {field && <Nested field={field} node={node} isReadOnly={isReadOnly} onOpen={onOpen} onData={onData} />}
      <SchemaForm {...form} errors={ownErrors(pick(false), field)} omit={names.filter((name) => !own.includes(name))} />
      <Prompts type={type} node={node} root={root} catalog={catalog} isReadOnly={isReadOnly} onData={onData} />
      {options.length > 0 && (
        <details open={hasOptions || Object.keys(pick(true)).length > 0}>
          <summary>Errors, timeout and budget</summary>
          <SchemaForm {...form} errors={pick(true)} omit={names.filter((name) => !options.includes(name))} />
        </details>
      )}
    </>
  );
}

/** Errors inside of a nested graph are shown there. */
function ownErrors(errors: Problems, field: string | null): Problems {
  return Object.fromEntries(Object.entries(errors).filter(([path]) => field === null || !path.startsWith(`$.${field}.`)));
}

function hasDraft(value: unknown): boolean {
  if (value instanceof Draft) return true;
  return typeof value === "object" && value !== null && Object.values(value).some(hasDraft);
}

function Nested({ field, node, isReadOnly, onOpen, onData }: Pick<InspectorProps, "node" | "isReadOnly" | "onOpen" | "onData"> & { field: string }) {
  const graphs = usePolled("graphs", (signal) => get<GraphPage>("/api/graphs?limit=200", signal), 0);
  const [busy, error, act] = useAction();
  const inner = node.data?.[field];
  const use = (id: string) =>
    act(async () => {
      const found = await get<GraphShown>(`/api/graphs/${encodeURIComponent(id)}`);
      onData({ ...node.data, [field]: found.document });
    });
  const count = isGraph(inner) ? inner.nodes.length : 0;
  return (
    <div className="nested">
      <div className="bar">
        <span>{count ? `A graph of ${count} node${count === 1 ? "" : "s"} inside` : "No graph inside yet"}</span>
        <span className="grow" />
        <button onClick={onOpen} aria-label={`Open the graph inside ${node.id}`}>
          Open
        </button>
      </div>
      {!isReadOnly && (
        <select aria-label="Use a copy of a saved graph" value="" disabled={busy} onChange={(event) => void use(event.target.value)}>
          <option value="">Use a copy of a saved graph…</option>
          {graphs.value?.graphs.map((graph) => (
            <option key={graph.id} value={graph.id}>
              {graph.name}
            </option>
          ))}
        </select>
      )}
      <Failure error={error} />
    </div>
  );
}

/** Texts of other nodes, to begin with. */
function Prompts({ type, node, root, catalog, isReadOnly, onData }: Pick<InspectorProps, "node" | "root" | "catalog" | "isReadOnly" | "onData"> & { type: NodeTypeShown }) {
  const field = promptField(type);
  const texts = useMemo(() => [...new Map(promptsIn(catalog, root).map((found) => [found.text, found])).values()], [catalog, root]);
  const others = texts.filter((found) => found.text !== node.data?.[field ?? ""]);
  if (!field || isReadOnly || !others.length) return null;
  return (
    <select aria-label={`Copy ${field} of another node`} value="" onChange={(event) => onData({ ...node.data, [field]: others[Number(event.target.value)]!.text })}>
      <option value="">Copy {field} of another node…</option>
      {others.map(({ id, text }, at) => (
        <option key={at} value={at}>
          {id}: {text.slice(0, 60)}
        </option>
      ))}
    </select>
  );
}

function promptField(type: NodeTypeShown | undefined): string | null {
  return Object.entries(propertiesOf(type)).find(([, schema]) => schema["x-penstock-picker"] === "prompt")?.[0] ?? null;
}

function promptsIn(catalog: Catalog, graph: Graph): { id: string; text: string }[] {
  return graph.nodes.flatMap((node) => {
    const type = catalog.types.get(node.type);
    const text = node.data?.[promptField(type) ?? ""];
    const inner = node.data?.[graphField(type) ?? ""];
    const own = typeof text === "string" && text ? [{ id: node.id, text }] : [];
    return isGraph(inner) ? [...own, ...promptsIn(catalog, inner)] : own;
  });
}

function Connections(props: InspectorProps) {
  const { catalog, graph, node } = props;
  const sides = ["inputs", "outputs"] as const;
  return (
    <div className="connections" role="group" aria-label="Connections">
      <h2>Connections</h2>
      {sides.map((side) =>
        handlesOf(catalog, graph, node, side).map((handle) => <OneHandle key={`${side} ${handle.name}`} {...props} side={side} name={handle.name} channel={handle.channel} />),
      )}
    </div>
  );
}

function OneHandle({ catalog, graph, node, side, name, channel, isReadOnly, onConnect, onDisconnect }: InspectorProps & { side: Side; name: string; channel: string }) {
  const here: End = { node: node.id, handle: name };
  const isHere = (end: End) => end.node === here.node && end.handle === name;
  const edges = graph.edges.filter((edge) => isHere(side === "inputs" ? targetOf(edge) : sourceOf(edge)));
  const choices = isReadOnly ? [] : partners(catalog, graph, here, side);
  const label = side === "inputs" ? `Connect ${name} from` : `Connect ${name} to`;
  const other = (edge: GraphEdge) => (side === "inputs" ? sourceOf(edge) : targetOf(edge));
  const pick = (at: string) => {
    const end = choices[Number(at)]?.end;
    if (end) side === "inputs" ? onConnect(end, here) : onConnect(here, end);
  };
  return (
    <div className={`connection ${channel}`}>
      <span className="name">
        {side === "inputs" ? "→ " : ""}
        {visible(name)}
        {side === "outputs" ? " →" : ""} <small>{channel}</small>
      </span>
      {edges.map((edge) => (
        <span key={edge.id} className="end">
          {visible(other(edge).node)} · {visible(other(edge).handle)}
          {!isReadOnly && (
            <button aria-label={`Disconnect ${name} ${side === "inputs" ? "from" : "to"} ${other(edge).node}`} onClick={() => onDisconnect(edge.id)}>
              ✕
            </button>
          )}
        </span>
      ))}
      {choices.length > 0 && (
        <select aria-label={label} value="" onChange={(event) => pick(event.target.value)}>
          <option value="">{label}…</option>
          {choices.map((choice, at) => (
            <option key={choice.label} value={at}>
              {choice.label}
            </option>
          ))}
        </select>
      )}
      {!edges.length && !choices.length && <span className="muted small">not connected</span>}
    </div>
  );
}
