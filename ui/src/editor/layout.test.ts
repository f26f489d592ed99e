import assert from "node:assert/strict";
import { test } from "node:test";
import type { Graph } from "./document.ts";
import { arranged } from "./layout.ts";

const chain = (count: number): Graph => ({
  nodes: Array.from({ length: count }, (_, at) => ({ id: `n${at}`, type: "text" })),
  edges: Array.from({ length: count - 1 }, (_, at) => ({ id: `e${at}`, source: `n${at}`, target: `n${at + 1}`, data: { channel: "flow" as const } })),
});

function extent(graph: Graph): { width: number; height: number; spots: number } {
  const found = [...arranged(graph, () => 1).values()];
  const [xs, ys] = [found.map(({ x }) => x), found.map(({ y }) => y)];
  const spots = new Set(found.map(({ x, y }) => `${x} ${y}`)).size;
  return { width: Math.max(...xs) - Math.min(...xs), height: Math.max(...ys) - Math.min(...ys), spots };
}

test("a short chain is one row, from left to right", () => {
  const { height, spots } = extent(chain(5));
  assert.equal(height, 0);
  assert.equal(spots, 5);
});

test("a long chain is folded into rows that fit a screen, without two nodes in one place", () => {
  for (const count of [20, 100, 300]) {
    const { width, height, spots } = extent(chain(count));
    assert.equal(spots, count);
    assert.ok(width < 4 * height && height < 4 * width, `${count}: ${width} × ${height}`);
  }
});
