// A run as its events describe it.
//
// The model is a reducer over numbered events: an event that was applied already is dropped, one that is ahead of the
// next is refused, so any split or repetition of a stream gives the same state. A long run begins with the server's
// columns of its calls instead, and continues with the events after them. What happened before is kept by its time, so
// that the page can show any earlier moment. The model knows nothing of HTTP or of React.

import type { BudgetList, BudgetShown, EventShown, RunEvent, RunTree } from "../api/types.ts";
import { CallTable, COST_UNKNOWN, maybeText, number, REPLAYED, stopOf, text, type Stop } from "./calls.ts";
import { EventLog } from "./event-log.ts";
import { toNanos } from "./money.ts";

export type { Call, Stop } from "./calls.ts";
export type Status = "queued" | "running" | "waiting" | "parked" | "completed" | "failed" | "halted" | "cancelled";

/** What is spent, held, unresolved and waited for of one ceiling; the unit of money is a billionth of a dollar. */
export interface Figures {
  unit: string;
  spent: number;
  held: number;
  unresolved: number;
  waiting: number;
  limit: number | null;
}

export interface Budget {
  key: string;
  name: string;
  level: string;
  node: string | null;
  units: Figures[];
  /** Whether the figures were read from the ledger, and are those of now. */
  isStored?: true;
}

export interface NodeState {
  id: string;
  epoch: number;
  type: string;
  status: "running" | "completed" | "error" | "cancelled" | "skipped";
  startedMs: number;
  endedMs: number | null;
  message: string | null;
  text: string;
  replayed: boolean;
  progress: number;
}

export interface Refusal extends Stop {
  seq: number;
  atMs: number;
  call: string | null;
  node: string | null;
}

/** Something that changed at a moment; `seq` orders what came at the same time. */
interface Change<T> {
  seq: number;
  atMs: number;
  value: T;
}

export interface RunState {
  lastSeq: number;
  /** The event up to which the server's columns were read; what was before has no node events. */
  columnsSeq: number;
  status: Status;
  epoch: number;
  startedMs: number | null;
  endedMs: number | null;
  /** Time worked in earlier attempts, and when the current one began: the run's time limit counts both. */
  workedMs: number;
  resumedMs: number | null;
  /** Bills of calls that are not in any table. */
  strayNanos: number;
  strayTokens: number;
  nodes: Map<string, NodeState>;
  attempts: Map<number, CallTable>;
  refusals: Refusal[];
  budgets: Map<string, Budget>;
  /** What the ledger has, and events may not: daily budgets above a short run, bills of a lost worker. */
  stored: Budget[];
  /** The event up to which the ledger was read. */
  storedSeq: number;
  log: EventLog;
  statuses: Change<Status>[];
  budgetChanges: Change<Budget>[];
  /** The newest `limit` event: each ancestor of a refused call reports the refusal, one after the other. */
  limitSeq: number;
}

const ENDINGS: Record<string, Status> = {
  "run.completed": "completed",
  "run.failed": "failed",
  "run.halted": "halted",
  "run.cancelled": "cancelled",
  "run.parked": "parked",
};
const MAX_TEXT = 20_000;
/** The id of a bill: the attempt, its worker's mark, and the call, such as 1-534fa4e1e110/n000004. */
const BILL = /^(\d+)-[^/]*\/([^/]+)/;

/** Events that columns of calls do not replace: few, and enough for budgets and refusals of any moment. */
export const HISTORY_TYPES = [
  ...["run.queued", "run.started", "run.resumed", "run.waiting", "run.granted", ...Object.keys(ENDINGS)],
  ...["approval.answered", "budget", "limit", "node.skipped", "node.error"],
];

