// A graph as its author changes it: every change gives a new document that shares what did not change with the old one.
//
// Fields that nothing here knows stay where they are, of the document, of nodes, of edges and in their data. It knows no
// node type; handles and settings come from the server's description of the types (types.ts).

export type Channel = "flow" | "link";
export type Data = Record<string, unknown>;

export interface GraphNode {
  id: string;
  type: string;
  position?: Position;
  data?: Data;
  [other: string]: unknown;
}

export interface GraphEdge {
  id: string;
  source: string;
  target: string;
  sourceHandle?: string | null;
  targetHandle?: string | null;
  data?: { channel?: Channel; [other: string]: unknown };
  [other: string]: unknown;
}

export interface Graph {
  nodes: GraphNode[];
  edges: GraphEdge[];
  [other: string]: unknown;
}

export interface Position {
  x: number;
  y: number;
}

/** One end of an edge. */
export interface End {
  node: string;
  handle: string;
}

export const EMPTY: Graph = { nodes: [], edges: [] };
export const OUTPUT = "output";
export const INPUT = "input";

/** Why a value cannot be edited as a graph; null if it can. */
export function unreadable(value: unknown): string | null {
  if (!isObject(value)) return "a graph is an object with nodes and edges";
  for (const field of ["nodes", "edges"] as const) {
    const items = value[field];
    if (!Array.isArray(items)) return `${field} is not a list`;
    const wrong = items.findIndex((item) => !isObject(item) || typeof item.id !== "string" || !item.id);
    if (wrong >= 0) return `${field}[${wrong}] has no id`;
    const ids = items.map((item: { id: string }) => item.id);
    const twice = ids.find((id, at) => ids.indexOf(id) < at);
    if (twice !== undefined) return `${field} has the id ${twice} twice`;
  }
  const nodes = value.nodes as Data[];
  const bare = nodes.findIndex((node) => typeof node.type !== "string" || (node.data !== undefined && !isObject(node.data)));
  if (bare >= 0) return `nodes[${bare}] has no type, or its data is not an object`;
  const loose = (value.edges as Data[]).findIndex((edge) => typeof edge.source !== "string" || typeof edge.target !== "string");
  return loose >= 0 ? `edges[${loose}] has no source or no target` : null;
}

export function isGraph(value: unknown): value is Graph {
  return unreadable(value) === null;
}

export function nodeOf(graph: Graph, id: string): GraphNode | undefined {
  return graph.nodes.find((node) => node.id === id);
}

export function sourceOf(edge: GraphEdge): End {
  return { node: edge.source, handle: edge.sourceHandle || OUTPUT };
}

export function targetOf(edge: GraphEdge): End {
  return { node: edge.target, handle: edge.targetHandle || INPUT };
}

/** A name that is not taken, made from `base`: `agent`, `agent-2`, … */
export function freeId(base: string, taken: Iterable<string>): string {
  const names = new Set(taken);
  if (!names.has(base)) return base;
  for (let number = 2; ; number++) if (!names.has(`${base}-${number}`)) return `${base}-${number}`;
}

export function addNode(graph: Graph, type: string, data: Data, position: Position): [Graph, string] {
  const id = freeId(type, graph.nodes.map((node) => node.id));
  return [{ ...graph, nodes: [...graph.nodes, { id, type, position, data }] }, id];
}

export function setData(graph: Graph, id: string, data: Data): Graph {
  return changeNode(graph, id, (node) => ({ ...node, data }));
}

function changeNode(graph: Graph, id: string, change: (node: GraphNode) => GraphNode): Graph {
  return { ...graph, nodes: graph.nodes.map((node) => (node.id === id ? change(node) : node)) };
}

/** Renames a node and the ends of its edges; the same graph if the name is taken or empty. */
export function renameNode(graph: Graph, id: string, name: string): Graph {
  if (!name || name === id || nodeOf(graph, name)) return graph;
  const edges = graph.edges.map((edge) => {
    if (edge.source !== id && edge.target !== id) return edge;
    return { ...edge, source: edge.source === id ? name : edge.source, target: edge.target === id ? name : edge.target };
  });
  return { ...changeNode(graph, id, (node) => ({ ...node, id: name })), edges };
}

/** Removes nodes and the edges at them. */
export function removeNodes(graph: Graph, ids: Iterable<string>): Graph {
  const gone = new Set(ids);
  if (!graph.nodes.some((node) => gone.has(node.id))) return graph;
  return {
    ...graph,
    nodes: graph.nodes.filter((node) => !gone.has(node.id)),
    edges: graph.edges.filter((edge) => !gone.has(edge.source) && !gone.has(edge.target)),
  };
}

