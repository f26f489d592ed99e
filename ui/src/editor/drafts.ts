// Unsaved changes in the browser's storage, by person and graph: they survive a crash of the tab and of the server.

import { isObject, type Position } from "./document.ts";

export interface Draft {
  /** The version that it is based on; 0 for a graph that was never saved. */
  base: number;
  name: string;
  text: string;
  origin: string;
  positions: Record<string, Position>;
  at: number;
}

const PREFIX = "penstock.draft.";

function keyOf(person: string, graph: string): string {
  return `${PREFIX}${encodeURIComponent(person)}.${encodeURIComponent(graph)}`;
}

export function readDraft(person: string, graph: string): Draft | null {
  try {
    const found: unknown = JSON.parse(localStorage.getItem(keyOf(person, graph)) ?? "null");
    const isDraft = isObject(found) && typeof found.text === "string" && typeof found.origin === "string" && typeof found.base === "number";
    return isDraft ? (found as unknown as Draft) : null;
  } catch {
    return null;
  }
}

/** Returns whether the browser kept it: its storage may be full or switched off. */
export function keepDraft(person: string, graph: string, draft: Draft): boolean {
  try {
    localStorage.setItem(keyOf(person, graph), JSON.stringify(draft));
    return true;
  } catch {
    return false;
  }
}

export function dropDraft(person: string, graph: string): void {
  try {
    localStorage.removeItem(keyOf(person, graph));
  } catch {
    // there is no storage, and so no draft in it
  }
}

/** The graphs of which this person has unsaved changes here. */
export function draftsOf(person: string): string[] {
  const start = `${PREFIX}${encodeURIComponent(person)}.`;
  try {
    return Object.keys(localStorage).filter((key) => key.startsWith(start)).map((key) => decodeURIComponent(key.slice(start.length)));
  } catch {
    return [];
  }
}
