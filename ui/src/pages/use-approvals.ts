// Open approvals, for their page, for a run that waits, and for the count in the navigation.

import { get, query } from "../api/client.ts";
import type { ApprovalPage } from "../api/types.ts";
import { usePolled } from "../ui/parts.tsx";

const POLL_MS = 3_000;

export function useApprovals(runId?: string) {
  const path = `/api/approvals${query({ run_id: runId })}`;
  return usePolled(path, (signal) => get<ApprovalPage>(path, signal), POLL_MS);
}
