// One graph in the editor: loaded, changed, kept as a draft, checked and saved.
//
// A save names the version it is based on, so that a version that was saved elsewhere meanwhile is never overwritten: the
// editor shows it, and its author decides. Positions are stored apart, as soon as a node is moved, and make no version.

import { useCallback, useEffect, useMemo, useRef, useState } from "react";
import { ApiError, get, getText, sendText } from "../api/client.ts";
import type { GraphShown, GraphSummary, LayoutShown, Me, ProblemShown, Validity } from "../api/types.ts";
import { isAway, usePolled } from "../ui/parts.tsx";
import { begin, commit, EMPTY, redo, undo, unreadable, type Graph, type History, type Position, type Snapshot } from "./document.ts";
import { dropDraft, keepDraft, readDraft } from "./drafts.ts";
import { pretty, read, write, type Origin } from "./json-text.ts";

const CHECK_AFTER_MS = 250;
const ARRANGE_AFTER_MS = 400;
const LOOK_EVERY_MS = 4_000;
/** A longer text is sent once, as the document: a request has a maximum size. */
const MAX_SOURCE = 900_000;

/** What is saved: the newest version that this editor knows of. */
export interface Base {
  version: number;
  name: string;
  shown: GraphShown | null;
}

interface Loaded {
  base: Base;
  origin: Origin;
  history: History;
  name: string;
  /** The graph as it is saved, to tell whether there are changes. */
  saved: Graph | null;
  /** When the draft was written that was restored; null if none was. */
  restoredAt: number | null;
  /** Whether another tab had unsaved changes of the graph when it was opened here. */
  isElsewhere: boolean;
}

export interface Editor {
  id: string;
  base: Base;
  name: string;
  graph: Graph;
  positions: Readonly<Record<string, Position>>;
  isDirty: boolean;
  isReadOnly: boolean;
  /** Whether this person may save and run graphs at all. */
  mayAct: boolean;
  /** Why it cannot be changed; empty if it can. */
  readOnlyReason: string;
  restoredAt: number | null;
  isElsewhere: boolean;
  draftFails: boolean;
  problems: ProblemShown[] | null;
  /** A version that was saved elsewhere since this one was loaded. */
  newer: GraphSummary | null;
  versions: GraphSummary[];
  canUndo: boolean;
  canRedo: boolean;
  change: (change: (graph: Graph) => Graph, tag?: string) => void;
  move: (moved: Record<string, Position>) => void;
  rename: (name: string) => void;
  undo: () => void;
  redo: () => void;
  save: (note: string) => Promise<GraphShown>;
  saveAs: (id: string) => Promise<void>;
  /** Look for versions that were saved elsewhere. */
  look: () => void;
  /** Base the changes on the newest version, which stays in the list of versions. */
  keepMine: () => Promise<void>;
  discard: () => void;
  /** Put an earlier version on the canvas, as a change that can be undone. */
  bringBack: (version: number) => Promise<void>;
  importText: (text: string) => void;
  exportText: () => string;
}

export interface Opened {
  editor: Editor | null;
  error: unknown;
}

function urlOf(id: string): string {
  return `/api/graphs/${encodeURIComponent(id)}`;
}

/** The document of a version as its author wrote it, or printed evenly if the server has no text of it. */
async function originOf(id: string, answer: Origin): Promise<Origin> {
  const shown = answer.value as GraphShown;
  const text = await getText(`${urlOf(id)}/source?version=${shown.version}`);
  return read(text || pretty(answer, shown.document));
}

async function load(id: string, me: Me, newName: string | null): Promise<Loaded> {
  const { draft, isElsewhere } = await readDraft(me.name, id);
  let base: Base = { version: 0, name: newName || draft?.name || id, shown: null };
  let origin = read(pretty(read(JSON.stringify(EMPTY))));
  let positions: Record<string, Position> = {};
  try {
    const answer = read(await getText(urlOf(id)));
    const shown = answer.value as GraphShown;
    base = { version: shown.version, name: shown.name, shown };
    origin = await originOf(id, answer);
    positions = (await get<LayoutShown>(`${urlOf(id)}/layout`)).positions;
  } catch (error) {
    const isNew = error instanceof ApiError && error.status === 404 && (newName !== null || draft !== null);
    const isAway = error instanceof ApiError && error.status === 0 && draft !== null;
    if (!isNew && !isAway) throw error;
    if (isAway) base = { version: draft!.base, name: draft!.name, shown: null };
  }
  const why = unreadable(origin.value);
  if (why) throw new Error(`the document of this graph cannot be edited: ${why}`);
  const saved = base.version ? (origin.value as Graph) : null;
  const plain = { base, origin, name: base.name, saved, restoredAt: null, isElsewhere };
  if (!draft) return { ...plain, history: begin({ graph: origin.value as Graph, positions }) };
  const graph = read(draft.text).value as Graph;
  const history = begin({ graph, positions: { ...positions, ...draft.positions } });
  // The draft keeps the version that it was made from: a newer one is shown, and not overwritten.
  const draftBase = { ...base, version: Math.min(draft.base, base.version) };
  return { base: draftBase, origin: read(draft.origin), name: draft.name, saved: null, restoredAt: draft.at, isElsewhere, history };
}

