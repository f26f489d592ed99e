import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import { CallTable } from "./calls.ts";
import { diffLines, pairNodes, useByNode } from "./compare.ts";

function table(calls: [string, string | null, Record<string, unknown>][]): CallTable {
  const made = new CallTable(1);
  for (const [call_id, node_id, more] of calls) {
    made.begin({ call_id, node_id, kind: "llm", name: call_id, ...more }, 100, false);
    made.finish({ call_id, status: "success", ...more }, 150);
  }
  return made;
}

test("a node's use is that of its calls, iterations together, without what the journal gave", () => {
  const found = useByNode(
    table([
      ["n1", "each", { kind: "system", node_type: "map" }],
      ["n2", "each/0/read", { cost_usd: 0.25, tokens_in: 2, tokens_out: 1 }],
      ["n3", "each/11/read", { cost_usd: 0.5 }],
      ["n4", "each/1/read", { cost_usd: 8, replayed: true }],
      ["n5", null, { cost_usd: 4 }],
    ]),
  );
  assert.deepEqual(Object.fromEntries(found), {
    each: { calls: 0, costNanos: 0, tokens: 0, ms: 50 },
    "each/*/read": { calls: 3, costNanos: 750_000_000, tokens: 3, ms: 0 },
  });
});

test("nodes that one run does not have are paired with nothing", () => {
  const [a, b] = [useByNode(table([["n1", "a", {}]])), useByNode(table([["n1", "b", {}]]))];
  assert.deepEqual(
    pairNodes(a, b).map(({ node, one, other }) => [node, one !== null, other !== null]),
    [
      ["a", true, false],
      ["b", false, true],
    ],
  );
});

test("the lines of a difference give both texts again, and mark no more than they have to", () => {
  const text = fc.array(fc.constantFrom("a", "b", "c", ""), { maxLength: 12 }).map((lines) => lines.join("\n"));
  fc.assert(
    fc.property(text, text, (one, other) => {
      const lines = diffLines(one, other)!;
      const without = (kind: string) => lines.filter((line) => line.kind !== kind).map((line) => line.text).join("\n");
      assert.equal(without("added"), one);
      assert.equal(without("removed"), other);
      if (one === other) assert.ok(lines.every(({ kind }) => kind === "same"));
    }),
  );
});

test("texts that are too long to compare are not compared", () => {
  const long = (word: string) => Array.from({ length: 2_000 }, (_, line) => `${word} ${line}`).join("\n");
  assert.equal(diffLines(long("one"), long("other")), null);
  assert.equal(diffLines(long("one"), `${long("one")}\nmore`)!.at(-1)!.kind, "added");
});
