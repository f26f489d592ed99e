// The events of a run, newest first. Those that are not at hand are loaded when they come into view.

import { useVirtualizer } from "@tanstack/react-virtual";
import { useEffect, useRef, useState } from "react";
import { get, query } from "../../api/client.ts";
import type { EventShown } from "../../api/types.ts";
import { PAGE } from "../../model/event-log.ts";
import { KNOWN_TYPES, type RunState } from "../../model/run.ts";
import { setParams, type Route } from "../../router.ts";
import { Failure, Value } from "../../ui/parts.tsx";
import { visible } from "../../ui/visible.ts";
import { exactTime } from "./words.ts";

const ROW_PX = 30;
const SHOWN_CHARACTERS = 300;

export function Events({ id, state, route }: { id: string; state: RunState; route: Route }) {
  const { log } = state;
  const scroller = useRef<HTMLDivElement>(null);
  const [error, setError] = useState<unknown>(null);
  const [, redraw] = useState(0);
  const asked = useRef(new Set<number>());
  const virtual = useVirtualizer({
    count: log.lastSeq,
    getScrollElement: () => scroller.current,
    estimateSize: () => ROW_PX,
    overscan: 20,
    initialRect: { width: 900, height: 600 },
  });
  const items = virtual.getVirtualItems();
  const places = new Set(items.map(({ index }) => log.missing(log.lastSeq - index)).filter((place) => place !== null));
  const wanted = Number(route.params.get("event")) || 0;
  const missing = log.missing(wanted);
  if (missing !== null) places.add(missing);
  const needed = [...places].join(" ");
  useEffect(() => {
    for (const place of needed ? needed.split(" ").map(Number) : []) {
      if (asked.current.has(place)) continue;
      asked.current.add(place);
      const path = `/api/runs/${encodeURIComponent(id)}/events${query({ after: place || undefined, limit: PAGE })}`;
      get<{ events: EventShown[] }>(path).then(
        ({ events }) => {
          for (const event of events) if (event.seq <= log.lastSeq) log.add(event);
          setError(null);
          redraw((old) => old + 1);
        },
        (failure: unknown) => setError(failure),
      ).finally(() => asked.current.delete(place));
    }
  }, [id, log, needed]);
  const event = wanted ? log.get(wanted) : undefined;
  const pick = (seq: number) => setParams(route, { event: seq === wanted ? null : String(seq) });
  if (log.lastSeq === 0) return <p className="empty">Nothing has happened yet.</p>;
  return (
    <>
      <Failure error={error} />
      <div className={event ? "columns" : ""}>
        <div ref={scroller} className="scroll" tabIndex={0} role="region" aria-label="Events, newest first">
          <ol className="events" reversed style={{ height: virtual.getTotalSize(), position: "relative" }}>
            {items.map(({ index, start }) => {
              const seq = log.lastSeq - index;
              return (
                <li key={seq} style={{ transform: `translateY(${start}px)`, position: "absolute", left: 0, right: 0, height: ROW_PX }}>
                  <Row seq={seq} event={log.get(seq)} picked={seq === wanted} onPick={() => pick(seq)} />
                </li>
              );
            })}
          </ol>
        </div>
        {event && <Details event={event} onClose={() => pick(event.seq)} />}
      </div>
    </>
  );
}

function Row({ seq, event, picked, onPick }: { seq: number; event: EventShown | undefined; picked: boolean; onPick: () => void }) {
  if (!event) return <span className="muted">{seq} …</span>;
  const data = Object.keys(event.data).length ? JSON.stringify(event.data).slice(0, SHOWN_CHARACTERS) : "";
  return (
    <button className="event" aria-pressed={picked} onClick={onPick}>
      <span className="muted">{seq}</span>
      <time className="muted" dateTime={new Date(event.at_ms).toISOString()}>
        {new Date(event.at_ms).toLocaleTimeString()}
      </time>
      <b>
        {visible(event.type)}
        {!KNOWN_TYPES.has(event.type) && <span className="small muted"> unknown type</span>}
      </b>
      <code>{visible(data)}</code>
    </button>
  );
}

function Details({ event, onClose }: { event: EventShown; onClose: () => void }) {
  return (
    <aside className="pad stack" aria-label={`Event ${event.seq}`}>
      <div className="bar">
        <h2>{visible(event.type)}</h2>
        <span className="grow" />
        <button onClick={onClose}>Close</button>
      </div>
      {!KNOWN_TYPES.has(event.type) && (
        <p className="muted">This page does not know this type of event: the server may be newer. Its data is complete.</p>
      )}
      <dl className="facts">
        <dt>Number</dt>
        <dd>{event.seq}</dd>
        <dt>Time</dt>
        <dd>{exactTime(event.at_ms)}</dd>
      </dl>
      <Value of={event.data} label="Data of the event" />
    </aside>
  );
}
