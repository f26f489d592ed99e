// The sheets of all pages are loaded into one document: a class that two of them style looks as the last one says.

import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import { test } from "node:test";

const SOURCES = new URL(".", import.meta.url);
/** Made for every page, and refined where they are used. */
const REFINED = new Set(["events"]);

/** The classes that a sheet styles wherever they are: selectors that name no other class. */
function ownClasses(sheet: string): Set<string> {
  const plain = sheet.replace(/\/\*.*?\*\//gs, "");
  const selectors = [...plain.matchAll(/([^{}]+)\{/g)].flatMap(([, list]) => list!.split(","));
  const names = selectors.map((selector) => [...new Set([...selector.matchAll(/\.([a-zA-Z][\w-]*)/g)].map(([, name]) => name!))]);
  return new Set(names.filter((found) => found.length === 1).map(([name]) => name!));
}

test("no two sheets style the same class", () => {
  const files = readdirSync(SOURCES, { recursive: true, encoding: "utf-8" }).filter((file) => file.endsWith(".css"));
  assert.ok(files.length > 5);
  const owners = new Map<string, string[]>();
  for (const file of files) {
    for (const name of ownClasses(readFileSync(new URL(file, SOURCES), "utf-8"))) owners.set(name, [...(owners.get(name) ?? []), file]);
  }
  const shared = [...owners].filter(([name, found]) => found.length > 1 && !REFINED.has(name));
  assert.deepEqual(shared, []);
});

test("every class that a sheet styles is used", () => {
  const files = readdirSync(SOURCES, { recursive: true, encoding: "utf-8" });
  const code = files.filter((file) => /\.tsx?$/.test(file) && !file.endsWith(".test.ts")).map((file) => readFileSync(new URL(file, SOURCES), "utf-8"));
  const quoted = code.flatMap((text) => [...text.matchAll(/"[^"\n]*"|'[^'\n]*'|`[^`]*`/g)].map(([found]) => found));
  const words = new Set(quoted.join("\n").match(/[a-zA-Z][\w-]*/g));
  const isUsed = (name: string) => words.has(name) || FAMILIES.some((start) => name.startsWith(start));
  const unused = files
    .filter((file) => file.endsWith(".css"))
    .flatMap((file) => [...allClasses(readFileSync(new URL(file, SOURCES), "utf-8"))].filter((name) => !isUsed(name)).map((name) => `${file}: .${name}`));
  assert.deepEqual(unused, []);
});

/** Classes of the canvas library, and those whose ends are data. */
const FAMILIES = ["react-flow", "connectingto", "valid", "animated", "bar-", "c-", "k-", "s-", "to-"];

function allClasses(sheet: string): Set<string> {
  const plain = sheet.replace(/\/\*.*?\*\//gs, "");
  const selectors = [...plain.matchAll(/([^{}]+)\{/g)].map(([, list]) => list!).filter((list) => !list.trim().startsWith("@"));
  return new Set(selectors.flatMap((list) => [...list.matchAll(/\.([a-zA-Z][\w-]*)/g)].map(([, name]) => name!)));
}