/** Types of events of the server that this page is built for; the compiler misses one that is not here. */
const KNOWN: Record<RunEvent["type"], true> = {
  "run.queued": true,
  "run.started": true,
  "run.resumed": true,
  "run.parked": true,
  "run.waiting": true,
  "run.granted": true,
  "run.completed": true,
  "run.failed": true,
  "run.halted": true,
  "run.cancelled": true,
  "approval.requested": true,
  "approval.answered": true,
  "bill.resolved": true,
  "bill.released": true,
  "node.started": true,
  "node.completed": true,
  "node.error": true,
  "node.cancelled": true,
  "node.skipped": true,
  "node.progress": true,
  "text.delta": true,
  "tool.call": true,
  "call.started": true,
  "call.waiting": true,
  "call.ended": true,
  "call.settled": true,
  limit: true,
  budget: true,
  "price.unknown": true,
  "program.changed": true,
};

/** Types of events that the page knows; others are shown as they are. */
export const KNOWN_TYPES: ReadonlySet<string> = new Set(Object.keys(KNOWN));

export function isLive(status: Status): boolean {
  return status === "queued" || status === "running" || status === "waiting";
}

/** How long the run has worked, without the time it was queued or parked. */
export function elapsedMs(state: RunState, nowMs: number): number {
  if (state.resumedMs === null) return 0;
  return state.workedMs + Math.max(0, Math.min(state.endedMs ?? nowMs, nowMs) - state.resumedMs);
}

export function newRun(): RunState {
  return {
    lastSeq: 0,
    columnsSeq: 0,
    status: "queued",
    epoch: 1,
    startedMs: null,
    endedMs: null,
    workedMs: 0,
    resumedMs: null,
    strayNanos: 0,
    strayTokens: 0,
    nodes: new Map(),
    attempts: new Map(),
    refusals: [],
    budgets: new Map(),
    stored: [],
    storedSeq: 0,
    log: new EventLog(),
    statuses: [],
    budgetChanges: [],
    limitSeq: 0,
  };
}

/** A run as of the server's columns; the events after them continue it. */
export function fromColumns(tree: RunTree): RunState {
  const state = newRun();
  const table = CallTable.from(tree);
  const [, last] = table.span();
  state.lastSeq = state.columnsSeq = state.log.lastSeq = tree.last_seq;
  state.status = tree.status;
  state.epoch = tree.epoch || 1;
  state.attempts.set(state.epoch, table);
  state.startedMs = state.resumedMs = tree.base_ms || null;
  if (!isLive(tree.status)) {
    state.endedMs = last || tree.base_ms;
    table.closeOpen(last);
  }
  return state;
}

/** Add what happened before the columns; events that came since count more. */
export function applyHistory(state: RunState, events: EventShown[]): void {
  const before = newRun();
  for (const event of events) if (event.seq <= state.columnsSeq) applyOne(before, event);
  const [first, ...others] = state.refusals;
  const repeated = first && first.seq === before.limitSeq + 1 && first.message === before.refusals.at(-1)?.message;
  state.refusals = [...before.refusals, ...(repeated ? others : state.refusals)];
  state.statuses = [...before.statuses, ...state.statuses];
  state.budgetChanges = [...before.budgetChanges, ...state.budgetChanges];
  const sameAttempt = before.epoch === state.epoch;
  if (sameAttempt) nameNodes(state, before);
  for (const [key, budget] of before.budgets) {
    if (!state.budgets.has(key) && (sameAttempt || budget.level !== "node")) state.budgets.set(key, budget);
  }
  for (const [key, node] of before.nodes) if (!state.nodes.has(key)) state.nodes.set(key, node);
  if (before.startedMs !== null) state.startedMs = before.startedMs;
  if (sameAttempt && before.resumedMs !== null) {
    state.workedMs = before.workedMs;
    state.resumedMs = before.resumedMs;
  }
  if (!isLive(state.status)) state.endedMs = before.endedMs ?? state.endedMs;
}

/** The last figures of a node's budget may come without its node, which earlier events have named. */
function nameNodes(state: RunState, before: RunState): void {
  for (const [key, budget] of state.budgets) {
    if (budget.level !== "node" || budget.node !== null) continue;
    const named = [...before.budgets.values()].find(({ level, name }) => level === "node" && name === budget.name);
    if (!named) continue;
    state.budgets.delete(key);
    Object.assign(budget, { key: named.key, node: named.node });
    state.budgets.set(named.key, budget);
  }
}

