import assert from "node:assert/strict";
import { it } from "node:test";
import { CallTable } from "./calls.ts";
import { figuresOf, partOf, seenNodes } from "./graph.ts";
import { newRun } from "./run.ts";

const DOCUMENT = {
  nodes: [
    { id: "start", type: "input", position: { x: 0, y: 0 } },
    { id: "each", type: "map", data: { graph: { nodes: [{ id: "read", type: "agent", data: { budget: { max_cost_usd: 0.5 } } }], edges: [] } } },
    { id: "look", type: "tool", data: { label: "Look it up" } },
  ],
  edges: [
    { id: "a", source: "start", target: "each", data: { channel: "flow" } },
    { id: "b", source: "look", target: "each", data: { channel: "link" } },
    { id: "c", source: "gone", target: "each", data: { channel: "flow" } },
  ],
};

function table(): CallTable {
  const made = new CallTable(1);
  const begin = (id: string, parent: string | null, node: string | null, type: string | null) =>
    made.begin({ call_id: id, parent_id: parent, kind: type ? "system" : "llm", name: "x", node_id: node, node_type: type }, 10, false);
  begin("n1", null, "each", "map");
  for (const item of [0, 1]) {
    begin(`n1${item}`, "n1", `each/${item}`, "item");
    begin(`n2${item}`, `n1${item}`, `each/${item}/read`, "agent");
    begin(`n3${item}`, `n2${item}`, `each/${item}/read`, null);
    made.finish({ call_id: `n3${item}`, status: "success", cost_usd: 0.001, tokens_in: 2, tokens_out: 1 }, 30);
  }
  made.finish({ call_id: "n20", status: "success", cost_usd: 0, tokens_in: 0, tokens_out: 0 }, 30);
  return made;
}

it("a graph has its nodes and edges, and a nested one is found by its path", () => {
  const part = partOf(DOCUMENT, [])!;
  assert.deepEqual(part.nodes.map(({ id, label, hasInside }) => [id, label, hasInside]), [
    ["start", "start", false],
    ["each", "each", true],
    ["look", "Look it up", false],
  ]);
  assert.deepEqual(part.edges.map(({ id, isLink }) => [id, isLink]), [["a", false], ["b", true]]);
  assert.deepEqual(part.nodes.map(({ isPart }) => isPart), [false, false, true]); // the tool is used over a link
  assert.equal(partOf(DOCUMENT, ["each"])!.nodes[0]!.limitUsd, 0.5);
  for (const odd of [null, 7, "x", [], { nodes: 3 }, { nodes: [null] }]) partOf(odd, ["each"]);
  assert.equal(partOf(DOCUMENT, ["start"]), null);
});

it("a node has the figures of all below it, and one inside a map those of all its items", () => {
  const outer = figuresOf(newRun(), table(), []).get("each")!;
  assert.deepEqual([outer.times, outer.ended, outer.status, outer.costNanos, outer.tokens], [1, 0, "running", 2_000_000, 6]);
  const inner = figuresOf(newRun(), table(), ["each"]).get("read")!;
  assert.deepEqual([inner.times, inner.ended, inner.status, inner.costNanos], [2, 1, "running", 2_000_000]);
});

it("a run without a document shows the nodes that it has entered", () => {
  assert.deepEqual(seenNodes(table()).nodes.map(({ id, type }) => [id, type]), [["each", "map"]]);
});
