// The reducer of an answer: recorded runs, streams that are cut and repeated, tools, and what was said before a restart.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { describe, test } from "node:test";
import fc from "fast-check";
import type { EventShown } from "../../api/types.ts";
import { applyAll, DETAIL_TYPES, isUnderWay, newAnswer, textOf, type Answer } from "./answer.ts";

interface Recorded {
  run: { status: string; cost_nanos: number; tokens_in: number; tokens_out: number };
  events: EventShown[];
}

const RUNS = ["completed", "halted-then-granted", "waiting", "whole-tree-halted"].map((name) => {
  const text = readFileSync(new URL(`../../test/${name}.json`, import.meta.url), "utf8");
  return { name, ...(JSON.parse(text) as Recorded) };
});

function numbered(...events: [string, Record<string, unknown>][]): EventShown[] {
  return events.map(([type, data], index) => ({ seq: index + 1, at_ms: 1000 + index, type, data }));
}

function answerOf(events: EventShown[]): Answer {
  const answer = newAnswer();
  applyAll(answer, events);
  return answer;
}

const said = (text: string, source = "main/guide", node = "guide"): [string, Record<string, unknown>] => [
  "text.delta",
  { node_id: node, source, text },
];
const toolCall = (name: string, key: string): [string, Record<string, unknown>] => [
  "tool.call",
  { node_id: "guide", source: "main/guide", call: { id: key, name, arguments: { key } } },
];
const call = (type: string, call_id: string, data: Record<string, unknown> = {}): [string, Record<string, unknown>] => [
  `call.${type}`,
  { call_id, kind: "tool", name: "look", node_id: "guide", ...data },
];

describe("recorded runs", () => {
  for (const { name, run, events } of RUNS) {
    test(`${name}: status and sums are those of the record`, () => {
      const answer = answerOf(events);
      assert.equal(answer.status, run.status);
      if (isUnderWay(answer.status)) return; // its record has no sums yet
      assert.equal(answer.spentNanos, run.cost_nanos);
      assert.deepEqual([answer.tokensIn, answer.tokensOut], [run.tokens_in, run.tokens_out]);
      assert.equal(answer.heldNanos, 0);
    });

    test(`${name}: cutting and repeating the stream changes nothing`, () => {
      const whole = answerOf(events);
      const cut = fc.array(fc.tuple(fc.nat(events.length), fc.nat(events.length)), { maxLength: 6 });
      fc.assert(
        fc.property(cut, (cuts) => {
          const answer = newAnswer();
          // A reader that reconnects gets everything after the last event it has, or more.
          for (const [from, to] of cuts) {
            const start = Math.min(from, answer.lastSeq);
            applyAll(answer, events.slice(start, Math.max(start, to)));
          }
          applyAll(answer, events);
          assert.deepEqual(answer, whole);
        }),
        { numRuns: 25 },
      );
    });

    if (run.status === "waiting") continue;
    test(`${name}: the events that are read of a finished answer give the same figures and tools`, () => {
      const whole = answerOf(events);
      const few = answerOf(events.filter((event) => DETAIL_TYPES.includes(event.type)));
      for (const key of ["status", "spentNanos", "tokensIn", "tokensOut", "models", "tools", "endedMs"] as const)
        assert.deepEqual(few[key], whole[key], key);
    });
  }
});

test("the text is that of the outermost agent of the node that spoke last", () => {
  const events = numbered(["run.started", {}], said("Find out: ", "main/find", "find"), said("A"), said("inner", "main/guide/sub"), said("B"));
  assert.equal(textOf(answerOf(events)), "AB");
});

test("what was said before a restart stays until the run speaks again, and is then replaced", () => {
  const before = numbered(["run.started", {}], said("One "), said("two"), ["run.resumed", {}]);
  assert.equal(textOf(answerOf(before)), "One two");
  const after = numbered(["run.started", {}], said("One "), said("two"), ["run.resumed", {}], said("One "));
  assert.equal(textOf(answerOf(after)), "One ");
});

test("two calls of one tool have a card each, in their order", () => {
  const { tools } = answerOf(
    numbered(
      ["run.started", {}],
      toolCall("look", "a"),
      toolCall("look", "b"),
      call("started", "n1"),
      call("started", "n2"),
      call("ended", "n2", { status: "fail", error: "Refused", stop_reason: "no such key", duration_ms: 5 }),
      call("ended", "n1", { status: "success", duration_ms: 9, cost_usd: 0.5 }),
    ),
  );
  assert.deepEqual(
    tools.map((tool) => [tool.arguments, tool.state, tool.message, tool.durationMs, tool.costNanos]),
    [
      [{ key: "a" }, "done", null, 9, 500_000_000],
      [{ key: "b" }, "failed", "no such key", 5, 0],
    ],
  );
});

test("a tool that a limit refused and one that a stop interrupted say so", () => {
  const { tools, status } = answerOf(
    numbered(
      toolCall("look", "a"),
      call("ended", "n1", { status: "halt", stop: { message: "no money left" } }),
      toolCall("look", "b"),
      call("started", "n2"),
      ["run.cancelled", { cost_usd: 0 }],
    ),
  );
  assert.equal(status, "cancelled");
  assert.deepEqual(
    tools.map((tool) => [tool.state, tool.message]),
    [
      ["refused", "no money left"],
      ["interrupted", null],
    ],
  );
});

test("money that is held is shown until its call ends, and the record of the run counts at the end", () => {
  const events = numbered(
    ["run.started", {}],
    ["call.started", { call_id: "n1", kind: "llm", model: "m", held_usd: 0.25 }],
    ["call.ended", { call_id: "n1", kind: "llm", model: "m", cost_usd: 0.1, tokens_in: 3, tokens_out: 4 }],
    ["call.ended", { call_id: "n2", kind: "llm", cost_usd: null }],
    ["run.completed", { cost_usd: 0.125, tokens_in: 5, tokens_out: 6, unknown_costs: 1 }],
  );
  assert.equal(answerOf(events.slice(0, 2)).heldNanos, 250_000_000);
  const open = answerOf(events.slice(0, 4));
  assert.deepEqual([open.heldNanos, open.spentNanos, open.unknownCosts], [0, 100_000_000, 1]);
  const closed = answerOf(events);
  assert.deepEqual([closed.spentNanos, closed.tokensIn, closed.tokensOut, closed.unknownCosts], [125_000_000, 5, 6, 1]);
});

test("an answer that waits for an approval goes on when it is answered", () => {
  const events = numbered(
    ["run.started", {}],
    ["approval.requested", { approval: { id: "p1" } }],
    ["run.waiting", {}],
    ["approval.answered", { approval_id: "p1" }],
  );
  const waiting = answerOf(events.slice(0, 3));
  assert.deepEqual([waiting.status, waiting.approvals], ["waiting", ["p1"]]);
  assert.deepEqual([answerOf(events).status, answerOf(events).approvals], ["running", []]);
});
