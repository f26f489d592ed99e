import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import { frameParser, type Frame } from "./sse.ts";

const STREAM = 'retry: 2000\n\n: beat\n\nid: 1\nevent: a\ndata: {"x":1}\n\nid: 2\r\nevent: b\r\ndata: one\r\ndata: two\r\n\r\ndata:last\n\n';
const FRAMES: Frame[] = [
  { id: "1", event: "a", data: '{"x":1}' },
  { id: "2", event: "b", data: "one\ntwo" },
  { id: "", event: "", data: "last" },
];

test("frames are the same in whatever pieces the text comes", () => {
  fc.assert(
    fc.property(fc.array(fc.nat(STREAM.length)), (cuts) => {
      const parse = frameParser();
      const frames: Frame[] = [];
      let from = 0;
      for (const cut of [...cuts, STREAM.length].sort((a, b) => a - b)) {
        frames.push(...parse(STREAM.slice(from, cut)));
        from = cut;
      }
      assert.deepEqual(frames, FRAMES);
    }),
  );
});

test("an unfinished frame is not given", () => {
  assert.deepEqual(frameParser()("id: 1\ndata: half\n"), []);
});
