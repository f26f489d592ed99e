// Where each call lies in a flame graph: by time, or by its share of money or tokens.
//
// Every call lies below the one that made it. By time, calls that ran beside each other lie in lanes of their own; by
// money or tokens, a call is as wide as it and all below it used. Positions are shares of the whole, from 0 to 1. It
// knows nothing of the screen: `paint` gives the rectangles of a part of the flame, at most one for each pixel.

import type { CallTable, Tree } from "./calls.ts";

export type Measure = "time" | "money" | "tokens";

export interface Flame {
  /** By row: where it begins and ends, and its lane from the top. */
  from: Float64Array;
  to: Float64Array;
  lane: Int32Array;
  /** By row: end of everything below it; work that was abandoned may outlast the call that made it. */
  reach: Float64Array;
  lanes: number;
  /** What the whole width stands for: milliseconds, billionths of a dollar, or tokens. */
  total: number;
}

const MAX_SLOTS = 64;

export function flameOf(table: CallTable, measure: Measure, nowMs: number): Flame {
  const tree = table.tree();
  return measure === "time" ? byTime(table, tree, nowMs) : byShare(table, tree, measure === "money" ? tree.costNanos : tree.tokens);
}

function newFlame(count: number): Flame {
  const floats = () => new Float64Array(count);
  return { from: floats(), to: floats(), lane: new Int32Array(count), reach: floats(), lanes: 0, total: 0 };
}

/** What is used by the calls below a call is drawn from its left; what it used itself is the rest. */
function byShare(table: CallTable, tree: Tree, used: Float64Array): Flame {
  const flame = newFlame(table.count);
  const next = new Float64Array(table.count);
  for (const row of tree.order) if (table.parent[row]! < 0) flame.total += used[row]!;
  const total = flame.total || 1;
  let top = 0;
  for (const row of tree.order) {
    const above = table.parent[row]!;
    const from = above < 0 ? top : next[above]!;
    const to = from + used[row]! / total;
    if (above < 0) top = to;
    else next[above] = to;
    flame.from[row] = next[row] = from;
    flame.to[row] = flame.reach[row] = to;
    flame.lane[row] = tree.depth[row]!;
    flame.lanes = Math.max(flame.lanes, tree.depth[row]! + 1);
  }
  return flame;
}

function byTime(table: CallTable, tree: Tree, nowMs: number): Flame {
  const flame = newFlame(table.count);
  const [first, known] = table.span();
  let last = known;
  for (let row = 0; row < table.count; row += 1) if (table.end[row]! < 0) last = Math.max(last, nowMs);
  flame.total = Math.max(1, last - first);
  const height = new Int32Array(table.count).fill(1);
  const offset = new Int32Array(table.count);
  const slots = new Map<number, Slot[]>();
  // A call begins after the one that made it: from the last to the first, what is below a call is whole before it.
  for (let row = table.count - 1; row >= 0; row -= 1) {
    flame.from[row] = (table.began[row]! - first) / flame.total;
    const end = table.end[row]! < 0 ? last : table.end[row]!;
    flame.to[row] = Math.max(flame.from[row]!, (end - first) / flame.total);
    flame.reach[row] = Math.max(flame.reach[row]!, flame.to[row]!);
    const above = table.parent[row]!;
    if (above >= 0) flame.reach[above] = Math.max(flame.reach[above]!, flame.reach[row]!);
    height[row]! += heightOf(slots.get(row));
    slots.delete(row);
    place(slots, above, row, flame, height[row]!, offset);
  }
  for (const row of tree.order) {
    const above = table.parent[row]!;
    flame.lane[row] = (above < 0 ? 0 : flame.lane[above]! + 1) + offset[row]!;
    flame.lanes = Math.max(flame.lanes, flame.lane[row]! + 1);
  }
  return flame;
}

/** Lanes below a call that are free until `from`; rows are placed from the last to the first. */
interface Slot {
  top: number;
  height: number;
  from: number;
}

function heightOf(slots: Slot[] | undefined): number {
  const last = slots?.at(-1);
  return last ? last.top + last.height : 0;
}

function place(slots: Map<number, Slot[]>, above: number, row: number, flame: Flame, height: number, offset: Int32Array): void {
  let list = slots.get(above);
  if (!list) slots.set(above, (list = []));
  const from = flame.from[row]!;
  const searched = list.length > MAX_SLOTS ? list.slice(-MAX_SLOTS) : list;
  const free = searched.find((slot) => slot.from >= flame.reach[row]! && slot.height >= height);
  if (free) {
    free.from = from;
    offset[row] = free.top;
    return;
  }
  const last = list.at(-1);
  if (last && last.from >= flame.reach[row]!) {
    last.height = Math.max(last.height, height); // the last slot may grow: nothing is below it
    last.from = from;
    offset[row] = last.top;
    return;
  }
  const top = heightOf(list);
  list.push({ top, height, from });
  offset[row] = top;
}

export interface View {
  /** The part of the width that is shown, as shares. */
  from: number;
  to: number;
  width: number;
  firstLane: number;
  lanes: number;
}

/** Calls `draw` for every call of the view that can be seen; what is too narrow is drawn once a pixel, without what is below it. */
export function paint(
  table: CallTable,
  flame: Flame,
  view: View,
  draw: (row: number, x: number, width: number, lane: number) => void,
): void {
  const { order, size } = table.tree();
  const scale = view.width / (view.to - view.from || 1);
  const drawn = new Int32Array(flame.lanes).fill(-1);
  for (let at = 0; at < order.length; ) {
    const row = order[at]!;
    const from = flame.from[row]!;
    if (flame.reach[row]! < view.from || from > view.to) {
      at += size[row]!;
      continue;
    }
    const x = (from - view.from) * scale;
    const width = (flame.to[row]! - from) * scale;
    const lane = flame.lane[row]!;
    if (lane >= view.firstLane && lane < view.firstLane + view.lanes && (width > 1 || Math.floor(x) > drawn[lane]!)) {
      draw(row, x, Math.max(1, width), lane);
      drawn[lane] = Math.floor(x + Math.max(0, width - 1));
    }
    at += (flame.reach[row]! - from) * scale < 1 ? size[row]! : 1;
  }
}

/** The call at a place; -1 if there is none. */
export function rowAt(table: CallTable, flame: Flame, share: number, lane: number, slack = 0): number {
  const { order, size } = table.tree();
  for (let at = 0; at < order.length; ) {
    const row = order[at]!;
    if (flame.from[row]! - slack > share || flame.reach[row]! + slack < share) at += size[row]!;
    else if (flame.lane[row] === lane && flame.to[row]! + slack >= share) return row;
    else at += 1;
  }
  return -1;
}

/** The call to which an arrow key leads: up to what made it, down to the first that it made, sideways to the next. */
export function neighbour(table: CallTable, row: number, key: string): number {
  const { order, place: places, size, depth } = table.tree();
  const at = places[row]!;
  if (key === "ArrowUp") return table.parent[row]!;
  if (key === "ArrowDown") return size[row]! > 1 ? order[at + 1]! : -1;
  if (key === "ArrowRight") {
    const after = at + size[row]!;
    return after < order.length && table.parent[order[after]!] === table.parent[row] ? order[after]! : -1;
  }
  for (let before = at - 1; before >= 0; before -= 1) {
    const other = order[before]!;
    if (depth[other]! < depth[row]!) return -1;
    if (table.parent[other] === table.parent[row]) return other;
  }
  return -1;
}
