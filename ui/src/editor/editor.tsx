// The editor of one graph: palette, canvas, settings, problems, versions, and a run over the canvas.

import { useCallback, useEffect, useMemo, useRef, useState } from "react";
import { get } from "../api/client.ts";
import type { Me, NodeTypes, OfferedModels, ToolList } from "../api/types.ts";
import { initialValue, type Pickers } from "../forms/schema-form.tsx";
import { priceWords, several } from "../model/money.ts";
import { costByNode, type RunState } from "../model/run.ts";
import { useRun } from "../pages/run/use-run.ts";
import { go, setParams, type Route } from "../router.ts";
import { Dialog, Failure, usePolled, when } from "../ui/parts.tsx";
import { visible } from "../ui/visible.ts";
import { Canvas, type Overlay } from "./canvas.tsx";
import * as model from "./document.ts";
import type { Data, End, Graph, GraphNode, Path, Position } from "./document.ts";
import "./editor.css";
import { Inspector } from "./inspector.tsx";
import { arranged, CARD_WIDTH, freeSpot, places } from "./layout.ts";
import { Palette } from "./palette.tsx";
import { CopyDialog, Newer, ProblemList, RunPanel, SaveDialog, Versions } from "./panels.tsx";
import { catalogOf, graphField, handlesOf, misfit, place, problemsAt, type Catalog, type PlacedProblem } from "./types.ts";
import { useEditor, type Editor } from "./use-editor.ts";

export function EditorPage({ id, me, route }: { id: string; me: Me; route: Route }) {
  const types = usePolled("node-types", (signal) => get<NodeTypes>("/api/node-types", signal), 0);
  const { editor, error } = useEditor(id, me, route.params.get("new"));
  const catalog = useMemo(() => (types.value ? catalogOf(types.value) : null), [types.value]);
  if (editor && catalog) return <Workbench editor={editor} catalog={catalog} route={route} />;
  return (
    <>
      <h1>{visible(id)}</h1>
      <Failure error={error ?? types.error} />
      {!error && !types.error && <p className="muted">Loading…</p>}
      <a href="#/graphs">All graphs</a>
    </>
  );
}

type Open = "save" | "copy" | "versions" | "newer" | "help" | null;

