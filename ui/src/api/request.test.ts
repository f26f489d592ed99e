import assert from "node:assert/strict";
import { test } from "node:test";
import { ApiError, request } from "./request.ts";

function refusing(read: () => Promise<unknown>): () => void {
  const before = globalThis.fetch;
  globalThis.fetch = async () => ({ ok: false, status: 401, json: read }) as unknown as Response;
  return () => void (globalThis.fetch = before);
}

test("an error of the server has its message", async () => {
  const restore = refusing(async () => ({ error: { code: "token_unknown", message: "the token was revoked" } }));
  await assert.rejects(request("api/me", {}, "t").finally(restore), (error) => error instanceof ApiError && error.message === "the token was revoked");
});

test("a request that is aborted while its error is read is aborted, and not an error without a message", async () => {
  const leaving = new AbortController();
  const restore = refusing(async () => {
    leaving.abort();
    throw new DOMException("aborted", "AbortError");
  });
  await assert.rejects(request("api/runs", { signal: leaving.signal }, "t").finally(restore), { name: "AbortError" });
});