export function removeEdges(graph: Graph, ids: Iterable<string>): Graph {
  const gone = new Set(ids);
  if (!graph.edges.some((edge) => gone.has(edge.id))) return graph;
  return { ...graph, edges: graph.edges.filter((edge) => !gone.has(edge.id)) };
}

/** Adds an edge with its channel; the same graph if it is there already. */
export function connect(graph: Graph, source: End, target: End, channel: Channel): Graph {
  const same = (edge: GraphEdge) => equal(sourceOf(edge), source) && equal(targetOf(edge), target);
  if (graph.edges.some(same)) return graph;
  const id = freeId(`${source.node}-${target.node}`, graph.edges.map((edge) => edge.id));
  const ends = { source: source.node, sourceHandle: source.handle, target: target.node, targetHandle: target.handle };
  return { ...graph, edges: [...graph.edges, { id, ...ends, data: { channel } }] };
}

function equal(left: End, right: End): boolean {
  return left.node === right.node && left.handle === right.handle;
}

/** A part of a graph to paste elsewhere: the nodes and the edges between them. */
export function copyOf(graph: Graph, ids: Iterable<string>): Graph {
  const wanted = new Set(ids);
  return {
    nodes: graph.nodes.filter((node) => wanted.has(node.id)),
    edges: graph.edges.filter((edge) => wanted.has(edge.source) && wanted.has(edge.target)),
  };
}

/** Adds copies under new ids, a step beside the originals; returns the ids of the new nodes by their old ones. */
export function paste(graph: Graph, piece: Graph, places: (id: string) => Position): [Graph, Map<string, string>] {
  const names = new Set(graph.nodes.map((node) => node.id));
  const ids = new Map<string, string>();
  for (const node of piece.nodes) {
    const id = freeId(node.id, names);
    names.add(id);
    ids.set(node.id, id);
  }
  const nodes = piece.nodes.map((node) => ({ ...node, id: ids.get(node.id)!, position: places(node.id) }));
  const edgeIds = new Set(graph.edges.map((edge) => edge.id));
  const edges = piece.edges.map((edge) => {
    const [source, target] = [ids.get(edge.source)!, ids.get(edge.target)!];
    const id = freeId(`${source}-${target}`, edgeIds);
    edgeIds.add(id);
    return { ...edge, id, source, target };
  });
  return [{ ...graph, nodes: [...graph.nodes, ...nodes], edges: [...graph.edges, ...edges] }, ids];
}

// ---- nested graphs

/** Where a nested graph is: node ids from the outside in, each with the setting that holds the graph. */
export type Path = readonly { node: string; field: string }[];

export function graphAt(root: Graph, path: Path): Graph | null {
  let graph: unknown = root;
  for (const { node, field } of path) {
    if (!isGraph(graph)) return null;
    graph = nodeOf(graph, node)?.data?.[field] ?? EMPTY;
  }
  return isGraph(graph) ? graph : null;
}

/** The outermost graph after a change of the graph at a path. */
export function withGraphAt(root: Graph, path: Path, change: (graph: Graph) => Graph): Graph {
  const [first, ...rest] = path;
  if (!first) return change(root);
  const node = nodeOf(root, first.node);
  if (!node) return root;
  const inner = isGraph(node.data?.[first.field]) ? (node.data[first.field] as Graph) : EMPTY;
  const changed = withGraphAt(inner, rest, change);
  return changed === inner ? root : setData(root, first.node, { ...node.data, [first.field]: changed });
}

/** A node's name in layouts and runs: its path from the outermost graph, as in `each/read`. */
export function pathName(path: Path, id: string): string {
  return [...path.map((step) => step.node), id].join("/");
}

// ---- history

export interface Snapshot {
  graph: Graph;
  positions: Readonly<Record<string, Position>>;
}

export interface History {
  past: readonly Snapshot[];
  present: Snapshot;
  future: readonly Snapshot[];
  /** Changes with the same tag in a row, such as typing in one field, are one step. */
  tag: string | null;
}

const MAX_STEPS = 200;

export function begin(present: Snapshot): History {
  return { past: [], present, future: [], tag: null };
}

export function commit(history: History, next: Snapshot, tag: string | null = null): History {
  const { past, present } = history;
  if (next.graph === present.graph && next.positions === present.positions) return history;
  if (tag !== null && tag === history.tag) return { past, present: next, future: [], tag };
  return { past: [...past, present].slice(-MAX_STEPS), present: next, future: [], tag };
}

export function undo(history: History): History {
  const before = history.past.at(-1);
  if (!before) return history;
  return { past: history.past.slice(0, -1), present: before, future: [history.present, ...history.future], tag: null };
}

export function redo(history: History): History {
  const [next, ...future] = history.future;
  return next ? { past: [...history.past, history.present], present: next, future, tag: null } : history;
}

export function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
