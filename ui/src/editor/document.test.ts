import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import type { NodeTypes } from "../api/types.ts";
import * as model from "./document.ts";
import type { Graph, History, Snapshot } from "./document.ts";
import { catalogOf, handlesOf, misfit, partners, place, placeholders } from "./types.ts";
import { read, write } from "./json-text.ts";

const ID = fc.constantFrom("a", "b", "c", "d", "e");
const UNKNOWN = { extra: { deep: [1.5, null] }, viewport: { zoom: 2 } };

const START: Graph = {
  id: "start",
  ...UNKNOWN,
  nodes: [
    { id: "a", type: "of-another-server", data: { anything: { goes: [true] }, _editor: 1 }, measured: { width: 3 } },
    { id: "b", type: "echo", data: { n: 1 } },
    { id: "c", type: "map", data: { graph: { nodes: [{ id: "x", type: "echo", odd: 1 }], edges: [] }, other: 2 } },
  ],
  edges: [{ id: "a-b", source: "a", target: "b", data: { channel: "flow", colour: "red" }, animated: true }],
};

type Edit = (graph: Graph) => Graph;
const inside: model.Path = [{ node: "c", field: "graph" }];

const edit: fc.Arbitrary<Edit> = fc.oneof(
  fc.tuple(ID, fc.integer()).map(([type, n]): Edit => (graph) => model.addNode(graph, type, { n }, { x: n, y: 0 })[0]),
  fc.tuple(ID, fc.jsonValue()).map(([id, value]): Edit => (graph) => model.setData(graph, id, { value })),
  fc.tuple(ID, ID).map(([id, name]): Edit => (graph) => model.renameNode(graph, id, name)),
  fc.array(ID).map((ids): Edit => (graph) => model.removeNodes(graph, ids)),
  fc.tuple(ID, ID).map(([from, to]): Edit => (graph) => model.removeEdges(graph, [`${from}-${to}`])),
  fc.tuple(ID, ID).map(([from, to]): Edit => (graph) =>
    model.nodeOf(graph, from) && model.nodeOf(graph, to)
      ? model.connect(graph, { node: from, handle: "output" }, { node: to, handle: "input" }, "flow")
      : graph),
  fc.array(ID).map((ids): Edit => (graph) => model.paste(graph, model.copyOf(graph, ids), () => ({ x: 0, y: 0 }))[0]),
  fc.tuple(ID, fc.integer()).map(([type, n]): Edit => (graph) =>
    model.withGraphAt(graph, inside, (inner) => model.addNode(inner, type, { n }, { x: 0, y: 0 })[0])),
);

function edited(edits: Edit[]): History {
  const begun = model.begin({ graph: START, positions: {} });
  return edits.reduce((history, change) => model.commit(history, { ...history.present, graph: change(history.present.graph) }), begun);
}

test("undoing any edits gives the document back, and redoing them the edited one", () => {
  fc.assert(
    fc.property(fc.array(edit, { maxLength: 30 }), (edits) => {
      const history = edited(edits);
      const steps = history.past.length;
      let undone = history;
      for (let step = 0; step < steps; step++) undone = model.undo(undone);
      assert.equal(undone.present.graph, START);
      assert.equal(model.undo(undone), undone);
      let redone = undone;
      for (let step = 0; step < steps; step++) redone = model.redo(redone);
      assert.deepEqual(redone.present, history.present);
      assert.equal(model.redo(redone), redone);
    }),
  );
});

test("unknown fields and node types survive edits of anything else, byte for byte", () => {
  const text = JSON.stringify(START, null, 3);
  const origin = read(text);
  fc.assert(
    fc.property(fc.array(edit, { maxLength: 12 }), (edits) => {
      const graph = edits.reduce((found, change) => change(found), origin.value as Graph);
      const { nodes: _nodes, edges: _edges, ...rest } = graph;
      assert.deepEqual(rest, { id: "start", ...UNKNOWN });
      const written = write(graph, origin);
      assert.deepEqual(JSON.parse(written), JSON.parse(JSON.stringify(graph)));
      const untouched = model.nodeOf(graph, "a");
      const [first] = (origin.value as Graph).nodes;
      if (untouched === first) assert.ok(written.includes(text.slice(text.indexOf('"of-another-server"'), text.indexOf('"width": 3'))));
    }),
  );
});

test("edits keep ids unique and leave no edge without its nodes", () => {
  fc.assert(
    fc.property(fc.array(edit, { maxLength: 30 }), (edits) => {
      const { graph } = edited(edits).present;
      const kept = new Set(graph.nodes.map((node) => node.id));
      assert.equal(kept.size, graph.nodes.length);
      assert.equal(new Set(graph.edges.map((one) => one.id)).size, graph.edges.length);
      for (const one of graph.edges) {
        assert.ok(kept.has(one.source) && kept.has(one.target), one.id);
        assert.ok(one.data?.channel, "every edge has its channel");
      }
    }),
  );
});

test("typing in one field is one step of the history", () => {
  const at = (n: number): Snapshot => ({ graph: model.setData(START, "b", { n }), positions: {} });
  let history = model.begin({ graph: START, positions: {} });
  for (const n of [1, 2, 3]) history = model.commit(history, at(n), "b.n");
  history = model.commit(history, at(4), "b.m");
  assert.equal(history.past.length, 2);
  assert.deepEqual(model.undo(history).present.graph, at(3).graph);
  assert.equal(model.undo(model.undo(history)).present.graph, START);
});