/** Apply events in order; returns false if one is missing before them, and the rest was left out. */
export function apply(state: RunState, events: Iterable<EventShown>): boolean {
  for (const event of events) {
    if (event.seq <= state.lastSeq) continue;
    if (event.seq !== state.lastSeq + 1) return false;
    state.lastSeq = event.seq;
    state.log.add(event);
    applyOne(state, event);
  }
  return true;
}

export function tableOf(state: RunState, epoch = state.epoch): CallTable {
  let table = state.attempts.get(epoch);
  if (!table) {
    table = new CallTable(epoch);
    state.attempts.set(epoch, table);
  }
  return table;
}

function applyOne(state: RunState, event: EventShown): void {
  const { type, data, at_ms } = event;
  const before = state.status;
  if (type.startsWith("run.")) applyRun(state, event);
  else if (type.startsWith("node.")) applyNode(state, event);
  else if (type === "call.started" || type === "call.waiting") tableOf(state).begin(data, at_ms, type === "call.waiting");
  else if (type === "call.ended") tableOf(state).finish(data, at_ms);
  else if (type === "call.settled") settle(state, data, state.epoch, text(data.call_id));
  else if (type === "bill.resolved") {
    const [, epoch = "", id = ""] = BILL.exec(text(data.call_id)) ?? [];
    settle(state, data, Number(epoch), id);
  }
  else if (type === "budget") setBudget(state, event);
  else if (type === "limit") addRefusal(state, event);
  else if (type === "text.delta") {
    const node = state.nodes.get(keyOf(state, text(data.node_id)));
    if (node) node.text = (node.text + text(data.text)).slice(-MAX_TEXT);
  } else if (type === "approval.answered" && state.status === "waiting") state.status = "running";
  if (state.status !== before || event.seq === 1) {
    state.statuses.push({ seq: event.seq, atMs: at_ms, value: state.status });
  }
}

function applyRun(state: RunState, { seq, type, data, at_ms }: EventShown): void {
  const ending = ENDINGS[type];
  if (ending) {
    state.status = ending;
    state.endedMs = at_ms;
    closeOpen(state, at_ms);
  } else if (type === "run.queued" || type === "run.granted") {
    state.status = "queued";
    state.endedMs = null;
  } else if (type === "run.started" || type === "run.resumed") {
    // A worker that was lost has reported no ends: its last event is the last that is known of its calls.
    closeOpen(state, state.log.get(seq - 1)?.at_ms ?? at_ms);
    state.status = "running";
    state.epoch = number(data.epoch) || 1;
    state.startedMs ??= at_ms;
    state.workedMs = number(data.worked_ms);
    state.resumedMs = at_ms;
    state.endedMs = null;
    state.attempts.set(state.epoch, new CallTable(state.epoch));
    // Budgets of nodes begin anew in each attempt; those of the run and of days go on.
    for (const [key, budget] of state.budgets) if (budget.level === "node") state.budgets.delete(key);
  } else if (type === "run.waiting") state.status = "waiting";
}

function closeOpen(state: RunState, atMs: number): void {
  for (const node of state.nodes.values()) {
    if (node.status === "running") {
      node.status = "cancelled";
      node.endedMs = atMs;
    }
  }
  for (const table of state.attempts.values()) table.closeOpen(atMs);
}

function applyNode(state: RunState, { type, data, at_ms }: EventShown): void {
  const id = text(data.node_id);
  const what = type.slice("node.".length);
  const key = keyOf(state, id);
  let node = state.nodes.get(key);
  if (!node || what === "started") {
    node = {
      id,
      epoch: state.epoch,
      type: text(data.node_type),
      status: "running",
      startedMs: at_ms,
      endedMs: null,
      message: null,
      text: "",
      replayed: data.replayed === true,
      progress: 0,
    };
    state.nodes.set(key, node);
  }
  if (what === "progress") node.progress += 1;
  if (what === "completed" || what === "error" || what === "cancelled" || what === "skipped") {
    node.status = what;
    node.endedMs = at_ms;
    node.message = typeof data.message === "string" ? data.message : null;
  }
}

