// Why a run stopped and what helps, and what it waits for.

import { useState } from "react";
import type { RunShown } from "../../api/types.ts";
import { visible } from "../../ui/visible.ts";
import { ApprovalCard } from "../approvals.tsx";
import type { LimitName } from "../limits.tsx";
import { useApprovals } from "../use-lists.ts";
import { GrantDialog } from "./header.tsx";
import type { LiveRun } from "./use-run.ts";
import { WHOSE } from "./words.ts";

const TITLES: Record<string, string> = {
  halted: "Stopped by a limit",
  failed: "Failed",
  cancelled: "Cancelled",
  parked: "Parked",
};

export function Stopped({ record, status, run, mayAct }: { record: RunShown; status: string; run: LiveRun; mayAct: boolean }) {
  const [granting, setGranting] = useState(false);
  const title = TITLES[status];
  if (!title || record.status !== status) return null;
  const halt = record.halted_by;
  const path = `/api/runs/${encodeURIComponent(record.id)}`;
  const canGrant = mayAct && record.advice.some((advice) => advice.step === "grant");
  return (
    <section className={`note ${status === "failed" || status === "halted" ? "bad" : "warn"}`} aria-label="Why it stopped">
      <h2>
        {title}
        {halt ? `: ${WHOSE[halt.whose]}` : ""}
      </h2>
      {record.error && <p>{visible(record.error)}</p>}
      {halt?.node_id && (
        <p className="muted">
          Reached in the node <code>{visible(halt.node_id)}</code>
          {record.stop_reason && ` (${record.stop_reason.replaceAll("_", " ")})`}
        </p>
      )}
      {record.advice.length > 0 && (
        <>
          <b>What helps</b>
          <ul>
            {record.advice.map((advice) => (
              <li key={advice.step}>{visible(sentence(advice.message))}</li>
            ))}
          </ul>
        </>
      )}
      {canGrant && (
        <div>
          <button className="primary" onClick={() => setGranting(true)}>
            Grant more and go on
          </button>
        </div>
      )}
      {granting && <GrantDialog record={record} path={path} onClose={() => (setGranting(false), run.refresh())} />}
    </section>
  );
}

function sentence(text: string): string {
  const plain = Object.entries(PLAIN).reduce((all, [name, word]) => all.replaceAll(name, word), text);
  return plain.charAt(0).toUpperCase() + plain.slice(1);
}

const PLAIN: Record<LimitName, string> = {
  max_cost_usd: "more money",
  max_steps: "more steps",
  max_tokens: "more tokens",
  max_api_calls: "more API calls",
  max_retries: "more retries",
  timeout_s: "more time",
};

export function Waiting({ run, mayAct, onAnswered }: { run: RunShown; mayAct: boolean; onAnswered: () => void }) {
  const approvals = useApprovals(run.id);
  return (
    <>
      {approvals.value?.approvals.map((approval) => (
        <ApprovalCard
          key={approval.id}
          approval={approval}
          mayAct={mayAct}
          onAnswered={() => (approvals.again(), onAnswered())}
          inRun
        />
      ))}
    </>
  );
}
