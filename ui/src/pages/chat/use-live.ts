// Answers that are being written, followed live, and the details of those that are finished.

import { useEffect, useRef, useState } from "react";
import { eventsOf } from "../../api/chat.ts";
import { follow } from "../../api/client.ts";
import { applyAll, DETAIL_TYPES, isUnderWay, newAnswer, type Answer } from "./answer.ts";

export interface Live {
  answer: Answer;
  connection: "connecting" | "open" | "ended" | "lost";
  message: string | null;
}

const AGAIN_MS = 2_000;

/** Follow the run of an answer until it has ended; renders at most once a frame. */
export function useLive(runId: string | null, onEnd: () => void): Live | null {
  const [, render] = useState(0);
  const live = useRef<{ id: string | null; value: Live }>({ id: null, value: fresh() });
  if (live.current.id !== runId) live.current = { id: runId, value: fresh() };
  const ended = useRef(onEnd);
  ended.current = onEnd;
  useEffect(() => {
    if (runId === null) return;
    const abort = new AbortController();
    const { value } = live.current;
    let frame = 0;
    let timer: ReturnType<typeof setTimeout> | undefined;
    const draw = () => {
      frame ||= requestAnimationFrame(() => ((frame = 0), render((old) => old + 1)));
    };
    const once = () =>
      follow(
        runId,
        () => value.answer.lastSeq,
        {
          onEvents(events) {
            applyAll(value.answer, events);
            if (!isUnderWay(value.answer.status)) ended.current(); // its text is stored by now
            draw();
            return true;
          },
          onState(connection, message) {
            value.connection = connection;
            value.message = message ?? null;
            // A parked run is taken up again by the next server, so it is worth asking again.
            if (connection === "ended" && !abort.signal.aborted) {
              if (isUnderWay(value.answer.status)) timer = setTimeout(() => void once(), AGAIN_MS);
              else ended.current();
            }
            draw();
          },
        },
        abort.signal,
      );
    void once();
    return () => {
      abort.abort();
      cancelAnimationFrame(frame);
      clearTimeout(timer);
    };
  }, [runId]);
  return runId === null ? null : live.current.value;
}

function fresh(): Live {
  return { answer: newAnswer(), connection: "connecting", message: null };
}

/** Tools, models and figures of finished answers, by run; read once for each. */
export function useDetails(runIds: string[]): Map<string, Answer> {
  const known = useRef(new Map<string, Answer>());
  const [, render] = useState(0);
  const missing = runIds.filter((id) => !known.current.has(id)).join(",");
  useEffect(() => {
    if (!missing) return;
    const abort = new AbortController();
    const ids = missing.split(",");
    void (async () => {
      try {
        for (const [id, events] of await eventsOf(ids, DETAIL_TYPES, abort.signal)) {
          const answer = newAnswer();
          applyAll(answer, events);
          known.current.set(id, answer);
        }
        render((old) => old + 1);
      } catch {
        // The answers are shown without details; those are read again with the next change.
      }
    })();
    return () => abort.abort();
  }, [missing]);
  return known.current;
}