export function useEditor(id: string, me: Me, newName: string | null): Opened {
  const [loaded, setLoaded] = useState<Loaded | null>(null);
  const [error, setError] = useState<unknown>(null);
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    let isCurrent = true;
    let retry: ReturnType<typeof setTimeout> | undefined;
    setLoaded(null);
    setError((old: unknown) => (isAway(old) ? old : null));
    load(id, me, newName).then(
      (found) => isCurrent && (setLoaded(found), setError(null)),
      (failure: unknown) => {
        if (!isCurrent) return;
        setError(failure);
        if (isAway(failure)) retry = setTimeout(() => setTurn((old) => old + 1), LOOK_EVERY_MS);
      },
    );
    return () => {
      isCurrent = false;
      clearTimeout(retry);
    };
    // The name of a new graph matters only when it is first opened.
  }, [id, me.name, turn]);

  const graph = loaded?.history.present.graph ?? null;
  const positions = loaded?.history.present.positions ?? null;
  const text = useMemo(() => (loaded && graph ? write(graph, loaded.origin) : ""), [graph, loaded?.origin]);
  const reason = loaded ? whyReadOnly(loaded.base.shown, me) : "";
  const isDirty = loaded !== null && !reason && (graph !== loaded.saved || loaded.name !== loaded.base.name);
  const draftFails = useDraft(loaded, text, isDirty, me.name, id);
  const problems = useProblems(loaded, text, me, isDirty);
  useLayout(id, positions, loaded !== null && loaded.base.shown !== null && !reason, turn);
  const versions = usePolled(
    `versions ${id} ${loaded?.base.version} ${turn}`,
    (signal) => (loaded?.base.version ? get<GraphSummary[]>(`${urlOf(id)}/versions`, signal) : Promise.resolve([])),
    LOOK_EVERY_MS,
  );

  const latest = useRef(loaded);
  latest.current = loaded;
  const update = useCallback((change: (old: Loaded) => Loaded) => setLoaded((old) => old && change(old)), []);
  const put = useCallback(
    (next: (old: Snapshot) => Snapshot, tag?: string) =>
      update((old) => ({ ...old, history: commit(old.history, next(old.history.present), tag ?? null) })),
    [update],
  );
  if (!loaded || !graph || !positions) return { editor: null, error };

  const newest = versions.value?.[0];
  const body = (note: string, expected: number) => {
    const isPlain = text === pretty(read(JSON.stringify(graph))) || text.length > MAX_SOURCE;
    const rest = JSON.stringify({ name: loaded.name, note, expected_version: expected, ...(!isPlain && { source: text }) });
    return `{"document":${text.trim()},${rest.slice(1)}`;
  };
  const editor: Editor = {
    id,
    base: loaded.base,
    name: loaded.name,
    graph,
    positions,
    isDirty,
    isReadOnly: reason !== "",
    mayAct: me.role !== "viewer",
    readOnlyReason: reason,
    restoredAt: loaded.restoredAt,
    isElsewhere: loaded.isElsewhere,
    draftFails,
    problems,
    newer: newest && newest.version > loaded.base.version ? newest : null,
    versions: versions.value ?? [],
    canUndo: loaded.history.past.length > 0,
    canRedo: loaded.history.future.length > 0,
    change: (change, tag) => put((old) => ({ ...old, graph: change(old.graph) }), tag),
    move: (moved) => put((old) => ({ ...old, positions: { ...old.positions, ...moved } })),
    rename: (name) => update((old) => ({ ...old, name })),
    undo: () => update((old) => ({ ...old, history: undo(old.history) })),
    redo: () => update((old) => ({ ...old, history: redo(old.history) })),
    async save(note) {
      const shown = JSON.parse(await sendText("PUT", urlOf(id), body(note, loaded.base.version))) as GraphShown;
      const base = { version: shown.version, name: shown.name, shown };
      // What was changed while the request was under way stays a change.
      update((old) => ({ ...old, base, saved: graph, restoredAt: null }));
      return shown;
    },
    async saveAs(copy) {
      await sendText("PUT", urlOf(copy), body(`Copy of ${id}`, 0));
      const here = JSON.stringify({ positions });
      if (Object.keys(positions).length) await sendText("PATCH", `${urlOf(copy)}/layout`, here);
    },
    look: versions.again,
    async keepMine() {
      const shown = await get<GraphShown>(urlOf(id));
      update((old) => ({ ...old, base: { version: shown.version, name: shown.name, shown }, saved: null }));
    },
    discard() {
      dropDraft(me.name, id);
      setTurn((old) => old + 1);
    },
    async bringBack(version) {
      const answer = read(await getText(`${urlOf(id)}?version=${version}`));
      const origin = await originOf(id, answer);
      const why = unreadable(origin.value);
      if (why) throw new Error(`version ${version} cannot be edited: ${why}`);
      put((old) => ({ ...old, graph: origin.value as Graph }));
    },
    importText(given) {
      const origin = read(given);
      const why = unreadable(origin.value);
      if (why) throw new Error(`this is not a graph: ${why}`);
      update((old) => {
        const next = { graph: origin.value as Graph, positions: {} };
        return { ...old, origin, history: commit(old.history, next) };
      });
    },
    exportText: () => text,
  };
  return { editor, error: null };
}

