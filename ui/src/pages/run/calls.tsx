// The calls of a run as a tree, with what each cost.

import { formatCount, formatDuration, formatUsd } from "../../model/money.ts";
import { treeRows, type Call, type NodeState, type RunState, type TreeRow } from "../../model/run.ts";
import { setParams, type Route } from "../../router.ts";
import { Money, Status } from "../../ui/parts.tsx";
import { Inspector } from "./inspector.tsx";
import { kindOf } from "./words.ts";

const SHOWN_ROWS = 2_000;

export function Calls({ state, route }: { state: RunState; route: Route }) {
  const epoch = Number(route.params.get("attempt")) || state.epoch;
  const rows = treeRows(state, epoch);
  const shown = rows.slice(0, SHOWN_ROWS);
  const picked = route.params.get("call");
  const call = picked ? state.calls.get(picked) : undefined;
  const pick = (key: string) => setParams(route, { call: key === picked ? null : key });
  return (
    <>
      {state.epoch > 1 && <Attempts newest={state.epoch} chosen={epoch} onChoose={(one) => setParams(route, { attempt: one, call: null })} />}
      {rows.length === 0 && <p className="empty">Nothing has started yet.</p>}
      <div className={call ? "columns" : ""}>
        {rows.length > 0 && (
          <div className="scroll" tabIndex={0} role="region" aria-label="Calls of this run">
            <table className="tree">
              <thead>
                <tr>
                  <th scope="col">Node and call</th>
                  <th scope="col">State</th>
                  <th scope="col" className="number">
                    Time
                  </th>
                  <th scope="col" className="number">
                    Tokens
                  </th>
                  <th scope="col" className="number">
                    Cost
                  </th>
                </tr>
              </thead>
              <tbody>
                {shown.map((row) => (
                  <Row key={row.key} row={row} picked={picked} onPick={pick} />
                ))}
              </tbody>
            </table>
            {rows.length > shown.length && (
              <p className="pad muted">
                The first {formatCount(shown.length)} of {formatCount(rows.length)} rows. The export has all of them.
              </p>
            )}
          </div>
        )}
        {call && <Inspector call={call} onClose={() => pick(call.key)} />}
      </div>
    </>
  );
}

function Attempts({ newest, chosen, onChoose }: { newest: number; chosen: number; onChoose: (one: string | null) => void }) {
  return (
    <div className="bar pad">
      <span>This run was resumed.</span>
      <select
        aria-label="Attempt"
        value={chosen}
        onChange={(event) => onChoose(Number(event.target.value) === newest ? null : event.target.value)}
      >
        {Array.from({ length: newest }, (_, index) => (
          <option key={index} value={index + 1}>
            Attempt {index + 1} of {newest}
          </option>
        ))}
      </select>
      <span className="muted small">Finished work comes back from the journal, and is not paid for again.</span>
    </div>
  );
}

function Row({ row, picked, onPick }: { row: TreeRow; picked: string | null; onPick: (key: string) => void }) {
  const { node, call } = row;
  const tag = call?.nodeType ?? node?.type ?? kindOf(call!);
  const name = call?.nodeType ? (call.node ?? call.name) : (node?.id ?? call!.name);
  const colour = call?.nodeType || !call ? "node" : call.kind === "llm" || call.kind === "tool" ? call.kind : "other";
  const tookMs = spanOf(call ?? node!);
  return (
    <tr className={call ? "call" : ""} aria-selected={call !== null && call.key === picked}>
      <td>
        <div className="name" style={{ "--depth": row.depth } as object}>
          <span className={`kind ${colour}`}>{tag}</span>
          {call ? (
            <button onClick={() => onPick(call.key)} aria-expanded={call.key === picked}>
              {name}
            </button>
          ) : (
            <b>{name}</b>
          )}
          {call && call.attempt > 1 && <span className="small muted">try {call.attempt}</span>}
          {(call ?? node)?.replayed && <span className="small muted">⟲ from the journal</span>}
        </div>
      </td>
      <td>{call ? <CallStatus call={call} /> : <NodeStatus node={node!} />}</td>
      <td className="number">{tookMs === null ? "" : formatDuration(tookMs)}</td>
      <td className="number">{row.tokens ? formatCount(row.tokens) : ""}</td>
      <td className="number">
        <Cost row={row} />
      </td>
    </tr>
  );
}

function spanOf({ startedMs, endedMs }: { startedMs: number; endedMs: number | null }): number | null {
  return endedMs === null ? null : endedMs - startedMs;
}

/** Only the call that a limit refused is red; what stopped because of it is not. */
function CallStatus({ call }: { call: Call }) {
  if (call.status === "halt" && call.stop?.cause) return <Status of="refused" />;
  return <Status of={call.status} {...(call.status === "waiting" ? { word: "waits for a budget" } : {})} />;
}

function NodeStatus({ node }: { node: NodeState }) {
  return node.status === "error" ? <Status of="halted" word="stopped" /> : <Status of={node.status} />;
}

function Cost({ row }: { row: TreeRow }) {
  const { call } = row;
  if (!call) return null;
  if (row.heldNanos > 0) return <span className="muted">{formatUsd(row.heldNanos)} held</span>;
  if (call.replayed && row.costNanos === 0) return call.costNanos ? <span className="muted">paid before</span> : null;
  if (row.costUnknown && row.costNanos === 0) return "unknown";
  if (call.kind === "system" && row.costNanos === 0) return null;
  if (call.endedMs === null && row.costNanos === 0) return <span className="muted">not settled</span>;
  return <Money nanos={row.costNanos} unknown={row.costUnknown} />;
}
