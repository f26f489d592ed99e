// What the run is, and what may be done with it: resume, grant, cancel.

import { useEffect, useState } from "react";
import { post } from "../../api/client.ts";
import type { CancelShown, RunShown } from "../../api/types.ts";
import { isLive, type RunState } from "../../model/run.ts";
import { diffLink, runLink } from "../../router.ts";
import { Dialog, Failure, Field, shortId, Status, useAction, when } from "../../ui/parts.tsx";
import { visible } from "../../ui/visible.ts";
import { LimitFields, readLimits, type LimitName } from "../limits.tsx";
import { RAISED_BY } from "./words.ts";
import type { LiveRun } from "./use-run.ts";

export function Header(props: { run: LiveRun; record: RunShown; status: string; mayAct: boolean }) {
  const { run, record, status, mayAct } = props;
  const [asking, setAsking] = useState<"cancel" | "grant" | null>(null);
  const [busy, error, act] = useAction();
  const live = isLive(status as RunState["status"]);
  const mayCancel = mayAct && (live || status === "parked");
  const path = `/api/runs/${encodeURIComponent(record.id)}`;
  const earlier = typeof record.origin.run_id === "string" ? record.origin.run_id : null;
  useEffect(() => {
    const onKey = (event: KeyboardEvent) => {
      const typing = event.target instanceof Element && event.target.closest("input, textarea, select, dialog");
      if (event.key === "." && !typing && !event.ctrlKey && !event.metaKey && mayCancel) setAsking("cancel");
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, [mayCancel]);
  const canResume = ["parked", "failed", "halted", "cancelled"].includes(status);
  return (
    <>
      <div className="bar">
        <div>
          <h1>
            {visible(record.graph_id)} <span className="muted small">version {record.graph_version}</span>
          </h1>
          <p className="small muted">
            <span className="mono">{record.id}</span>, started {when(record.started_ms ?? record.created_ms)} by {visible(record.owner)}
            {earlier !== null && (
              <>
                {record.origin.kind === "replay" ? ", a replay of " : ", a fork of "}
                <a href={runLink(earlier)}>{visible(shortId(earlier))}</a>
              </>
            )}
            {record.epoch > 1 && `, resumed ${record.epoch - 1} ${record.epoch === 2 ? "time" : "times"}`}
          </p>
        </div>
        <span className="grow" />
        <Status of={status} />
        <a className="button" href={earlier === null ? `#/diff/${encodeURIComponent(record.id)}` : diffLink(earlier, record.id)}>
          Compare
        </a>
        {mayAct && canResume && (
          <button disabled={busy} onClick={() => void act(async () => (await post(`${path}/resume`), run.refresh()))}>
            Resume
          </button>
        )}
        {mayAct && status !== "completed" && <button onClick={() => setAsking("grant")}>Grant more</button>}
        {mayCancel && (
          <button className="danger" onClick={() => setAsking("cancel")}>
            Cancel run
          </button>
        )}
      </div>
      <Failure error={error} />
      {asking === "cancel" && <CancelDialog path={path} onClose={() => (setAsking(null), run.refresh())} />}
      {asking === "grant" && <GrantDialog record={record} path={path} onClose={() => (setAsking(null), run.refresh())} />}
    </>
  );
}

function CancelDialog({ path, onClose }: { path: string; onClose: () => void }) {
  const [reason, setReason] = useState("");
  const [busy, error, act] = useAction();
  const submit = () =>
    act(async () => {
      await post<CancelShown>(`${path}/cancel`, reason ? { reason } : {});
      onClose();
    });
  return (
    <Dialog title="Cancel this run?" onClose={onClose}>
      <p>
        Calls under way are stopped. What they have used until then may still be billed; finished work is kept, and the run
        can be resumed.
      </p>
      <form className="stack" onSubmit={(event) => (event.preventDefault(), void submit())}>
        <Field label="Reason (optional)">
          {(id) => <input id={id} maxLength={2000} value={reason} onChange={(event) => setReason(event.target.value)} />}
        </Field>
        <Failure error={error} />
        <div className="bar">
          <button className="danger" disabled={busy}>
            Cancel the run
          </button>
          <button type="button" onClick={onClose}>
            Keep it running
          </button>
        </div>
      </form>
    </Dialog>
  );
}

export function GrantDialog({ record, path, onClose }: { record: RunShown; path: string; onClose: () => void }) {
  const wanted = RAISED_BY[record.stop_reason ?? ""];
  const [more, setMore] = useState<Record<string, string>>(() => suggestion(record, wanted));
  const [busy, error, act] = useAction();
  const submit = () =>
    act(async () => {
      await post<RunShown>(`${path}/grant`, { limits: readLimits(more) });
      onClose();
    });
  return (
    <Dialog title="Grant more" onClose={onClose}>
      <p>
        Added to the run's limits. {record.status === "halted" ? "It goes on at once, from its finished work." : "It keeps running."}
      </p>
      <form className="stack" onSubmit={(event) => (event.preventDefault(), void submit())}>
        <LimitFields values={more} onChange={setMore} />
        <Failure error={error} />
        <div className="bar">
          <button className="primary" disabled={busy}>
            Grant
          </button>
          <button type="button" onClick={onClose}>
            Close
          </button>
        </div>
      </form>
    </Dialog>
  );
}

/** What the server advises, or as much again as the limit that stopped the run. */
function suggestion(record: RunShown, wanted: LimitName | undefined): Record<string, string> {
  if (!wanted) return {};
  const advised = record.advice.find((advice) => advice.step === "grant")?.amount_usd;
  if (wanted === "max_cost_usd" && advised) return { max_cost_usd: advised.toFixed(9).replace(/0+$/, "") };
  const limit = record.limits[wanted];
  return limit === undefined ? {} : { [wanted]: String(limit) };
}
