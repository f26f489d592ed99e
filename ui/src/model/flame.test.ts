import assert from "node:assert/strict";
import { describe, it } from "node:test";
import fc from "fast-check";
import { CallTable } from "./calls.ts";
import { flameOf, neighbour, paint, rowAt, type Flame } from "./flame.ts";

interface Made {
  parent: number;
  start: number;
  length: number;
  cost: number;
}

/** Calls of which each is inside the time of the one that made it, as shares of that. */
const calls = fc.array(
  fc.record({
    parent: fc.nat({ max: 1000 }),
    start: fc.double({ min: 0, max: 1, noNaN: true }),
    length: fc.double({ min: 0, max: 1, noNaN: true }),
    cost: fc.nat({ max: 1_000_000 }),
  }),
  { minLength: 1, maxLength: 40 },
);

function tableOf(made: Made[]): CallTable {
  const table = new CallTable(1);
  const spans: [number, number][] = [];
  const order = made.map((call, index) => {
    const parent = index === 0 ? -1 : call.parent % index;
    const [from, to] = parent < 0 ? [1_000, 101_000] : spans[parent]!;
    const start = Math.round(from + (to - from) * call.start);
    spans.push([start, Math.round(start + (to - start) * call.length)]);
    return { index, parent, cost: call.cost };
  });
  for (const { index, parent } of order) {
    table.begin({ call_id: `n${index}`, parent_id: parent < 0 ? null : `n${parent}`, kind: "llm", name: "x" }, spans[index]![0], false);
  }
  for (const { index, cost } of order) {
    table.finish({ call_id: `n${index}`, status: "success", cost_usd: cost / 1e9, tokens_in: 3, tokens_out: 4 }, spans[index]![1]);
  }
  return table;
}

function overlaps(flame: Flame, one: number, other: number): boolean {
  return flame.lane[one] === flame.lane[other] && flame.from[one]! < flame.to[other]! && flame.from[other]! < flame.to[one]!;
}

describe("a flame", () => {
  it("by time has no two calls in one place, and every call below the one that made it", () => {
    fc.assert(
      fc.property(calls, (made) => {
        const table = tableOf(made);
        const flame = flameOf(table, "time", 0);
        for (let row = 0; row < table.count; row += 1) {
          for (let other = 0; other < row; other += 1) assert.ok(!overlaps(flame, row, other), `${row} and ${other}`);
          const above = table.parent[row]!;
          if (above >= 0) assert.ok(flame.lane[row]! > flame.lane[above]!);
          assert.ok(flame.lane[row]! < flame.lanes);
        }
      }),
    );
  });

  it("by money gives each call the width of what it and all below it cost, inside the call that made it", () => {
    fc.assert(
      fc.property(calls, (made) => {
        const table = tableOf(made);
        const flame = flameOf(table, "money", 0);
        const { costNanos } = table.tree();
        for (let row = 0; row < table.count; row += 1) {
          const width = (flame.to[row]! - flame.from[row]!) * flame.total;
          assert.ok(Math.abs(width - costNanos[row]!) < 0.01 * Math.max(1, flame.total / 1e6));
          const above = table.parent[row]!;
          if (above < 0) continue;
          assert.ok(flame.from[row]! >= flame.from[above]! - 1e-9 && flame.to[row]! <= flame.to[above]! + 1e-9);
          for (let other = 0; other < row; other += 1) {
            const shared = Math.min(flame.to[row]!, flame.to[other]!) - Math.max(flame.from[row]!, flame.from[other]!);
            if (flame.lane[row] === flame.lane[other]) assert.ok(shared < 1e-9);
          }
        }
      }),
    );
  });

  it("draws at most one rectangle for each pixel of a lane, and every call that is wider", () => {
    const made = Array.from({ length: 5_000 }, (_, index) => ({ parent: 0, start: index / 5_000, length: 1e-7, cost: 1 }));
    const table = tableOf(made);
    const flame = flameOf(table, "time", 0);
    const drawn: number[] = [];
    paint(table, flame, { from: 0, to: 1, width: 300, firstLane: 0, lanes: flame.lanes }, (row) => drawn.push(row));
    assert.ok(drawn.length <= 302 * flame.lanes, String(drawn.length));
    assert.ok(drawn.includes(0));
  });

  it("of a run without costs is empty, and does not divide by zero", () => {
    const table = tableOf([{ parent: 0, start: 0, length: 1, cost: 0 }]);
    const flame = flameOf(table, "money", 0);
    assert.equal(flame.total, 0);
    assert.deepEqual([...flame.to], [0]);
  });

  it("is walked by the arrow keys and hit by a pointer", () => {
    const part = { length: 0.4, cost: 1 };
    const table = tableOf([{ parent: 0, start: 0, ...part, length: 1 }, { parent: 0, start: 0, ...part }, { parent: 0, start: 0.5, ...part }]);
    const flame = flameOf(table, "time", 0);
    assert.equal(neighbour(table, 1, "ArrowRight"), 2);
    assert.equal(neighbour(table, 2, "ArrowLeft"), 1);
    assert.equal(neighbour(table, 2, "ArrowUp"), 0);
    assert.equal(neighbour(table, 0, "ArrowDown"), 1);
    assert.equal(neighbour(table, 0, "ArrowLeft"), -1);
    for (const row of [0, 1, 2]) {
      assert.equal(rowAt(table, flame, (flame.from[row]! + flame.to[row]!) / 2, flame.lane[row]!), row);
    }
  });
});
