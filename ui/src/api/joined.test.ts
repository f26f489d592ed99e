import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import { joinedText } from "../test/joined.ts";
import { takenApart } from "./joined.ts";
import type { EventShown } from "./types.ts";

const anyLog = fc
  .array(
    fc.record({
      type: fc.constantFrom("text.delta", "text.delta", "budget"),
      text: fc.oneof(fc.string({ unit: "binary", maxLength: 4 }), fc.constantFrom("😀", "e\u0301", "")),
      node: fc.constantFrom("a", "b"),
      later: fc.nat(50),
    }),
    { maxLength: 30 },
  )
  .map((events) => {
    let at_ms = 1_000;
    return events.map(({ type, text, node, later }, index): EventShown => {
      at_ms += later;
      return { seq: index + 1, at_ms, type, data: { node_id: node, source: null, text } };
    });
  });

test("a joined event is taken apart into the events of the log, whatever was joined", () => {
  fc.assert(
    fc.property(anyLog, fc.array(fc.boolean(), { maxLength: 30 }), (log, cuts) => {
      const shown = joinedText(log, cuts);
      assert.deepEqual(shown.flatMap(({ joined, ...event }) => takenApart(event, joined)), log);
    }),
  );
});

test("what the server sends for two texts is two events", () => {
  const event = { seq: 2, at_ms: 1_014, type: "text.delta", data: { node_id: "n", source: null, text: "H😀lo" } };
  assert.deepEqual(takenApart(event, [[7, 3], [0, 1]]), [
    { ...event, seq: 1, at_ms: 1_007, data: { ...event.data, text: "H😀l" } },
    { ...event, data: { ...event.data, text: "o" } },
  ]);
});
