// A run as its events describe it.
//
// The model is a reducer over numbered events: an event that was applied already is dropped, one that is ahead of the
// next is refused, so any split or repetition of a stream gives the same state. It knows nothing of HTTP or of React.

import type { EventShown } from "../api/types.ts";
import { toNanos } from "./money.ts";

export type Status = "queued" | "running" | "waiting" | "parked" | "completed" | "failed" | "halted" | "cancelled";

export interface Call {
  key: string;
  id: string;
  parent: string | null;
  kind: string;
  name: string;
  model: string | null;
  /** Path of the node that made the call; null outside of nodes, or if the server does not tell. */
  node: string | null;
  /** Type of the node, if this is the call of a node itself. */
  nodeType: string | null;
  attempt: number;
  heldNanos: number;
  epoch: number;
  startedMs: number;
  endedMs: number | null;
  status: string;
  costNanos: number;
  costUnknown: boolean;
  tokensIn: number;
  tokensOut: number;
  replayed: boolean;
  finishReason: string | null;
  stop: Stop | null;
}

/** Why a call was not made, or was stopped: who asked for how much of whose budget. */
export interface Stop {
  reason: string;
  message: string;
  budget: string | null;
  whose: string | null;
  unit: string | null;
  limit: number | null;
  used: number | null;
  held: number | null;
  asked: number | null;
  /** False for a call that stopped only because one below it did. */
  cause: boolean;
}

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

export interface RunState {
  lastSeq: number;
  status: Status;
  epoch: number;
  startedMs: number | null;
  endedMs: number | null;
  /** Time worked in earlier epochs, and when the current one began: the run's time limit counts both. */
  workedMs: number;
  resumedMs: number | null;
  /** Known cost of the calls that this run made itself; replayed calls were paid for before. */
  spentNanos: number;
  unknownCosts: number;
  tokens: number;
  modelCalls: number;
  nodes: Map<string, NodeState>;
  calls: Map<string, Call>;
  refusals: Stop[];
  budgets: Map<string, Budget>;
  events: EventShown[];
}

const ENDINGS: Record<string, Status> = {
  "run.completed": "completed",
  "run.failed": "failed",
  "run.halted": "halted",
  "run.cancelled": "cancelled",
  "run.parked": "parked",
};

export function isLive(status: Status): boolean {
  return status === "queued" || status === "running" || status === "waiting";
}

/** How long the run has worked, without the time it was queued or parked. */
export function elapsedMs(state: RunState, nowMs: number): number {
  if (state.resumedMs === null) return 0;
  return state.workedMs + Math.max(0, (state.endedMs ?? nowMs) - state.resumedMs);
}

export function newRun(): RunState {
  return {
    lastSeq: 0,
    status: "queued",
    epoch: 1,
    startedMs: null,
    endedMs: null,
    workedMs: 0,
    resumedMs: null,
    spentNanos: 0,
    unknownCosts: 0,
    tokens: 0,
    modelCalls: 0,
    nodes: new Map(),
    calls: new Map(),
    refusals: [],
    budgets: new Map(),
    events: [],
  };
}

/** Apply events in order; returns false if one is missing before them, and the rest was left out. */
export function apply(state: RunState, events: Iterable<EventShown>): boolean {
  for (const event of events) {
    if (event.seq <= state.lastSeq) continue;
    if (event.seq !== state.lastSeq + 1) return false;
    state.lastSeq = event.seq;
    state.events.push(event);
    applyOne(state, event);
  }
  return true;
}

function applyOne(state: RunState, event: EventShown): void {
  const { type, data } = event;
  if (type.startsWith("run.")) applyRun(state, event);
  else if (type.startsWith("node.")) applyNode(state, event);
  else if (type === "call.started" || type === "call.waiting") startCall(state, event);
  else if (type === "call.ended") endCall(state, event);
  else if (type === "call.settled") settleCall(state, event);
  else if (type === "budget") setBudget(state, event);
  else if (type === "limit") addRefusal(state, event);
  else if (type === "text.delta") {
    const node = state.nodes.get(keyOf(state, text(data.node_id)));
    if (node) node.text += text(data.text);
  } else if (type === "approval.answered" && state.status === "waiting") state.status = "running";
}

