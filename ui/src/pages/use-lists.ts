// Lists that the server reports as they change: open approvals, for their page, for a run that waits, and for the count
// in the navigation; and the budgets of today.

import { useEffect, useRef, useState } from "react";
import { get, query } from "../api/client.ts";
import type { Topic } from "../api/hub.ts";
import { watchTopic } from "../api/stream.ts";
import type { ApprovalPage, BudgetsOfDay } from "../api/types.ts";
import { usePolled } from "../ui/parts.tsx";

export function useApprovals(runId?: string) {
  const path = `/api/approvals${query({ run_id: runId })}`;
  const found = usePolled(path, (signal) => get<ApprovalPage>(path, signal), 0);
  useTopic("approvals", found.again);
  return found;
}

const BUDGETS_MS = 60_000;

/** The budgets of today, as they change; read now and then, too, because of the time until they are reset. */
export function useBudgets(): { value: BudgetsOfDay | null; error: unknown } {
  const read = usePolled("budgets", (signal) => get<BudgetsOfDay>("/api/budgets", signal), BUDGETS_MS);
  const [live, setLive] = useState<BudgetsOfDay | null>(null);
  useEffect(() => watchTopic("budgets", (latest) => setLive(latest as BudgetsOfDay)), []);
  const value = live && live.now_ms > (read.value?.now_ms ?? 0) ? live : read.value;
  return { value, error: read.error };
}

/** Calls back when a list on the server has changed, and after each reconnect; at most every `everyMs`. */
export function useTopic(topic: Topic, onChange: () => void, everyMs = 0): void {
  const latest = useRef(onChange);
  latest.current = onChange;
  useEffect(() => {
    let timer: ReturnType<typeof setTimeout> | undefined;
    let last = -Infinity;
    const call = () => {
      timer = undefined;
      last = performance.now();
      latest.current();
    };
    const leave = watchTopic(topic, () => {
      timer ??= setTimeout(call, Math.max(0, last + everyMs - performance.now()));
    });
    return () => (leave(), clearTimeout(timer));
  }, [topic, everyMs]);
}
