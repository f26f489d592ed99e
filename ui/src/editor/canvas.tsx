// The graph as cards with typed handles. Flow is solid with round handles, a link is dashed with square ones.

import {
  applyNodeChanges,
  Background,
  Controls,
  Handle,
  MarkerType,
  MiniMap,
  Position as Where,
  ReactFlow,
  ReactFlowProvider,
  useConnection,
  useReactFlow,
  useStore,
  type Connection,
  type Edge,
  type Node,
  type NodeChange,
  type NodeProps,
} from "@xyflow/react";
import "@xyflow/react/dist/style.css";
import { createContext, memo, useContext, useEffect, useMemo, useRef, useState, type DragEvent, type RefObject } from "react";
import type { NodeState } from "../model/run.ts";
import { formatUsd } from "../model/money.ts";
import { visible } from "../ui/visible.ts";
import { Status } from "../ui/parts.tsx";
import { INPUT, OUTPUT, pathName, sourceOf, targetOf, type End, type Graph, type GraphNode, type Path, type Position } from "./document.ts";
import { CARD_WIDTH, cardHeight, places } from "./layout.ts";
import { graphField, handlesOf, misfit, problemsAt, type Catalog, type HandleInfo, type PlacedProblem, type Side } from "./types.ts";

export interface Overlay {
  state: NodeState;
  costNanos: number;
}

export interface CanvasProps {
  catalog: Catalog;
  graph: Graph;
  path: Path;
  positions: Readonly<Record<string, Position>>;
  problems: PlacedProblem[];
  overlay: ReadonlyMap<string, Overlay> | null;
  selected: ReadonlySet<string>;
  selectedEdge: string | null;
  isReadOnly: boolean;
  onSelect: (nodes: string[], edge: string | null) => void;
  onConnect: (source: End, target: End) => void;
  onMove: (moved: Record<string, Position>) => void;
  onOpen: (node: string) => void;
  onDrop: (type: string, at: Position) => void;
}

interface CardData extends Record<string, unknown> {
  node: GraphNode;
  inputs: HandleInfo[];
  outputs: HandleInfo[];
  problems: number;
  overlay: Overlay | null;
}

type Card = Node<CardData, "card">;
/** The graph is a reference that does not change, so that an edit of one node does not draw all others again. */
const Surroundings = createContext<{ catalog: Catalog; graph: RefObject<Graph> } | null>(null);
export const DRAGGED = "application/x-penstock-node-type";
const PLAIN_ABOVE = 150;
/** Farther away than this, cards show their names and states only, larger. */
const FAR_BELOW = 0.62;
/** No graph is opened farther away than this; the rest of a larger one is beyond the edges. */
const MIN_FIT = 0.4;

const CardView = memo(function CardView({ data, selected }: NodeProps<Card>) {
  const { catalog } = useContext(Surroundings)!;
  const { node, inputs, outputs, problems, overlay } = data;
  const type = catalog.types.get(node.type);
  const category = (type?.category ?? "unknown").toLowerCase().replaceAll(" ", "-");
  const state = overlay?.state.status;
  return (
    <div className={`card c-${category}${selected ? " selected" : ""}${problems ? " wrong" : ""}${state ? ` s-${state}` : ""}`}>
      <header>
        <b title={node.id}>{visible(node.id)}</b>
        {problems > 0 && (
          <span className="count" title={`${problems} to mend`}>
            {problems}
          </span>
        )}
        <span className="kind">
          {type ? type.title : <>? {visible(node.type)}</>}
          {graphField(type) && " ▸"}
        </span>
      </header>
      <div className="ports">
        <Ports node={node.id} side="inputs" handles={inputs} />
        <Ports node={node.id} side="outputs" handles={outputs} />
      </div>
      {overlay && (
        <footer>
          <Status of={overlay.state.status === "error" ? "failed" : overlay.state.status} />
          {overlay.costNanos > 0 && <span>{formatUsd(overlay.costNanos)}</span>}
        </footer>
      )}
    </div>
  );
});

function Ports({ node, side, handles }: { node: string; side: Side; handles: HandleInfo[] }) {
  const { catalog, graph } = useContext(Surroundings)!;
  const from = useConnection((connection) =>
    connection.inProgress ? `${connection.fromHandle.type} ${connection.fromHandle.nodeId}\n${connection.fromHandle.id}` : "",
  );
  const [kind, start] = [from.slice(0, 6), end(from)];
  return (
    <ul className={side}>
      {handles.map((handle) => {
        const here = { node, handle: handle.name };
        const isOff = start !== null && !(kind === "source" ? side === "inputs" && !misfit(catalog, graph.current, start, here) : side === "outputs" && !misfit(catalog, graph.current, here, start));
        const isStart = start?.node === node && start.handle === handle.name;
        const note = `${handle.name}: ${handle.type}, ${handle.channel}${handle.required ? ", needed" : ""}`;
        return (
          <li key={handle.name} className={isOff && !isStart ? "off" : ""} title={handle.declared ? note : `${note}; the type has no such handle`}>
            <Handle
              id={handle.name}
              type={side === "inputs" ? "target" : "source"}
              position={side === "inputs" ? Where.Left : Where.Right}
              className={`${handle.channel}${handle.declared ? "" : " undeclared"}`}
            />
            <span className="port">
              {visible(handle.name)}
              {handle.required && <span aria-hidden="true">*</span>}
            </span>
          </li>
        );
      })}
    </ul>
  );
}

