// The graph that a run follows, as its document has it, with what each node has done so far.
//
// Graphs may be nested in the data of a node; a path such as `["each", "inner"]` leads to one. A node inside a map or a
// loop ran several times, and its figures are the sums of all of them.

import type { CallTable } from "./calls.ts";
import type { RunState } from "./run.ts";

export interface GraphNode {
  id: string;
  type: string;
  label: string;
  position: { x: number; y: number } | null;
  /** Whether a graph is nested in it. */
  hasInside: boolean;
  limitUsd: number | null;
  /** Whether other nodes use it over links, and nothing flows through it: it never runs by itself. */
  isPart: boolean;
}

export interface GraphEdge {
  id: string;
  source: string;
  target: string;
  isLink: boolean;
}

export interface GraphPart {
  nodes: GraphNode[];
  edges: GraphEdge[];
}

export interface NodeFigures {
  status: string;
  /** How often the node ran, and how often it has ended. */
  times: number;
  ended: number;
  costNanos: number;
  unknown: boolean;
  tokens: number;
  heldNanos: number;
  tookMs: number;
  /** Row of the newest of its calls; -1 if none is known. */
  row: number;
}

type Data = Record<string, unknown>;

/** The graph at a path of a document; null if there is none. */
export function partOf(document: unknown, path: string[]): GraphPart | null {
  let graph = asObject(document);
  for (const id of path) graph = asObject(asObject(asObject(listOf(graph, "nodes").find((node) => node.id === id)).data).graph);
  const nodes = listOf(graph, "nodes");
  if (nodes.length === 0) return null;
  const known = new Set(nodes.map((node) => String(node.id)));
  const edges = listOf(graph, "edges").filter(({ source, target }) => known.has(String(source)) && known.has(String(target)));
  const made = edges.map((edge, index) => ({
    id: String(edge.id ?? index),
    source: String(edge.source),
    target: String(edge.target),
    isLink: asObject(edge.data).channel === "link",
  }));
  const flows = new Set(made.flatMap(({ source, target, isLink }) => (isLink ? [] : [source, target])));
  const used = new Set(made.flatMap(({ source, isLink }) => (isLink ? [source] : [])));
  return { nodes: nodes.map((node) => nodeOf(node, used.has(String(node.id)) && !flows.has(String(node.id)))), edges: made };
}

/** Nodes that a run has entered without a document that names them, such as those of a Python program. */
export function seenNodes(table: CallTable): GraphPart {
  const found = new Map<string, GraphNode>();
  for (let row = 0; row < table.count; row += 1) {
    const path = table.strings[table.node[row]!];
    if (path === undefined) continue;
    const id = stepsOf(path)[0]!;
    const type = table.strings[table.nodeType[row]!] ?? "step";
    if (!found.has(id)) found.set(id, { id, type, label: id, position: null, hasInside: false, limitUsd: null, isPart: false });
  }
  return { nodes: [...found.values()], edges: [] };
}

function nodeOf(node: Data, isPart: boolean): GraphNode {
  const data = asObject(node.data);
  const position = asObject(node.position);
  const id = String(node.id);
  const placed = typeof position.x === "number" && typeof position.y === "number";
  const limit = Number(asObject(data.budget).max_cost_usd ?? NaN);
  return {
    id,
    type: String(node.type ?? ""),
    label: typeof data.label === "string" && data.label ? data.label : id,
    position: placed ? { x: position.x as number, y: position.y as number } : null,
    hasInside: listOf(asObject(data.graph), "nodes").length > 0,
    limitUsd: Number.isNaN(limit) ? null : limit,
    isPart,
  };
}

/** What the nodes of a part have done, by id; as of now or of a moment. */
export function figuresOf(state: RunState, table: CallTable, path: string[], atMs: number | null = null): Map<string, NodeFigures> {
  const found = new Map<string, NodeFigures>();
  const tree = table.tree(atMs);
  const ids = idsIn(table.strings, path);
  for (let row = 0; row < table.count; row += 1) {
    const id = ids[table.node[row]!];
    if (id === undefined || table.nodeType[row]! < 0 || !table.hasBegun(row, atMs)) continue;
    const figures = found.get(id) ?? blank();
    const hasEnded = table.hasEnded(row, atMs);
    figures.times += 1;
    figures.ended += hasEnded ? 1 : 0;
    figures.costNanos += tree.costNanos[row]!;
    figures.tokens += tree.tokens[row]!;
    figures.heldNanos += tree.heldNanos[row]!;
    figures.unknown ||= tree.unknown[row] !== 0;
    figures.tookMs += hasEnded ? table.end[row]! - table.start[row]! : 0;
    figures.status = worse(figures.status, hasEnded || atMs === null ? statusOf(table, row) : "running");
    figures.row = row;
    found.set(id, figures);
  }
  for (const node of state.nodes.values()) {
    const id = node.epoch === table.epoch && (atMs === null || node.startedMs <= atMs) ? idOf(node.id, path) : null;
    const status = atMs !== null && node.endedMs !== null && node.endedMs > atMs ? "running" : node.status;
    if (id !== null && (status === "skipped" || !found.has(id))) found.set(id, { ...(found.get(id) ?? blank()), status });
  }
  return found;
}

function blank(): NodeFigures {
  return { status: "", times: 0, ended: 0, costNanos: 0, unknown: false, tokens: 0, heldNanos: 0, tookMs: 0, row: -1 };
}

const WORST = ["", "skipped", "success", "interrupted", "halt", "fail", "refused", "waiting", "running"];

function worse(one: string, other: string): string {
  return WORST.indexOf(other) >= WORST.indexOf(one) ? other : one;
}

function statusOf(table: CallTable, row: number): string {
  const status = table.statuses[table.status[row]!] ?? "";
  return status === "halt" && table.stops[table.stop[row]!]?.cause ? "refused" : status;
}

function idsIn(strings: string[], path: string[]): (string | undefined)[] {
  return strings.map((text) => idOf(text, path) ?? undefined);
}

/** The node of a part that a path such as `each/3/read` names; null if it is of another part, or that of an item. */
function idOf(path: string, part: string[]): string | null {
  const steps = stepsOf(path);
  if (isItem(path)) return null;
  return steps.length === part.length + 1 && part.every((id, index) => steps[index] === id) ? steps.at(-1)! : null;
}

/** Whether a path such as `each/3` names an item of a map or a round of a loop, which is part of its node. */
function isItem(path: string): boolean {
  return /\/\d+$/.test(path);
}

/** Names in a path; the numbers of items and rounds are left out. */
function stepsOf(path: string): string[] {
  const steps = path.split("/");
  return steps.filter((step, index) => index === 0 || !/^\d+$/.test(step));
}

function asObject(value: unknown): Data {
  return typeof value === "object" && value !== null && !Array.isArray(value) ? (value as Data) : {};
}

function listOf(value: Data, name: string): Data[] {
  const list = value[name];
  return Array.isArray(list) ? list.map(asObject) : [];
}
