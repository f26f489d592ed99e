// Where the cards of a graph lie: as its author placed them, or in layers from left to right.

import dagre from "@dagrejs/dagre";
import type { GraphPart } from "../../model/graph.ts";

export const CARD = { width: 208, height: 78 };
const GAP = 24;

export interface Place {
  x: number;
  y: number;
}
export type Places = Map<string, Place>;

export function layout(part: GraphPart): Places {
  return authored(part) ?? layered(part);
}

/** Positions of the document, if every node has one and no two cards touch. */
function authored({ nodes }: GraphPart): Places | null {
  const places: Places = new Map();
  for (const { id, position } of nodes) {
    if (position === null) return null;
    for (const other of places.values()) {
      if (Math.abs(other.x - position.x) < CARD.width + GAP / 2 && Math.abs(other.y - position.y) < CARD.height) return null;
    }
    places.set(id, position);
  }
  return nodes.length > 1 && nodes.length <= 500 ? places : null;
}

/** Tools, memories and other linked parts hang below the node that uses them. */
function layered({ nodes, edges }: GraphPart): Places {
  const graph = new dagre.graphlib.Graph();
  graph.setGraph({ rankdir: "LR", nodesep: GAP, ranksep: 64 });
  graph.setDefaultEdgeLabel(() => ({}));
  const users = new Map(edges.filter((edge) => edge.isLink).map(({ source, target }) => [source, target]));
  for (const edge of edges) if (!edge.isLink) users.delete(edge.source), users.delete(edge.target);
  const parts = new Map<string, string[]>();
  for (const [part, user] of users) if (!users.has(user)) parts.set(user, [...(parts.get(user) ?? []), part]);
  const hung = new Set([...parts.values()].flat());
  for (const { id } of nodes) {
    if (hung.has(id)) continue;
    const below = parts.get(id)?.length ?? 0;
    graph.setNode(id, { width: CARD.width, height: CARD.height + below * (CARD.height + GAP) });
  }
  for (const { source, target } of edges) if (!hung.has(source) && !hung.has(target)) graph.setEdge(source, target);
  dagre.layout(graph);
  const places: Places = new Map();
  for (const id of graph.nodes()) {
    const { x, y, width, height } = graph.node(id);
    const top = { x: x - width / 2, y: y - height / 2 };
    places.set(id, top);
    parts.get(id)?.forEach((part, index) => places.set(part, { x: top.x + GAP, y: top.y + (index + 1) * (CARD.height + GAP) }));
  }
  return places;
}
