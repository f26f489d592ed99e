import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { describe, test } from "node:test";
import fc from "fast-check";
import type { EventShown } from "../api/types.ts";
import { apply, newRun, treeRows, type RunState } from "./run.ts";

interface Recorded {
  run: { status: string; cost_nanos: number; tokens_in: number; tokens_out: number; epoch: number; last_seq: number };
  events: EventShown[];
}

function recorded(name: string): Recorded {
  return JSON.parse(readFileSync(new URL(`../test/${name}.json`, import.meta.url), "utf8")) as Recorded;
}

const RUNS = ["completed", "halted-then-granted", "waiting", "whole-tree-halted"].map((name) => ({ name, ...recorded(name) }));

function event(seq: number, type: string, data: Record<string, unknown> = {}): EventShown {
  return { seq, at_ms: 1000 + seq, type, data };
}

function numbered(events: [string, Record<string, unknown>][]): EventShown[] {
  return events.map(([type, data], index) => event(index + 1, type, data));
}

function whole(events: EventShown[]): RunState {
  const state = newRun();
  assert.equal(apply(state, events), true);
  return state;
}

/** Events of any kind and in any order, with few ids so that they concern each other. */
const anyEvents = fc
  .array(
    fc.oneof(
      fc.tuple(
        fc.constantFrom("call.started", "call.waiting", "call.ended", "call.settled"),
        fc.record({
          call_id: fc.constantFrom("n1", "n2", "n3"),
          parent_id: fc.constantFrom(null, "n1", "n2"),
          kind: fc.constantFrom("llm", "tool", "system"),
          name: fc.constant("x"),
          node_id: fc.constantFrom("a", "a/0/b"),
          status: fc.constantFrom("success", "halt"),
          cost_usd: fc.constantFrom(null, 0.01, 0.1, 0.2),
          tokens_in: fc.nat(9),
          replayed: fc.boolean(),
        }),
      ),
      fc.tuple(
        fc.constantFrom("node.started", "node.completed", "node.error", "node.progress", "text.delta", "limit"),
        fc.record({ node_id: fc.constantFrom("a", "b"), text: fc.string(), message: fc.constantFrom("no", "never") }),
      ),
      fc.tuple(
        fc.constantFrom("run.started", "run.resumed", "run.waiting", "run.halted", "run.granted", "run.completed", "new.type"),
        fc.record({ epoch: fc.constantFrom(1, 2) }),
      ),
      fc.tuple(
        fc.constant("budget"),
        fc.record({ level: fc.constantFrom("run", "node"), budget: fc.constant("main"), units: fc.constant([{ unit: "usd", spent: 0.1 }]) }),
      ),
    ),
    { maxLength: 40 },
  )
  .map((events) => numbered(events as [string, Record<string, unknown>][]));

describe("a stream of events", () => {
  for (const { name, run, events } of RUNS) {
    test(`of the recorded run “${name}” adds up to its record`, () => {
      const state = whole(events);
      assert.equal(state.lastSeq, run.last_seq);
      assert.equal(state.status, run.status);
      assert.equal(state.epoch, run.epoch);
      if (state.status === "waiting") return; // the record is brought up to date at the end
      assert.equal(state.spentNanos, run.cost_nanos);
      assert.equal(state.tokens, run.tokens_in + run.tokens_out);
    });
  }

  const anyRun = fc.oneof(anyEvents, fc.constantFrom(...RUNS.map(({ events }) => events)));

  test("gives the same state however it is split", () => {
    fc.assert(
      fc.property(anyRun, fc.array(fc.nat(200)), (events, cuts) => {
        const state = newRun();
        let from = 0;
        for (const cut of [...cuts, events.length].sort((a, b) => a - b)) {
          assert.equal(apply(state, events.slice(from, cut)), true);
          from = Math.min(cut, events.length);
        }
        assert.deepEqual(state, whole(events));
      }),
    );
  });

  test("gives the same state if parts of it come again", () => {
    fc.assert(
      fc.property(anyRun, fc.array(fc.tuple(fc.nat(200), fc.nat(200))), (events, pieces) => {
        const state = newRun();
        for (const [from, to] of pieces) apply(state, events.slice(from, to));
        assert.equal(apply(state, events), true);
        assert.deepEqual(state, whole(events));
      }),
    );
  });

  test("with an event missing is refused from there on, and continues when it comes", () => {
    const events = RUNS[0]!.events;
    const state = newRun();
    assert.equal(apply(state, events.slice(0, 10)), true);
    assert.equal(apply(state, events.slice(11)), false);
    assert.equal(state.lastSeq, 10);
    assert.equal(apply(state, events.slice(10)), true);
    assert.deepEqual(state, whole(events));
  });

  test("keeps events of unknown types and goes on", () => {
    const state = whole(numbered([["run.started", { epoch: 1 }], ["brand.new", { a: 1 }], ["run.completed", {}]]));
    assert.equal(state.status, "completed");
    assert.equal(state.events[1]!.type, "brand.new");
  });
});

