// An answer as the events of its run describe it: its text so far, its tools, its models, its money, and what it waits for.
//
// A reducer over numbered events: one that was applied already is dropped, so a stream that is resumed doubles nothing.
// Events of some types may be left out, as they are for answers that are finished. Knows nothing of HTTP or of React.

import type { EventShown } from "../../api/types.ts";
import { toNanos } from "../../model/money.ts";

export type AnswerStatus = "queued" | "running" | "waiting" | "parked" | "completed" | "failed" | "halted" | "cancelled";

export interface ToolCard {
  key: string;
  name: string;
  node: string | null;
  /** What the model called it with; undefined if only the call itself was reported. */
  arguments?: unknown;
  state: "requested" | "running" | "done" | "failed" | "refused" | "interrupted";
  message: string | null;
  durationMs: number | null;
  costNanos: number;
}

export interface Units {
  unit: string;
  spent: number;
  held: number;
  limit: number | null;
}

export interface Answer {
  lastSeq: number;
  status: AnswerStatus;
  /** The node whose text is shown. */
  speaker: string | null;
  tools: ToolCard[];
  models: string[];
  tokensIn: number;
  tokensOut: number;
  spentNanos: number;
  heldNanos: number;
  unresolvedNanos: number;
  unknownCosts: number;
  approvals: string[];
  resumed: number;
  startedMs: number | null;
  endedMs: number | null;
  /** Of the run and of what is above it, by name. */
  budgets: Map<string, { level: string; name: string; units: Units[] }>;
  /** By node, then by source; the nodes in the order they last spoke. */
  texts: Map<string, Map<string, string>>;
  isStale: boolean;
  held: Map<string, number>;
  isFinal: boolean;
}

/** What is read of answers that are finished. */
export const DETAIL_TYPES = [
  "run.started",
  "run.resumed",
  "run.completed",
  "run.failed",
  "run.halted",
  "run.cancelled",
  "tool.call",
  "call.ended",
  "bill.resolved",
  "bill.released",
];

const ENDINGS: Record<string, AnswerStatus> = {
  "run.completed": "completed",
  "run.failed": "failed",
  "run.halted": "halted",
  "run.cancelled": "cancelled",
  "run.parked": "parked",
};

export function newAnswer(): Answer {
  return {
    lastSeq: 0,
    status: "queued",
    speaker: null,
    tools: [],
    models: [],
    tokensIn: 0,
    tokensOut: 0,
    spentNanos: 0,
    heldNanos: 0,
    unresolvedNanos: 0,
    unknownCosts: 0,
    approvals: [],
    resumed: 0,
    startedMs: null,
    endedMs: null,
    budgets: new Map(),
    texts: new Map(),
    isStale: false,
    held: new Map(),
    isFinal: false,
  };
}

export function isUnderWay(status: AnswerStatus): boolean {
  return status === "queued" || status === "running" || status === "waiting" || status === "parked";
}

/** The text so far: of the last node to speak, and there of the outermost agent, as the server keeps it. */
export function textOf(answer: Answer): string {
  const speakers = [...answer.texts.values()].at(-1);
  if (!speakers) return "";
  const outermost = [...speakers.keys()].reduce((one, other) => (depth(other) < depth(one) ? other : one));
  return speakers.get(outermost)!;
}

function depth(source: string): number {
  return source.split("/").length;
}

export function applyAll(answer: Answer, events: Iterable<EventShown>): void {
  for (const event of events) {
    if (event.seq <= answer.lastSeq) continue;
    answer.lastSeq = event.seq;
    apply(answer, event);
  }
}

function apply(answer: Answer, event: EventShown): void {
  const { type, data } = event;
  if (type.startsWith("run.")) applyRun(answer, event);
  else if (type === "text.delta") addText(answer, data);
  else if (type === "tool.call") addTool(answer, data);
  else if (type === "call.started") startCall(answer, data);
  else if (type === "call.ended") endCall(answer, data);
  else if (type === "call.settled") settle(answer, data);
  else if (type === "budget") setBudget(answer, data);
  else if (type === "approval.requested") answer.approvals.push(text(object(data.approval).id));
  else if (type === "approval.answered") answered(answer, data);
  else if (type === "bill.resolved" || type === "bill.released") resolveBill(answer, data);
}

function applyRun(answer: Answer, { type, data, at_ms }: EventShown): void {
  const ending = ENDINGS[type];
  if (ending) end(answer, ending, data, at_ms);
  else if (type === "run.started" || type === "run.resumed") {
    answer.status = "running";
    answer.isStale = true; // what was said stays until the run speaks again
    answer.startedMs ??= at_ms;
    answer.endedMs = null;
    answer.isFinal = false;
    if (type === "run.resumed") {
      answer.resumed += 1;
      answer.tools = answer.tools.filter((tool) => tool.state === "done" || tool.state === "failed");
    }
  } else if (type === "run.queued" || type === "run.granted") answer.status = "queued";
  else if (type === "run.waiting") answer.status = "waiting";
}

function end(answer: Answer, status: AnswerStatus, data: Record<string, unknown>, atMs: number): void {
  answer.status = status;
  answer.endedMs = atMs;
  answer.held.clear();
  answer.heldNanos = 0;
  for (const tool of answer.tools) {
    if (tool.state === "running" || tool.state === "requested") tool.state = "interrupted";
  }
  if (status === "parked") return;
  // The record of the run counts over all its attempts, and its calls in events do not.
  answer.isFinal = true;
  answer.approvals = [];
  answer.spentNanos = toNanos(data.cost_usd);
  answer.unresolvedNanos = toNanos(data.unresolved_usd);
  answer.unknownCosts = number(data.unknown_costs);
  answer.tokensIn = number(data.tokens_in);
  answer.tokensOut = number(data.tokens_out);
}

