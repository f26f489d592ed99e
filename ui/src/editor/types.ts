// What the server says of node types, read for the editor: handles of a node, which fit each other, and problems in place.

import type { HandleShown, NodeTypeShown, NodeTypes, ProblemShown } from "../api/types.ts";
import { isGraph, isObject, nodeOf, sourceOf, targetOf, type Channel, type End, type Graph, type GraphNode, type Path } from "./document.ts";

export type Side = "inputs" | "outputs";

export interface HandleInfo extends HandleShown {
  /** False for a handle that an edge names and the type does not have. */
  declared: boolean;
}

export interface Catalog {
  types: ReadonlyMap<string, NodeTypeShown>;
  conversions: ReadonlySet<string>;
}

export function catalogOf(found: NodeTypes): Catalog {
  return {
    types: new Map(found.node_types.map((type) => [type.type, type])),
    conversions: new Set(found.conversions.map(([given, wanted]) => `${given} ${wanted}`)),
  };
}

type Properties = Record<string, Record<string, unknown>>;

export function propertiesOf(type: NodeTypeShown | undefined): Properties {
  const properties = type?.data_schema?.properties;
  return isObject(properties) ? (properties as Properties) : {};
}

/** The setting of a type that holds a nested graph. */
export function graphField(type: NodeTypeShown | undefined): string | null {
  return Object.entries(propertiesOf(type)).find(([, schema]) => schema["x-penstock-picker"] === "graph")?.[0] ?? null;
}

const PLACEHOLDER = /(\\?)\{\{\s*([A-Za-z_][\w-]*)/g;

export function placeholders(text: string): string[] {
  const names = [...text.matchAll(PLACEHOLDER)].filter(([, escaped]) => !escaped).map(([, , name]) => name!);
  return [...new Set(names)];
}

function open(name: string, channel: Channel = "flow"): HandleInfo {
  return { name, type: "any", channel, many: "one", required: false, declared: true };
}

/** The handles of a node: those of its type, those its settings add, and those that only its edges name. */
export function handlesOf(catalog: Catalog, graph: Graph, node: GraphNode, side: Side): HandleInfo[] {
  const type = catalog.types.get(node.type);
  const declared = type?.[side]?.map((handle) => ({ ...handle, declared: true })) ?? added(type, node, side);
  const extra = side === "outputs" ? fallbackOf(node) : null;
  const found = extra && !declared.some((handle) => handle.name === extra) ? [...declared, open(extra)] : declared;
  const isOpen = !type || type[side] === null;
  const names = new Set(found.map((handle) => handle.name));
  for (const edge of graph.edges) {
    if ((side === "inputs" ? edge.target : edge.source) !== node.id) continue;
    const end = side === "inputs" ? targetOf(edge) : sourceOf(edge);
    if (names.has(end.handle)) continue;
    names.add(end.handle);
    found.push({ ...open(end.handle, edge.data?.channel ?? "flow"), declared: isOpen });
  }
  return found;
}

function added(type: NodeTypeShown | undefined, node: GraphNode, side: Side): HandleInfo[] {
  if (side === "outputs") return [];
  const fields = Object.entries(propertiesOf(type)).filter(([, schema]) => schema["x-penstock-handles"] === "placeholders");
  const texts = fields.map(([name]) => node.data?.[name]).filter((text) => typeof text === "string");
  return placeholders(texts.join("\n")).map((name) => open(name));
}

function fallbackOf(node: GraphNode): string | null {
  const policy = node.data?.error_policy;
  const handle = isObject(policy) ? policy.fallback_handle : null;
  return typeof handle === "string" && handle ? handle : null;
}

/** Why two handles do not fit; null if they do. */
export function misfit(catalog: Catalog, graph: Graph, source: End, target: End): string | null {
  const [from, to] = [nodeOf(graph, source.node), nodeOf(graph, target.node)];
  if (!from || !to) return "the node is not there";
  if (from === to) return "a node cannot be connected to itself";
  const leaves = handlesOf(catalog, graph, from, "outputs").find((handle) => handle.name === source.handle);
  const arrives = handlesOf(catalog, graph, to, "inputs").find((handle) => handle.name === target.handle);
  if (!leaves || !arrives) return "the handle is not there";
  return mismatch(catalog, graph, leaves, arrives, target, () => reachable(graph, target.node, "forward").has(source.node));
}

function mismatch(catalog: Catalog, graph: Graph, leaves: HandleInfo, arrives: HandleInfo, target: End, isCircle: () => boolean): string | null {
  if (leaves.channel !== arrives.channel) return `${leaves.channel} does not fit ${arrives.channel}`;
  if (!fits(catalog, leaves.type, arrives.type)) return `${leaves.type} does not become ${arrives.type}`;
  const takesOne = arrives.many === "one";
  if (takesOne && graph.edges.some((edge) => edge.target === target.node && targetOf(edge).handle === target.handle)) return "it takes one edge and has one";
  return leaves.channel === "flow" && isCircle() ? "it would close a circle" : null;
}

function fits(catalog: Catalog, given: string, wanted: string): boolean {
  return given === wanted || given === "any" || wanted === "any" || catalog.conversions.has(`${given} ${wanted}`);
}

/** The nodes that flow leads to from a node, or that lead to it; the node itself included. */
export function reachable(graph: Graph, start: string, direction: "forward" | "back"): ReadonlySet<string> {
  const next = new Map<string, string[]>();
  for (const edge of graph.edges) {
    if (edge.data?.channel !== "flow") continue;
    const [from, to] = direction === "forward" ? [edge.source, edge.target] : [edge.target, edge.source];
    const known = next.get(from);
    if (known) known.push(to);
    else next.set(from, [to]);
  }
  const seen = new Set([start]);
  for (const node of seen) for (const other of next.get(node) ?? []) seen.add(other);
  return seen;
}

export interface Choice {
  end: End;
  label: string;
}

/** The ends that an output may be connected to, or an input from. */
export function partners(catalog: Catalog, graph: Graph, end: End, side: Side): Choice[] {
  const other: Side = side === "outputs" ? "inputs" : "outputs";
  const here = nodeOf(graph, end.node);
  const own = here && handlesOf(catalog, graph, here, side).find((handle) => handle.name === end.handle);
  if (!own) return [];
  const closesCircle = reachable(graph, end.node, side === "outputs" ? "back" : "forward");
  return graph.nodes.flatMap((node) => {
    if (node === here) return [];
    return handlesOf(catalog, graph, node, other).flatMap((handle) => {
      const there: End = { node: node.id, handle: handle.name };
      const isCircle = () => closesCircle.has(node.id);
      const why = side === "outputs" ? mismatch(catalog, graph, own, handle, there, isCircle) : mismatch(catalog, graph, handle, own, end, isCircle);
      return why === null ? [{ end: there, label: `${there.node} · ${there.handle}` }] : [];
    });
  });
}

// ---- problems

export interface PlacedProblem extends ProblemShown {
  /** The nested graph that it is in, and the node or edge there; null if it is about the graph. */
  at: Path;
  node: string | null;
  edge: string | null;
  /** Path in the node's data, as forms have it: `$.model`. */
  field: string | null;
}

const STEP = /\.([A-Za-z_]\w*)|\[(\d+)\]|\["((?:[^"\\]|\\.)*)"\]/g;