describe("money", () => {
  const call = (id: string, parent: string | null, more: Record<string, unknown> = {}): Record<string, unknown> => ({
    call_id: id,
    parent_id: parent,
    kind: "llm",
    name: id,
    ...more,
  });

  test("rises to every ancestor in the tree, and is counted once", () => {
    const state = whole(
      numbered([
        ["run.started", { epoch: 1 }],
        ["call.started", call("root", null, { kind: "system" })],
        ["call.started", call("node", "root", { kind: "system", node_id: "a", node_type: "agent" })],
        ["node.started", { node_id: "a", node_type: "agent" }],
        ["call.started", call("one", "node", { node_id: "a", held_usd: 0.05 })],
        ["call.started", call("two", "node", { node_id: "a" })],
        ["call.ended", call("two", "node", { status: "success", cost_usd: 0.002, tokens_in: 1, tokens_out: 2 })],
      ]),
    );
    const costs = treeRows(state, 1).map((row) => [row.call!.id, row.depth, row.costNanos, row.heldNanos]);
    assert.deepEqual(costs, [
      ["root", 0, 2_000_000, 50_000_000],
      ["node", 1, 2_000_000, 50_000_000],
      ["one", 2, 0, 50_000_000],
      ["two", 2, 2_000_000, 0],
    ]);
    assert.equal(treeRows(state, 1)[1]!.node!.id, "a");
    assert.equal(state.spentNanos, 2_000_000);
  });

  test("of a replayed call is not spent again, and a late bill is added", () => {
    const state = whole(
      numbered([
        ["run.started", { epoch: 1 }],
        ["call.ended", call("a", null, { status: "success", cost_usd: 0.01 })],
        ["run.halted", {}],
        ["run.resumed", { epoch: 2, worked_ms: 500 }],
        ["call.ended", call("a", null, { status: "success", cost_usd: 0.01, replayed: true })],
        ["call.ended", call("b", null, { status: "fail", cost_usd: 0 })],
        ["call.settled", { call_id: "b", cost_usd: 0.03 }],
      ]),
    );
    assert.equal(state.spentNanos, 40_000_000);
    assert.deepEqual(treeRows(state, 2).map((row) => row.costNanos), [0, 30_000_000]);
    assert.deepEqual(treeRows(state, 1).map((row) => row.costNanos), [10_000_000]);
  });

  test("that nobody knows is no zero", () => {
    const state = whole(numbered([["call.ended", call("a", null, { status: "fail", cost_usd: null })]]));
    assert.equal(state.unknownCosts, 1);
    assert.equal(treeRows(state, 1)[0]!.costUnknown, true);
  });
});

test("the whole tree of a recorded run has its cost at the root, and its budgets at every level", () => {
  const { run, events } = recorded("whole-tree-halted");
  const state = whole(events);
  const [root] = treeRows(state, 1);
  assert.equal(root!.costNanos, run.cost_nanos);
  const levels = [...state.budgets.values()].map(({ level, name, node }) => [level, node ?? name.split(":")[0]]);
  assert.deepEqual(levels, [
    ["run", "main"],
    ["node", "researcher"],
    ["owner", "user"],
    ["all", "all"],
  ]);
  const paid = [...state.budgets.values()].map(({ units }) => units.find(({ unit }) => unit === "usd")!);
  assert.equal(paid[0]!.spent, run.cost_nanos);
  assert.equal(paid[1]!.spent, run.cost_nanos);
  assert.deepEqual(state.refusals.map((stop) => [stop.reason, stop.whose, stop.asked]), [["api_call_limit_exceeded", "run", 1]]);
});

test("a refusal that every ancestor reports is one refusal, with whose budget said no", () => {
  const limit = { stop_reason: "budget_exceeded", message: "no", budget: "main", whose: "run", asked: 0.5, held: 0.1 };
  const state = whole(numbered([["limit", limit], ["limit", { ...limit, cause: false }], ["limit", limit]]));
  assert.equal(state.refusals.length, 1);
  assert.equal(state.refusals[0]!.whose, "run");
  assert.equal(state.refusals[0]!.asked, 0.5);
});

test("a node's budget begins anew when the run is resumed, the run's goes on", () => {
  const budget = (level: string) => ({ level, budget: level, node_id: null, units: [{ unit: "usd", spent: 1, held: 0.5, limit: 2 }] });
  const state = whole(numbered([["budget", budget("run")], ["budget", budget("node")], ["run.resumed", { epoch: 2 }]]));
  assert.deepEqual([...state.budgets.values()].map((one) => one.level), ["run"]);
  assert.equal([...state.budgets.values()][0]!.units[0]!.held, 500_000_000);
});

test("nothing is left running when a run ends", () => {
  const state = whole(
    numbered([
      ["node.started", { node_id: "a" }],
      ["call.started", { call_id: "n1", parent_id: null, kind: "llm", name: "m", held_usd: 0.1 }],
      ["run.parked", {}],
    ]),
  );
  assert.equal([...state.nodes.values()][0]!.status, "cancelled");
  assert.equal([...state.calls.values()][0]!.status, "interrupted");
  assert.equal([...state.calls.values()][0]!.heldNanos, 0);
});