function addText(answer: Answer, data: Record<string, unknown>): void {
  const piece = text(data.text);
  if (!piece) return;
  if (answer.isStale) {
    answer.texts = new Map();
    answer.isStale = false;
  }
  const node = text(data.node_id);
  const sources = answer.texts.get(node) ?? new Map<string, string>();
  const source = text(data.source);
  sources.set(source, (sources.get(source) ?? "") + piece);
  answer.texts.delete(node);
  answer.texts.set(node, sources);
  answer.speaker = node;
}

function addTool(answer: Answer, data: Record<string, unknown>): void {
  const call = object(data.call);
  const name = text(call.name);
  const node = maybeText(data.node_id);
  const waiting = answer.tools.find((tool) => tool.name === name && tool.node === node && tool.arguments === undefined);
  if (waiting) waiting.arguments = call.arguments;
  else answer.tools.push({ ...newTool(`${answer.tools.length}`, name, node), arguments: call.arguments });
}

function newTool(key: string, name: string, node: string | null): ToolCard {
  return { key, name, node, state: "requested", message: null, durationMs: null, costNanos: 0 };
}

/** The first card of that tool that was not begun yet; calls of one turn begin in their order. */
function cardFor(answer: Answer, data: Record<string, unknown>): ToolCard {
  const name = text(data.name);
  const node = maybeText(data.node_id);
  const begun = answer.tools.find((tool) => tool.key === text(data.call_id) && tool.state === "running");
  const open = begun ?? answer.tools.find((tool) => tool.name === name && tool.node === node && tool.state === "requested");
  if (open) return open;
  const card = newTool(`${answer.tools.length}`, name, node);
  answer.tools.push(card);
  return card;
}

function startCall(answer: Answer, data: Record<string, unknown>): void {
  const id = text(data.call_id);
  const held = toNanos(data.held_usd);
  if (held) answer.held.set(id, held);
  answer.heldNanos = sum(answer.held.values());
  if (data.kind === "llm") addModel(answer, data);
  if (data.kind !== "tool" || data.replayed === true) return;
  const card = cardFor(answer, data);
  card.key = id;
  card.state = "running";
}

function endCall(answer: Answer, data: Record<string, unknown>): void {
  answer.held.delete(text(data.call_id));
  answer.heldNanos = sum(answer.held.values());
  if (data.kind === "llm") addModel(answer, data);
  if (data.kind === "tool" && data.replayed !== true) endTool(answer, data);
  if (data.replayed === true || data.kind === "system" || answer.isFinal) return;
  answer.spentNanos += toNanos(data.cost_usd);
  answer.tokensIn += number(data.tokens_in);
  answer.tokensOut += number(data.tokens_out);
  if (data.cost_usd === null) answer.unknownCosts += 1;
}

function endTool(answer: Answer, data: Record<string, unknown>): void {
  const card = cardFor(answer, data);
  card.key = text(data.call_id);
  card.state = data.status === "success" ? "done" : data.status === "halt" ? "refused" : "failed";
  card.message = maybeText(object(data.stop).message) ?? maybeText(data.stop_reason) ?? maybeText(data.error);
  card.durationMs = number(data.duration_ms);
  card.costNanos = toNanos(data.cost_usd);
}

function addModel(answer: Answer, data: Record<string, unknown>): void {
  const model = maybeText(data.model);
  if (model && !answer.models.includes(model)) answer.models.push(model);
}

function settle(answer: Answer, data: Record<string, unknown>): void {
  if (answer.isFinal) return;
  answer.spentNanos += toNanos(data.cost_usd);
  answer.tokensIn += number(data.tokens_in);
  answer.tokensOut += number(data.tokens_out);
}

function resolveBill(answer: Answer, data: Record<string, unknown>): void {
  answer.unresolvedNanos = Math.max(0, answer.unresolvedNanos - toNanos(data.held_usd));
  answer.spentNanos += toNanos(data.cost_usd);
}

function setBudget(answer: Answer, data: Record<string, unknown>): void {
  const name = text(data.budget);
  const level = text(data.level);
  const units = (Array.isArray(data.units) ? data.units : []).map((one: Record<string, unknown>): Units => {
    const unit = text(one.unit);
    const amount = (value: unknown) => (unit === "usd" ? toNanos(value) : number(value));
    return { unit, spent: amount(one.spent), held: amount(one.held), limit: one.limit == null ? null : amount(one.limit) };
  });
  answer.budgets.set(`${level}:${name}`, { level, name, units });
}

function answered(answer: Answer, data: Record<string, unknown>): void {
  answer.approvals = answer.approvals.filter((id) => id !== data.approval_id);
  if (answer.status === "waiting" && answer.approvals.length === 0) answer.status = "running";
}

function sum(values: Iterable<number>): number {
  let total = 0;
  for (const value of values) total += value;
  return total;
}

function object(value: unknown): Record<string, unknown> {
  return typeof value === "object" && value !== null ? (value as Record<string, unknown>) : {};
}

function text(value: unknown): string {
  return typeof value === "string" ? value : "";
}

function maybeText(value: unknown): string | null {
  return typeof value === "string" ? value : null;
}

function number(value: unknown): number {
  return typeof value === "number" ? value : 0;
}
