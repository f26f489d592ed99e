// Money is counted in whole billionths of a dollar, so that sums are exact, and shown with three significant digits.

import type { ModelShown } from "../api/types.ts";

export const NANOS = 1_000_000_000;

export function toNanos(usd: unknown): number {
  const value = typeof usd === "string" ? Number(usd) : usd;
  return typeof value === "number" && Number.isFinite(value) ? Math.round(value * NANOS) : 0;
}

export function formatUsd(nanos: number): string {
  if (nanos === 0) return "$0";
  const sign = nanos < 0 ? "−" : "";
  const usd = Math.abs(nanos) / NANOS;
  const whole = Math.floor(Math.log10(usd));
  const digits = usd >= 1 ? 2 : Math.min(9, 2 - whole);
  const text = usd.toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: digits });
  return `${sign}$${text}`;
}

/** The price of a million tokens, with all its digits. */
export function formatPrice(usd: number | null | undefined): string {
  return usd == null ? "–" : `$${usd.toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 9 })}`;
}

/** What a model costs, for a list to choose from. */
export function priceWords({ price, key }: Pick<ModelShown, "price" | "key">): string {
  const missing = key === "missing" ? ", no key" : "";
  if (!price) return `no known price${missing}`;
  const assumed = price.source === "assumed" ? " assumed" : "";
  return `${formatPrice(price.input_usd_per_mtok)} in, ${formatPrice(price.output_usd_per_mtok)} out per million tokens${assumed}${missing}`;
}

/** The exact amount, for tooltips. */
export function exactUsd(nanos: number): string {
  const digits = String(Math.abs(nanos)).padStart(10, "0");
  const fraction = digits.slice(-9).replace(/0+$/, "");
  return `${nanos < 0 ? "−" : ""}$${digits.slice(0, -9)}${fraction ? `.${fraction}` : ""}`;
}

export function formatCount(value: number): string {
  return value.toLocaleString("en-US");
}

/** A number of things: `1 run`, `2 runs`. */
export function several(count: number, thing: string): string {
  return `${formatCount(count)} ${thing}${count === 1 ? "" : "s"}`;
}

export function formatDuration(ms: number): string {
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(ms < 10_000 ? 1 : 0)} s`;
  const minutes = Math.floor(ms / 60_000);
  const rest = minutes < 60 ? Math.floor((ms % 60_000) / 1000) : minutes % 60;
  const [large, small] = minutes < 60 ? [`${minutes} min`, `${rest} s`] : [`${Math.floor(minutes / 60)} h`, `${rest} min`];
  return rest ? `${large} ${small}` : large;
}

export function formatBytes(bytes: number): string {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  const power = bytes < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log10(bytes) / 3));
  const value = bytes / 1_000 ** power;
  return `${power && value < 100 ? value.toFixed(1) : formatCount(Math.round(value))} ${units[power]}`;
}