const handle = (name: string, type = "any", channel: "flow" | "link" = "flow", many: "one" | "list" = "one") => ({ name, type, channel, many, required: false });
const shown = { title: "T", description: "", category: "Other", runs: true };
const TYPES: NodeTypes = {
  conversions: [["number", "text"]],
  node_types: [
    { ...shown, type: "echo", inputs: [handle("input")], outputs: [handle("output", "text")], data_schema: null },
    { ...shown, type: "number", inputs: [handle("input", "number")], outputs: [handle("output", "number")], data_schema: null },
    { ...shown, type: "tool", inputs: [], outputs: [handle("tool", "any", "link")], data_schema: null },
    { ...shown, type: "agent", inputs: [handle("input"), handle("tools", "any", "link", "list")], outputs: [handle("output")], data_schema: null },
    { ...shown, type: "template", inputs: null, outputs: [handle("output", "text")], data_schema: { properties: { template: { "x-penstock-handles": "placeholders" } } } },
    { ...shown, type: "map", inputs: [handle("input")], outputs: [handle("output")], data_schema: { properties: { graph: { "x-penstock-picker": "graph" } } } },
  ],
};
const catalog = catalogOf(TYPES);

test("handles fit by channel, by type and by how many edges they take", () => {
  const graph: Graph = {
    nodes: ["echo", "number", "tool", "agent", "template"].map((type) => ({ id: type, type, data: type === "template" ? { template: "{{ a.b }} \\{{ no }} {{b}}" } : {} })),
    edges: [{ id: "1", source: "number", target: "echo", data: { channel: "flow" } }],
  };
  const why = (from: string, out: string, to: string, into: string) => misfit(catalog, graph, { node: from, handle: out }, { node: to, handle: into });
  assert.match(why("echo", "output", "number", "input")!, /text does not become number/);
  assert.equal(why("number", "output", "agent", "input"), null);
  assert.match(why("agent", "output", "echo", "input")!, /one edge/);
  assert.match(why("tool", "tool", "agent", "input")!, /link does not fit flow/);
  assert.equal(why("tool", "tool", "agent", "tools"), null);
  assert.match(why("echo", "output", "echo", "input")!, /itself/);
  assert.deepEqual(handlesOf(catalog, graph, graph.nodes[4]!, "inputs").map((one) => one.name), ["a", "b"]);
  const ends = partners(catalog, graph, { node: "echo", handle: "output" }, "outputs").map((one) => one.label);
  assert.deepEqual(ends, ["agent · input", "template · a", "template · b"]);
  const circle = model.connect(graph, { node: "echo", handle: "output" }, { node: "agent", handle: "input" }, "flow");
  assert.match(misfit(catalog, circle, { node: "agent", handle: "output" }, { node: "number", handle: "input" })!, /circle/);
  assert.deepEqual(placeholders("{{x}}{{ x }}{{y-z}}"), ["x", "y-z"]);
});

test("an edge at an undeclared handle is drawn, and said to be undeclared", () => {
  const graph: Graph = { nodes: [{ id: "e", type: "echo" }, { id: "u", type: "unknown" }], edges: [{ id: "1", source: "u", sourceHandle: "odd", target: "e", targetHandle: "wrong", data: { channel: "link" } }] };
  assert.deepEqual(handlesOf(catalog, graph, graph.nodes[0]!, "inputs").map(({ name, declared }) => [name, declared]), [["input", true], ["wrong", false]]);
  assert.deepEqual(handlesOf(catalog, graph, graph.nodes[1]!, "outputs").map(({ name, channel, declared }) => [name, channel, declared]), [["odd", "link", true]]);
});

test("a problem is found at its node, in nested graphs too", () => {
  const at = (path: string) => place(START, { code: "c", path, message: "m" });
  assert.deepEqual([at("$.nodes[1].data.n").node, at("$.nodes[1].data.n").field], ["b", "$.n"]);
  assert.deepEqual([at("$.nodes[1].type").node, at("$.nodes[1].type").field], ["b", null]);
  assert.equal(at("$.edges[0].target").edge, "a-b");
  assert.deepEqual([at("$.nodes").node, at("$.nodes[9].id").node], [null, null]);
  const nested = at('$.nodes[2].data.graph.nodes[0].data.x[0]["y z"]');
  assert.deepEqual([nested.at, nested.node, nested.field], [inside, "x", '$.x[0]["y z"]']);
});

test("what is not a graph is refused with what is wrong in it", () => {
  assert.equal(model.unreadable(START), null);
  for (const [value, why] of [
    [[], /an object/],
    [{ nodes: {}, edges: [] }, /nodes is not a list/],
    [{ nodes: [{ id: "a" }], edges: [] }, /nodes\[0\] has no type/],
    [{ nodes: [{ id: "a", type: "t" }, { id: "a", type: "t" }], edges: [] }, /a twice/],
    [{ nodes: [], edges: [{ id: "e", source: "a" }] }, /no target/],
  ] as const)
    assert.match(model.unreadable(value) ?? "", why);
});
