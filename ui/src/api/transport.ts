// How a hub reaches the server.

import type { Transport } from "./hub.ts";
import { ApiError, readFrames, request } from "./request.ts";

export function transportOf(base: string, token: () => string | null): Transport {
  const url = (path: string) => new URL(path.slice(1), base).href;
  return {
    async stream(path, signal, onOpen, onFrames) {
      const response = await request(url(path), { headers: { Accept: "text/event-stream" }, signal }, token());
      onOpen();
      await readFrames(response, (frames) => (onFrames(frames), true));
    },
    async has(run) {
      try {
        await request(url(`/api/runs/${encodeURIComponent(run)}`), { headers: { Accept: "application/json" } }, token());
        return true;
      } catch (error) {
        if (error instanceof ApiError && error.status === 404) return false;
        throw error;
      }
    },
    pause: delay,
  };
}

export function delay(ms: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    if (signal.aborted) return resolve();
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}
