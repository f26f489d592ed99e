// The calls of one attempt of a run, in columns: a run may have 100,000 of them.
//
// A row is a call, in the order in which the calls began, so the row of a call is after that of the call that made it.
// Rows come from the server's columns or from events, and both give the same table. It knows nothing of HTTP or React.

import type { RunTree } from "../api/types.ts";
import { toNanos } from "./money.ts";

export const REPLAYED = 1;
export const ABANDONED = 2;
export const COST_UNKNOWN = 4;
export const WAITED = 8;

const KINDS = ["system", "llm", "tool"];
const STATUSES = ["running", "waiting", "success", "fail", "halt", "interrupted"];
const RUNNING = 0;
const WAITING = 1;
const INTERRUPTED = 5;
const OPEN = -1;

/** Why a call was not made, or was stopped: who wanted how much of whose budget. */
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
  unresolved: number | null;
  /** Whether waiting would have helped: others held what was missing. */
  momentary: boolean;
  /** Whether a limit refused this very call: not one that was cancelled, or that stopped because one below it did. */
  cause: boolean;
}

/** One call as an object, for the rows on the screen and the inspector. */
export interface Call {
  row: number;
  key: string;
  id: string;
  epoch: number;
  parent: string | null;
  kind: string;
  name: string;
  model: string | null;
  /** Path of the node that made the call; null outside of nodes. */
  node: string | null;
  /** Type of the node, if this is the call of a node itself. */
  nodeType: string | null;
  attempt: number;
  heldNanos: number;
  /** When it began to wait for a budget; the same as its start if it did not wait. */
  beganMs: number;
  startedMs: number;
  endedMs: number | null;
  status: string;
  costNanos: number;
  costUnknown: boolean;
  tokensIn: number;
  tokensOut: number;
  replayed: boolean;
  abandoned: boolean;
  waited: boolean;
  finishReason: string | null;
  error: string | null;
  stop: Stop | null;
}

/** Sums over each call and all below it, and the order in which a tree shows them. */
export interface Tree {
  /** Rows depth first. */
  order: Int32Array;
  /** By row: its place in `order`, its depth, and the number of rows of its subtree with itself. */
  place: Int32Array;
  depth: Int32Array;
  size: Int32Array;
  costNanos: Float64Array;
  tokens: Float64Array;
  heldNanos: Float64Array;
  unknown: Uint8Array;
}

type Data = Record<string, unknown>;
const NUMBERS = ["parent", "name", "node", "nodeType", "model", "attempt", "stop"] as const;
const AMOUNTS = ["began", "start", "end", "cost", "tokensIn", "tokensOut", "held"] as const;
const SMALL = ["kind", "status", "flags"] as const;

export class CallTable {
  readonly epoch: number;
  count = 0;
  /** Grows with every change, so that what is derived from the table can be kept until then. */
  version = 0;
  /** Calls that the server left out of its columns. */
  leftOut = 0;
  ids: string[] = [];
  strings: string[] = [];
  stops: Stop[] = [];
  kinds = [...KINDS];
  statuses = [...STATUSES];
  parent = new Int32Array(64);
  name = new Int32Array(64);
  node = new Int32Array(64);
  nodeType = new Int32Array(64);
  model = new Int32Array(64);
  attempt = new Int32Array(64);
  stop = new Int32Array(64);
  began = new Float64Array(64);
  start = new Float64Array(64);
  end = new Float64Array(64);
  cost = new Float64Array(64);
  tokensIn = new Float64Array(64);
  tokensOut = new Float64Array(64);
  held = new Float64Array(64);
  kind = new Uint8Array(64);
  status = new Uint8Array(64);
  flags = new Uint8Array(64);
  /** Facts that few calls have and columns do not: why a model stopped, and errors, by row. */
  notes = new Map<number, { finishReason: string | null; error: string | null }>();
  private rows = new Map<string, number>();
  private texts = new Map<string, number>();

  constructor(epoch: number) {
    this.epoch = epoch;
  }

  rowOf(id: string): number {
    return this.rows.get(id) ?? -1;
  }

