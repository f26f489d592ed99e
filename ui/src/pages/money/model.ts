// What the money page computes: the days of a range, the lines and bars of the chart, and the time of the reset.

import type { MoneySum } from "../../api/types.ts";

export interface DayCost {
  day: string;
  nanos: number;
  unknown: number;
}

const DAY_MS = 86_400_000;

/** Every day of the range, also those without costs. */
export function everyDay(since: string, until: string, sums: MoneySum[]): DayCost[] {
  const found = new Map(sums.map((sum) => [sum.day, sum]));
  const days: DayCost[] = [];
  for (let at = Date.parse(since); at <= Date.parse(until); at += DAY_MS) {
    const day = dayOf(at);
    const sum = found.get(day);
    days.push({ day, nanos: sum?.cost_nanos ?? 0, unknown: sum?.unknown_costs ?? 0 });
  }
  return days;
}

export function dayOf(ms: number): string {
  return new Date(ms).toISOString().slice(0, 10);
}

export function daysBefore(day: string, count: number): string {
  return dayOf(Date.parse(day) - count * DAY_MS);
}

/** Up to five round amounts from zero to at least `most`. */
export function ticks(most: number): number[] {
  if (most <= 0) return [0];
  const power = 10 ** Math.floor(Math.log10(most));
  const step = [0.25, 0.5, 1, 2.5].map((factor) => factor * power).find((size) => most / size <= 4) ?? 5 * power;
  const count = Math.ceil(most / step - 1e-9);
  return Array.from({ length: count + 1 }, (_, at) => Math.round(at * step));
}

export function bars(count: number, width: number): { width: number; x: (at: number) => number } {
  const place = width / Math.max(count, 1);
  const bar = Math.min(46, Math.max(1, place * 0.72));
  return { width: bar, x: (at) => place * at + (place - bar) / 2 };
}

/** When the budgets of the next day apply, for people: `in 3 h 12 min`. */
export function untilReset(nowMs: number, resetsMs: number): string {
  const minutes = Math.max(1, Math.ceil((resetsMs - nowMs) / 60_000));
  const hours = Math.floor(minutes / 60);
  return hours ? `in ${hours} h ${minutes % 60} min` : `in ${minutes} min`;
}
