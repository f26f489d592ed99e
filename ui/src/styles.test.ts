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
