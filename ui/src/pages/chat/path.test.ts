// A window of a conversation that grows at its ends, and attachments that are taken or not.

import assert from "node:assert/strict";
import { test } from "node:test";
import { attachedType } from "../../api/chat.ts";
import type { ChatPath, PlacedMessage } from "../../api/types.ts";
import { joined, MAX_SHOWN } from "./use-path.ts";

function pathOf(from: number, to: number, has_earlier: boolean, has_later: boolean): ChatPath {
  const messages = Array.from({ length: to - from }, (_, at) => ({ id: `m${from + at}` }) as PlacedMessage);
  const chat = { id: "c", owner: "ann", title: "", graph_id: "g", created_ms: 0, updated_ms: 0 };
  return { ...chat, messages, has_earlier, has_later, end_id: "m999" };
}

test("earlier messages are added above, and the far end is let go beyond the maximum", () => {
  const short = joined(pathOf(40, 80, true, false), pathOf(0, 40, false, false), "earlier");
  assert.deepEqual([short.messages.length, short.messages[0]!.id, short.has_earlier, short.has_later], [80, "m0", false, false]);
  const long = joined(pathOf(40, 40 + MAX_SHOWN, true, false), pathOf(0, 40, true, false), "earlier");
  assert.deepEqual([long.messages.length, long.messages[0]!.id, long.has_earlier, long.has_later], [MAX_SHOWN, "m0", true, true]);
});

test("later messages are added below, and nothing more is said to come when there is nothing", () => {
  const long = joined(pathOf(0, MAX_SHOWN, false, true), pathOf(MAX_SHOWN, MAX_SHOWN + 40, true, false), "later");
  assert.deepEqual([long.messages.at(-1)!.id, long.has_earlier, long.has_later], [`m${MAX_SHOWN + 39}`, true, false]);
  assert.equal(joined(pathOf(0, 5, false, true), pathOf(0, 0, false, true), "later").has_later, false);
});

test("pictures, PDF and texts can be attached, an SVG only as a text, and programs not at all", () => {
  const type = (name: string, type = "") => attachedType({ name, type });
  assert.equal(type("a.png", "image/png"), "image/png");
  assert.equal(type("a.svg", "image/svg+xml"), "text/plain");
  assert.equal(type("a.html", "text/html"), "text/plain");
  assert.equal(type("notes.md"), "text/plain");
  assert.equal(type("a.exe", "application/x-msdownload"), null);
  assert.equal(type("a.exe"), null);
});
