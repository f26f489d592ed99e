// Where nodes are drawn: where their author put them, else where their document says, else in layers along the flow.

import dagre from "@dagrejs/dagre";
import { pathName, type Graph, type GraphNode, type Path, type Position } from "./document.ts";

export const CARD_WIDTH = 220;
const ROW = 24;
const HEAD = 62;

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
  return new Map(
    graph.nodes.map((node) => {
      const { x, y, width, height } = layers.node(node.id);
      return [node.id, { x: Math.round(x - width / 2), y: Math.round(y - height / 2) }];
    }),
  );
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
