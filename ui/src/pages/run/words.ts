// The words of the run page: whose budget, which limit, which kind of call.

import { formatCount, formatDuration, formatUsd } from "../../model/money.ts";
import type { Call } from "../../model/run.ts";
import type { LimitName } from "../limits.tsx";

export const RAISED_BY: Record<string, LimitName> = {
  budget_exceeded: "max_cost_usd",
  step_limit_exceeded: "max_steps",
  token_limit_exceeded: "max_tokens",
  api_call_limit_exceeded: "max_api_calls",
  retry_budget_exceeded: "max_retries",
  timeout: "timeout_s",
};

export const WHOSE: Record<string, string> = {
  run: "this run's own limit",
  owner: "the daily budget of its owner",
  all: "the daily budget of everyone",
  node: "the budget of a node",
};

export function ownerOf(level: string, node: string, owner: string): string {
  return { owner: `Daily budget of ${owner}`, all: "Daily budget of everyone" }[level] ?? `Budget of ${node}`;
}

export function formatOf(unit: string): (value: number) => string {
  if (unit === "usd") return formatUsd;
  return unit === "seconds" ? (value) => formatDuration(value * 1000) : formatCount;
}

export function kindOf(call: Call): string {
  if (call.kind === "llm") return "model";
  if (call.kind !== "system") return call.kind;
  return call.parent === null ? "run" : "context";
}

/** A moment in the reader's time zone, with the zone, and in UTC, which servers and logs use. */
export function exactTime(ms: number): string {
  const here = new Date(ms).toLocaleString(undefined, {
    ...{ year: "numeric", month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit" },
    timeZoneName: "short",
  } as Intl.DateTimeFormatOptions);
  return `${here} (${new Date(ms).toISOString().replace("T", " ").replace("Z", " UTC")})`;
}