function Workbench({ editor, catalog, route }: { editor: Editor; catalog: Catalog; route: Route }) {
  const [path, setPath] = useState<Path>([]);
  const [picked, setPicked] = useState<{ nodes: string[]; edge: string | null }>({ nodes: [], edge: null });
  const [open, setOpen] = useState<Open>(null);
  const [said, say] = useState("");
  const [failure, setFailure] = useState<unknown>(null);
  const [imports, setImports] = useState(0);
  const search = useRef<HTMLInputElement>(null);
  const file = useRef<HTMLInputElement>(null);
  const pickers = usePickers();
  const graph = model.graphAt(editor.graph, path);
  const here = graph ?? model.EMPTY;
  const problems = useMemo(
    () => (editor.problems ?? []).map((problem) => place(editor.graph, problem)),
    [editor.graph, editor.problems],
  );
  const runId = route.params.get("run");
  const [isRunOpen, setRunOpen] = useState(runId !== null);
  const selected = useMemo(() => new Set(picked.nodes.filter((id) => model.nodeOf(here, id))), [picked.nodes, here]);
  const node = selected.size === 1 ? model.nodeOf(here, [...selected][0]!) : undefined;
  useEffect(() => {
    if (!graph && path.length) setPath([]); // the node around it was removed
  }, [graph, path]);
  const change = useCallback(
    (edit: (graph: Graph) => Graph, tag?: string) => {
      if (!editor.isReadOnly) editor.change((root) => model.withGraphAt(root, path, edit), tag);
    },
    [editor, path],
  );
  const rows = (one: GraphNode) => Math.max(handlesOf(catalog, here, one, "inputs").length, handlesOf(catalog, here, one, "outputs").length);

  const add = (type: string, at?: Position) => {
    if (editor.isReadOnly) return;
    const where = places(here, path, editor.positions, rows);
    const near = node ?? here.nodes.at(-1);
    const spot = at ?? freeSpot(where.values(), beside(near && where.get(near.id), catalog.types.get(type)?.runs === false));
    const [added, id] = model.addNode(here, type, firstData(catalog, type), spot);
    const joined = at ? added : joinedTo(catalog, added, node?.id, id);
    change(() => joined);
    setPicked({ nodes: [id], edge: null });
    say(joined === added ? `${id} added` : `${id} added and connected to ${node?.id}`);
  };
  const join = (source: End, target: End) => {
    const from = model.nodeOf(here, source.node);
    const handle = from && handlesOf(catalog, here, from, "outputs").find((one) => one.name === source.handle);
    if (handle) change((old) => model.connect(old, source, target, handle.channel));
    say(`${source.node} connected to ${target.node}`);
  };
  const remove = () => {
    if (picked.edge) change((old) => model.removeEdges(old, [picked.edge!]));
    else if (selected.size) change((old) => model.removeNodes(old, selected));
    else return;
    say(picked.edge ? "Connection removed" : `${[...selected].join(", ")} removed`);
    setPicked({ nodes: [], edge: null });
  };
  const paste = () => {
    const piece = readClipboard();
    if (!piece || editor.isReadOnly) return;
    const where = places(here, path, editor.positions, rows);
    const beside = (id: string): Position => {
      const { x, y } = where.get(id) ?? piece.nodes.find((one) => one.id === id)?.position ?? { x: 0, y: 0 };
      return { x: x + 40, y: y + 60 };
    };
    const [next, ids] = model.paste(here, piece, beside);
    change(() => next);
    setPicked({ nodes: [...ids.values()], edge: null });
    say(`${ids.size} pasted`);
  };
  const enter = (id: string) => {
    const found = model.nodeOf(here, id);
    const field = found && graphField(catalog.types.get(found.type));
    if (!field) return;
    setPath([...path, { node: id, field }]);
    setPicked({ nodes: [], edge: null });
    say(`Inside ${id}`);
  };
  const show = (problem: PlacedProblem) => {
    setPath(problem.at);
    setPicked({ nodes: problem.node ? [problem.node] : [], edge: problem.edge });
  };
  const arrange = () => {
    const found = arranged(here, rows);
    editor.move(Object.fromEntries([...found].map(([id, position]) => [model.pathName(path, id), position])));
  };
  const importFile = async (chosen: File | undefined) => {
    setFailure(null);
    try {
      if (chosen) editor.importText(await chosen.text());
      setPath([]);
      setImports((old) => old + 1);
    } catch (error) {
      setFailure(error);
    }
  };
  const save = () => (editor.newer ? setOpen("newer") : setOpen("save"));
  useKeys({
    "ctrl+s": save,
    "ctrl+z": editor.undo,
    "ctrl+shift+z": editor.redo,
    "ctrl+y": editor.redo,
    "ctrl+c": () => writeClipboard(model.copyOf(here, selected)),
    "ctrl+x": () => (writeClipboard(model.copyOf(here, selected)), remove()),
    "ctrl+v": paste,
    "ctrl+a": () => setPicked({ nodes: here.nodes.map((one) => one.id), edge: null }),
    delete: remove,
    backspace: remove,
    a: () => search.current?.focus(),
    enter: () => node && (document.querySelector<HTMLElement>(".node-settings input, .node-settings select, .node-settings button")?.focus(), undefined),
    "?": () => setOpen("help"),
    escape: () => (picked.nodes.length || picked.edge ? setPicked({ nodes: [], edge: null }) : path.length ? setPath(path.slice(0, -1)) : undefined),
  });
  const [watched, setWatched] = useState<Watched | null>(null);
  const run = watched?.id === runId ? watched : null;
  const overlay = useOverlay(run, path);

  return (
    <div className="editor">
      {runId && <Watch key={runId} id={runId} onChange={setWatched} />}
      <header className="bar">
        <a href="#/graphs">Graphs</a>
        <h1 className="hidden">{visible(editor.name)}</h1>
        <div className="which">
          <input className="graph-name" aria-label="Name of the graph" value={editor.name} disabled={editor.isReadOnly} maxLength={200} onChange={(event) => editor.rename(event.target.value)} />
          <span className="muted" role="status">
            {editor.base.version ? `version ${editor.base.version}` : "not saved yet"}
            {editor.isDirty && " · unsaved changes"}
          </span>
        </div>
        <span className="grow" />
        <button onClick={editor.undo} disabled={!editor.canUndo} title="Ctrl+Z">
          Undo
        </button>
        <button onClick={editor.redo} disabled={!editor.canRedo} title="Ctrl+Shift+Z">
          Redo
        </button>
        <button onClick={arrange} disabled={editor.isReadOnly || !here.nodes.length}>
          Arrange
        </button>
        <button onClick={() => setOpen("versions")} disabled={!editor.versions.length}>
          Versions
        </button>
        <button onClick={() => file.current?.click()} disabled={editor.isReadOnly}>
          Import
        </button>
        <input ref={file} type="file" hidden accept="application/json,.json" onChange={(event) => (void importFile(event.target.files?.[0]), (event.target.value = ""))} />
        <button onClick={() => download(`${editor.id}.json`, editor.exportText())}>Export</button>
        <button onClick={() => setOpen("help")} aria-label="Keyboard help">
          ?
        </button>
        {editor.isReadOnly ? (
          editor.mayAct && <button onClick={() => setOpen("copy")}>Save a copy</button>
        ) : (
          <button className="primary" onClick={save} disabled={!editor.isDirty} title="Ctrl+S">
            Save
          </button>
        )}
        {editor.mayAct && (
          <button onClick={() => setRunOpen(true)} disabled={problems.length > 0 || (editor.isReadOnly && !editor.base.version)}>
            ▷ Run
          </button>
        )}
      </header>
      <Notices editor={editor} failure={failure} onNewer={() => setOpen("newer")} />
      <p className="hidden" role="status">
        {said}
      </p>
      {path.length > 0 && (
        <nav className="crumbs" aria-label="Where this graph is">
          <button onClick={() => setPath([])}>{visible(editor.name)}</button>
          {path.map((step, at) => (
            <span key={at}>
              ▸{" "}
              <button aria-current={at === path.length - 1 ? "location" : undefined} onClick={() => setPath(path.slice(0, at + 1))}>
                {visible(step.node)}
              </button>
            </span>
          ))}
        </nav>
      )}
      <div className={`bench${editor.isReadOnly ? " read-only" : ""}`}>
        {!editor.isReadOnly && <Palette catalog={catalog} onAdd={add} search={search} />}
        <div className="canvas" role="region" aria-label="Canvas">
          {here.nodes.length === 0 && (
            <div className="empty">
              <h2>An empty graph</h2>
              <p>Choose a node on the left, or press “a” and type its name. The next one is connected to it.</p>
            </div>
          )}
          <Canvas
            key={imports} // fitted anew
            catalog={catalog}
            graph={here}
            path={path}
            positions={editor.positions}
            problems={problems}
            overlay={overlay}
            selected={selected}
            selectedEdge={picked.edge}
            isReadOnly={editor.isReadOnly}
            onSelect={(nodes, edge) => setPicked({ nodes, edge })}
            onConnect={join}
            onMove={editor.move}
            onOpen={enter}
            onDrop={add}
          />
        </div>
        <aside className="side" aria-label="Details">
          {isRunOpen && (
            <RunPanel editor={editor} running={runId} status={run?.status ?? null} onRun={(id) => setParams(route, { run: id, new: null })} onClose={() => (setRunOpen(false), setParams(route, { run: null }))} />
          )}
          {node ? (
            <Inspector
              catalog={catalog}
              graph={here}
              root={editor.graph}
              node={node}
              problems={problemsAt(problems, path, node.id)}
              pickers={pickers}
              overlay={overlay?.get(node.id) ?? null}
              isReadOnly={editor.isReadOnly}
              onData={(data: Data) => change((old) => model.setData(old, node.id, data), `data ${model.pathName(path, node.id)}`)}
              onRename={(name) => {
                change((old) => model.renameNode(old, node.id, name));
                setPicked({ nodes: [name], edge: null });
              }}
              onConnect={join}
              onDisconnect={(edge) => change((old) => model.removeEdges(old, [edge]))}
              onOpen={() => enter(node.id)}
              onRemove={remove}
            />
          ) : (
            <Outline catalog={catalog} graph={here} problems={problems} path={path} selected={selected} onPick={(id) => setPicked({ nodes: [id], edge: null })} />
          )}
          {problems.length > 0 && <ProblemList problems={problems} onShow={show} />}
        </aside>
      </div>
      {open === "save" && (
        <SaveDialog editor={editor} onClose={() => setOpen(null)} onNewer={() => setOpen("newer")} onSaved={() => (setOpen(null), setParams(route, { new: null }))} />
      )}
      {open === "copy" && <CopyDialog editor={editor} onClose={() => setOpen(null)} onSaved={(id) => go(`#/graphs/${encodeURIComponent(id)}`)} />}
      {open === "versions" && (
        <Versions
          editor={editor}
          onClose={() => setOpen(null)}
          onBack={(version) => {
            setOpen(null);
            setPath([]);
            say(`Version ${version} is on the canvas. Save to make it the newest.`);
          }}
        />
      )}
      {open === "newer" && <Newer editor={editor} onClose={() => setOpen(null)} onCopy={() => setOpen("copy")} />}
      {open === "help" && <Help onClose={() => setOpen(null)} />}
    </div>
  );
}

