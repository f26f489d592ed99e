// The events of a run, newest first.

import type { EventShown } from "../../api/types.ts";
import { formatCount } from "../../model/money.ts";

const SHOWN_EVENTS = 1_000;

export function Events({ events }: { events: EventShown[] }) {
  const shown = events.slice(-SHOWN_EVENTS).toReversed();
  return (
    <div className="scroll" tabIndex={0} role="region" aria-label="Events, newest first">
      {events.length > shown.length && (
        <p className="pad muted">
          The newest {formatCount(shown.length)} of {formatCount(events.length)} events. The export has all of them.
        </p>
      )}
      <ol className="events" reversed>
        {shown.map((event) => (
          <li key={event.seq}>
            <span className="muted">{event.seq}</span>
            <span className="muted">{new Date(event.at_ms).toLocaleTimeString()}</span>
            <b>{event.type}</b>
            <code>{Object.keys(event.data).length ? JSON.stringify(event.data) : ""}</code>
          </li>
        ))}
      </ol>
    </div>
  );
}
