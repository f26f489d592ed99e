import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import { Hub, MAX_RUNS, type News, type Subscription, type Transport } from "./hub.ts";
import { ApiError } from "./request.ts";
import type { EventShown } from "./types.ts";

/** A server with logs of runs, whose connections a test feeds, breaks and inspects. */
class Server implements Transport {
  logs = new Map<string, number>();
  connections: { path: string; frames: (frames: unknown[]) => void; end: (error?: unknown) => void; open: () => void }[] = [];
  gone = new Set<string>();
  pauses: number[] = [];

  stream(path: string, signal: AbortSignal, onOpen: () => void, onFrames: (frames: unknown[]) => void): Promise<void> {
    return new Promise((resolve, reject) => {
      const end = (error?: unknown) => (error === undefined ? resolve() : reject(error as Error));
      signal.addEventListener("abort", () => end(new Error("aborted")));
      this.connections.push({ path, frames: onFrames, end, open: onOpen });
    });
  }

  has(run: string): Promise<boolean> {
    return Promise.resolve(!this.gone.has(run));
  }

  pause(ms: number): Promise<void> {
    this.pauses.push(ms);
    return Promise.resolve();
  }

  get now() {
    return this.connections.at(-1)!;
  }

  /** Where the newest connection begins, by run. */
  places(): Record<string, number> {
    const runs = decodeURIComponent(new URL(this.now.path, "http://x").searchParams.get("runs") ?? "");
    return Object.fromEntries(runs.split(",").filter(Boolean).map((one) => [one.split("@")[0]!, Number(one.split("@")[1])]));
  }
}

const settled = () => new Promise((resolve) => setImmediate(resolve));

function event(run_id: string, seq: number) {
  return { run_id, seq, at_ms: seq, type: "text.delta", data: {} };
}

function follower(run: string, seq = 0) {
  const got: number[] = [];
  const news: News[] = [];
  const subscription: Subscription = {
    run,
    topic: null,
    seq,
    tell: (one) => (one.kind === "events" ? got.push(...one.events.map((each: EventShown) => each.seq)) : news.push(one)),
  };
  return { subscription, got, news };
}