/** Ids begin anew in each attempt of a run. */
function keyOf(state: RunState, id: string): string {
  return `${state.epoch}:${id}`;
}

/** Add a late bill to its call, or to the run if the call is not known. */
function settle(state: RunState, data: Record<string, unknown>, epoch: number, id: string): void {
  if (state.attempts.get(epoch)?.settle({ ...data, call_id: id })) return;
  state.strayNanos += toNanos(data.cost_usd);
  state.strayTokens += number(data.tokens_in) + number(data.tokens_out);
}

function setBudget(state: RunState, event: EventShown): void {
  const budget = budgetOf(event.data, state.budgets.values());
  state.budgets.set(budget.key, budget);
  state.budgetChanges.push({ seq: event.seq, atMs: event.at_ms, value: budget });
}

/** A budget as events and `/budgets` have it. */
export function budgetOf(data: Record<string, unknown> | BudgetShown, known: Iterable<Budget> = []): Budget {
  const level = text(data.level);
  const name = text(data.budget);
  const given = maybeText(data.node_id);
  // The last figures of a node's budget may come without its node, when that has ended.
  const before = given === null ? [...known].find((one) => one.level === level && one.name === name) : undefined;
  const node = before?.node ?? given;
  const key = before?.key ?? `${level}:${node ?? ""}:${name}`;
  const units = Array.isArray(data.units) ? (data.units as Record<string, unknown>[]).map(figuresOf) : [];
  return { key, name, level, node, units };
}

function figuresOf(given: Record<string, unknown>): Figures {
  const unit = text(given.unit);
  const amount = (value: unknown) => (unit === "usd" ? toNanos(value) : number(value));
  return {
    unit,
    spent: amount(given.spent),
    held: amount(given.held),
    unresolved: amount(given.unresolved),
    waiting: amount(given.waiting),
    limit: given.limit == null ? null : amount(given.limit),
  };
}

/** Only the cause of a refusal is kept, not the same stop at each ancestor. */
function addRefusal(state: RunState, { seq, data, at_ms }: EventShown): void {
  const stop = stopOf(data)!;
  const repeated = state.limitSeq === seq - 1 && state.refusals.at(-1)?.message === stop.message;
  state.limitSeq = seq;
  if (!stop.cause || repeated) return;
  state.refusals.push({ ...stop, seq, atMs: at_ms, call: maybeText(data.call_id), node: maybeText(data.node_id) });
}

export interface Usage {
  /** Known cost of the calls that this run made itself; replayed calls were paid for before. */
  spentNanos: number;
  tokens: number;
  modelCalls: number;
  unknownCosts: number;
  heldNanos: number;
}

/** What the calls of all known attempts have used, as of now or of a moment. */
export function usageOf(state: RunState, atMs: number | null = null): Usage {
  const usage = { spentNanos: 0, tokens: 0, modelCalls: 0, unknownCosts: 0, heldNanos: 0 };
  if (atMs === null) {
    usage.spentNanos = state.strayNanos;
    usage.tokens = state.strayTokens;
  }
  for (const table of state.attempts.values()) {
    for (let row = 0; row < table.count; row += 1) {
      usage.heldNanos += table.held[row]!;
      const flags = table.flags[row]!;
      if (flags & REPLAYED || !table.hasEnded(row, atMs)) continue;
      usage.spentNanos += table.cost[row]!;
      usage.tokens += table.tokensIn[row]! + table.tokensOut[row]!;
      if (flags & COST_UNKNOWN) usage.unknownCosts += 1;
      if (table.kinds[table.kind[row]!] === "llm") usage.modelCalls += 1;
    }
  }
  return usage;
}

/** Known cost by the path of the node that made the calls, over all known attempts; replayed calls were paid for before. */
export function costByNode(state: RunState): Map<string, number> {
  const costs = new Map<string, number>();
  for (const { count, flags, node, strings, cost } of state.attempts.values()) {
    for (let row = 0; row < count; row += 1) {
      const path = strings[node[row]!];
      if (path === undefined || flags[row]! & REPLAYED) continue;
      costs.set(path, (costs.get(path) ?? 0) + cost[row]!);
    }
  }
  return costs;
}

