// One run, live: its record from the API, and its events as a model that re-renders at most once a frame.
//
// A short run is read event by event. A long one opens with the server's columns of its calls; its earlier events come
// when they are looked at. If the server's database was restored, the events that this page has seen are gone: the page
// says so, and begins again.

import { useEffect, useRef, useState } from "react";
import { ApiError, get, query, readEvents } from "../../api/client.ts";
import type { News } from "../../api/hub.ts";
import { watchRun } from "../../api/stream.ts";
import type { BudgetList, EventShown, RunShown, RunTree } from "../../api/types.ts";
import { apply, applyHistory, fromColumns, HISTORY_TYPES, isLive, newRun, setStored, type RunState } from "../../model/run.ts";

/** Other runs spend of the same day, of which this one has no events. */
const BUDGETS_MS = 5_000;
/** Runs with more events than this open with columns. */
const COLUMNS_FROM = 2_000;

export interface LiveRun {
  record: RunShown | null;
  state: RunState;
  connection: "connecting" | "open" | "lost";
  message: string | null;
  error: unknown;
  /** Whether the server has lost events that this page had seen. */
  restored: boolean;
  /** Read the record again. */
  refresh: () => void;
}

export function useRun(id: string): LiveRun {
  const [record, setRecord] = useState<RunShown | null>(null);
  const [error, setError] = useState<unknown>(null);
  const [connection, setConnection] = useState<LiveRun["connection"]>("connecting");
  const [message, setMessage] = useState<string | null>(null);
  const [restored, setRestored] = useState(false);
  const [turn, setTurn] = useState(0);
  const [, render] = useState(0);
  const held = useRef({ id, state: newRun() });
  if (held.current.id !== id) held.current = { id, state: newRun() };
  const run = held.current;

  useEffect(() => {
    const abort = new AbortController();
    const { signal } = abort;
    const path = `/api/runs/${encodeURIComponent(id)}`;
    let frame = 0;
    let isLoaded = false;
    let failed: unknown = null;
    const redraw = () => {
      frame ||= requestAnimationFrame(() => {
        frame = 0;
        render((old) => old + 1);
      });
    };
    const loadBudgets = async () => {
      try {
        setStored(run.state, await get<BudgetList>(`${path}/budgets`, signal));
        redraw();
      } catch {
        // Without it, daily budgets are those of the events.
      }
    };
    const load = async () => {
      try {
        const found = await get<RunShown>(path, signal);
        isLoaded = true;
        setRecord((old) => (old?.id === id && old.last_seq > found.last_seq ? old : found)); // a later request may answer first
        setError(null);
        void loadBudgets();
        return found;
      } catch (failure) {
        failed = failure;
        if (!signal.aborted) setError(failure);
        return null;
      }
    };
    let leave = () => {};
    const watch = () => {
      leave();
      if (!signal.aborted) leave = watchRun(id, run.state.lastSeq, onNews);
    };
    const onNews = (news: News) => {
      if (news.kind === "open" || news.kind === "lost") {
        setConnection(news.kind);
        setMessage(news.kind === "lost" ? news.message : null);
      }
      if (news.kind === "open" && !isLoaded) void load();
      if (news.kind === "lost" && news.status === 422 && run.state.lastSeq > 0) {
        run.state = newRun();
        setRestored(true);
        setTurn((old) => old + 1);
      }
      if (news.kind !== "events") return;
      const { status: before, epoch } = run.state;
      if (!apply(run.state, news.events)) watch(); // an event is missing: read on from the last that is not
      redraw();
      const isSettled = news.events.some(({ type }) => type.startsWith("bill."));
      // Its record has why it stopped, what it cost, and how often it was resumed.
      if (run.state.status !== before || run.state.epoch !== epoch || isSettled) void load();
    };
    const open = async () => {
      const found = await load();
      if (failed instanceof ApiError && failed.status === 404) return; // nothing to wait for
      if (found && run.state.lastSeq === 0 && found.last_seq > COLUMNS_FROM) {
        const opened = await columns(path, signal);
        if (opened) run.state = { ...opened, stored: run.state.stored, storedSeq: run.state.storedSeq };
        redraw();
        void history(id, run.state, signal).then(redraw, () => {}); // without it, only earlier budgets are missing
      }
      watch();
    };
    void open();
    const timer = setInterval(() => {
      if (isLive(run.state.status) && isLoaded && document.visibilityState === "visible") void loadBudgets();
    }, BUDGETS_MS);
    return () => {
      abort.abort();
      clearInterval(timer);
      leave();
      cancelAnimationFrame(frame);
    };
  }, [id, run, turn]);

  const shown = record?.id === id ? record : null;
  const refresh = () => setTurn((old) => old + 1);
  return { record: shown, state: run.state, connection, message, error, restored, refresh };
}

/** The run as of its columns; null from a server that has none, which sends the events instead. */
async function columns(path: string, signal: AbortSignal): Promise<RunState | null> {
  try {
    return fromColumns(await get<RunTree>(`${path}/tree`, signal));
  } catch {
    return null;
  }
}

/** Budgets, refusals and states from before the columns. */
async function history(id: string, state: RunState, signal: AbortSignal): Promise<void> {
  if (state.columnsSeq === 0) return;
  const found: EventShown[] = [];
  const path = `/api/stream${query({ runs: `${id}@0`, types: HISTORY_TYPES, follow: "false" })}`;
  await readEvents(path, (events) => found.push(...events) > 0, signal);
  applyHistory(state, found);
}
