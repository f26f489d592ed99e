// The graph that the run follows, with what each node does and has spent; a nested graph opens in place.

import { Background, Controls, Handle, Position, ReactFlow, useStore, type Edge, type Node, type NodeProps } from "@xyflow/react";
import "@xyflow/react/dist/base.css";
import { useMemo } from "react";
import { get, query } from "../../api/client.ts";
import type { GraphShown } from "../../api/types.ts";
import { figuresOf, partOf, seenNodes, type GraphNode, type GraphPart, type NodeFigures } from "../../model/graph.ts";
import { formatCount, formatDuration, formatUsd, toNanos } from "../../model/money.ts";
import { setParams } from "../../router.ts";
import { Status, usePolled } from "../../ui/parts.tsx";
import { visible } from "../../ui/visible.ts";
import { CARD, layout, type Place } from "./layout.ts";
import type { ViewProps } from "./views.tsx";
import "./graph.css";

const FAR = 0.6;
const DRAWN_IN_FULL = 150;

export default function GraphView(props: ViewProps) {
  const { record, table, route } = props;
  const path = `/api/graphs/${encodeURIComponent(record.graph_id)}${query({ version: record.graph_version })}`;
  const graph = usePolled(path, (signal) => get<GraphShown>(path, signal), 0);
  const inside = (route.params.get("in") ?? "").split("/").filter(Boolean);
  const document = graph.value?.document;
  const part = useMemo(() => partOf(document, inside), [document, inside.join("/")]); // eslint-disable-line
  if (!graph.value && !graph.error) return <p className="empty">Loading…</p>;
  const shown = part ?? seenNodes(table);
  return (
    <>
      {graph.error !== null && (
        <p className="pad muted">
          The graph of this run cannot be read ({graph.error instanceof Error ? graph.error.message : "unknown"}). These are the
          nodes that it has entered.
        </p>
      )}
      <Bar {...props} inside={inside} />
      {shown.nodes.length === 0 ? (
        <p className="empty">No node has started yet.</p>
      ) : route.params.get("as") === "table" ? (
        <NodeTable {...props} part={shown} inside={inside} />
      ) : (
        <Drawing {...props} part={shown} inside={inside} />
      )}
    </>
  );
}

function Bar({ route, record, inside }: ViewProps & { inside: string[] }) {
  const asTable = route.params.get("as") === "table";
  return (
    <div className="bar pad-bar">
      <nav aria-label="Nested graphs" className="bar">
        {[record.graph_id, ...inside].map((name, index) =>
          index === inside.length ? (
            <b key={index} aria-current="location">
              {visible(name)}
            </b>
          ) : (
            <button key={index} className="plain" onClick={() => setParams(route, { in: inside.slice(0, index).join("/") || null })}>
              {visible(name)} ›
            </button>
          ),
        )}
      </nav>
      <span className="grow" />
      <button aria-pressed={asTable} onClick={() => setParams(route, { as: asTable ? null : "table" })}>
        {asTable ? "Show the graph" : "Show as a table"}
      </button>
    </div>
  );
}

interface CardData extends Record<string, unknown> {
  node: GraphNode;
  figures: NodeFigures | undefined;
  picked: boolean;
  isLinked: boolean;
  onPick: () => void;
  onOpen: (() => void) | null;
}

type Inside = ViewProps & { part: GraphPart; inside: string[] };

function useCards({ state, table, route, atMs, picked, onPick, part, inside }: Inside): CardData[] {
  const figures = figuresOf(state, table, inside, atMs);
  const linked = new Set(part.edges.flatMap(({ source, target, isLink }) => (isLink ? [source, target] : [])));
  return part.nodes.map((node) => {
    const own = figures.get(node.id);
    const key = own && own.row >= 0 ? table.call(own.row).key : null;
    return {
      node,
      figures: own,
      picked: key !== null && key === picked,
      isLinked: linked.has(node.id),
      onPick: () => key !== null && onPick(key),
      onOpen: node.hasInside ? () => setParams(route, { in: [...inside, node.id].join("/"), call: null }) : null,
    };
  });
}

function Drawing(props: Inside) {
  const { part, inside } = props;
  const places = useMemo(() => layout(part), [part]);
  const cards = useCards(props);
  const nodes: Node<CardData>[] = cards.map((data) => ({
    id: data.node.id,
    type: "card",
    position: places.get(data.node.id) ?? { x: 0, y: 0 },
    width: CARD.width,
    height: CARD.height,
    data,
  }));
  nodes.sort((one, other) => one.position.x - other.position.x || one.position.y - other.position.y); // the order of Tab
  const running = new Set(cards.filter(({ figures }) => figures?.status === "running").map(({ node }) => node.id));
  const edges: Edge[] = part.edges.map((edge) => ({
    id: edge.id,
    source: edge.source,
    target: edge.target,
    animated: running.has(edge.target) && !edge.isLink,
    className: edge.isLink ? "link" : "",
    ...(edge.isLink ? linkEnds(places.get(edge.source), places.get(edge.target)) : FLOW_ENDS),
  }));
  return (
    <div className="graph-view">
      <ReactFlow
        key={inside.join("/")}
        nodes={nodes}
        edges={edges}
        nodeTypes={CARDS}
        fitView
        fitViewOptions={{ maxZoom: 1, padding: 0.12 }}
        minZoom={0.05}
        nodesDraggable={false}
        nodesConnectable={false}
        nodesFocusable={false}
        edgesFocusable={false}
        elementsSelectable={false}
        onNodeClick={(_, node) => node.data.onPick()}
        onNodeDoubleClick={(_, node) => node.data.onOpen?.()}
        zoomOnDoubleClick={false}
        onlyRenderVisibleElements={part.nodes.length > DRAWN_IN_FULL}
        proOptions={{ hideAttribution: true }}
        aria-label="Graph of this run"
      >
        <Background />
        <Controls showInteractive={false} />
      </ReactFlow>
    </div>
  );
}

