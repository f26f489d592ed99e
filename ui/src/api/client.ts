// The API over HTTP: requests with the person's token, errors with the server's own words.
//
// The token is kept in memory, and in the tab's session storage only if the person asks for it. It is never part of an
// address, and it is forgotten as soon as the server refuses it.

import { ApiError, query, readFrames, request } from "./request.ts";
import { delay } from "./transport.ts";
import type { EventShown } from "./types.ts";

export { ApiError, query } from "./request.ts";

const KEY = "penstock.token";
let token: string | null = readToken();
let onSignOut: (message: string) => void = () => {};

export function signIn(secret: string, keep: boolean): void {
  token = secret;
  if (keep) sessionStorage.setItem(KEY, secret);
  else sessionStorage.removeItem(KEY);
}

export function signOut(message = ""): void {
  token = null;
  sessionStorage.removeItem(KEY);
  onSignOut(message);
}

export function whenSignedOut(listener: (message: string) => void): void {
  onSignOut = listener;
}

export function hasToken(): boolean {
  return token !== null;
}

export function currentToken(): string | null {
  return token;
}

function readToken(): string | null {
  return typeof sessionStorage === "undefined" ? null : sessionStorage.getItem(KEY);
}

/** Sends a request; relative to the page, which may be served below a prefix of a proxy. */
export async function send(path: string, init: RequestInit): Promise<Response> {
  const used = token;
  try {
    return await request(path.slice(1), init, used, readClock);
  } catch (error) {
    // Of several requests with the same token, the first says why it is no longer accepted.
    if (error instanceof ApiError && error.status === 401 && used === token) signOut(error.code === "unauthorized" ? "" : error.message);
    throw error;
  }
}

let clockAheadMs = 0;

/** The header has whole seconds; a smaller difference is none. */
function readClock(response: Response): void {
  const sent = Date.parse(response.headers.get("Date") ?? "");
  if (Number.isNaN(sent)) return;
  const ahead = sent + 500 - Date.now();
  clockAheadMs = Math.abs(ahead) < 2_000 ? 0 : ahead;
}

/** By how much the server's clock is ahead of this computer's, as of the last response. */
export function clockDifferenceMs(): number {
  return clockAheadMs;
}

/** Now by the server's clock, by which every time of a run is measured. */
export function serverNow(): number {
  return Date.now() + clockAheadMs;
}

export async function get<T>(path: string, signal?: AbortSignal): Promise<T> {
  const response = await send(path, { headers: { Accept: "application/json" }, signal: signal ?? null });
  return (await response.json()) as T;
}

export async function post<T>(path: string, body: unknown = {}): Promise<T> {
  const headers = { "Content-Type": "application/json", Accept: "application/json" };
  const response = await send(path, { method: "POST", headers, body: JSON.stringify(body) });
  return (await response.json()) as T;
}

/** A response as its text, for what must be written back as it was read. */
export async function getText(path: string, signal?: AbortSignal): Promise<string> {
  return (await send(path, { headers: { Accept: "application/json" }, signal: signal ?? null })).text();
}

/** Sends JSON that is text already; returns the response as text, empty if it has none. */
export async function sendText(method: "PUT" | "POST" | "PATCH" | "DELETE", path: string, body?: string): Promise<string> {
  const headers = { ...(body !== undefined && { "Content-Type": "application/json" }), Accept: "application/json" };
  return (await send(path, { method, headers, body: body ?? null })).text();
}

export interface Follower {
  onEvents(events: EventShown[]): boolean;
  onState(state: "open" | "ended" | "lost", message?: string, failure?: unknown): void;
}

const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 4_000;

/** Follow a run's events after `after()` until it is over or `signal` aborts; reconnects by itself. */
export async function follow(runId: string, after: () => number, follower: Follower, signal: AbortSignal): Promise<void> {
  let pause = FIRST_PAUSE_MS;
  while (!signal.aborted) {
    const before = after();
    try {
      const over = await readStream(runId, before, follower, signal);
      if (over) return follower.onState("ended");
    } catch (error) {
      if (signal.aborted) return;
      const status = error instanceof ApiError ? error.status : 0;
      const message = error instanceof Error ? error.message : String(error);
      follower.onState("lost", message, error);
      if (status >= 400 && status < 500 && status !== 429) return;
    }
    pause = after() > before ? FIRST_PAUSE_MS : Math.min(pause * 2, LONGEST_PAUSE_MS);
    await delay(pause, signal);
  }
}

/** Returns whether the run is over. */
async function readStream(runId: string, after: number, follower: Follower, signal: AbortSignal): Promise<boolean> {
  const path = `/api/runs/${encodeURIComponent(runId)}/events${query({ after: after || undefined })}`;
  return readEvents(path, (events) => follower.onEvents(events), signal, () => follower.onState("open"));
}

/** Reads a stream of events until it ends or `onEvents` returns false; returns true if there is nothing to read (204). */
export async function readEvents(
  path: string,
  onEvents: (events: EventShown[]) => boolean,
  signal: AbortSignal,
  onOpen: () => void = () => {},
): Promise<boolean> {
  const response = await send(path, { headers: { Accept: "text/event-stream" }, signal });
  if (response.status === 204) return true;
  onOpen();
  await readFrames(response, (events) => onEvents(events as EventShown[]));
  return false;
}