function applyRun(state: RunState, { type, data, at_ms }: EventShown): void {
  const ending = ENDINGS[type];
  if (ending) {
    state.status = ending;
    state.endedMs = at_ms;
    closeOpen(state, at_ms);
  } else if (type === "run.queued" || type === "run.granted") {
    state.status = "queued";
    state.endedMs = null;
  } else if (type === "run.started" || type === "run.resumed") {
    state.status = "running";
    state.epoch = number(data.epoch) || 1;
    state.startedMs ??= at_ms;
    state.workedMs = number(data.worked_ms);
    state.resumedMs = at_ms;
    state.endedMs = null;
    // Budgets of nodes begin anew in each attempt; those of the run and of days go on.
    for (const [key, budget] of state.budgets) if (budget.level === "node") state.budgets.delete(key);
  } else if (type === "run.waiting") state.status = "waiting";
}

/** Nothing of a run goes on after its end, also if a killed worker could not say so. */
function closeOpen(state: RunState, atMs: number): void {
  for (const node of state.nodes.values()) {
    if (node.status === "running") {
      node.status = "cancelled";
      node.endedMs = atMs;
    }
  }
  for (const call of state.calls.values()) {
    if (call.endedMs === null) {
      call.status = "interrupted";
      call.heldNanos = 0;
      call.endedMs = atMs;
    }
  }
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

function startCall(state: RunState, { type, data, at_ms }: EventShown): void {
  const id = text(data.call_id);
  const key = keyOf(state, id);
  state.calls.set(key, {
    key,
    id,
    parent: maybeText(data.parent_id),
    kind: text(data.kind),
    name: text(data.name),
    model: maybeText(data.model),
    node: maybeText(data.node_id),
    nodeType: maybeText(data.node_type),
    attempt: number(data.attempt) || 1,
    heldNanos: toNanos(data.held_usd),
    epoch: state.epoch,
    startedMs: at_ms,
    endedMs: null,
    status: type === "call.waiting" ? "waiting" : "running",
    costNanos: 0,
    costUnknown: false,
    tokensIn: 0,
    tokensOut: 0,
    replayed: data.replayed === true,
    finishReason: null,
    stop: type === "call.waiting" ? stopOf(data.stop) : null,
  });
}

function endCall(state: RunState, event: EventShown): void {
  const { data, at_ms } = event;
  const key = keyOf(state, text(data.call_id));
  if (!state.calls.has(key)) startCall(state, event); // a refused call may end without having started
  const call = state.calls.get(key)!;
  call.endedMs = at_ms;
  call.startedMs = Math.min(call.startedMs, at_ms - number(data.duration_ms));
  call.status = text(data.status);
  call.replayed = data.replayed === true;
  call.costUnknown = data.cost_usd === null;
  call.costNanos = toNanos(data.cost_usd);
  call.heldNanos = 0;
  call.tokensIn = number(data.tokens_in);
  call.tokensOut = number(data.tokens_out);
  call.finishReason = maybeText(data.finish_reason);
  call.stop = stopOf(data.stop) ?? stopInWords(data.stop_reason);
  if (call.replayed) return;
  state.spentNanos += call.costNanos;
  state.tokens += call.tokensIn + call.tokensOut;
  if (call.costUnknown) state.unknownCosts += 1;
  if (call.kind === "llm") state.modelCalls += 1;
}

/** A bill that came after the call had ended; it adds to what was settled then. */
function settleCall(state: RunState, { data }: EventShown): void {
  const cost = toNanos(data.cost_usd);
  const tokensIn = number(data.tokens_in);
  const tokensOut = number(data.tokens_out);
  state.spentNanos += cost;
  state.tokens += tokensIn + tokensOut;
  const call = state.calls.get(keyOf(state, text(data.call_id)));
  if (!call) return;
  call.costNanos += cost;
  call.tokensIn += tokensIn;
  call.tokensOut += tokensOut;
}

function setBudget(state: RunState, { data }: EventShown): void {
  const level = text(data.level);
  const name = text(data.budget);
  const told = maybeText(data.node_id);
  // The last figures of a node's budget may come without its node, when that has ended.
  const known = told === null ? [...state.budgets.values()].find((one) => one.level === level && one.name === name) : null;
  const node = known?.node ?? told;
  const key = known?.key ?? `${level}:${node ?? ""}:${name}`;
  const units = Array.isArray(data.units) ? data.units.map(figuresOf) : [];
  state.budgets.set(key, { key, name, level, node, units });
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

function stopOf(given: unknown): Stop | null {
  if (typeof given !== "object" || given === null) return null;
  const data = given as Record<string, unknown>;
  return {
    reason: text(data.reason) || text(data.stop_reason),
    message: text(data.message),
    budget: maybeText(data.budget),
    whose: maybeText(data.whose),
    unit: maybeText(data.unit),
    limit: maybeNumber(data.limit),
    used: maybeNumber(data.used),
    held: maybeNumber(data.held),
    asked: maybeNumber(data.asked),
    cause: data.cause !== false,
  };
}

/** A stop as older servers tell it: its reason, a colon and its message. */
function stopInWords(given: unknown): Stop | null {
  if (typeof given !== "string") return null;
  const [reason = "", ...message] = given.split(": ");
  return stopOf({ reason, message: message.join(": ") || given });
}

/** Each ancestor of a refused call reports the refusal, too: only the cause is kept. */
function addRefusal(state: RunState, { data }: EventShown): void {
  const stop = stopOf(data)!;
  const last = state.refusals.at(-1);
  const repeated = last?.message === stop.message && state.events.at(-2)?.type === "limit";
  if (stop.cause && !repeated) state.refusals.push(stop);
}

export interface TreeRow {
  key: string;
  depth: number;
  /** The node of the row: of its own call, or told by node events alone. */
  node: NodeState | null;
  call: Call | null;
  /** Sums over the row's own call and all below it, without what was paid for in an earlier attempt. */
  costNanos: number;
  costUnknown: boolean;
  tokens: number;
  heldNanos: number;
}

/** The rows of one attempt's tree, depth first, in the order things started. */
export function treeRows(state: RunState, epoch: number): TreeRow[] {
  const calls = [...state.calls.values()].filter((call) => call.epoch === epoch);
  const nodes = [...state.nodes.values()].filter((node) => node.epoch === epoch);
  if (calls.some((call) => call.parent === null)) return wholeTree(calls, nodes);
  // Servers that do not tell every call do not tell either of which node a call is: nothing is guessed.
  const rows: TreeRow[] = nodes.map((node) => rowOf(null, node, 0));
  for (const call of calls) rows.push(rowOf(call, null, 0));
  return rows;
}

function wholeTree(calls: Call[], nodes: NodeState[]): TreeRow[] {
  const nodeOf = new Map(nodes.map((node) => [node.id, node]));
  const rowFor = new Map<string, TreeRow>();
  const children = new Map<string, TreeRow[]>();
  const tops: TreeRow[] = [];
  for (const call of calls) {
    const row = rowOf(call, call.nodeType === null ? null : (nodeOf.get(call.node ?? "") ?? null), 0);
    rowFor.set(call.key, row);
    children.set(call.key, []);
  }
  for (const call of calls) {
    const row = rowFor.get(call.key)!;
    const siblings = children.get(`${call.epoch}:${call.parent}`);
    if (siblings) siblings.push(row);
    else tops.push(row);
  }
  // A call starts after the one that made it, so from the last to the first each sum is whole before it rises.
  for (const call of calls.toReversed()) {
    const above = rowFor.get(`${call.epoch}:${call.parent}`);
    const row = rowFor.get(call.key)!;
    if (!above) continue;
    above.costNanos += row.costNanos;
    above.tokens += row.tokens;
    above.heldNanos += row.heldNanos;
    above.costUnknown ||= row.costUnknown;
  }
  const rows: TreeRow[] = [];
  // A stack and not recursion: calls may be nested as deeply as a graph allows.
  const stack = tops.toReversed();
  for (let row = stack.pop(); row; row = stack.pop()) {
    rows.push(row);
    for (const child of children.get(row.call!.key)!.toReversed()) {
      child.depth = row.depth + 1;
      stack.push(child);
    }
  }
  return rows;
}

function rowOf(call: Call | null, node: NodeState | null, depth: number): TreeRow {
  const paid = call !== null && !call.replayed;
  return {
    key: call ? `call:${call.key}` : `node:${node!.epoch}:${node!.id}`,
    depth,
    node,
    call,
    costNanos: paid ? call.costNanos : 0,
    costUnknown: paid && call.costUnknown,
    tokens: paid ? call.tokensIn + call.tokensOut : 0,
    heldNanos: call?.heldNanos ?? 0,
  };
}

function maybeText(value: unknown): string | null {
  return typeof value === "string" ? value : null;
}

function maybeNumber(value: unknown): number | null {
  return typeof value === "number" ? value : null;
}

function text(value: unknown): string {
  return typeof value === "string" ? value : "";
}

function number(value: unknown): number {
  return typeof value === "number" ? value : 0;
}
