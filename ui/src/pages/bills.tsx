import { useState } from "react";
import { get, post } from "../api/client.ts";
import type { BillList, BillShown, ResolveBill, RunShown } from "../api/types.ts";
import { formatUsd, toNanos } from "../model/money.ts";
import { isLive } from "../model/run.ts";
import { Failure, useAction, usePolled, when } from "../ui/parts.tsx";
import { visible } from "../ui/visible.ts";

/** The calls of which nobody knows what they cost; what is held for them stays taken until somebody says. */
export function Bills({ run, mayAct, onResolved }: { run: RunShown; mayAct: boolean; onResolved: () => void }) {
  const path = `/api/runs/${encodeURIComponent(run.id)}/bills`;
  const bills = usePolled(`${path} ${run.last_seq}`, (signal) => get<BillList>(path, signal), 0);
  const over = !isLive(run.status);
  return (
    <section className="panel" aria-label="Unresolved bills">
      <header>
        <h2>Unresolved bills</h2>
        <span className="muted small">
          {formatUsd(toNanos(run.unresolved_usd))} stay taken until each is resolved{over ? "" : ", after the run has ended"}
        </span>
      </header>
      <Failure error={bills.error} />
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
          {bills.value?.bills.map((bill) => (
            <BillRow key={bill.call_id} bill={bill} path={path} mayAct={mayAct && over} onResolved={onResolved} />
          ))}
        </tbody>
      </table>
    </section>
  );
}

export function BillRow({ bill, path, mayAct, onResolved }: { bill: BillShown; path: string; mayAct: boolean; onResolved: () => void }) {
  const [cost, setCost] = useState("");
  const [busy, error, act] = useAction();
  const settle = () =>
    act(async () => {
      const body: ResolveBill = { call_id: bill.call_id, cost_usd: cost.trim() };
      await post(`${path}/resolve`, body);
      onResolved();
    });
  const release = () => act(async () => (await post(`${path}/release`, { call_id: bill.call_id }), onResolved()));
  const name = visible(bill.name ?? bill.call_id);
  return (
    <tr>
      <td style={{ minWidth: 120 }}>
        {name} {bill.model && bill.model !== bill.name && <span className="muted">{visible(bill.model)}</span>}
      </td>
      <td className="muted">{when(bill.at_ms)}</td>
      <td className="small">{bill.reason && visible(bill.reason)}</td>
      <td className="number">{formatUsd(toNanos(bill.held_usd))}</td>
      {mayAct && (
        <td>
          <form className="bar" style={{ flexWrap: "nowrap", whiteSpace: "nowrap" }} onSubmit={(event) => (event.preventDefault(), void settle())}>
            <input
              style={{ width: 110 }}
              inputMode="decimal"
              aria-label={`Cost of ${name} in US dollars`}
              placeholder="0.02"
              value={cost}
              onChange={(event) => setCost(event.target.value)}
            />
            <button disabled={busy || !cost.trim()}>Settle</button>
            <button type="button" disabled={busy} onClick={() => void release()}>
              It cost nothing
            </button>
          </form>
          <Failure error={error} />
        </td>
      )}
    </tr>
  );
}