  /** A call starts, or waits for a budget. */
  begin(data: Data, atMs: number, waits: boolean): void {
    const row = this.row(data, atMs, waits ? WAITING : RUNNING);
    if (waits) {
      this.flags[row]! |= WAITED;
      this.stop[row] = this.addStop(stopOf(data.stop), this.stop[row]!);
    } else {
      this.status[row] = RUNNING;
      this.start[row] = atMs;
      this.attempt[row] = number(data.attempt) || 1;
      this.nodeType[row] = this.text(data.node_type);
      this.held[row] = toNanos(data.held_usd);
      this.stop[row] = -1;
    }
    this.version += 1;
  }

  finish(data: Data, atMs: number): void {
    const row = this.row(data, atMs - number(data.duration_ms), RUNNING); // a refused call may end without a start
    this.end[row] = atMs;
    this.status[row] = indexIn(this.statuses, text(data.status));
    this.cost[row]! += toNanos(data.cost_usd);
    this.tokensIn[row]! += number(data.tokens_in);
    this.tokensOut[row]! += number(data.tokens_out);
    this.held[row] = 0;
    if (data.model != null) this.model[row] = this.text(data.model);
    if (data.cost_usd === null) this.flags[row]! |= COST_UNKNOWN;
    if (data.abandoned === true) this.flags[row]! |= ABANDONED;
    if (data.replayed === true) this.flags[row]! |= REPLAYED;
    this.stop[row] = this.addStop(stopOf(data.stop) ?? stopInWords(data.stop_reason), -1);
    const finishReason = maybeText(data.finish_reason);
    const error = maybeText(data.error);
    if (finishReason !== null || error !== null) this.notes.set(row, { finishReason, error });
    this.version += 1;
  }

  /** A bill that came after the call had ended adds to what was settled then; false if the call is not known. */
  settle(data: Data): boolean {
    const row = this.rowOf(text(data.call_id));
    if (row < 0) return false;
    this.cost[row]! += toNanos(data.cost_usd);
    this.tokensIn[row]! += number(data.tokens_in);
    this.tokensOut[row]! += number(data.tokens_out);
    this.version += 1;
    return true;
  }

  /** Nothing goes on after the end of a run, even if a killed worker could not report it. */
  closeOpen(atMs: number): void {
    for (let row = 0; row < this.count; row += 1) {
      if (this.end[row] !== OPEN) continue;
      this.end[row] = Math.max(atMs, this.began[row]!);
      this.status[row] = INTERRUPTED;
      this.held[row] = 0;
    }
    this.version += 1;
  }

  call(row: number): Call {
    const flags = this.flags[row]!;
    const end = this.end[row]!;
    const id = this.ids[row]!;
    const note = this.notes.get(row);
    return {
      row,
      key: `${this.epoch}:${id}`,
      id,
      epoch: this.epoch,
      parent: this.parent[row]! < 0 ? null : this.ids[this.parent[row]!]!,
      kind: this.kinds[this.kind[row]!] ?? "",
      name: this.strings[this.name[row]!] ?? "",
      model: this.strings[this.model[row]!] ?? null,
      node: this.strings[this.node[row]!] ?? null,
      nodeType: this.strings[this.nodeType[row]!] ?? null,
      attempt: this.attempt[row]!,
      heldNanos: this.held[row]!,
      beganMs: this.began[row]!,
      startedMs: this.start[row]!,
      endedMs: end === OPEN ? null : end,
      status: this.statuses[this.status[row]!] ?? "",
      costNanos: this.cost[row]!,
      costUnknown: (flags & COST_UNKNOWN) !== 0,
      tokensIn: this.tokensIn[row]!,
      tokensOut: this.tokensOut[row]!,
      replayed: (flags & REPLAYED) !== 0,
      abandoned: (flags & ABANDONED) !== 0,
      waited: (flags & WAITED) !== 0,
      finishReason: note?.finishReason ?? null,
      error: note?.error ?? null,
      stop: this.stops[this.stop[row]!] ?? null,
    };
  }

  /** The call as it was at a moment; null if it had not begun. */
  callAt(row: number, atMs: number | null): Call | null {
    const call = this.call(row);
    if (atMs === null) return call;
    if (call.beganMs > atMs) return null;
    if (call.endedMs !== null && call.endedMs <= atMs) return call;
    const status = call.startedMs > atMs ? "waiting" : "running";
    return { ...call, status, endedMs: null, costNanos: 0, costUnknown: false, tokensIn: 0, tokensOut: 0, stop: null };
  }

