// Limits of a run as a form: of a new run, and what a grant adds.

import type { Limits } from "../api/types.ts";
import { formatCount, formatDuration, formatUsd, toNanos } from "../model/money.ts";
import { Field } from "../ui/parts.tsx";

export const LIMITS = {
  max_cost_usd: "Money, US dollars",
  max_steps: "Steps",
  max_tokens: "Tokens",
  max_api_calls: "API calls",
  max_retries: "Retries",
  timeout_s: "Time, seconds",
} as const;

export type LimitName = keyof typeof LIMITS;

export function LimitFields({
  values,
  onChange,
  names = Object.keys(LIMITS) as LimitName[],
}: {
  values: Record<string, string>;
  onChange: (values: Record<string, string>) => void;
  names?: LimitName[];
}) {
  return (
    <div className="grid2">
      {names.map((name) => (
        <Field key={name} label={LIMITS[name]}>
          {(id) => (
            <input
              id={id}
              inputMode="decimal"
              value={values[name] ?? ""}
              onChange={(event) => onChange({ ...values, [name]: event.target.value })}
            />
          )}
        </Field>
      ))}
    </div>
  );
}

/** Limits as they are in force, such as “$1, 1,000 steps, 1 h”. */
export function limitsInWords(limits: Record<string, unknown>): string {
  const words: Record<LimitName, (value: number) => string> = {
    max_cost_usd: (value) => formatUsd(toNanos(value)),
    max_steps: (value) => `${formatCount(value)} steps`,
    max_tokens: (value) => `${formatCount(value)} tokens`,
    max_api_calls: (value) => `${formatCount(value)} API calls`,
    max_retries: (value) => `${formatCount(value)} retries`,
    timeout_s: (value) => formatDuration(value * 1000),
  };
  const given = (Object.keys(words) as LimitName[]).filter((name) => limits[name] !== undefined);
  return given.map((name) => words[name](Number(limits[name]))).join(", ") || "no limit";
}

/** Reads the filled-in fields; money stays text, so that it stays exact. */
export function readLimits(values: Record<string, string>): Limits {
  const limits: Record<string, string | number> = {};
  for (const name of Object.keys(LIMITS) as LimitName[]) {
    const text = (values[name] ?? "").trim();
    if (!text) continue;
    if (!/^\d+(\.\d+)?$/.test(text)) throw new Error(`${LIMITS[name]}: write a number such as 0.50, not “${text}”`);
    limits[name] = name === "max_cost_usd" ? text : Number(text);
  }
  return limits as Limits;
}
