// What the run has used of its own limits, and of the budgets above and below it.

import { useEffect, useState } from "react";
import { serverNow } from "../../api/client.ts";
import type { RunShown } from "../../api/types.ts";
import { formatCount, formatDuration, formatUsd, toNanos } from "../../model/money.ts";
import { budgetsAt, elapsedMs, isLive, usageOf, type RunState } from "../../model/run.ts";
import { Meter, type Level } from "../../ui/parts.tsx";
import type { LimitName } from "../limits.tsx";
import { formatOf, ownerOf, RAISED_BY } from "./words.ts";

export function Strip({ record, state, atMs }: { record: RunShown; state: RunState; atMs: number | null }) {
  // Until the events have come, the record has what was used.
  const hasRecord = state.lastSeq === 0 && !isLive(record.status);
  const now = useNow(isLive(state.status));
  const stopped = (hasRecord ? record.status : state.status) === "halted" && atMs === null ? record.stop_reason : null;
  const own = record.halted_by === null || record.halted_by.whose === "run";
  const tripped = (name: LimitName) => own && stopped !== null && RAISED_BY[stopped] === name;
  const levels = levelsOf(record, state, elapsedMs(state, atMs ?? now), atMs).map(([name, level]) => ({ ...level, tripped: tripped(name) }));
  const others = outerLevels(record, state, atMs);
  return (
    <div className="strips" role="group" aria-label="What the run has used of its limits">
      <div className="strip">
        {[...levels.slice(0, 1), ...others].map((level) => (
          <Meter key={level.name} level={level} />
        ))}
      </div>
      <div className="strip small-strip">
        {levels.slice(1).map((level) => (
          <Meter key={level.name} level={level} small />
        ))}
      </div>
    </div>
  );
}

function levelsOf(record: RunShown, state: RunState, elapsed: number, atMs: number | null): [LimitName, Level][] {
  const limit = (name: LimitName) => (record.limits[name] === undefined ? null : Number(record.limits[name]));
  const usage = usageOf(state, atMs);
  const own = budgetsAt(state, atMs).find((budget) => budget.level === "run");
  const figures = (unit: string) => own?.units.find((one) => one.unit === unit);
  const ended = atMs === null && (state.lastSeq === 0 ? !isLive(record.status) : !isLive(state.status));
  const money: Level = {
    name: "Money of this run",
    ...(ended ? { held: 0, waiting: 0 } : figures("usd")),
    spent: Math.max(ended ? record.cost_nanos : (figures("usd")?.spent ?? 0), usage.spentNanos),
    unresolved: ended ? toNanos(record.unresolved_usd) : (figures("usd")?.unresolved ?? 0),
    limit: record.limits.max_cost_usd === undefined ? null : toNanos(record.limits.max_cost_usd),
    format: formatUsd,
    note: usage.unknownCosts ? `at least: ${usage.unknownCosts} of unknown cost` : undefined,
  };
  const seconds = limit("timeout_s");
  const time: Level = { name: "Time", spent: elapsed, limit: seconds === null ? null : seconds * 1000, format: formatDuration };
  const levels: [LimitName, Level][] = [["max_cost_usd", money]];
  levels.push(["timeout_s", time]);
  const tokens = ended ? Math.max(usage.tokens, record.tokens_in + record.tokens_out) : usage.tokens;
  levels.push(["max_tokens", { name: "Tokens", spent: tokens, limit: limit("max_tokens"), format: formatCount }]);
  for (const [name, unit, label] of COUNTED) {
    const one = figures(unit);
    if (one) levels.push([name, { ...one, name: label, limit: limit(name), format: formatCount }]);
    else if (name === "max_api_calls") levels.push([name, { name: "Model calls", spent: usage.modelCalls, limit: limit(name), format: formatCount }]);
  }
  return levels.filter(([, level], index) => index < 2 || level.limit !== null || level.spent > 0);
}

const COUNTED: [LimitName, string, string][] = [
  ["max_api_calls", "api calls", "API calls"],
  ["max_steps", "steps", "Steps"],
  ["max_retries", "retries", "Retries"],
];

/** Budgets above and below the run: of days and of nodes; without budget events, the one that stopped the run. */
function outerLevels(record: RunShown, state: RunState, atMs: number | null): Level[] {
  const halt = atMs === null ? record.halted_by : null;
  const stopper = halt && halt.whose !== "run" ? halt : null;
  const levels: Level[] = [];
  let stopperShown = false;
  for (const budget of budgetsAt(state, atMs)) {
    if (budget.level === "run") continue;
    for (const figures of budget.units) {
      if (figures.limit === null) continue;
      const tripped = stopper?.budget === budget.name && stopper.unit === figures.unit;
      stopperShown ||= tripped;
      const unit = figures.unit === "usd" ? "" : `, ${figures.unit}`;
      const name = `${ownerOf(budget.level, budget.node ?? budget.name, record.owner)}${unit}`;
      const then = budget.isStored ? "now" : "when the run ended";
      const note = budget.level === "node" || isLive(state.status) || atMs !== null ? undefined : then;
      levels.push({ ...figures, name, format: formatOf(figures.unit), tripped, note });
    }
  }
  if (stopper?.limit != null && !stopperShown) {
    const amount = (value: number | null | undefined) => (stopper.unit === "usd" ? toNanos(value) : (value ?? 0));
    const name = ownerOf(stopper.whose, stopper.node_id ?? stopper.budget, record.owner);
    const format = formatOf(stopper.unit ?? "");
    levels.push({ name, spent: amount(stopper.used), limit: amount(stopper.limit), format, tripped: true });
  }
  return levels;
}

export function useNow(ticking: boolean): number {
  const [now, setNow] = useState(serverNow);
  useEffect(() => {
    if (!ticking) return;
    const timer = setInterval(() => setNow(serverNow()), 1000);
    return () => clearInterval(timer);
  }, [ticking]);
  return now;
}