  /** Name of a call below the one that made it: of a node's own call, what its path adds to that of the node around it. */
  nameBelow(row: number): string {
    const path = this.nodeType[row]! < 0 ? undefined : this.strings[this.node[row]!];
    if (path === undefined) return this.strings[this.name[row]!] ?? "";
    const above = this.parent[row]! < 0 ? undefined : this.strings[this.node[this.parent[row]!]!];
    return above !== undefined && path.startsWith(`${above}/`) ? path.slice(above.length + 1) : path;
  }

  hasBegun(row: number, atMs: number | null): boolean {
    return atMs === null || this.began[row]! <= atMs;
  }

  hasEnded(row: number, atMs: number | null): boolean {
    const end = this.end[row]!;
    return end !== OPEN && (atMs === null || end <= atMs);
  }

  /** First and last moment that the table knows. */
  span(): [number, number] {
    let first = Infinity;
    let last = -Infinity;
    for (let row = 0; row < this.count; row += 1) {
      first = Math.min(first, this.began[row]!);
      last = Math.max(last, this.end[row]!, this.start[row]!);
    }
    return this.count ? [first, last] : [0, 0];
  }

  private kept: { version: number; atMs: number | null; tree: Tree } | null = null;

  /** The tree as of now, or of a moment; kept until the table changes. */
  tree(atMs: number | null = null): Tree {
    if (this.kept?.version !== this.version || this.kept.atMs !== atMs) {
      this.kept = { version: this.version, atMs, tree: this.derive(atMs) };
    }
    return this.kept.tree;
  }

  private derive(atMs: number | null): Tree {
    const n = this.count;
    const ints = () => new Int32Array(n);
    const [order, place, depth, size] = [ints(), ints(), ints(), ints()];
    const [costNanos, tokens, heldNanos] = [new Float64Array(n), new Float64Array(n), new Float64Array(n)];
    const unknown = new Uint8Array(n);
    const [firstChild, nextSibling] = [ints().fill(-1), ints().fill(-1)];
    let firstTop = -1;
    // A call begins after the one that made it, so from the last to the first each sum is whole before it rises.
    for (let row = n - 1; row >= 0; row -= 1) {
      const paid = (this.flags[row]! & REPLAYED) === 0;
      if (paid && this.hasEnded(row, atMs)) {
        costNanos[row]! += this.cost[row]!;
        tokens[row]! += this.tokensIn[row]! + this.tokensOut[row]!;
        unknown[row]! |= this.flags[row]! & COST_UNKNOWN;
      }
      if (atMs === null) heldNanos[row]! += this.held[row]!;
      size[row]! += 1;
      const above = this.parent[row]!;
      if (above < 0) {
        nextSibling[row] = firstTop;
        firstTop = row;
        continue;
      }
      costNanos[above]! += costNanos[row]!;
      tokens[above]! += tokens[row]!;
      heldNanos[above]! += heldNanos[row]!;
      unknown[above]! |= unknown[row]!;
      size[above]! += size[row]!;
      nextSibling[row] = firstChild[above]!;
      firstChild[above] = row;
    }
    let at = 0;
    let row = firstTop;
    while (row >= 0) {
      order[at] = row;
      place[row] = at;
      at += 1;
      if (this.parent[row]! >= 0) depth[row] = depth[this.parent[row]!]! + 1;
      let next = firstChild[row]!;
      for (let up = row; next < 0 && up >= 0; up = this.parent[up]!) next = nextSibling[up]!;
      row = next;
    }
    return { order, place, depth, size, costNanos, tokens, heldNanos, unknown };
  }

  private row(data: Data, atMs: number, status: number): number {
    const id = text(data.call_id);
    const known = this.rowOf(id);
    if (known >= 0) return known;
    const row = this.count;
    this.grow(row + 1);
    this.parent[row] = this.rowOf(text(data.parent_id));
    this.rows.set(id, row);
    this.ids.push(id);
    this.kind[row] = indexIn(this.kinds, text(data.kind));
    this.name[row] = this.text(data.name);
    this.node[row] = this.text(data.node_id);
    this.nodeType[row] = this.text(data.node_type);
    this.model[row] = this.text(data.model);
    this.began[row] = atMs;
    this.start[row] = atMs;
    this.end[row] = OPEN;
    this.status[row] = status;
    this.attempt[row] = 1;
    this.stop[row] = -1;
    this.flags[row] = data.replayed === true ? REPLAYED : 0;
    this.count += 1;
    return row;
  }