const FLOW_ENDS = { sourceHandle: "out", targetHandle: "in" };

/** A link goes from the edge of a part that faces its user to the edge of the user that faces the part. */
function linkEnds(part: Place | undefined, user: Place | undefined) {
  const isBelow = (part?.y ?? 0) >= (user?.y ?? 0);
  return isBelow ? { sourceHandle: "out-top", targetHandle: "in-bottom" } : { sourceHandle: "out-bottom", targetHandle: "in-top" };
}

function Card({ data: { node, figures, picked, isLinked, onPick, onOpen } }: NodeProps<Node<CardData>>) {
  const far = useStore((store) => store.transform[2] < FAR);
  const state = CLASSES[figures?.status ?? ""] ?? "";
  return (
    <div className={`graph-card ${state || "idle"}${picked ? " picked" : ""}`}>
      <Handle id="in" type="target" position={Position.Left} isConnectable={false} />
      {isLinked && <LinkHandles />}
      <header>
        <button className="plain" onClick={(event) => (event.stopPropagation(), onPick())} disabled={!figures || figures.row < 0}>
          <b title={node.id}>{visible(node.label)}</b>
        </button>
        {onOpen && !far && (
          <button className="open" onClick={(event) => (event.stopPropagation(), onOpen())}>
            Open
          </button>
        )}
      </header>
      <div className="bar">
        <NodeStatus node={node} figures={figures} />
      </div>
      {!far && (
        <footer>
          <span>{visible(node.type)}</span>
          <span>{moneyOf(node, figures) || tookOf(figures)}</span>
        </footer>
      )}
      <Handle id="out" type="source" position={Position.Right} isConnectable={false} />
    </div>
  );
}

function LinkHandles() {
  return (
    <>
      <Handle id="in-top" type="target" position={Position.Top} isConnectable={false} />
      <Handle id="in-bottom" type="target" position={Position.Bottom} isConnectable={false} />
      <Handle id="out-top" type="source" position={Position.Top} isConnectable={false} />
      <Handle id="out-bottom" type="source" position={Position.Bottom} isConnectable={false} />
    </>
  );
}

const CARDS = { card: Card };
const CLASSES: Record<string, string> = {
  running: "running",
  waiting: "running",
  success: "done",
  completed: "done",
  fail: "failed",
  error: "failed",
  refused: "refused",
  halt: "halted",
  interrupted: "halted",
  cancelled: "halted",
};

function NodeStatus({ node, figures }: { node: GraphNode; figures: NodeFigures | undefined }) {
  if (!figures && node.isPart) return <span className="muted">used over a link</span>;
  if (!figures) return <Status of="queued" word="not started" />;
  const count = figures.times > 1 ? ` ${formatCount(figures.ended)} of ${formatCount(figures.times)}` : "";
  const word = { success: "done", completed: "done", halt: "stopped", waiting: "waits for a budget" }[figures.status] ?? figures.status;
  return <Status of={figures.status} word={`${word}${count}`} />;
}

function moneyOf(node: GraphNode, figures: NodeFigures | undefined): string {
  const limit = node.limitUsd === null ? "" : ` of ${formatUsd(toNanos(node.limitUsd))}`;
  if (!figures) return limit ? `$0${limit}` : "";
  if (figures.heldNanos > 0) return `${formatUsd(figures.heldNanos)} held${limit}`;
  if (figures.costNanos === 0 && !limit && !figures.unknown) return "";
  return `${figures.unknown ? "≥ " : ""}${formatUsd(figures.costNanos)}${limit}`;
}

function tookOf(figures: NodeFigures | undefined): string {
  return figures?.tookMs ? formatDuration(figures.tookMs) : "";
}

function NodeTable(props: Inside) {
  const cards = useCards(props);
  return (
    <div className="scroll" tabIndex={0} role="region" aria-label="Nodes of this graph">
      <table className="tree">
        <thead>
          <tr>
            {["Node", "Type", "State", "Time", "Tokens", "Cost", "Comes after"].map((name, index) => (
              <th key={name} scope="col" className={index > 2 && index < 6 ? "number" : ""}>
                {name}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {cards.map(({ node, figures, picked, onPick, onOpen }) => (
            <tr key={node.id} aria-selected={picked}>
              <td>
                <div className="bar">
                  <button className="plain" onClick={onPick} disabled={!figures || figures.row < 0}>
                    {visible(node.label)}
                  </button>
                  {onOpen && <button onClick={onOpen}>Open</button>}
                </div>
              </td>
              <td>{visible(node.type)}</td>
              <td>
                <NodeStatus node={node} figures={figures} />
              </td>
              <td className="number">{tookOf(figures)}</td>
              <td className="number">{figures?.tokens ? formatCount(figures.tokens) : ""}</td>
              <td className="number">{moneyOf(node, figures)}</td>
              <td>
                {props.part.edges
                  .filter(({ target }) => target === node.id)
                  .map(({ source, isLink }) => visible(source) + (isLink ? " (link)" : ""))
                  .join(", ")}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
