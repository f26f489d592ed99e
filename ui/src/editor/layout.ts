// Where nodes are drawn: where their author put them, else where their document says, else in layers along the flow.

import dagre from "@dagrejs/dagre";
import { pathName, type Graph, type GraphNode, type Path, type Position } from "./document.ts";

export const CARD_WIDTH = 220;
const ROW = 24;
const HEAD = 62;
const STEP = CARD_WIDTH + 64;
/** Between folded rows. */
const ROW_GAP = 70;
const MIN_COLUMNS = 6;
/** How much wider than high a graph is folded, and about what it is then. */
const WIDE = 4;
const SHAPE = 1.2;

export function cardHeight(rows: number): number {
  return HEAD + ROW * Math.max(1, rows);
}

/** Positions of all nodes by layers; parts that are only linked to go with the node that uses them. */
export function arranged(graph: Graph, rows: (node: GraphNode) => number): Map<string, Position> {
  const layers = new dagre.graphlib.Graph();
  layers.setGraph({ rankdir: "LR", nodesep: 52, ranksep: 64 });
  layers.setDefaultEdgeLabel(() => ({}));
  for (const node of graph.nodes) layers.setNode(node.id, { width: CARD_WIDTH, height: cardHeight(rows(node)) });
  for (const edge of graph.edges) {
    if (layers.hasNode(edge.source) && layers.hasNode(edge.target)) layers.setEdge(edge.source, edge.target);
  }
  dagre.layout(layers);
  const found = new Map(
    graph.nodes.map((node) => {
      const { x, y, width, height } = layers.node(node.id);
      return [node.id, { x: Math.round(x - width / 2), y: Math.round(y - height / 2) }];
    }),
  );
  return folded(found, (id) => layers.node(id).height);
}

/** A graph that is far wider than high, as rows of columns: a long chain would be a thin line on any screen. */
export function folded(found: Map<string, Position>, heightOf: (id: string) => number): Map<string, Position> {
  const columns = [...Map.groupBy([...found.keys()], (id) => found.get(id)!.x).entries()].sort(([a], [b]) => a - b);
  const boxes = [...found].map(([id, { y }]) => ({ y, end: y + heightOf(id) }));
  const [top, bottom] = [Math.min(...boxes.map(({ y }) => y)), Math.max(...boxes.map(({ end }) => end))];
  const height = bottom - top + ROW_GAP;
  if (columns.length <= MIN_COLUMNS || columns.length * STEP < WIDE * height) return found;
  const across = Math.max(MIN_COLUMNS, Math.ceil(Math.sqrt((columns.length * height * SHAPE) / STEP)));
  const placed = columns.flatMap(([x, ids], at) => {
    const row = Math.floor(at / across);
    const start = columns[row * across]![0];
    return ids.map((id): [string, Position] => [id, { x: x - start, y: found.get(id)!.y - top + row * height }]);
  });
  return new Map(placed);
}

/** The position of every node of a graph; nodes that nothing places, or that lie on one spot, are arranged. */
export function places(
  graph: Graph,
  path: Path,
  positions: Readonly<Record<string, Position>>,
  rows: (node: GraphNode) => number,
): Map<string, Position> {
  const known = new Map<string, Position>();
  for (const node of graph.nodes) {
    const found = positions[pathName(path, node.id)] ?? node.position;
    if (found && Number.isFinite(found.x) && Number.isFinite(found.y)) known.set(node.id, found);
  }
  const spots = new Set([...known.values()].map(({ x, y }) => `${x} ${y}`));
  if (known.size === graph.nodes.length && (spots.size > 1 || known.size < 2)) return known;
  const found = arranged(graph, rows);
  if (spots.size > 1) for (const [id, position] of known) found.set(id, position);
  return found;
}

/** A free spot beside `near`, or below everything. */
export function freeSpot(taken: Iterable<Position>, near: Position | null): Position {
  const all = [...taken];
  const spot = near ? { x: near.x + CARD_WIDTH + 90, y: near.y } : { x: 0, y: 0 };
  const isTaken = () => all.some(({ x, y }) => Math.abs(x - spot.x) < CARD_WIDTH + 20 && Math.abs(y - spot.y) < 110);
  while (isTaken()) spot.y += 120;
  return spot;
}