function end(from: string): End | null {
  if (!from) return null;
  const [node = "", handle = ""] = from.slice(7).split("\n");
  return { node, handle };
}

const NODE_TYPES = { card: CardView };
const SEVERAL = ["Meta", "Control"];
const PRO = { hideAttribution: true };
const MARKER = { type: MarkerType.ArrowClosed, width: 16, height: 16 };

export function Canvas(props: CanvasProps) {
  const graph = useRef(props.graph);
  graph.current = props.graph;
  return (
    <ReactFlowProvider>
      <Surroundings.Provider value={useMemo(() => ({ catalog: props.catalog, graph }), [props.catalog])}>
        <Flow {...props} />
      </Surroundings.Provider>
    </ReactFlowProvider>
  );
}

function Flow(props: CanvasProps) {
  const { catalog, graph, path, positions, problems, overlay, selected, selectedEdge, isReadOnly, onSelect } = props;
  const flow = useReactFlow();
  const isFar = useStore((store) => store.transform[2] < FAR_BELOW);
  const [cards, setCards] = useState<Card[]>([]);
  const where = useMemo(() => {
    const rows = (node: GraphNode) => Math.max(...(["inputs", "outputs"] as const).map((side) => handlesOf(catalog, graph, node, side).length));
    return places(graph, path, positions, rows);
  }, [catalog, graph, path, positions]);

  const drawn = useRef<{ catalog: Catalog; edges: Graph["edges"] } | null>(null);
  useEffect(() => {
    const hasSameEnds = drawn.current?.catalog === catalog && drawn.current.edges === graph.edges;
    drawn.current = { catalog, edges: graph.edges };
    setCards((old) => {
      const before = new Map(old.map((card) => [card.id, card]));
      return graph.nodes.map((node) => {
        const known = before.get(node.id);
        const ends = hasSameEnds && known?.data.node === node ? known.data : null;
        const found = problemsAt(problems, path, node.id).length;
        const next: CardData = {
          node,
          inputs: ends?.inputs ?? handlesOf(catalog, graph, node, "inputs"),
          outputs: ends?.outputs ?? handlesOf(catalog, graph, node, "outputs"),
          problems: found,
          overlay: overlay?.get(node.id) ?? null,
        };
        const data = known && same(known.data, next) ? known.data : next;
        const type = catalog.types.get(node.type)?.title ?? node.type;
        const position = where.get(node.id)!;
        const ariaLabel = `${node.id}, ${type}${found ? `, ${found} to mend` : ""}${data.overlay ? `, ${data.overlay.state.status}` : ""}`;
        const isSelected = selected.has(node.id);
        const isAsBefore = known?.data === data && known.ariaLabel === ariaLabel && known.selected === isSelected;
        if (isAsBefore && known.position.x === position.x && known.position.y === position.y) return known;
        return {
          ...(known?.measured && { measured: known.measured }),
          id: node.id,
          type: "card" as const,
          position,
          initialWidth: CARD_WIDTH,
          initialHeight: cardHeight(Math.max(data.inputs.length, data.outputs.length)),
          data,
          selected: isSelected,
          ariaLabel,
        };
      });
    });
  }, [catalog, graph, path, problems, overlay, selected, where]);

  const drawnEdges = graph.edges;
  const edges = useMemo(
    () =>
      drawnEdges.map((edge): Edge => {
        const channel = edge.data?.channel;
        const [source, target] = [sourceOf(edge), targetOf(edge)];
        const isWrong = problems.some((problem) => problem.edge === edge.id && problem.at.length === path.length);
        const runs = overlay?.get(source.node)?.state.status;
        return {
          id: edge.id,
          source: source.node,
          target: target.node,
          sourceHandle: source.handle || OUTPUT,
          targetHandle: target.handle || INPUT,
          className: `${channel ?? "none"}${isWrong || !channel ? " wrong" : ""}${runs === "completed" ? " passed" : ""}`,
          selected: edge.id === selectedEdge,
          ...(channel !== "link" && { markerEnd: MARKER }),
        };
      }),
    [drawnEdges, problems, path, overlay, selectedEdge],
  );

  const onNodesChange = (changes: NodeChange<Card>[]) => {
    setCards((old) => applyNodeChanges(changes, old));
    const moved: Record<string, Position> = {};
    for (const change of changes) {
      if (change.type === "position" && change.dragging === false && change.position) {
        const { x, y } = change.position;
        const now = { x: Math.round(x), y: Math.round(y) };
        const before = where.get(change.id);
        if (before?.x !== now.x || before.y !== now.y) moved[pathName(path, change.id)] = now;
      }
    }
    if (Object.keys(moved).length) props.onMove(moved);
    const picks = changes.filter((change) => change.type === "select");
    if (picks.length) {
      const next = new Set(selected);
      for (const pick of picks) pick.selected ? next.add(pick.id) : next.delete(pick.id);
      onSelect([...next], next.size ? null : selectedEdge);
    }
  };
  const endsOf = (found: Connection | Edge): [End, End] => [
    { node: found.source, handle: found.sourceHandle ?? OUTPUT },
    { node: found.target, handle: found.targetHandle ?? INPUT },
  ];
  const onDrop = (event: DragEvent) => {
    const type = event.dataTransfer.getData(DRAGGED);
    if (!type || isReadOnly) return;
    event.preventDefault();
    props.onDrop(type, flow.screenToFlowPosition({ x: event.clientX, y: event.clientY }));
  };
  const key = path.map((step) => step.node).join("/");
  const [fitted, setFitted] = useState<string | null>(null);
  const isMeasured = cards.length > PLAIN_ABOVE || (cards.length > 0 && cards.every((card) => card.measured));
  const count = useRef(0);
  useEffect(() => {
    const hasGrown = cards.length > count.current;
    if (!isMeasured || (fitted === key && !hasGrown)) return;
    count.current = cards.length;
    setFitted(key);
    void flow.fitView({ padding: 0.06, maxZoom: 1 }).then(() => {
      if (flow.getZoom() >= MIN_FIT) return;
      const [near] = [...selected].map((id) => where.get(id));
      if (near) return void flow.setCenter(near.x + CARD_WIDTH / 2, near.y + 50, { zoom: MIN_FIT });
      const all = [...where.values()];
      const [left, top] = [Math.min(...all.map(({ x }) => x)), Math.min(...all.map(({ y }) => y))];
      void flow.setViewport({ x: 20 - left * MIN_FIT, y: 20 - top * MIN_FIT, zoom: MIN_FIT });
    });
  }, [fitted, key, isMeasured, cards.length, flow]);

  const act = useStable({
    onNodesChange,
    onEdgeClick: (_: unknown, edge: Edge) => onSelect([], edge.id),
    onPaneClick: () => onSelect([], null),
    onNodeDoubleClick: (_: unknown, node: Card) => props.onOpen(node.id),
    onConnect: (found: Connection) => props.onConnect(...endsOf(found)),
    isValidConnection: (found: Connection | Edge) => misfit(catalog, graph, ...endsOf(found)) === null,
  });
  return (
    <ReactFlow<Card>
      nodes={cards}
      edges={edges}
      nodeTypes={NODE_TYPES}
      {...act}
      onDrop={onDrop}
      onDragOver={(event) => event.preventDefault()}
      nodesDraggable={!isReadOnly}
      nodesConnectable={!isReadOnly}
      edgesFocusable={false}
      deleteKeyCode={null}
      selectionKeyCode="Shift"
      multiSelectionKeyCode={SEVERAL}
      zoomOnDoubleClick={false}
      minZoom={0.1}
      maxZoom={2}
      onlyRenderVisibleElements={graph.nodes.length > PLAIN_ABOVE}
      proOptions={PRO}
      className={isFar ? "far" : ""}
    >
      <Background gap={22} />
      <Controls showInteractive={false} />
      {graph.nodes.length > 12 && <MiniMap pannable zoomable ariaLabel="Map of the graph" />}
    </ReactFlow>
  );
}

/** The same functions at every drawing, which call the newest ones: a new one would draw every card and edge again. */
function useStable<T extends Record<string, (...values: never[]) => unknown>>(actions: T): T {
  const newest = useRef(actions);
  newest.current = actions;
  return useMemo(() => {
    const call = (name: keyof T) => (...values: never[]) => newest.current[name]!(...values);
    return Object.fromEntries(Object.keys(newest.current).map((name) => [name, call(name)])) as T;
  }, []);
}

function same(left: CardData, right: CardData): boolean {
  const handles = ({ inputs, outputs }: CardData) => JSON.stringify([inputs, outputs]);
  return (
    left.node === right.node &&
    left.problems === right.problems &&
    left.overlay?.state.status === right.overlay?.state.status &&
    left.overlay?.costNanos === right.overlay?.costNanos &&
    ((left.inputs === right.inputs && left.outputs === right.outputs) || handles(left) === handles(right))
  );
}
