// The hub of all tabs of a browser, in a worker that they share: one connection for each person who is signed in.

import { Hub, type News, type Subscription, type Topic } from "./hub.ts";
import { transportOf } from "./transport.ts";

/** What a tab sends: a subscription by a number of its own, its end, or that the tab goes away. */
export type ToHub =
  | { id: number; base: string; token: string | null; run: string | null; topic: Topic | null; seq: number }
  | { id: number; ends: true }
  | { leaves: true };

export interface FromHub {
  id: number;
  news: News;
}

const hubs = new Map<string, Hub>();

function hubOf(base: string, token: string | null): Hub {
  const key = JSON.stringify([base, token]);
  let hub = hubs.get(key);
  if (!hub) hubs.set(key, (hub = new Hub(transportOf(base, () => token))));
  return hub;
}

addEventListener("connect", (event) => {
  const port = (event as MessageEvent).ports[0]!;
  const here = new Map<number, { hub: Hub; subscription: Subscription }>();
  const end = (id: number) => {
    const found = here.get(id);
    here.delete(id);
    found?.hub.remove(found.subscription);
  };
  port.onmessage = ({ data }: MessageEvent<ToHub>) => {
    if ("leaves" in data) for (const id of [...here.keys()]) end(id);
    else if ("ends" in data) end(data.id);
    else {
      const { id, base, token, run, topic, seq } = data;
      const tell = (news: News) => port.postMessage({ id, news } satisfies FromHub);
      const subscription = { run, topic, seq, tell };
      const hub = hubOf(base, token);
      here.set(id, { hub, subscription });
      hub.add(subscription);
    }
  };
});