function Notices({ editor, failure, onNewer }: { editor: Editor; failure: unknown; onNewer: () => void }) {
  return (
    <>
      <Failure error={failure} />
      {editor.readOnlyReason && <div className="note">{editor.readOnlyReason}</div>}
      {editor.newer && (
        <div className="note warn" role="alert">
          <div className="bar">
            {editor.newer.saved_by || editor.newer.owner} saved version {editor.newer.version} while you had version {editor.base.version} open.
            <button onClick={onNewer}>Show what changed</button>
          </div>
        </div>
      )}
      {editor.restoredAt !== null && (
        <div className="note">
          <div className="bar">
            Your unsaved changes of {when(editor.restoredAt)} are back.
            <button onClick={editor.discard}>Discard them</button>
          </div>
        </div>
      )}
      {editor.isElsewhere && <div className="note">Another tab of this browser has unsaved changes of this graph.</div>}
      {editor.draftFails && (
        <div className="note warn" role="alert">
          This browser does not keep unsaved changes, because its storage is full or switched off. Save often.
        </div>
      )}
    </>
  );
}

/** The graph as a list, for those who do not see the canvas or have a large one. */
function Outline({ catalog, graph, problems, path, selected, onPick }: { catalog: Catalog; graph: Graph; problems: PlacedProblem[]; path: Path; selected: ReadonlySet<string>; onPick: (id: string) => void }) {
  if (!graph.nodes.length) return null;
  return (
    <section className="outline" aria-label="Nodes">
      <h2>{selected.size > 1 ? `${selected.size} nodes selected` : several(graph.nodes.length, "node")}</h2>
      <ul>
        {graph.nodes.map((node) => {
          const wrong = problemsAt(problems, path, node.id).length;
          return (
            <li key={node.id}>
              <button aria-pressed={selected.has(node.id)} onClick={() => onPick(node.id)}>
                {visible(node.id)} <small>{catalog.types.get(node.type)?.title ?? visible(node.type)}</small>
                {wrong > 0 && <span className="count">{wrong}</span>}
              </button>
            </li>
          );
        })}
      </ul>
    </section>
  );
}

