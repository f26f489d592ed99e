// All graphs: found by name, opened in the editor, made anew, archived and brought back.

import { useState } from "react";
import { get, getText, query, sendText } from "../api/client.ts";
import type { GraphListed, GraphPage, Me } from "../api/types.ts";
import { draftsOf } from "../editor/drafts.ts";
import { EditorPage } from "../editor/editor.tsx";
import { read, write } from "../editor/json-text.ts";
import { go, setParams } from "../router.ts";
import { Dialog, Failure, Field, Status, useAction, usePolled, when } from "../ui/parts.tsx";
import { visible } from "../ui/visible.ts";
import type { PageProps } from "./index.ts";

const PAGE = 50;
const POLL_MS = 5_000;
const ID = /^[A-Za-z0-9][A-Za-z0-9._-]*$/;

export default function GraphsPage({ route, me }: PageProps) {
  const id = route.parts[1];
  return id ? <EditorPage key={id} id={id} me={me} route={route} /> : <List route={route} me={me} />;
}

export function graphLink(id: string): string {
  return `#/graphs/${encodeURIComponent(id)}`;
}

function List({ route, me }: PageProps) {
  const text = route.params.get("q") ?? "";
  const isArchive = route.params.get("archived") === "1";
  const [pages, setPages] = useState(1);
  const [isNew, setNew] = useState(false);
  const [busy, error, act] = useAction();
  const path = `/api/graphs${query({ q: text, archived: isArchive ? "true" : undefined, limit: Math.min(PAGE * pages, 500) })}`;
  const graphs = usePolled(path, (signal) => get<GraphPage>(path, signal), POLL_MS);
  const drafts = new Set(draftsOf(me.name));
  const found = graphs.value?.graphs;
  const change = (action: () => Promise<unknown>) => act(async () => (await action(), graphs.again()));
  return (
    <>
      <div className="bar">
        <h1>Graphs</h1>
        <span className="grow" />
        {me.role !== "viewer" && (
          <button className="primary" onClick={() => setNew(true)}>
            New graph
          </button>
        )}
      </div>
      <div className="bar">
        <input type="search" className="find-graph" aria-label="Find a graph" placeholder="Find by name or id" value={text} onChange={(event) => setParams(route, { q: event.target.value })} />
        <div className="chips" role="group" aria-label="Which graphs">
          <button aria-pressed={!isArchive} onClick={() => setParams(route, { archived: null })}>
            In use
          </button>
          <button aria-pressed={isArchive} onClick={() => setParams(route, { archived: "1" })}>
            Archived
          </button>
        </div>
      </div>
      <Failure error={graphs.error ?? error} />
      {found && !found.length ? (
        <div className="panel empty">
          {text ? <>No graph has “{text}” in its name or id.</> : isArchive ? "No graph is archived." : "No graphs yet. Make the first one."}
        </div>
      ) : (
        <div className="panel">
          <table>
            <thead>
              <tr>
                <th>Graph</th>
                <th>State</th>
                <th>Owner</th>
                <th className="number">Version</th>
                <th>Saved</th>
                <th>
                  <span className="hidden">Actions</span>
                </th>
              </tr>
            </thead>
            <tbody>
              {found?.map((graph) => (
                <tr key={graph.id}>
                  <td>
                    <a href={graphLink(graph.id)}>{visible(graph.name)}</a>
                    {graph.name !== graph.id && <div className="muted small mono">{visible(graph.id)}</div>}
                  </td>
                  <td>
                    {graph.valid ? <Status of="completed" word="can run" /> : <Status of="halted" word="draft" />}
                    {graph.source === "program" && <div className="muted small">Python, read-only</div>}
                    {drafts.has(graph.id) && <div className="muted small">unsaved changes here</div>}
                  </td>
                  <td>{visible(graph.owner)}</td>
                  <td className="number">{graph.version}</td>
                  <td>
                    {when(graph.created_ms)}
                    {graph.saved_by && <div className="muted small">by {visible(graph.saved_by)}</div>}
                  </td>
                  <td className="number">
                    {mayChange(graph, me) &&
                      (isArchive ? (
                        <button disabled={busy} onClick={() => void change(() => restore(graph))} aria-label={`Restore ${graph.id}`}>
                          Restore
                        </button>
                      ) : (
                        <button disabled={busy} onClick={() => void change(() => sendText("DELETE", `/api/graphs/${encodeURIComponent(graph.id)}`))} aria-label={`Archive ${graph.id}`}>
                          Archive
                        </button>
                      ))}
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {graphs.value?.next && <button onClick={() => setPages(pages + 1)}>Show more</button>}
      {isNew && <NewGraph onClose={() => setNew(false)} />}
    </>
  );
}

function mayChange(graph: GraphListed, me: Me): boolean {
  return graph.source !== "program" && me.role !== "viewer" && (me.role === "admin" || graph.owner === me.name);
}

/** Saving an archived graph as it is brings it back, without a new version. */
async function restore(graph: GraphListed): Promise<void> {
  const path = `/api/graphs/${encodeURIComponent(graph.id)}`;
  const origin = read(await getText(path));
  const { document } = origin.value as { document: object };
  const text = write({ document, expected_version: graph.version }, origin);
  await sendText("PUT", path, text);
}

function NewGraph({ onClose }: { onClose: () => void }) {
  const [name, setName] = useState("");
  const [id, setId] = useState<string | null>(null);
  const [busy, error, act] = useAction();
  const chosen = id ?? slug(name);
  const isFine = ID.test(chosen) && chosen.length <= 100;
  const submit = () =>
    act(async () => {
      const { graphs } = await get<GraphPage>(`/api/graphs${query({ q: chosen, limit: 500 })}`);
      if (graphs.some((graph) => graph.id === chosen)) throw new Error(`a graph has the id ${chosen} already; choose another`);
      go(`${graphLink(chosen)}?new=${encodeURIComponent(name || chosen)}`);
    });
  return (
    <Dialog title="New graph" onClose={onClose}>
      <form className="stack" onSubmit={(event) => (event.preventDefault(), void submit())}>
        <Field label="Name">{(field) => <input id={field} value={name} maxLength={200} onChange={(event) => setName(event.target.value)} />}</Field>
        <Field label="Id" hint="Letters, digits, dots, hyphens and underscores. It is the graph's name for programs, and stays.">
          {(field) => <input id={field} className="mono" value={chosen} onChange={(event) => setId(event.target.value)} />}
        </Field>
        <Failure error={error} />
        <div className="bar">
          <button className="primary" disabled={busy || !isFine}>
            Create
          </button>
          <button type="button" onClick={onClose}>
            Back
          </button>
        </div>
      </form>
    </Dialog>
  );
}

function slug(name: string): string {
  return name.toLowerCase().normalize("NFKD").replace(/[^a-z0-9]+/g, "-").replace(/^-+|-+$/g, "").slice(0, 60);
}
