// What was sent to a model or a tool and what came back, if the operator lets the server record it.

import { ApiError, get } from "../../api/client.ts";
import type { CallPayload } from "../../api/types.ts";
import type { Call } from "../../model/run.ts";
import { Failure, usePolled, Value } from "../../ui/parts.tsx";

export function Payload({ run, call }: { run: string; call: Call }) {
  const path = `/api/runs/${encodeURIComponent(run)}/calls/${encodeURIComponent(call.id)}`;
  const loaded = usePolled(`${path} ${call.endedMs}`, (signal) => get<CallPayload>(path, signal), 0);
  const missing = loaded.error instanceof ApiError && loaded.error.status === 404;
  return (
    <section aria-label="Payload" className="stack">
      <h2>What was sent and received</h2>
      {missing ? (
        <p className="muted">The server has no record of this call's request and response.</p>
      ) : loaded.error ? (
        <Failure error={loaded.error} />
      ) : loaded.value ? (
        <Recorded payload={loaded.value} isOpen={call.endedMs === null} />
      ) : (
        <p className="muted">Loading…</p>
      )}
    </section>
  );
}

function Recorded({ payload, isOpen }: { payload: CallPayload; isOpen: boolean }) {
  const { recording, request, response, truncated, expired } = payload;
  if (expired) return <p className="muted">It was recorded, and has been deleted after the time that the operator keeps it.</p>;
  if (recording === "off") {
    return <p className="muted">The operator of this server does not record requests and responses of calls.</p>;
  }
  if (request == null && response == null) return <p className="muted">Nothing was recorded for this call.</p>;
  return (
    <>
      {recording === "redacted" && <p className="muted small">Secrets and personal data are left out of what is recorded.</p>}
      {truncated && <p className="muted small">It was too long to be recorded whole.</p>}
      <h3>Request</h3>
      <Value of={request} label="Request" />
      <h3>Response</h3>
      {response == null ? <p className="muted">{isOpen ? "None yet." : "None."}</p> : <Value of={response} label="Response" />}
    </>
  );
}
