import assert from "node:assert/strict";
import { test } from "node:test";
import { visible, visibleText } from "./visible.ts";

test("characters that hide or turn others are written out", () => {
  const cases: Record<string, string> = {
    "pay \u202ennA\u202c": "pay ⟨U+202E⟩nnA⟨U+202C⟩",
    "a\u0000b\u001b[31m": "a⟨U+0000⟩b⟨U+001B⟩[31m",
    "x\ud800": "x⟨U+D800⟩",
    "tag \u{e0041}": "tag ⟨U+E0041⟩",
    "Ann\tO'Neil\nline": "Ann\tO'Neil\nline",
  };
  for (const show of [visible, visibleText]) {
    for (const [text, shown] of Object.entries(cases)) assert.equal(show(text), shown);
  }
});

test("a joiner makes two names look alike, and belongs to text of many scripts", () => {
  assert.equal(visible("an\u200dn"), "an⟨U+200D⟩n");
  for (const text of ["👩\u200d🔧", "می\u200cخواهم", "one\r\ntwo"]) assert.equal(visibleText(text), text);
});
