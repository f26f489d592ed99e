import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import { JsonInvalid, pretty, read, write } from "./json-text.ts";

const spaced = fc.tuple(fc.jsonValue(), fc.constantFrom(undefined, 1, 2, 4, "\t"));

test("what was not changed is written byte for byte", () => {
  fc.assert(
    fc.property(spaced, ([value, indent]) => {
      const text = ` ${JSON.stringify(value, null, indent)}\n`;
      const origin = read(text);
      assert.deepEqual(JSON.parse(JSON.stringify(origin.value)), JSON.parse(text));
      assert.equal(write(origin.value, origin), text);
    }),
  );
});

test("numbers, escapes and odd spacing keep their spelling when something beside them changes", () => {
  const text = '{ "nodes" : [ {"id":"a", "data":{"t":1.0,"big":12345678901234567890,"e":1E2,"u":"\\u00e9"}},\n\n  {"id":"b"} ],\r\n "x":-0 }\n\n';
  const origin = read(text);
  const before = origin.value as { nodes: { id: string; data?: object }[] };
  const [a, b] = before.nodes;
  const changed = { ...before, nodes: [{ ...a!, data: { ...a!.data, t: 2, new: [1] } }, b] };
  const expected = text.replace('"t":1.0', '"t":2').replace('"\\u00e9"}', '"\\u00e9","new":[1]}');
  assert.equal(write(changed, origin), expected);
  assert.equal(write({ ...before, nodes: [b] }, origin), '{ "nodes" : [\n\n  {"id":"b"} ],\r\n "x":-0 }\n\n');
});

test("a changed value means what it is, whatever it was made from", () => {
  fc.assert(
    fc.property(spaced, fc.jsonValue(), ([before, indent], after) => {
      const origin = read(JSON.stringify(before, null, indent));
      const mixed = { before: origin.value, after };
      assert.deepEqual(JSON.parse(write(mixed, origin)), JSON.parse(JSON.stringify(mixed)));
    }),
  );
});

test("the usual form is what others write with two spaces", () => {
  fc.assert(
    fc.property(fc.jsonValue(), (value) => {
      const compact = read(JSON.stringify(value));
      assert.equal(pretty(compact), `${JSON.stringify(value, null, 2)}\n`);
    }),
  );
  assert.equal(pretty(read('{"a":1.0,"b":[]}')), '{\n  "a": 1.0,\n  "b": []\n}\n');
});

test("an error has its line and column", () => {
  for (const [text, where] of [
    ['{"a": 1,\n  b}', "line 2, column 3"],
    ["[1 2]", "line 1, column 4"],
    ["", "line 1, column 1"],
    ["[1]x", "line 1, column 4"],
    ["[01]", "line 1, column 3"],
    ["[1,]", "line 1, column 4"],
  ] as const) {
    assert.throws(() => read(text), (error) => error instanceof JsonInvalid && error.message.startsWith(where), text);
  }
  const own = read('{"__proto__": {"a": 1}}').value as object;
  assert.ok(Object.hasOwn(own, "__proto__"));
});

test("a document that comes back by undoing is written as it was read, whatever was read since", () => {
  const text = '\n{ "ratio" : 1.0,\n   "list": [1E2 , "\\u00e9"] }\n\n';
  const first = read(text);
  const second = read('{"ratio":2,"list":[]}');
  assert.equal(write(first.value, second), text);
  assert.equal(write({ ...(first.value as object), ratio: 3 }, second), '{"ratio":3,"list":[1E2 , "\\u00e9"]}');
});