const KEYS: [string, string][] = [
  ["a", "find a node type; Enter adds the first one found, connected to the selected node"],
  ["Tab", "moves through the page, to each node in turn"],
  ["Enter", "on a node selects it; again, goes to its settings, where connections are made too"],
  ["Arrow keys", "move the selected node"],
  ["Ctrl+C, X, V, A", "copy, cut, paste, select all"],
  ["Delete", "removes what is selected"],
  ["Ctrl+Z, Ctrl+Shift+Z", "undo, redo"],
  ["Ctrl+S", "save"],
  ["Escape", "leaves a field; again, selects nothing; again, leaves a nested graph"],
];

function Help({ onClose }: { onClose: () => void }) {
  return (
    <Dialog title="Keys" onClose={onClose}>
      <dl className="facts">
        {KEYS.map(([key, what]) => (
          <div key={key} className="contents">
            <dt>
              <kbd>{key}</kbd>
            </dt>
            <dd>{what}</dd>
          </div>
        ))}
      </dl>
      <div className="bar">
        <button onClick={onClose}>Close</button>
      </div>
    </Dialog>
  );
}

// ---- parts

function usePickers(): Pickers {
  const models = usePolled("models", (signal) => get<OfferedModels>("/api/models", signal), 0);
  const tools = usePolled("tools", (signal) => get<ToolList>("/api/tools", signal), 0);
  return useMemo(() => {
    const named = { choices: (models.value?.models ?? []).map((one) => ({ value: one.id, description: priceWords(one) })), allowOther: true };
    const offered = { choices: tools.value?.tools ?? [], allowOther: true };
    return { model: named, tool: offered, "tools[]": offered };
  }, [models.value, tools.value]);
}

/** The states of the nodes of a run that the canvas shows; several runs of one node are one, the worst first. */
function useOverlay(watched: Watched | null, path: Path): ReadonlyMap<string, Overlay> | null {
  const key = `${watched?.seq} ${path.map((step) => step.node).join("/")}`;
  const overlay = useMemo(() => {
    if (!watched) return null;
    const { state } = watched;
    const found = new Map<string, Overlay>();
    for (const one of state.nodes.values()) {
      const id = innermost(one.id, path);
      if (id === null) continue;
      const known = found.get(id);
      if (!known || RANK.indexOf(one.status) >= RANK.indexOf(known.state.status)) found.set(id, { state: one, costNanos: known?.costNanos ?? 0 });
    }
    for (const [node, nanos] of costByNode(state)) {
      const id = innermost(node, path, true);
      const shown = id === null ? undefined : found.get(id);
      if (shown) shown.costNanos += nanos;
    }
    return found;
    // The state is one object that grows; its number says that it did.
  }, [watched, key]);
  return overlay;
}