/** Finds the node and the setting that a problem is about, from its path in the document. */
export function place(root: Graph, problem: ProblemShown): PlacedProblem {
  const steps = [...problem.path.matchAll(STEP)];
  const at: { node: string; field: string }[] = [];
  const placed: PlacedProblem = { ...problem, at, node: null, edge: null, field: null };
  if (problem.code === "unknown_type") placed.message = "this server has no such node type";
  let graph: Graph | null = root;
  for (let step = 0; graph && step < steps.length; ) {
    const [list, index] = [steps[step]?.[1], Number(steps[step + 1]?.[2])];
    if (list === "edges") placed.edge = graph.edges[index]?.id ?? null;
    if (list !== "nodes" || !graph.nodes[index]) return placed;
    const node: GraphNode = graph.nodes[index];
    placed.node = node.id;
    const field = steps[step + 3]?.[1] ?? "";
    const inner: unknown = steps[step + 2]?.[1] === "data" ? node.data?.[field] : null;
    const goesOn = steps[step + 4]?.[1] === "nodes" || steps[step + 4]?.[1] === "edges";
    if (!goesOn || !isGraph(inner)) {
      const rest = steps.slice(step + 3).map(([text]) => text).join("");
      placed.field = steps[step + 2]?.[1] === "data" ? `$${rest}` : null;
      return placed;
    }
    at.push({ node: node.id, field });
    placed.node = null;
    graph = inner;
    step += 4;
  }
  return placed;
}

/** The problems of a node, those inside of its nested graph included. */
export function problemsAt(problems: PlacedProblem[], path: Path, node: string): PlacedProblem[] {
  const isHere = (found: PlacedProblem) => path.every((step, at) => found.at[at]?.node === step.node);
  return problems.filter((found) => isHere(found) && (found.at.length > path.length ? found.at[path.length]!.node : found.node) === node);
}
