// What every page is made of.

import { useEffect, useId, useRef, useState, type ReactNode } from "react";
import { ApiError } from "../api/client.ts";
import { exactUsd, formatUsd } from "../model/money.ts";
import { visible, visibleText } from "./visible.ts";

const SIGNS: Record<string, string> = {
  queued: "○",
  running: "◐",
  waiting: "◇",
  parked: "‖",
  completed: "✓",
  success: "✓",
  failed: "✕",
  error: "✕",
  halted: "■",
  halt: "■",
  fail: "✕",
  refused: "✕",
  cancelled: "■",
  interrupted: "■",
  skipped: "–",
};

const WORDS: Record<string, string> = { success: "done", fail: "failed", halt: "stopped", waiting: "needs you" };

export function Status({ of, word }: { of: string; word?: string }) {
  return (
    <span className={`status ${of}`}>
      <i aria-hidden="true">{SIGNS[of] ?? "•"}</i>
      {word ?? WORDS[of] ?? of}
    </span>
  );
}

export function Money({ nanos, unknown = false }: { nanos: number; unknown?: boolean }) {
  const least = unknown ? "at least " : "";
  return (
    <span title={`${least}${exactUsd(nanos)}`}>
      {unknown && <abbr title="at least: a call was billed at an unknown cost">≥ </abbr>}
      {formatUsd(nanos)}
    </span>
  );
}

export interface Level {
  name: string;
  spent: number;
  held?: number;
  unresolved?: number;
  waiting?: number;
  limit: number | null;
  format: (value: number) => string;
  tripped?: boolean;
  note?: string | undefined;
}

/** One ceiling: what is spent, held and unresolved of it, and what is left. */
export function Meter({ level, small = false }: { level: Level; small?: boolean }) {
  const { name, spent, held = 0, unresolved = 0, waiting = 0, limit, format, tripped = false, note } = level;
  const left = limit === null ? null : Math.max(0, limit - spent - held - unresolved);
  return (
    <section className={`meter${tripped ? " tripped" : ""}`} aria-label={name}>
      <div className="top">
        <span>{name}</span>
        {tripped ? <b>■ limit reached</b> : <span>{note}</span>}
      </div>
      <div className="figure">
        {format(spent)} <small>{limit === null ? "no limit" : `of ${format(limit)}`}</small>
      </div>
      {limit !== null && <Track {...level} />}
      <dl className="legend">
        {!small && <Key name="spent" value={format(spent)} />}
        {held > 0 && <Key name="held" value={format(held)} />}
        {unresolved > 0 && <Key name="unresolved" value={format(unresolved)} />}
        {waiting > 0 && <Key name="waited for" value={format(waiting)} />}
        {left !== null && <Key name="left" value={format(left)} />}
      </dl>
    </section>
  );
}

function Key({ name, value }: { name: string; value: string }) {
  return (
    <div className={`k-${name.replace(" ", "-")}`}>
      <dt>{name}</dt>
      <dd>{value}</dd>
    </div>
  );
}

export function Track({ name, spent, held = 0, unresolved = 0, limit, format, thin = false }: Level & { thin?: boolean }) {
  const share = (value: number) => (limit ? `${Math.min(100, (100 * value) / limit)}%` : value > 0 ? "100%" : "0");
  const parts = [`${format(spent)} of ${limit === null ? "no limit" : format(limit)}`];
  if (held) parts.push(`${format(held)} held`);
  if (unresolved) parts.push(`${format(unresolved)} unresolved`);
  return (
    <div
      className={`track${thin ? " thin" : ""}`}
      role="meter"
      aria-label={name}
      aria-valuemin={0}
      aria-valuemax={limit ?? spent}
      aria-valuenow={Math.min(spent, limit ?? spent)}
      aria-valuetext={parts.join(", ")}
    >
      <span className="spent" style={{ width: share(spent) }} />
      <span className="held" style={{ width: share(held) }} />
      <span className="unresolved" style={{ width: share(unresolved) }} />
    </div>
  );
}

export function Failure({ error }: { error: unknown }) {
  if (!error) return null;
  const message = error instanceof Error ? error.message : String(error);
  const path = error instanceof ApiError && error.path ? ` (${error.path})` : "";
  return (
    <div className="note bad" role="alert">
      {visible(message)}
      {path}
    </div>
  );
}

export function Field({ label, hint, children }: { label: string; hint?: string; children: (id: string) => ReactNode }) {
  const id = useId();
  return (
    <div className="field">
      <label htmlFor={id}>{label}</label>
      {children(id)}
      {hint && <span className="muted small">{hint}</span>}
    </div>
  );
}

export function Value({ of, label }: { of: unknown; label: string }) {
  return (
    <pre className="value" tabIndex={0} role="region" aria-label={label}>
      {visibleText(typeof of === "string" ? of : (JSON.stringify(of, null, 2) ?? ""))}
    </pre>
  );
}

export function Dialog({ title, onClose, children }: { title: string; onClose: () => void; children: ReactNode }) {
  const dialog = useRef<HTMLDialogElement>(null);
  const id = useId();
  useEffect(() => {
    dialog.current?.showModal();
  }, []);
  return (
    <dialog ref={dialog} onClose={onClose} aria-labelledby={id}>
      <div className="stack">
        <h1 id={id}>{title}</h1>
        {children}
      </div>
    </dialog>
  );
}

/** Runs one action at a time, and keeps its error for the page to show. */
export function useAction(): [boolean, unknown, (action: () => Promise<void>) => Promise<void>] {
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState<unknown>(null);
  const run = async (action: () => Promise<void>) => {
    setBusy(true);
    setError(null);
    try {
      await action();
    } catch (failure) {
      setError(failure);
    } finally {
      setBusy(false);
    }
  };
  return [busy, error, run];
}

const RETRY_MS = 3_000;

/** Whether a request failed because the server is not there at the moment. */
export function isAway(error: unknown): boolean {
  return error instanceof ApiError && (error.status === 0 || error.status >= 502);
}

/** Loads now, again every `everyMs` while the tab is visible, and again when `key` changes or the server is back. */
export function usePolled<T>(key: string, load: (signal: AbortSignal) => Promise<T>, everyMs: number) {
  const [state, setState] = useState<{ key: string; value: T | null; error: unknown }>({ key, value: null, error: null });
  const [turn, setTurn] = useState(0);
  const latest = useRef(load);
  latest.current = load;
  useEffect(() => {
    const abort = new AbortController();
    let timer: ReturnType<typeof setTimeout> | undefined;
    const once = async () => {
      let pause = everyMs;
      if (document.visibilityState === "visible") {
        try {
          const value = await latest.current(abort.signal);
          if (!abort.signal.aborted) setState({ key, value, error: null });
        } catch (error) {
          if (!abort.signal.aborted) setState((old) => ({ key, value: old.key === key ? old.value : null, error }));
          if (!everyMs && isAway(error)) pause = RETRY_MS;
        }
      }
      if (!abort.signal.aborted && pause) timer = setTimeout(once, pause);
    };
    void once();
    return () => {
      abort.abort();
      clearTimeout(timer);
    };
  }, [key, everyMs, turn]);
  const value = state.key === key ? state.value : null;
  return { value, error: state.key === key ? state.error : null, again: () => setTurn((old) => old + 1) };
}

/** An id as lists show it. */
export function shortId(id: string): string {
  return id.length > 24 ? `${id.slice(0, 8)}…${id.slice(-6)}` : id;
}

export function when(ms: number | null): string {
  return ms === null ? "" : new Date(ms).toLocaleString(undefined, { dateStyle: "short", timeStyle: "medium" });
}