interface Watched {
  id: string;
  state: RunState;
  seq: number;
  status: string;
}

/** Follows a run and hands its state up at each change. */
function Watch({ id, onChange }: { id: string; onChange: (watched: Watched) => void }) {
  const { state } = useRun(id);
  const [seq, status] = [state.lastSeq, state.status];
  useEffect(() => onChange({ id, state, seq, status }), [id, state, seq, status, onChange]);
  return null;
}

const RANK = ["skipped", "completed", "running", "cancelled", "error"];

/** The node of the shown graph that a path of a run is about, without the numbers of items and rounds. */
function innermost(found: string, path: Path, isBelow = false): string | null {
  const parts = found.split("/");
  const names = parts.filter((part, at) => at === 0 || at === parts.length - 1 || !/^\d+$/.test(part));
  const isInside = path.every((step, at) => names[at] === step.node);
  if (!isInside || names.length <= path.length) return null;
  return isBelow || names.length === path.length + 1 ? names[path.length]! : null;
}

function firstData(catalog: Catalog, type: string): Data {
  const shown = catalog.types.get(type);
  const found = shown?.data_schema ? initialValue(shown.data_schema) : {};
  const data = model.isObject(found) ? { ...found } : {};
  const field = graphField(shown);
  if (field && field in data) data[field] = { nodes: [], edges: [] };
  return data;
}

/** What runs goes on the right of its neighbour, a part of it below on the left. */
function beside(near: Position | undefined, isPart: boolean): Position | null {
  return near && isPart ? { x: near.x - 2 * CARD_WIDTH - 160, y: near.y + 140 } : (near ?? null);
}

/** The graph with a new node connected to the selected one: after it in the flow, or as a part of it. */
function joinedTo(catalog: Catalog, graph: Graph, selected: string | undefined, added: string): Graph {
  if (selected === undefined) return graph;
  const ends = (id: string, side: "inputs" | "outputs") => handlesOf(catalog, graph, model.nodeOf(graph, id)!, side).map((handle) => ({ handle, end: { node: id, handle: handle.name } }));
  for (const [from, to] of [[selected, added], [added, selected]] as const) {
    for (const source of ends(from, "outputs")) {
      const isUsed = graph.edges.some((edge) => edge.source === from && model.sourceOf(edge).handle === source.end.handle);
      const isAfter = from === selected;
      if (isAfter !== (source.handle.channel === "flow") || (isAfter && isUsed && ends(from, "outputs").length > 1)) continue;
      const target = ends(to, "inputs").find(({ end }) => misfit(catalog, graph, source.end, end) === null);
      if (target) return model.connect(graph, source.end, target.end, source.handle.channel);
    }
  }
  return graph;
}

const CLIPBOARD = "penstock.clipboard";

function writeClipboard(piece: Graph): void {
  if (!piece.nodes.length) return;
  try {
    localStorage.setItem(CLIPBOARD, JSON.stringify(piece)); // so that it can be pasted in another tab
  } catch (error) {
    console.warn(error);
  }
}

function readClipboard(): Graph | null {
  try {
    const found: unknown = JSON.parse(localStorage.getItem(CLIPBOARD) ?? "null");
    return model.isGraph(found) ? found : null;
  } catch {
    return null;
  }
}

function useKeys(keys: Record<string, () => void>): void {
  const latest = useRef(keys);
  latest.current = keys;
  useEffect(() => {
    const onKey = (event: KeyboardEvent) => {
      const target = event.target instanceof Element ? event.target : null;
      const withControl = event.ctrlKey || event.metaKey;
      const name = `${withControl ? "ctrl+" : ""}${event.shiftKey && withControl ? "shift+" : ""}${event.key.toLowerCase()}`;
      if (target?.closest("dialog")) return;
      if (target instanceof HTMLElement && target.closest("input, textarea, select") && name !== "ctrl+s") {
        if (name === "escape") target.blur(); // from here, keys are the canvas's again
        return;
      }
      if (["enter", "backspace"].includes(name) && target?.closest("button, a, summary")) return;
      const act = latest.current[name];
      if (!act || event.altKey) return;
      event.preventDefault();
      act();
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, []);
}

function download(name: string, text: string): void {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const link = Object.assign(document.createElement("a"), { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

