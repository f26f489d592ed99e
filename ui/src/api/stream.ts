// What this tab watches: through the worker that it shares with the other tabs, or by itself where there is none.

import { currentToken, signOut } from "./client.ts";
import { Hub, type News, type Subscription, type Topic } from "./hub.ts";
import type { FromHub, ToHub } from "./hub-worker.ts";
import workerUrl from "./hub-worker.ts?sharedworker&url";
import { transportOf } from "./transport.ts";

interface Line {
  open(id: number, subscription: Subscription): void;
  close(id: number): void;
}

interface TrustedTypes {
  createPolicy(name: string, rules: { createScriptURL(url: string): string }): { createScriptURL(url: string): string };
}

/** Where the page is served, without its place in the fragment: the same for every tab. */
const BASE = new URL(".", document.baseURI).href;

let line: Line | null = null;
let newest = 0;
const watched = new Map<number, Subscription>();

/** Watch a run from an event on, or a list; returns a function that ends it. */
function watch(run: string | null, topic: Topic | null, seq: number, tell: (news: News) => void): () => void {
  const id = (newest += 1);
  const subscription: Subscription = {
    run,
    topic,
    seq,
    tell(news) {
      if (news.kind === "events") subscription.seq = news.events.at(-1)!.seq;
      if (!watched.has(id)) return;
      if (news.kind === "lost" && news.status === 401) signOut(news.message);
      else tell(news);
    },
  };
  watched.set(id, subscription);
  line ??= openLine();
  line.open(id, subscription);
  return () => {
    if (watched.delete(id)) line?.close(id);
  };
}

export function watchRun(run: string, after: number, tell: (news: News) => void): () => void {
  return watch(run, null, after, tell);
}

/** Calls back with the newest event about a list, at first with its state. */
export function watchTopic(topic: Topic, onChange: (latest: unknown) => void): () => void {
  return watch(null, topic, 0, (news) => news.kind === "changed" && onChange(news.latest));
}

function openLine(): Line {
  if (typeof SharedWorker === "undefined") return ownLine();
  try {
    return workerLine();
  } catch {
    return ownLine(); // a private window may refuse workers
  }
}

function ownLine(): Line {
  const hub = new Hub(transportOf(BASE, currentToken));
  const open = new Map<number, Subscription>();
  return {
    open: (id, subscription) => (open.set(id, subscription), hub.add(subscription)),
    close(id) {
      const subscription = open.get(id);
      open.delete(id);
      if (subscription) hub.remove(subscription);
    },
  };
}

function workerLine(): Line {
  const { trustedTypes } = globalThis as { trustedTypes?: TrustedTypes };
  // The policy of the page lets a worker start from this one file only.
  const policy = trustedTypes?.createPolicy("penstock-worker", { createScriptURL: () => workerUrl });
  const worker = new SharedWorker(policy?.createScriptURL(workerUrl) ?? workerUrl, { type: "module", name: "penstock" });
  const { port } = worker;
  const send = (message: ToHub) => port.postMessage(message);
  const open = (id: number, { run, topic, seq }: Subscription) =>
    send({ id, base: BASE, token: currentToken(), run, topic, seq });
  port.onmessage = ({ data: { id, news } }: MessageEvent<FromHub>) => watched.get(id)?.tell(news);
  worker.onerror = () => {
    // The script could not be loaded: every subscription continues from where it is, without the other tabs.
    line = ownLine();
    for (const [id, subscription] of watched) line.open(id, subscription);
  };
  // A worker is not notified of tabs that are closed. A page that is shown again from the cache subscribes anew.
  addEventListener("pagehide", () => send({ leaves: true }));
  addEventListener("pageshow", ({ persisted }) => {
    if (persisted) for (const [id, subscription] of watched) open(id, subscription);
  });
  return { open, close: (id) => send({ id, ends: true }) };
}
