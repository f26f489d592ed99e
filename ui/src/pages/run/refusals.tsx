// Calls that were not made: who asked for how much of whose budget, and what was left of it.

import { refusalsAt, type Refusal, type RunState } from "../../model/run.ts";
import { formatCount, toNanos } from "../../model/money.ts";
import { setParams, type Route } from "../../router.ts";
import { visible } from "../../ui/visible.ts";
import { formatOf, WHOSE } from "./words.ts";

const SHOWN = 50;
const AMOUNTS: ReadonlySet<string> = new Set(["Asked for", "Used", "Held", "Of"]);

export function Refusals({ state, route, atMs }: { state: RunState; route: Route; atMs: number | null }) {
  const refusals = refusalsAt(state, atMs);
  if (refusals.length === 0) return null;
  const shown = refusals.slice(-SHOWN).toReversed();
  return (
    <details className="panel refusals">
      <summary>
        <b>
          {formatCount(refusals.length)} {refusals.length === 1 ? "call was" : "calls were"} refused by a limit
        </b>
        <span className="muted small"> who asked for how much, and of whose budget</span>
      </summary>
      <div className="scroll" tabIndex={0} role="region" aria-label="Refused calls, newest first">
        <table>
          <thead>
            <tr>
              {["Node", "Whose limit", "Asked for", "Used", "Held", "Of", ""].map((name) => (
                <th key={name} scope="col" className={AMOUNTS.has(name) ? "number" : ""}>
                  {name || <span className="hidden">Call</span>}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {shown.map((refusal) => (
              <Row key={refusal.seq} refusal={refusal} epoch={state.epoch} route={route} />
            ))}
          </tbody>
        </table>
      </div>
      {refusals.length > SHOWN && <p className="pad muted">The newest {SHOWN} of them. The events have all.</p>}
    </details>
  );
}

function Row({ refusal, epoch, route }: { refusal: Refusal; epoch: number; route: Route }) {
  const format = formatOf(refusal.unit ?? "");
  const amount = (value: number | null) =>
    value === null ? "" : format(refusal.unit === "usd" ? toNanos(value) : value);
  return (
    <tr>
      <td>{visible(refusal.node ?? "")}</td>
      <td title={visible(refusal.message)}>
        {(refusal.whose && WHOSE[refusal.whose]) ?? visible(refusal.budget ?? refusal.message)}
        {refusal.momentary && <span className="small muted"> while others held it</span>}
      </td>
      <td className="number">{amount(refusal.asked)}</td>
      <td className="number">{amount(refusal.used)}</td>
      <td className="number">{amount(refusal.held || null)}</td>
      <td className="number">{amount(refusal.limit)}</td>
      <td>
        {refusal.call !== null && (
          <button onClick={() => setParams(route, { view: null, call: `${epoch}:${refusal.call}` })}>Show the call</button>
        )}
      </td>
    </tr>
  );
}
