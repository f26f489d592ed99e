// Any moment of the run: the views, the meters and the refusals show what was known then.
//
// The moment is in the address, in milliseconds after the start of the attempt that is shown, so that a link opens it.

import { useId } from "react";
import { formatDuration } from "../../model/money.ts";
import { isLive, tableOf, type RunState } from "../../model/run.ts";
import { setParams, type Route } from "../../router.ts";

/** The moment in the address; null for now. */
export function momentOf(state: RunState, route: Route): number | null {
  const given = route.params.get("t");
  const offset = Number(given);
  if (given === null || !Number.isFinite(offset) || offset < 0) return null;
  const [first, last] = spanOf(state);
  return first === null ? null : Math.min(first + offset, last);
}

/** From the start of the newest attempt to the last thing that is known of it. */
function spanOf(state: RunState): [number | null, number] {
  const [began, known] = tableOf(state).span();
  const first = state.resumedMs ?? (began || null);
  return [first, Math.max(first ?? 0, known, state.endedMs ?? 0)];
}

export function Scrubber({ state, route, atMs }: { state: RunState; route: Route; atMs: number | null }) {
  const id = useId();
  const [first, last] = spanOf(state);
  if (first === null || last <= first) return null;
  const length = last - first;
  const show = (offset: number) => setParams(route, { t: offset >= length ? null : String(Math.max(0, Math.round(offset))) });
  const step = (by: 1 | -1) => {
    const moment = changeAfter(state, atMs ?? last, by);
    show(moment === null ? (by > 0 ? length : 0) : moment - first);
  };
  return (
    <div className="bar pad-bar scrubber">
      <label htmlFor={id}>Moment</label>
      <button onClick={() => step(-1)} disabled={atMs !== null && atMs <= first} aria-label="To the change before">
        ◂
      </button>
      <input
        id={id}
        type="range"
        min={0}
        max={length}
        step="any"
        value={(atMs ?? last) - first}
        aria-valuetext={atMs === null ? "now" : `${formatDuration(atMs - first)} after the start`}
        onChange={(event) => show(Number(event.target.value))}
      />
      <button onClick={() => step(1)} disabled={atMs === null} aria-label="To the change after">
        ▸
      </button>
      <span className="small moment">
        {atMs === null ? (isLive(state.status) ? "now" : `the end, ${formatDuration(length)}`) : formatDuration(atMs - first)}
      </span>
      <button onClick={() => setParams(route, { t: null })} disabled={atMs === null}>
        Now
      </button>
    </div>
  );
}

/** The nearest moment, before or after one, at which a call began or ended; null if there is none. */
function changeAfter(state: RunState, atMs: number, by: 1 | -1): number | null {
  const table = tableOf(state);
  let nearest: number | null = null;
  const look = (moment: number) => {
    if (moment >= 0 && (moment - atMs) * by > 0 && (nearest === null || (nearest - moment) * by > 0)) nearest = moment;
  };
  for (let row = 0; row < table.count; row += 1) {
    look(table.began[row]!);
    look(table.end[row]!);
  }
  return nearest;
}
