// The events of a run by their number, in pages: those that came last are at hand, others are loaded when looked at.

import type { EventShown } from "../api/types.ts";

export const PAGE = 500;
const MAX_PAGES = 60;

export class EventLog {
  /** Number of the newest event of the run. */
  lastSeq = 0;
  private pages = new Map<number, (EventShown | undefined)[]>();

  add(event: EventShown): void {
    const number = Math.floor((event.seq - 1) / PAGE);
    let page = this.pages.get(number);
    if (!page) {
      page = [];
      this.pages.set(number, page);
      // A Map keeps the order of insertion: the page that came first is dropped first.
      for (const oldest of this.pages.keys()) {
        if (this.pages.size <= MAX_PAGES) break;
        this.pages.delete(oldest);
      }
    }
    page[(event.seq - 1) % PAGE] = event;
    this.lastSeq = Math.max(this.lastSeq, event.seq);
  }

  get(seq: number): EventShown | undefined {
    return this.pages.get(Math.floor((seq - 1) / PAGE))?.[(seq - 1) % PAGE];
  }

  /** The event after which to load, so that this one is at hand; null if it is, or does not exist. */
  missing(seq: number): number | null {
    if (seq < 1 || seq > this.lastSeq || this.get(seq)) return null;
    return Math.floor((seq - 1) / PAGE) * PAGE;
  }
}