  private grow(count: number): void {
    if (count <= this.parent.length) return;
    const length = Math.max(count, this.parent.length * 2);
    for (const name of NUMBERS) this[name] = copyInto(new Int32Array(length), this[name]);
    for (const name of AMOUNTS) this[name] = copyInto(new Float64Array(length), this[name]);
    for (const name of SMALL) this[name] = copyInto(new Uint8Array(length), this[name]);
  }

  private text(value: unknown): number {
    if (typeof value !== "string") return -1;
    let index = this.texts.get(value);
    if (index === undefined) {
      index = this.strings.push(value) - 1;
      this.texts.set(value, index);
    }
    return index;
  }

  private addStop(stop: Stop | null, otherwise: number): number {
    return stop === null ? otherwise : this.stops.push(stop) - 1;
  }

  /** The table of the server's columns. */
  static from(tree: RunTree): CallTable {
    const table = new CallTable(tree.epoch);
    const { columns } = tree;
    const n = columns.call.length;
    table.grow(n);
    table.count = n;
    table.leftOut = tree.calls - n;
    table.strings = tree.strings;
    table.texts = new Map(tree.strings.map((value, index) => [value, index]));
    table.stops = tree.stops.map((stop) => stopOf(stop)!);
    const kinds = tree.kinds.map((name) => indexIn(table.kinds, name));
    const statuses = tree.statuses.map((name) => indexIn(table.statuses, name));
    for (const [mine, theirs] of COPIED) table[mine].set(columns[theirs]);
    for (let row = 0; row < n; row += 1) {
      table.kind[row] = kinds[columns.kind[row]!]!;
      table.status[row] = statuses[columns.status[row]!]!;
      table.began[row] = table.start[row] = tree.base_ms + columns.start_ms[row]!;
      table.end[row] = columns.end_ms[row]! < 0 ? OPEN : tree.base_ms + columns.end_ms[row]!;
      const id = `n${String(columns.call[row]).padStart(6, "0")}`;
      table.ids.push(id);
      table.rows.set(id, row);
    }
    return table;
  }
}

const COPIED = [
  ["parent", "parent"],
  ["name", "name"],
  ["node", "node"],
  ["nodeType", "node_type"],
  ["model", "model"],
  ["attempt", "attempt"],
  ["stop", "stop"],
  ["cost", "cost_nanos"],
  ["tokensIn", "tokens_in"],
  ["tokensOut", "tokens_out"],
  ["flags", "flags"],
] as const;

function copyInto<T extends Int32Array | Float64Array | Uint8Array>(target: T, source: T): T {
  target.set(source);
  return target;
}

/** Index of a name; one that a newer server has brought is added. */
function indexIn(names: string[], name: string): number {
  const index = names.indexOf(name);
  return index >= 0 ? index : names.push(name) - 1;
}

const CANCELS: ReadonlySet<string> = new Set(["aborted", "context_canceled"]);

export function stopOf(given: unknown): Stop | null {
  if (typeof given !== "object" || given === null) return null;
  const data = given as Data;
  const reason = text(data.reason) || text(data.stop_reason);
  return {
    reason,
    message: text(data.message),
    budget: maybeText(data.budget),
    whose: maybeText(data.whose),
    unit: maybeText(data.unit),
    limit: maybeNumber(data.limit),
    used: maybeNumber(data.used),
    held: maybeNumber(data.held),
    asked: maybeNumber(data.asked),
    unresolved: maybeNumber(data.unresolved),
    momentary: data.momentary === true,
    cause: data.cause !== false && !CANCELS.has(reason),
  };
}

/** A stop as older servers send it: its reason, a colon and its message. */
function stopInWords(given: unknown): Stop | null {
  if (typeof given !== "string") return null;
  const [reason = "", ...message] = given.split(": ");
  return stopOf({ reason, message: message.join(": ") || given });
}

export function maybeText(value: unknown): string | null {
  return typeof value === "string" ? value : null;
}

function maybeNumber(value: unknown): number | null {
  return typeof value === "number" ? value : null;
}

export function text(value: unknown): string {
  return typeof value === "string" ? value : "";
}

export function number(value: unknown): number {
  return typeof value === "number" ? value : 0;
}