describe("one connection for everything that is watched", () => {
  test("is made anew at the positions of all when another run is watched", async () => {
    const server = new Server();
    const hub = new Hub(server);
    const [a, b] = [follower("a"), follower("b", 7)];
    hub.add(a.subscription);
    await settled();
    server.now.frames([event("a", 1), event("a", 2)]);
    hub.add(b.subscription);
    await settled();
    assert.deepEqual(server.places(), { a: 2, b: 7 });
    server.now.frames([event("b", 8), event("a", 3)]);
    assert.deepEqual([a.got, b.got], [[1, 2, 3], [8]]);
  });

  test("gives each page of the same run only what comes after its own position", async () => {
    const server = new Server();
    const hub = new Hub(server);
    const [early, late] = [follower("a", 2), follower("a")];
    hub.add(early.subscription);
    hub.add(late.subscription);
    await settled();
    assert.deepEqual(server.places(), { a: 0 });
    server.now.frames([1, 2, 3].map((seq) => event("a", seq)));
    assert.deepEqual([early.got, late.got], [[3], [1, 2, 3]]);
  });

  test("gives a page that is inside a joined text only the texts after its own position", async () => {
    const server = new Server();
    const hub = new Hub(server);
    const [early, late] = [follower("a", 2), follower("a")];
    hub.add(early.subscription);
    hub.add(late.subscription);
    await settled();
    assert.match(server.now.path, /&coalesce_ms=50$/);
    server.now.frames([{ ...event("a", 4), data: { text: "abcd" }, joined: [[3, 1], [2, 1], [1, 1], [0, 1]] }]);
    assert.deepEqual([early.got, late.got], [[3, 4], [1, 2, 3, 4]]);
  });

  test("delivers every event once and in order, however connections break and pages come and go", async () => {
    const step = fc.oneof(
      fc.record({ does: fc.constant("send" as const), run: fc.constantFrom("a", "b"), count: fc.integer({ min: 1, max: 5 }) }),
      fc.record({ does: fc.constant("break" as const), run: fc.constant(""), count: fc.constant(0) }),
      fc.record({ does: fc.constant("join" as const), run: fc.constantFrom("a", "b"), count: fc.constant(0) }),
      fc.record({ does: fc.constant("leave" as const), run: fc.constant(""), count: fc.nat(5) }),
    );
    await fc.assert(
      fc.asyncProperty(fc.array(step, { maxLength: 30 }), async (steps) => {
        const server = new Server();
        const hub = new Hub(server);
        const written = new Map([["a", 0], ["b", 0]]);
        let members: ReturnType<typeof follower>[] = [];
        const read = () => {
          if (!members.length) return;
          const frames = Object.entries(server.places()).flatMap(([run, from]) => {
            const sent = (server.now as { sent?: Map<string, number> }).sent ?? new Map<string, number>();
            (server.now as { sent?: Map<string, number> }).sent = sent;
            const first = sent.get(run) ?? from;
            sent.set(run, written.get(run)!);
            return Array.from({ length: Math.max(0, written.get(run)! - first) }, (_, at) => event(run, first + at + 1));
          });
          if (frames.length) server.now.frames(frames);
        };
        for (const { does, run, count } of steps) {
          if (does === "send") written.set(run, written.get(run)! + count);
          else if (does === "break" && members.length) server.now.end(new ApiError(0, "unreachable", "away"));
          else if (does === "join") {
            const member = follower(run);
            members.push(member);
            hub.add(member.subscription);
          } else if (does === "leave" && members[count]) {
            hub.remove(members[count].subscription);
            members = members.filter((_, at) => at !== count);
          }
          await settled();
          read();
        }
        for (const { subscription, got } of members) {
          assert.deepEqual(got, Array.from({ length: written.get(subscription.run!)! }, (_, at) => at + 1));
        }
        for (const { subscription } of members) hub.remove(subscription);
        await settled();
      }),
      { numRuns: 60 },
    );
  });

  test("drops a run that is gone, or whose events the server has lost, and keeps the others", async () => {
    const server = new Server();
    const hub = new Hub(server);
    const [a, b, c] = [follower("a", 5), follower("b"), follower("c")];
    for (const { subscription } of [a, b, c]) hub.add(subscription);
    await settled();
    server.now.end(new ApiError(422, "invalid", "run a has no event 5 yet", null, [{ run_id: "a", last_seq: 2 }]));
    await settled();
    assert.deepEqual(a.news, [{ kind: "lost", message: "run a has no event 5 yet", status: 422 }]);
    assert.deepEqual(server.places(), { b: 0, c: 0 });
    server.gone.add("b");
    server.now.end(new ApiError(404, "not_found", "there is no such run"));
    await settled();
    assert.equal(b.news[0]!.kind, "lost");
    assert.deepEqual(server.places(), { c: 0 });
    assert.deepEqual(c.news, []);
  });

  test("says that it is lost, waits longer each time, and says that it is open again", async () => {
    const server = new Server();
    const hub = new Hub(server);
    const a = follower("a");
    hub.add(a.subscription);
    for (let time = 0; time < 3; time += 1) {
      await settled();
      server.now.end(new ApiError(0, "unreachable", "the server does not answer"));
    }
    await settled();
    assert.deepEqual(server.pauses.slice(1), [1_000, 2_000, 4_000]);
    server.now.open();
    assert.deepEqual(a.news.map(({ kind }) => kind), ["lost", "lost", "lost", "open"]);
  });

  test("ends for a person whose token has ended, and is no endless loop at an older server", async () => {
    const server = new Server();
    const hub = new Hub(server);
    const a = follower("a");
    hub.add(a.subscription);
    await settled();
    server.now.end(new ApiError(404, "not_found", "there is no such route"));
    await settled();
    assert.match((a.news[0] as { message: string }).message, /older than the page/);
    server.now.end(new ApiError(401, "token_expired", "the token has expired"));
    await settled();
    assert.deepEqual(a.news.at(-1), { kind: "lost", message: "the token has expired", status: 401 });
    assert.equal(server.connections.length, 2);
  });

  test("refuses one run more than the server takes", () => {
    const hub = new Hub(new Server());
    for (let run = 0; run < MAX_RUNS; run += 1) hub.add(follower(`r${run}`).subscription);
    const more = follower("one-more");
    hub.add(more.subscription);
    assert.match((more.news[0] as { message: string }).message, /50 runs are open/);
    hub.add(follower("r3").subscription); // a second page of a run that is watched
  });

  test("reports that a list has changed, to those who watch it", async () => {
    const server = new Server();
    const hub = new Hub(server);
    const heard: [string, News][] = [];
    for (const topic of ["runs", "approvals", "budgets"] as const) {
      hub.add({ run: null, topic, seq: 0, tell: (news) => heard.push([topic, news]) });
    }
    await settled();
    assert.match(server.now.path, /topics=runs&topics=approvals&topics=budgets$/);
    server.now.frames([{ type: "run.summary", run: {} }, { type: "run.summary", run: { id: "r" } }]);
    server.now.frames([{ type: "budgets.day", day: "2026-11-18", budgets: [] }]);
    const runs = { kind: "changed" as const, latest: { type: "run.summary", run: { id: "r" } } };
    const budgets = { kind: "changed" as const, latest: { type: "budgets.day", day: "2026-11-18", budgets: [] } };
    assert.deepEqual(heard, [["runs", runs], ["budgets", budgets]]);
  });
});
