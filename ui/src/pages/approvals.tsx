import { useState } from "react";
import { post } from "../api/client.ts";
import type { ApprovalShown } from "../api/types.ts";
import { SchemaForm, type Problems } from "../forms/schema-form.tsx";
import { runLink } from "../router.ts";
import { Failure, Field, useAction, Value, when } from "../ui/parts.tsx";
import { visible } from "../ui/visible.ts";
import type { PageProps } from "./index.ts";
import { parseJson } from "./start.tsx";
import { useApprovals } from "./use-lists.ts";

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
  const { expects } = approval;
  const [given, setGiven] = useState<{ value: unknown; problems: Problems } | null>(null);
  const [isShowingAll, setShowingAll] = useState(false);
  const [edited, setEdited] = useState<string | null>(null);
  const [reason, setReason] = useState("");
  const [busy, error, act] = useAction();
  const answer = (verdict: "approve" | "edit" | "reject") =>
    act(async () => {
      const body: { reason: string; answer?: unknown } = { reason };
      if (verdict === "edit") body.answer = given ? given.value : isText ? edited : parseJson(edited ?? "");
      await post(`/api/approvals/${encodeURIComponent(approval.id)}/${verdict}`, body);
      onAnswered();
    });
  const beginEdit = () => {
    if (expects) setGiven({ value: argumentsOf(approval.value), problems: {} });
    else setEdited(isText ? String(approval.value) : JSON.stringify(approval.value, null, 2));
  };
  const submitEdit = () => {
    if (given && Object.keys(given.problems).length) setShowingAll(true);
    else void answer("edit");
  };
  return (
    <section className="panel pad stack" aria-label="Approval">
      <div>
        <h2>◇ {visible(approval.question) || "May this go on?"}</h2>
        <p className="small muted">
          Asked {when(approval.asked_ms)} by the node <code>{visible(approval.node_id)}</code>
          {!inRun && (
            <>
              {" "}
              of run <a href={runLink(approval.run_id)}>{visible(approval.run_id)}</a>, of {visible(approval.owner)}
            </>
          )}
        </p>
      </div>
      {expects && (
        <p>
          The tool <code>{visible(expects.tool)}</code> would run with {given ? "these arguments instead" : "these arguments"}.
        </p>
      )}
      {given && expects ? (
        <SchemaForm
          schema={expects.parameters}
          value={given.value}
          onChange={(value, problems) => setGiven({ value, problems })}
          showAll={isShowingAll}
          disabled={busy}
        />
      ) : edited === null ? (
        <Value of={expects ? argumentsOf(approval.value) : approval.value} label="What it would go on with" />
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
            {edited === null && given === null ? (
              <>
                <button className="primary" disabled={busy} onClick={() => void answer("approve")}>
                  Approve
                </button>
                <button disabled={busy} onClick={beginEdit}>
                  Edit
                </button>
              </>
            ) : (
              <>
                <button className="primary" disabled={busy} onClick={submitEdit}>
                  Approve with this change
                </button>
                <button onClick={() => (setEdited(null), setGiven(null))}>Discard the change</button>
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

/** A tool's call is shown with its name, and answered with its arguments alone. */
function argumentsOf(value: unknown): unknown {
  return typeof value === "object" && value !== null && "arguments" in value ? value.arguments : value;
}
