// Everything that pages watch, over one connection to the server: runs by their events, and lists that may have changed.
//
// A browser has six connections to a server for all its tabs, so each tab must not have one for each run. A subscription
// is a position in the log of a run, or the name of a list. When what is watched changes, the connection is made anew at
// those positions; a run that is watched from two positions is read from the first, and each subscription gets only what
// comes after its own. It knows nothing of pages: they live here, or behind the port of a worker (`hub-worker.ts`).

import { takenApart, type Joined } from "./joined.ts";
import { ApiError } from "./request.ts";
import type { EventShown } from "./types.ts";

export type Topic = "runs" | "approvals" | "budgets";

export type News =
  | { kind: "events"; events: EventShown[] }
  /** A list has changed; `latest` is the newest event about it. */
  | { kind: "changed"; latest: unknown }
  | { kind: "open" }
  | { kind: "lost"; message: string; status: number };

export interface Subscription {
  run: string | null;
  topic: Topic | null;
  /** The last event that the subscriber has. */
  seq: number;
  tell: (news: News) => void;
}

interface Frame extends EventShown {
  run_id?: string;
  joined?: Joined;
}

export interface Transport {
  /** Opens a stream, calls `onOpen`, then `onFrames` with what comes, until the stream ends; throws ApiError. */
  stream(path: string, signal: AbortSignal, onOpen: () => void, onFrames: (frames: unknown[]) => void): Promise<void>;
  /** Whether the server still has a run for this person. */
  has(run: string): Promise<boolean>;
  pause(ms: number, signal: AbortSignal): Promise<void>;
}

/** The server takes this many runs on one connection. */
export const MAX_RUNS = 50;
const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 4_000;
/** Texts that come within this time are one event: a page is drawn so often at most, and needs no more. */
const COALESCE_MS = 50;
/** Changes of what is watched within this time make one new connection. */
const SETTLE_MS = 20;
const NAMES: Record<string, Topic> = { "run.summary": "runs", "approvals.open": "approvals", "budgets.day": "budgets" };

export class Hub {
  private readonly transport: Transport;
  private readonly subscriptions = new Set<Subscription>();
  private current: AbortController | null = null;
  private isRunning = false;

  constructor(transport: Transport) {
    this.transport = transport;
  }

  add(subscription: Subscription): void {
    const others = [...this.watchedRuns().keys()];
    if (subscription.run !== null && !others.includes(subscription.run) && others.length >= MAX_RUNS) {
      const message = `${MAX_RUNS} runs are open in this browser already: close one of their pages`;
      subscription.tell({ kind: "lost", message, status: 429 });
      return;
    }
    this.subscriptions.add(subscription);
    this.restart();
  }

  remove(subscription: Subscription): void {
    if (this.subscriptions.delete(subscription)) this.restart();
  }

  /** What is watched has changed: the connection is made anew. */
  private restart(): void {
    this.current?.abort();
    if (!this.isRunning) void this.work();
  }

  private async work(): Promise<void> {
    this.isRunning = true;
    let pause = SETTLE_MS;
    while (this.subscriptions.size) {
      const abort = (this.current = new AbortController());
      await this.transport.pause(pause, abort.signal);
      pause = SETTLE_MS;
      if (abort.signal.aborted) continue; // more has changed
      let got = false;
      try {
        const onFrames = (frames: unknown[]) => (this.deliver(frames as Frame[]), (got = true), undefined);
        await this.transport.stream(this.path(), abort.signal, () => this.tellAll({ kind: "open" }), onFrames);
        this.failures = got ? 0 : this.failures + 1;
      } catch (error) {
        if (abort.signal.aborted) continue;
        this.failures = got ? 0 : this.failures + 1;
        if (await this.dropped(error)) continue;
        const status = error instanceof ApiError ? error.status : 0;
        this.tellAll({ kind: "lost", message: words(error, status), status });
        if (status === 401) this.subscriptions.clear();
      }
      pause = Math.min(FIRST_PAUSE_MS * 2 ** Math.min(this.failures, 4), LONGEST_PAUSE_MS);
    }
    this.isRunning = false;
    this.current = null;
  }

  private failures = 0;

  private path(): string {
    const runs = [...this.watchedRuns()].map(([run, seq]) => `${run}@${seq}`);
    const topics = new Set([...this.subscriptions].map(({ topic }) => topic).filter((topic) => topic !== null));
    const watched = `runs=${runs.map(encodeURIComponent).join(",")}&coalesce_ms=${COALESCE_MS}`;
    const parts = [...(runs.length ? [watched] : []), ...[...topics].map((topic) => `topics=${topic}`)];
    return `/api/stream?${parts.join("&")}`;
  }

  /** Each run with the first position from which it is watched. */
  private watchedRuns(): Map<string, number> {
    const runs = new Map<string, number>();
    for (const { run, seq } of this.subscriptions) if (run !== null) runs.set(run, Math.min(seq, runs.get(run) ?? seq));
    return runs;
  }

  private deliver(frames: Frame[]): void {
    const byRun = new Map<string, EventShown[]>();
    const changed = new Map<Topic, unknown>();
    for (const frame of frames) {
      const { run_id, joined, ...event } = frame;
      const topic = NAMES[frame.type];
      if (topic && run_id === undefined) changed.set(topic, event);
      else if (run_id !== undefined) {
        const events = byRun.get(run_id) ?? [];
        byRun.set(run_id, events);
        // Pages may be at different places, also inside a joined event.
        events.push(...takenApart(event, joined));
      }
    }
    for (const subscription of [...this.subscriptions]) {
      if (subscription.topic !== null && changed.has(subscription.topic)) {
        subscription.tell({ kind: "changed", latest: changed.get(subscription.topic) });
      }
      const events = (subscription.run !== null && byRun.get(subscription.run)?.filter(({ seq }) => seq > subscription.seq)) || [];
      if (events.length === 0) continue;
      subscription.seq = events.at(-1)!.seq;
      subscription.tell({ kind: "events", events });
    }
  }

  /** Drops the runs because of which the server refuses the whole stream; false if it is about something else. */
  private async dropped(error: unknown): Promise<boolean> {
    if (!(error instanceof ApiError) || (error.status !== 404 && error.status !== 422)) return false;
    const { message, status } = error;
    const gone = new Set(status === 422 ? error.details.map((detail) => String((detail as { run_id?: unknown }).run_id)) : []);
    if (status === 404) {
      for (const run of this.watchedRuns().keys()) {
        const isThere = await this.transport.has(run).catch(() => true);
        if (!isThere) gone.add(run);
      }
    }
    const affected = [...this.subscriptions].filter(({ run }) => run !== null && gone.has(run));
    for (const subscription of affected) {
      this.subscriptions.delete(subscription);
      subscription.tell({ kind: "lost", message, status });
    }
    return affected.length > 0;
  }

  private tellAll(news: News): void {
    for (const { tell } of [...this.subscriptions]) tell(news);
  }
}

function words(error: unknown, status: number): string {
  if (status === 404) return "this server cannot stream to this page; it may be older than the page: reload it";
  return error instanceof Error ? error.message : String(error);
}
