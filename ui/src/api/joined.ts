// Text that the server has joined: one event for several neighbours in the log of a run, which it can be taken apart into.

import type { EventShown } from "./types.ts";

/** For each piece, how many milliseconds before the last it was emitted, and its number of characters. */
export type Joined = readonly (readonly [agoMs: number, characters: number])[];

/** The events that a joined one stands for, as they are in the log; an event that is not joined as it is. */
export function takenApart(event: EventShown, joined: Joined | undefined): EventShown[] {
  if (!joined) return [event];
  const characters = [...String(event.data.text)]; // the server counts characters, and not halves of them
  let from = 0;
  return joined.map(([agoMs, size], at) => {
    const text = characters.slice(from, (from += size)).join("");
    return { ...event, seq: event.seq - joined.length + 1 + at, at_ms: event.at_ms - agoMs, data: { ...event.data, text } };
  });
}
