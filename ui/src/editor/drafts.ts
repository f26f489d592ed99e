// Unsaved changes in the browser's storage, by person, graph and tab: they survive a crash of the tab and of the server.
//
// Each tab has drafts of its own, so that two tabs with one graph never overwrite or drop each other's. A tab holds a lock
// as long as it lives: drafts of a tab that does not are taken over by the next one that opens the graph.

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

export interface Found {
  draft: Draft | null;
  /** Whether another tab that is open has unsaved changes of the graph. */
  isElsewhere: boolean;
}

const PREFIX = "penstock.draft.";
const LOCK = "penstock.tab.";
const TAB = Math.random().toString(36).slice(2);

// Not there in pages that a browser does not take as secure; then every draft counts as left behind.
void globalThis.navigator?.locks?.request(LOCK + TAB, () => new Promise(() => {}));

function startOf(person: string, graph: string): string {
  return `${startOfAll(person)}${part(graph)}.`;
}

function startOfAll(person: string): string {
  return `${PREFIX}${part(person)}.`;
}

function part(name: string): string {
  return encodeURIComponent(name).replaceAll(".", "%2E");
}

/** The person's draft of this tab, or else the newest one that a tab left behind, which is this tab's from now on. */
export async function readDraft(person: string, graph: string): Promise<Found> {
  const start = startOf(person, graph);
  const held = (await globalThis.navigator?.locks?.query())?.held?.map((lock) => lock.name) ?? [];
  const tabs = keys().filter((key) => key.startsWith(start)).map((key) => key.slice(start.length));
  const mine = tabs.filter((tab) => tab === TAB || !held.includes(LOCK + tab));
  const found = mine.flatMap((tab) => {
    const draft = parsed(start + tab);
    return draft ? [{ tab, draft }] : [];
  });
  const newest = found.sort((a, b) => Number(b.tab === TAB) - Number(a.tab === TAB) || b.draft.at - a.draft.at)[0];
  if (newest && newest.tab !== TAB && keepDraft(person, graph, newest.draft)) localStorage.removeItem(start + newest.tab);
  return { draft: newest?.draft ?? null, isElsewhere: mine.length < tabs.length };
}

function parsed(key: string): Draft | null {
  try {
    const found: unknown = JSON.parse(localStorage.getItem(key) ?? "null");
    const isDraft = isObject(found) && typeof found.text === "string" && typeof found.origin === "string" && typeof found.base === "number";
    return isDraft ? (found as unknown as Draft) : null;
  } catch {
    return null;
  }
}

function keys(): string[] {
  try {
    return Object.keys(localStorage);
  } catch {
    return [];
  }
}

/** Returns whether the browser kept it: its storage may be full or switched off. */
export function keepDraft(person: string, graph: string, draft: Draft): boolean {
  try {
    localStorage.setItem(startOf(person, graph) + TAB, JSON.stringify(draft));
    return true;
  } catch {
    return false;
  }
}

export function dropDraft(person: string, graph: string): void {
  try {
    localStorage.removeItem(startOf(person, graph) + TAB);
  } catch {
    // there is no storage, and so no draft in it
  }
}

/** The graphs of which this person has unsaved changes here. */
export function draftsOf(person: string): string[] {
  const start = startOfAll(person);
  const found = keys().filter((key) => key.startsWith(start));
  return found.map((key) => decodeURIComponent(key.slice(start.length, key.lastIndexOf("."))));
}