/** Keep the budgets of the run and of the days above it as the ledger has them. */
export function setStored(state: RunState, { budgets, last_seq }: BudgetList): void {
  state.storedSeq = last_seq;
  state.stored = budgets.map((one) => ({ ...budgetOf(one), isStored: true }));
}

/** Budgets as they were at a moment, or now. */
export function budgetsAt(state: RunState, atMs: number | null): Budget[] {
  if (atMs === null) {
    const days = state.stored.filter(({ key, level }) => level !== "run" && !state.budgets.has(key));
    return [...[...state.budgets.values()].map((budget) => newest(state, budget)), ...days];
  }
  const found = new Map<string, Budget>();
  for (const { atMs: changed, value } of state.budgetChanges) if (changed <= atMs) found.set(value.key, value);
  return [...found.values()];
}

/** A budget as its last event has it, or the ledger: other runs spend of a day while this one waits. */
function newest(state: RunState, budget: Budget): Budget {
  if (budget.level === "run") return withUnresolved(budget, state.stored);
  const stored = isLive(state.status) ? state.stored.find(({ key }) => key === budget.key) : undefined;
  const reported = state.budgetChanges.findLast(({ value }) => value.key === budget.key)?.seq ?? 0;
  return stored && reported <= state.storedSeq ? stored : budget;
}

/** The run's own budget with the bills that a lost worker has left: events have those of the newest attempt alone. */
function withUnresolved(budget: Budget, stored: Budget[]): Budget {
  const left = stored.find(({ level }) => level === "run")?.units ?? [];
  const units = budget.units.map((one) => {
    const unresolved = left.find(({ unit }) => unit === one.unit)?.unresolved ?? 0;
    return unresolved > one.unresolved ? { ...one, unresolved } : one;
  });
  return { ...budget, units };
}

export function statusAt(state: RunState, atMs: number | null): Status {
  if (atMs === null || state.statuses.length === 0) return state.status;
  let status: Status = "queued";
  for (const change of state.statuses) if (change.atMs <= atMs) status = change.value;
  return status;
}

export function refusalsAt(state: RunState, atMs: number | null): Refusal[] {
  return atMs === null ? state.refusals : state.refusals.filter((refusal) => refusal.atMs <= atMs);
}

/** Budgets that pay for a call of a node, the innermost first: of its nodes, the run, its owner's day, everyone's day. */
export function payersOf(budgets: Budget[], node: string | null): Budget[] {
  const path = node === null ? "" : `${node}/`;
  const inside = budgets.filter(({ level, node: owner }) => level === "node" && owner !== null && path.startsWith(`${owner}/`));
  inside.sort((one, other) => other.node!.length - one.node!.length);
  const outside = ["run", "owner", "all"].flatMap((level) => budgets.filter((budget) => budget.level === level));
  return [...inside, ...outside];
}

/** The rows that a tree shows: without what is below collapsed rows, or only matches and what is above them. */
export function visibleRows(
  table: CallTable,
  atMs: number | null,
  collapsed: ReadonlySet<number>,
  matches: ((row: number) => boolean) | null = null,
): Int32Array {
  const { order, size } = table.tree(atMs);
  const shown = new Int32Array(order.length);
  const kept = matches && ancestorsOf(table, matches);
  let count = 0;
  for (let at = 0; at < order.length; ) {
    const row = order[at]!;
    if (!table.hasBegun(row, atMs) || (kept && !kept[row])) {
      at += size[row]!; // what it made began later, and has no match either
      continue;
    }
    shown[count] = row;
    count += 1;
    at += collapsed.has(row) && !kept ? size[row]! : 1;
  }
  return shown.subarray(0, count);
}

function ancestorsOf(table: CallTable, matches: (row: number) => boolean): Uint8Array {
  const kept = new Uint8Array(table.count);
  for (let row = table.count - 1; row >= 0; row -= 1) {
    if (kept[row] === 0 && matches(row)) kept[row] = 1;
    if (kept[row] && table.parent[row]! >= 0) kept[table.parent[row]!] = 1;
  }
  return kept;
}
