// How two runs differ: what each node used in one and in the other, and which lines of two texts are not the same.
//
// Iterations of a map or a loop are one row: `each/0/read` and `each/1/read` are `each/*/read`. Knows no HTTP and no page.

import { REPLAYED, type CallTable } from "./calls.ts";

export interface NodeUse {
  calls: number;
  costNanos: number;
  tokens: number;
  /** How long the node itself ran, all times together; 0 if none of its calls is its own. */
  ms: number;
}

export interface NodePair {
  node: string;
  one: NodeUse | null;
  other: NodeUse | null;
}

/** What each node used, without calls from the journal, which were paid for before. */
export function useByNode(table: CallTable): Map<string, NodeUse> {
  const found = new Map<string, NodeUse>();
  for (let row = 0; row < table.count; row += 1) {
    const path = table.strings[table.node[row]!];
    if (path === undefined) continue;
    const name = path.replaceAll(/\/\d+(?=\/|$)/g, "/*");
    let use = found.get(name);
    if (!use) found.set(name, (use = { calls: 0, costNanos: 0, tokens: 0, ms: 0 }));
    if (table.kinds[table.kind[row]!] !== "system") use.calls += 1;
    if (table.nodeType[row]! >= 0 && table.end[row]! >= 0) use.ms += table.end[row]! - table.start[row]!;
    if (table.flags[row]! & REPLAYED) continue;
    use.costNanos += table.cost[row]!;
    use.tokens += table.tokensIn[row]! + table.tokensOut[row]!;
  }
  return found;
}

/** The nodes of both, those of the first in its order, then those that only the second has. */
export function pairNodes(one: Map<string, NodeUse>, other: Map<string, NodeUse>): NodePair[] {
  const names = new Set([...one.keys(), ...other.keys()]);
  return [...names].map((node) => ({ node, one: one.get(node) ?? null, other: other.get(node) ?? null }));
}

export interface Line {
  kind: "same" | "removed" | "added";
  text: string;
}

const MAX_LINES = 1_500;

/** The lines of two texts, with those that only one of them has marked; null if they are too long to be compared. */
export function diffLines(one: string, other: string): Line[] | null {
  const [before, after] = [one.split("\n"), other.split("\n")];
  let head = 0;
  while (head < before.length && head < after.length && before[head] === after[head]) head += 1;
  let tail = 0;
  while (tail < before.length - head && tail < after.length - head && before.at(-1 - tail) === after.at(-1 - tail)) tail += 1;
  const [left, right] = [before.slice(head, before.length - tail), after.slice(head, after.length - tail)];
  if (left.length > MAX_LINES || right.length > MAX_LINES) return null;
  const same = (text: string): Line => ({ kind: "same", text });
  const end = tail ? before.slice(-tail) : [];
  return [...before.slice(0, head).map(same), ...middle(left, right), ...end.map(same)];
}

/** By the longest common subsequence; `lengths` has that of every pair of tails. */
function middle(left: string[], right: string[]): Line[] {
  const width = right.length + 1;
  const lengths = new Uint16Array((left.length + 1) * width);
  for (let i = left.length - 1; i >= 0; i -= 1) {
    for (let j = right.length - 1; j >= 0; j -= 1) {
      const next = left[i] === right[j] ? lengths[(i + 1) * width + j + 1]! + 1 : Math.max(lengths[(i + 1) * width + j]!, lengths[i * width + j + 1]!);
      lengths[i * width + j] = next;
    }
  }
  const lines: Line[] = [];
  let [i, j] = [0, 0];
  while (i < left.length || j < right.length) {
    if (i < left.length && j < right.length && left[i] === right[j]) {
      lines.push({ kind: "same", text: left[i]! });
      i += 1;
      j += 1;
    } else if (j >= right.length || (i < left.length && lengths[(i + 1) * width + j]! >= lengths[i * width + j + 1]!)) {
      lines.push({ kind: "removed", text: left[i]! });
      i += 1;
    } else {
      lines.push({ kind: "added", text: right[j]! });
      j += 1;
    }
  }
  return lines;
}
