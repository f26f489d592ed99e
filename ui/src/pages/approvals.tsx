import { useState } from "react";
import { post } from "../api/client.ts";
import type { ApprovalShown } from "../api/types.ts";
import { runLink } from "../router.ts";
import { Failure, Field, useAction, Value, when } from "../ui/parts.tsx";
import type { PageProps } from "./index.ts";
import { parseJson } from "./start.tsx";
import { useApprovals } from "./use-approvals.ts";

export default function ApprovalsPage({ me }: PageProps) {
  const approvals = useApprovals();
  const waiting = approvals.value?.approvals;
  return (
    <>
      <h1>Approvals</h1>
      <Failure error={approvals.error} />
      {waiting?.length === 0 && <div className="panel empty">Nothing waits for you.</div>}
      {waiting?.map((approval) => (
        <ApprovalCard key={approval.id} approval={approval} mayAct={me.role !== "viewer"} onAnswered={approvals.again} />
      ))}
    </>
  );
}

export function ApprovalCard(props: {
  approval: ApprovalShown;
  mayAct: boolean;
  onAnswered: () => void;
  inRun?: boolean;
}) {
  const { approval, mayAct, onAnswered, inRun = false } = props;
  const isText = typeof approval.value === "string";
  const [edited, setEdited] = useState<string | null>(null);
  const [reason, setReason] = useState("");
  const [busy, error, act] = useAction();
  const answer = (verdict: "approve" | "edit" | "reject") =>
    act(async () => {
      const body: { reason: string; answer?: unknown } = { reason };
      if (verdict === "edit") body.answer = isText ? edited : parseJson(edited ?? "");
      await post(`/api/approvals/${encodeURIComponent(approval.id)}/${verdict}`, body);
      onAnswered();
    });
  return (
    <section className="panel pad stack" aria-label="Approval">
      <div>
        <h2>◇ {approval.question || "May this go on?"}</h2>
        <p className="small muted">
          Asked {when(approval.asked_ms)} by the node <code>{approval.node_id}</code>
          {!inRun && (
            <>
              {" "}
              of run <a href={runLink(approval.run_id)}>{approval.run_id}</a>, of {approval.owner}
            </>
          )}
        </p>
      </div>
      {edited === null ? (
        <Value of={approval.value} label="What it would go on with" />
      ) : (
        <Field label="Go on with this instead" hint={isText ? "Text." : "JSON."}>
          {(id) => <textarea id={id} rows={6} value={edited} onChange={(event) => setEdited(event.target.value)} />}
        </Field>
      )}
      {mayAct ? (
        <>
          <Field label="Reason (optional)">
            {(id) => <input id={id} maxLength={2000} value={reason} onChange={(event) => setReason(event.target.value)} />}
          </Field>
          <Failure error={error} />
          <div className="bar">
            {edited === null ? (
              <>
                <button className="primary" disabled={busy} onClick={() => void answer("approve")}>
                  Approve
                </button>
                <button
                  disabled={busy}
                  onClick={() => setEdited(isText ? String(approval.value) : JSON.stringify(approval.value, null, 2))}
                >
                  Edit
                </button>
              </>
            ) : (
              <>
                <button className="primary" disabled={busy} onClick={() => void answer("edit")}>
                  Approve with this change
                </button>
                <button onClick={() => setEdited(null)}>Discard the change</button>
              </>
            )}
            <button className="danger" disabled={busy} onClick={() => void answer("reject")}>
              Reject
            </button>
          </div>
        </>
      ) : (
        <p className="muted">Your role can look, but not answer.</p>
      )}
    </section>
  );
}
