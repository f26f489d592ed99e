import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { describe, test } from "node:test";
import fc from "fast-check";
import { takenApart } from "../api/joined.ts";
import type { EventShown, RunTree } from "../api/types.ts";
import { joinedText } from "../test/joined.ts";
import type { Call } from "./calls.ts";
import { apply, applyHistory, budgetsAt, costByNode, fromColumns, HISTORY_TYPES, KNOWN_TYPES, newRun, payersOf, setStored, statusAt, tableOf, usageOf, visibleRows, type RunState } from "./run.ts";

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

interface Shown extends Call {
  depth: number;
  sumNanos: number;
  sumHeld: number;
}

/** The rows of an attempt's tree as the page shows them. */
function treeRows(state: RunState, epoch = state.epoch, atMs: number | null = null): Shown[] {
  const table = tableOf(state, epoch);
  const tree = table.tree(atMs);
  return [...visibleRows(table, atMs, new Set())].map((row) => ({
    ...table.callAt(row, atMs)!,
    depth: tree.depth[row]!,
    sumNanos: tree.costNanos[row]!,
    sumHeld: tree.heldNanos[row]!,
  }));
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
        fc.constantFrom("call.started", "call.waiting", "call.ended", "call.settled", "bill.resolved"),
        fc.record({
          call_id: fc.constantFrom("n1", "n2", "n3", "1-a/n1", "2-b/n2", "3-c/n3"),
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
      assert.equal(usageOf(state).spentNanos, run.cost_nanos);
      assert.equal(usageOf(state).tokens, run.tokens_in + run.tokens_out);
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

  test("gives the same state if texts were joined on the way, and parts of it come again", () => {
    fc.assert(
      fc.property(anyRun, fc.array(fc.boolean(), { maxLength: 40 }), fc.array(fc.nat(200)), (events, cuts, places) => {
        const state = newRun();
        for (const place of [...places.sort((a, b) => a - b), 0]) {
          const from = Math.min(place, state.lastSeq);
          const sent = joinedText(events.slice(from), cuts).flatMap(({ joined, ...event }) => takenApart(event, joined));
          assert.equal(apply(state, sent), true);
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

  test("has no type that the page does not know", () => {
    for (const { events } of RUNS) for (const { type } of events) assert.ok(KNOWN_TYPES.has(type), type);
    for (const type of HISTORY_TYPES) assert.ok(KNOWN_TYPES.has(type), type);
  });

  test("keeps events of unknown types and goes on", () => {
    const state = whole(numbered([["run.started", { epoch: 1 }], ["brand.new", { a: 1 }], ["run.completed", {}]]));
    assert.equal(state.status, "completed");
    assert.equal(state.log.get(2)!.type, "brand.new");
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
    const costs = treeRows(state, 1).map((row) => [row.id, row.depth, row.sumNanos, row.sumHeld]);
    assert.deepEqual(costs, [
      ["root", 0, 2_000_000, 50_000_000],
      ["node", 1, 2_000_000, 50_000_000],
      ["one", 2, 0, 50_000_000],
      ["two", 2, 2_000_000, 0],
    ]);
    assert.equal(treeRows(state, 1)[1]!.node, "a");
    assert.equal(usageOf(state).spentNanos, 2_000_000);
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
    assert.equal(usageOf(state).spentNanos, 40_000_000);
    assert.deepEqual(treeRows(state, 2).map((row) => row.sumNanos), [0, 30_000_000]);
    assert.deepEqual(treeRows(state, 1).map((row) => row.sumNanos), [10_000_000]);
  });

  test("of a bill that a person has resolved is that of its call, in the attempt that made it", () => {
    const bill = (call_id: string, cost_usd: number) => ["bill.resolved", { call_id, cost_usd, tokens_in: 7, tokens_out: 3 }] as [string, Record<string, unknown>];
    const state = whole(
      numbered([
        ["run.started", { epoch: 1 }],
        ["call.started", call("root", null, { kind: "system" })],
        ["call.ended", call("n1", "root", { status: "fail", cost_usd: 0 })],
        ["run.halted", {}],
        bill("1-534fa4e1e110/n1", 0.02),
        ["run.resumed", { epoch: 2 }],
        ["call.ended", call("n1", null, { status: "success", cost_usd: 0.01 })],
        bill("1-534fa4e1e110/n9", 0.04),
        bill("odd", 0.08),
      ]),
    );
    assert.deepEqual(treeRows(state, 1).map((row) => row.sumNanos), [20_000_000, 20_000_000]);
    assert.deepEqual(treeRows(state, 2).map((row) => row.sumNanos), [10_000_000]);
    assert.equal(usageOf(state).spentNanos, 150_000_000);
    assert.equal(usageOf(state).tokens, 30);
  });

  test("that nobody knows is no zero", () => {
    const state = whole(numbered([["call.ended", call("a", null, { status: "fail", cost_usd: null })]]));
    assert.equal(usageOf(state).unknownCosts, 1);
    assert.equal(treeRows(state, 1)[0]!.costUnknown, true);
  });
});

test("the whole tree of a recorded run has its cost at the root, and its budgets at every level", () => {
  const { run, events } = recorded("whole-tree-halted");
  const state = whole(events);
  const [root] = treeRows(state, 1);
  assert.equal(root!.sumNanos, run.cost_nanos);
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

test("calls of a lost worker end with its last event, not with the run", () => {
  const state = whole([
    event(1, "run.started", { epoch: 1 }),
    event(2, "call.started", { call_id: "n1", parent_id: null, kind: "llm", name: "m" }),
    { ...event(3, "run.resumed", { epoch: 2 }), at_ms: 20_000 },
    { ...event(4, "run.cancelled"), at_ms: 30_000 },
  ]);
  const [lost] = treeRows(state, 1);
  assert.deepEqual([lost!.status, lost!.endedMs], ["interrupted", 1002]);
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
  assert.equal(treeRows(state)[0]!.status, "interrupted");
  assert.equal(treeRows(state)[0]!.heldNanos, 0);
});

describe("columns", () => {
  const trees = JSON.parse(readFileSync(new URL("../test/trees.json", import.meta.url), "utf8")) as Record<string, RunTree[]>;
  /** What columns do not have: holds, and how a model or an error explained an end. */
  const known = (state: RunState) =>
    treeRows(state).map(({ heldNanos: _h, sumHeld: _s, finishReason: _f, error: _e, beganMs: _b, startedMs: _t, ...call }) => call);

  for (const { name, events } of RUNS) {
    test(`of the recorded run “${name}” and the events after them give the same calls as all events`, () => {
      for (const tree of trees[name]!) {
        const state = fromColumns(structuredClone(tree));
        const upTo = whole(events.slice(0, tree.last_seq));
        if (upTo.status === tree.status) assert.deepEqual(known(state), known(upTo));
        assert.equal(apply(state, events.slice(Math.max(0, tree.last_seq - 5))), true);
        const all = whole(events);
        assert.deepEqual(known(state), known(all));
        assert.equal(state.status, all.status);
        assert.equal(usageOf(state).spentNanos + earlier(all, state), usageOf(all).spentNanos);
      }
    });

    test(`of the recorded run “${name}” get their budgets and refusals from its history`, () => {
      for (const tree of trees[name]!) {
        const state = fromColumns(structuredClone(tree));
        apply(state, events.slice(tree.last_seq));
        applyHistory(state, events.filter(({ type }) => HISTORY_TYPES.includes(type)));
        const all = whole(events);
        assert.deepEqual(byKey(state), byKey(all));
        assert.deepEqual(state.refusals, all.refusals);
        assert.deepEqual(state.statuses, all.statuses);
        assert.equal(state.workedMs, all.workedMs);
      }
    });
  }

  const byKey = (state: RunState) => [...state.budgets.values()].sort((one, other) => one.key.localeCompare(other.key));

  /** What attempts before those of the columns have spent. */
  const earlier = (all: RunState, state: RunState) =>
    [...all.attempts].filter(([epoch]) => !state.attempts.has(epoch)).reduce((sum, [, table]) => sum + ofTable(table), 0);
  const ofTable = (table: RunState["attempts"] extends Map<number, infer T> ? T : never) =>
    table.tree().order.filter((row) => table.parent[row]! < 0).reduce((sum, row) => sum + table.tree().costNanos[row]!, 0);
});

test("sums of the tree are those of the run, in any stream", () => {
  fc.assert(
    fc.property(anyEvents, (events) => {
      const state = whole(events);
      let total = state.strayNanos;
      for (const epoch of state.attempts.keys()) {
        for (const row of treeRows(state, epoch)) if (row.depth === 0) total += row.sumNanos;
      }
      assert.equal(total, usageOf(state).spentNanos);
    }),
  );
});

test("the cost of a node is that of its calls in all attempts, without those that were replayed", () => {
  const made = (call_id: string, node_id: string | null, cost_usd: number, replayed = false) => [
    ["call.started", { call_id, node_id, parent_id: null, kind: "llm", name: call_id, replayed }],
    ["call.ended", { call_id, node_id, status: "success", cost_usd, replayed }],
  ] as [string, Record<string, unknown>][];
  const state = whole(numbered([...made("a", "ask", 0.001), ...made("b", "ask", 0.002), ...made("c", "each/1/read", 0.004), ...made("d", "ask", 0.008, true), ...made("e", null, 0.016)]));
  assert.deepEqual([...costByNode(state)], [["ask", 3_000_000], ["each/1/read", 4_000_000]]);
});

test("an earlier moment shows what had begun by then, and what was spent and budgeted", () => {
  const { events } = recorded("whole-tree-halted");
  const state = whole(events);
  const at = (seq: number) => events[seq - 1]!.at_ms;
  assert.deepEqual(treeRows(state, 1, at(14)).map((row) => [row.id, row.status]), [
    ["n000001", "running"],
    ["n000002", "success"],
    ["n000003", "running"],
    ["n000004", "running"],
    ["n000005", "running"],
  ]);
  assert.equal(usageOf(state, at(14)).spentNanos, 0);
  assert.equal(usageOf(state, at(69)).spentNanos, 27_750);
  assert.equal(statusAt(state, at(14)), "running");
  assert.equal(statusAt(state, at(69)), "halted");
  assert.deepEqual(budgetsAt(state, at(14)).map(({ level }) => level), ["run", "node"]);
});

test("daily budgets are those of the ledger until an event has newer figures, and of an earlier moment only those of events", () => {
  const units = (spent: number) => [{ unit: "usd" as const, spent, held: 0, unresolved: 0, waiting: 0, limit: 1, left: 1 - spent }];
  const day = { budget: "user:ann:2026-11-19", level: "owner" as const, node_id: null };
  const run = { budget: "main", level: "run" as const, node_id: null, units: units(0.1) };
  const figures = (state: RunState, atMs: number | null) =>
    budgetsAt(state, atMs).map(({ level, units: [one], isStored }) => [level, one!.spent, isStored ?? false]);
  const state = whole(numbered([["run.started", { epoch: 1 }], ["budget", run]]));
  setStored(state, { budgets: [run, { ...day, units: units(0.25) }], last_seq: 2 });
  assert.deepEqual(figures(state, null), [["run", 1e8, false], ["owner", 25e7, true]]);
  assert.deepEqual(figures(state, 1002), [["run", 1e8, false]]);
  assert.ok(apply(state, [event(3, "budget", { ...day, units: units(0.3) })]));
  assert.deepEqual(figures(state, null), [["run", 1e8, false], ["owner", 3e8, false]]);
  setStored(state, { budgets: [{ ...day, units: units(0.4) }], last_seq: 3 });
  assert.deepEqual(figures(state, null), [["run", 1e8, false], ["owner", 4e8, true]]); // another run has spent more
  assert.ok(apply(state, [event(4, "run.completed")]));
  assert.deepEqual(figures(state, null), [["run", 1e8, false], ["owner", 3e8, false]]); // as when this run ended
});

test("what a lost worker has left unresolved is in the run's own budget, and counted once", () => {
  const run = (unresolved: number) => ({
    ...{ budget: "main", level: "run" as const, node_id: null },
    units: [{ unit: "usd" as const, spent: 0.1, held: 0, unresolved, waiting: 0, limit: 1, left: 0.9 - unresolved }],
  });
  const unresolved = (state: RunState, atMs: number | null) => budgetsAt(state, atMs)[0]!.units[0]!.unresolved;
  const state = whole(numbered([["run.resumed", { epoch: 2 }], ["budget", run(0)]]));
  setStored(state, { budgets: [{ ...run(0.3), budget: "run:r" }], last_seq: 2 });
  assert.equal(unresolved(state, null), 3e8);
  assert.equal(unresolved(state, 1002), 0);
  assert.ok(apply(state, [event(3, "budget", run(0.4))]));
  assert.equal(unresolved(state, null), 4e8);
});

test("a call that was cancelled is none that a limit has refused", () => {
  const stop = { reason: "aborted", message: "cancelled", budget: "run r", unit: null, cause: true };
  const state = whole(
    numbered([
      ["run.started", { epoch: 1 }],
      ["call.started", { call_id: "n1", parent_id: null, kind: "llm", name: "m" }],
      ["call.ended", { call_id: "n1", parent_id: null, kind: "llm", name: "m", status: "halt", cost_usd: 0, stop }],
      ["limit", { ...stop, stop_reason: "aborted", call_id: "n1" }],
    ]),
  );
  assert.deepEqual(state.refusals, []);
  assert.equal(treeRows(state)[0]!.stop!.cause, false);
});

test("a call is paid for by its nodes from the inside out, the run, its owner's day and everyone's day", () => {
  const budget = (level: string, node: string | null = null) => ({ key: level + node, name: level, level, node, units: [] });
  const budgets = [budget("all"), budget("run"), budget("node", "each"), budget("node", "each/1/read"), budget("node", "other"), budget("owner")];
  const payers = payersOf(budgets, "each/1/read").map(({ level, node }) => node ?? level);
  assert.deepEqual(payers, ["each/1/read", "each", "run", "owner", "all"]);
});

test("a tree without what is collapsed, and only with what matches, keeps its order", () => {
  const call = (id: string, parent: string | null, name = id) => ["call.started", { call_id: id, parent_id: parent, kind: "llm", name }] as [string, Record<string, unknown>];
  const table = tableOf(whole(numbered([call("a", null), call("b", "a"), call("c", "a"), call("d", "b"), call("e", null)])));
  const ids = (rows: Int32Array) => [...rows].map((row) => table.ids[row]);
  assert.deepEqual(ids(visibleRows(table, null, new Set())), ["a", "b", "d", "c", "e"]);
  assert.deepEqual(ids(visibleRows(table, null, new Set([1]))), ["a", "b", "c", "e"]);
  assert.deepEqual(ids(visibleRows(table, null, new Set([0]), (row) => table.ids[row] === "d")), ["a", "b", "d"]);
});
