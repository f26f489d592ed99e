// One run, live: its record from the API, and its events as a model that re-renders at most once a frame.

import { useEffect, useRef, useState } from "react";
import { follow, get } from "../../api/client.ts";
import type { RunShown } from "../../api/types.ts";
import { apply, newRun, type RunState } from "../../model/run.ts";

export interface LiveRun {
  record: RunShown | null;
  state: RunState;
  connection: "connecting" | "open" | "ended" | "lost";
  message: string | null;
  error: unknown;
  /** Read the record again, and follow the run again if it had ended. */
  refresh: () => void;
}

export function useRun(id: string): LiveRun {
  const [record, setRecord] = useState<RunShown | null>(null);
  const [error, setError] = useState<unknown>(null);
  const [connection, setConnection] = useState<LiveRun["connection"]>("connecting");
  const [message, setMessage] = useState<string | null>(null);
  const [turn, setTurn] = useState(0);
  const [, render] = useState(0);
  const held = useRef({ id, state: newRun() });
  if (held.current.id !== id) held.current = { id, state: newRun() };
  const state = held.current.state;

  useEffect(() => {
    const abort = new AbortController();
    let frame = 0;
    const load = async () => {
      try {
        const found = await get<RunShown>(`/api/runs/${encodeURIComponent(id)}`, abort.signal);
        setRecord(found);
        setError(null);
      } catch (failure) {
        if (!abort.signal.aborted) setError(failure);
      }
    };
    const follower = {
      onEvents(events: Parameters<typeof apply>[1]) {
        const before = state.status;
        const whole = apply(state, events);
        frame ||= requestAnimationFrame(() => {
          frame = 0;
          render((old) => old + 1);
        });
        if (state.status !== before) void load(); // its record has why it stopped, and what helps
        return whole;
      },
      onState(now: "open" | "ended" | "lost", why?: string) {
        setConnection(now);
        setMessage(why ?? null);
        if (now === "ended") void load();
      },
    };
    void load();
    void follow(id, () => state.lastSeq, follower, abort.signal);
    return () => {
      abort.abort();
      cancelAnimationFrame(frame);
    };
  }, [id, state, turn]);

  const shown = record?.id === id ? record : null;
  return { record: shown, state, connection, message, error, refresh: () => setTurn((old) => old + 1) };
}
