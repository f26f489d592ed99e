// One request to the API, and its errors in the server's own words. It knows no page, so that a worker can use it too.

import { frameParser } from "./sse.ts";
import type { ErrorShown } from "./types.ts";

export class ApiError extends Error {
  readonly status: number;
  readonly code: string;
  readonly path: string | null;
  readonly details: readonly unknown[];
  constructor(status: number, code: string, message: string, path: string | null = null, details: readonly unknown[] = []) {
    super(message);
    this.status = status;
    this.code = code;
    this.path = path;
    this.details = details;
  }
}

/** Sends a request; `onResponse` sees every response, those that become an ApiError too. */
export async function request(
  url: string,
  init: RequestInit,
  token: string | null,
  onResponse: (response: Response) => void = () => {},
): Promise<Response> {
  const headers = new Headers(init.headers);
  if (token !== null) headers.set("Authorization", `Bearer ${token}`);
  let response: Response;
  try {
    response = await fetch(url, { ...init, headers, cache: "no-store", redirect: "error" });
  } catch (error) {
    if (init.signal?.aborted) throw error;
    throw new ApiError(0, "unreachable", "the server does not answer; it may be restarting");
  }
  onResponse(response);
  if (response.ok) return response;
  const error = await errorOf(response);
  init.signal?.throwIfAborted(); // its body may not have been read then
  throw error;
}

async function errorOf(response: Response): Promise<ApiError> {
  try {
    const { error } = (await response.json()) as ErrorShown;
    return new ApiError(response.status, error.code, error.message, error.path ?? null, error.details ?? []);
  } catch {
    return new ApiError(response.status, "unknown", `the server answered ${response.status}`);
  }
}

/** Reads the JSON of a stream's frames, piece by piece, until the stream ends or `onFrames` returns false. */
export async function readFrames(response: Response, onFrames: (frames: unknown[]) => boolean): Promise<void> {
  const parse = frameParser();
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  for (let piece = await reader.read(); !piece.done; piece = await reader.read()) {
    const frames = parse(piece.value).map((frame) => JSON.parse(frame.data) as unknown);
    if (frames.length && !onFrames(frames)) {
      await reader.cancel();
      return;
    }
  }
}

/** Builds a query string; empty values are left out, lists are repeated. */
export function query(values: Record<string, string | number | readonly string[] | undefined>): string {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== undefined && one !== "") parameters.append(name, String(one));
    }
  }
  const text = parameters.toString();
  return text && `?${text}`;
}