function whyReadOnly(shown: GraphShown | null, me: Me): string {
  if (shown?.source === "program") return "This graph follows Python code: change the code, and restart or reload the server.";
  if (me.role === "viewer") return "You may look at graphs, and not change them.";
  if (shown && shown.owner !== me.name && me.role !== "admin") return `This graph belongs to ${shown.owner}. Save a copy to change it.`;
  return "";
}

/** Keeps unsaved changes in the browser at every change; returns whether the browser refuses. */
function useDraft(loaded: Loaded | null, text: string, isDirty: boolean, person: string, id: string): boolean {
  const [fails, setFails] = useState(false);
  const positions = loaded?.history.present.positions;
  useEffect(() => {
    if (!loaded) return;
    if (!isDirty) return dropDraft(person, id);
    const { base, name, origin } = loaded;
    const draft = { base: base.version, name, text, origin: write(origin.value, origin), positions: positions ?? {}, at: Date.now() };
    setFails(!keepDraft(person, id, draft));
  }, [loaded?.base.version, loaded?.name, loaded === null, text, positions, isDirty, person, id]);
  return fails;
}

/** What keeps the graph from running, as the server finds it shortly after each change. */
function useProblems(loaded: Loaded | null, text: string, me: Me, isDirty: boolean): ProblemShown[] | null {
  const [found, setFound] = useState<{ text: string; problems: ProblemShown[] } | null>(null);
  const known = !isDirty ? loaded?.base.shown?.problems : undefined;
  useEffect(() => {
    if (!text || known || me.role === "viewer") return;
    let isCurrent = true;
    const timer = setTimeout(() => {
      sendText("POST", "/api/graphs/validate?handles=false", `{"document":${text}}`).then(
        (answer) => isCurrent && setFound({ text, problems: (JSON.parse(answer) as Validity).problems }),
        () => {}, // the server is away: the problems of before stay until it is back
      );
    }, CHECK_AFTER_MS);
    return () => {
      isCurrent = false;
      clearTimeout(timer);
    };
  }, [text, known, me.role]);
  return known ?? found?.problems ?? null;
}

/** Stores moved nodes apart from versions, shortly after they were moved. */
function useLayout(id: string, positions: Readonly<Record<string, Position>> | null, mayStore: boolean, turn: number): void {
  const stored = useRef<{ of: string; positions: Readonly<Record<string, Position>> } | null>(null);
  const key = `${id} ${turn}`;
  useEffect(() => {
    if (!positions) return;
    if (stored.current?.of !== key) stored.current = { of: key, positions: mayStore ? positions : {} };
    const before = stored.current.positions;
    const names = [...Object.keys(positions), ...Object.keys(before)];
    const changed = names.filter((name) => positions[name] !== before[name]);
    if (!mayStore || !changed.length) return;
    const timer = setTimeout(() => {
      const changes = Object.fromEntries(changed.map((name) => [name, positions[name] ?? null]));
      stored.current = { of: key, positions };
      sendText("PATCH", `${urlOf(id)}/layout`, JSON.stringify({ positions: changes })).catch(() => {
        if (stored.current?.of === key) stored.current.positions = before; // sent again with the next move
      });
    }, ARRANGE_AFTER_MS);
    return () => clearTimeout(timer);
  }, [key, id, positions, mayStore]);
}
