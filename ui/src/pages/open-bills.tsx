// All runs with bills that nobody knows: resolved here one by one, or looked at in their run.

import { useState } from "react";
import { get, query } from "../api/client.ts";
import type { BillPage, RunBills } from "../api/types.ts";
import { formatCount, formatUsd, toNanos } from "../model/money.ts";
import { isLive } from "../model/run.ts";
import { runLink, setParams } from "../router.ts";
import { Failure, Status, usePolled, when } from "../ui/parts.tsx";
import { visible } from "../ui/visible.ts";
import { BillRow } from "./bills.tsx";
import type { PageProps } from "./index.ts";

const PAGE = 20;
const POLL_MS = 10_000;
const STATES = { unresolved: "Unresolved", unknown: "Unknown cost" } as const;
type State = keyof typeof STATES;

export default function OpenBillsPage({ route, me }: PageProps) {
  const state: State = route.params.get("state") === "unknown" ? "unknown" : "unresolved";
  const [pages, setPages] = useState(1);
  const path = `/api/bills${query({ state, limit: Math.min(PAGE * pages, 100) })}`;
  const bills = usePolled(path, (signal) => get<BillPage>(path, signal), POLL_MS);
  const found = bills.value?.runs;
  return (
    <>
      <div className="bar">
        <h1>Bills</h1>
        <span className="grow" />
        <a href="#/money">Money</a>
      </div>
      <div className="chips" role="group" aria-label="Which bills">
        {(Object.keys(STATES) as State[]).map((name) => (
          <button key={name} aria-pressed={name === state} onClick={() => (setPages(1), setParams(route, { state: name === "unknown" ? name : null }))}>
            {STATES[name]}
          </button>
        ))}
      </div>
      <p className="muted">
        {state === "unresolved"
          ? "Calls that may have been billed although no answer came. What they held stays taken from every budget until somebody says what the invoice says."
          : "Calls that were answered, but have no price. Their cost is in no sum: register prices for these models."}
      </p>
      <Failure error={bills.error} />
      {found?.length === 0 && <div className="panel empty">{state === "unresolved" ? "No bill is open." : "Every call has a price."}</div>}
      {found?.map((run) => (
        <OneRun key={run.run_id} run={run} mayAct={me.role !== "viewer"} onResolved={bills.again} />
      ))}
      {bills.value?.next && PAGE * pages < 100 && <button onClick={() => setPages(pages + 1)}>Show more</button>}
      {bills.value?.next && PAGE * pages >= 100 && <p className="muted">There are more; resolve these first.</p>}
    </>
  );
}

function OneRun({ run, mayAct, onResolved }: { run: RunBills; mayAct: boolean; onResolved: () => void }) {
  const over = !isLive(run.status);
  const path = `/api/runs/${encodeURIComponent(run.run_id)}/bills`;
  return (
    <section className="panel" aria-label={`Run ${run.run_id}`}>
      <header>
        <h2>
          <a href={runLink(run.run_id)}>{visible(run.graph_id)}</a>
        </h2>
        <Status of={run.status} />
        <span className="muted small">
          {visible(run.owner)}, {when(run.ended_ms ?? run.created_ms)}
        </span>
        <span className="grow" />
        {run.unresolved_usd > 0 && <b>{formatUsd(toNanos(run.unresolved_usd))} held</b>}
      </header>
      {run.bills.length > 0 && (
        <div className="scroll">
          <table>
            <thead>
              <tr>
                <th scope="col">Call</th>
                <th scope="col">When</th>
                <th scope="col">Why</th>
                <th scope="col" className="number">
                  Held
                </th>
                {mayAct && over && <th scope="col">The invoice says</th>}
              </tr>
            </thead>
            <tbody>
              {run.bills.map((bill) => (
                <BillRow key={bill.call_id} bill={bill} path={path} mayAct={mayAct && over} onResolved={onResolved} />
              ))}
            </tbody>
          </table>
        </div>
      )}
      {run.unknown.length > 0 && (
        <table>
          <thead>
            <tr>
              <th scope="col">Model</th>
              <th scope="col">Node</th>
              <th scope="col" className="number">
                Calls of unknown cost
              </th>
            </tr>
          </thead>
          <tbody>
            {run.unknown.map((one) => (
              <tr key={`${one.node} ${one.model}`}>
                <td>{one.model ? visible(one.model) : <span className="muted">not known</span>}</td>
                <td>{one.node ? visible(one.node) : <span className="muted">the run as a whole</span>}</td>
                <td className="number">{formatCount(one.calls)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
    </section>
  );
}
