// What lies around the canvas: problems, versions with their differences, another's version, and a run from here.

import { useState } from "react";
import { ApiError, get, post } from "../api/client.ts";
import type { ChangeShown, GraphDiff, Limits, NewRun, RunShown } from "../api/types.ts";
import { LimitFields, readLimits } from "../pages/limits.tsx";
import { parseJson } from "../pages/start.tsx";
import { runLink } from "../router.ts";
import { Dialog, Failure, Field, Status, useAction, usePolled, when } from "../ui/parts.tsx";
import { visible } from "../ui/visible.ts";
import type { Editor } from "./use-editor.ts";
import type { PlacedProblem } from "./types.ts";

export function ProblemList({ problems, onShow }: { problems: PlacedProblem[]; onShow: (problem: PlacedProblem) => void }) {
  return (
    <section className="problems" aria-label="Problems">
      <h2>
        {problems.length} thing{problems.length === 1 ? "" : "s"} to mend before it can run
      </h2>
      <ul>
        {problems.map((problem) => (
          <li key={`${problem.path} ${problem.message}`}>
            <button onClick={() => onShow(problem)}>
              <b>{visible([...problem.at.map((step) => step.node), problem.node ?? problem.edge ?? "graph"].join(" ▸ "))}</b>{" "}
              {problem.field && problem.field !== "$" && `${visible(problem.field.replace(/^\$\.?/, ""))}: `}
              {visible(problem.message)}
            </button>
          </li>
        ))}
      </ul>
    </section>
  );
}

const WORDS = { added: "added", removed: "removed", changed: "changed" };

function short(value: unknown): string {
  const text = typeof value === "string" ? value : JSON.stringify(value);
  return text.length > 300 ? `${text.slice(0, 300)}…` : text;
}

export function Changes({ changes, truncated }: { changes: ChangeShown[]; truncated: boolean }) {
  if (!changes.length) return <p className="muted">Nothing but the name is different.</p>;
  return (
    <>
      <ul className="changes">
        {changes.map((change, at) => (
          <li key={at} className={change.kind}>
            <b>{WORDS[change.kind]}</b> {change.what} {visible(change.id)} {change.path && <code>{visible(change.path.replace(/^\./, ""))}</code>}
            {change.path && (
              <span className="values">
                {change.kind !== "added" && <del>{visible(short(change.before))}</del>}
                {change.kind !== "removed" && <ins>{visible(short(change.after))}</ins>}
              </span>
            )}
          </li>
        ))}
      </ul>
      {truncated && <p className="muted small">There are more changes.</p>}
    </>
  );
}

function useDiff(id: string, before: number, after: number) {
  const path = `/api/graphs/${encodeURIComponent(id)}/diff?before=${before}&after=${after}`;
  return usePolled(path, (signal) => (before ? get<GraphDiff>(path, signal) : Promise.resolve(null)), 0);
}

/** A version that was saved elsewhere: what changed, and what may be done about it. */
export function Newer({ editor, onClose, onCopy }: { editor: Editor; onClose: () => void; onCopy: () => void }) {
  const newer = editor.newer;
  const diff = useDiff(editor.id, editor.base.version, newer?.version ?? 0);
  const [busy, error, act] = useAction();
  if (!newer) return null;
  const done = (action: () => Promise<void> | void) => act(async () => (await action(), onClose()));
  return (
    <Dialog title={`Version ${newer.version} was saved elsewhere`} onClose={onClose}>
      <p>
        {newer.saved_by || newer.owner} saved it on {when(newer.created_ms)}
        {newer.note && <>: “{visible(newer.note)}”</>}. You have version {editor.base.version}
        {editor.isDirty ? " with changes of your own, which are kept in this browser." : "."}
      </p>
      <Failure error={diff.error} />
      {diff.value && <Changes {...diff.value} />}
      <Failure error={error} />
      <div className="bar">
        {!editor.isDirty && (
          <button className="primary" disabled={busy} onClick={() => void done(editor.discard)}>
            Open it
          </button>
        )}
        {editor.isDirty && (
          <>
            <button className="primary" disabled={busy} onClick={() => void done(editor.keepMine)}>
              Keep mine, to save as a version after it
            </button>
            <button className="danger" disabled={busy} onClick={() => void done(editor.discard)}>
              Take theirs, drop mine
            </button>
            <button disabled={busy} onClick={onCopy}>
              Save mine as a copy
            </button>
          </>
        )}
        <button onClick={onClose}>Decide later</button>
      </div>
    </Dialog>
  );
}

export function Versions({ editor, onClose, onBack }: { editor: Editor; onClose: () => void; onBack: (version: number) => void }) {
  const [busy, error, act] = useAction();
  const bringBack = (version: number) => act(async () => (await editor.bringBack(version), onBack(version)));
  const [[before, after], setPair] = useState<[number, number]>(() => {
    const newest = editor.versions[0]?.version ?? editor.base.version;
    return [Math.max(1, newest - 1), newest];
  });
  const diff = useDiff(editor.id, before, after);
  return (
    <Dialog title="Versions" onClose={onClose}>
      <div className="scroll" tabIndex={0} role="region" aria-label="All versions">
        <table className="versions">
          <thead>
            <tr>
              <th>Version</th>
              <th>Saved by</th>
              <th>When</th>
              <th>Note</th>
              <th>
                <span className="hidden">Actions</span>
              </th>
            </tr>
          </thead>
          <tbody>
            {editor.versions.map((one) => (
              <tr key={one.version}>
                <td>
                  {one.version}
                  {one.version === editor.base.version && " (open)"}
                </td>
                <td>{visible(one.saved_by || "–")}</td>
                <td>{when(one.created_ms)}</td>
                <td>{visible(one.note ?? "")}</td>
                <td>
                  <button
                    aria-pressed={one.version === after}
                    aria-label={`Changes in version ${one.version}`}
                    onClick={() => setPair([Math.max(1, one.version - 1), one.version])}
                  >
                    Changes
                  </button>{" "}
                  {!editor.isReadOnly && one.version !== editor.base.version && (
                    <button disabled={busy} aria-label={`Bring back version ${one.version}`} onClick={() => void bringBack(one.version)}>
                      Bring back
                    </button>
                  )}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <h2>
        {before === after ? "The first version" : `From version ${before} to ${after}`}
      </h2>
      <Failure error={error ?? diff.error} />
      {diff.value && before !== after && <Changes {...diff.value} />}
      <div className="bar">
        <button onClick={onClose}>Close</button>
      </div>
    </Dialog>
  );
}

export function SaveDialog({ editor, onClose, onSaved, onNewer }: { editor: Editor; onClose: () => void; onSaved: () => void; onNewer: () => void }) {
  const [note, setNote] = useState("");
  const [busy, error, act] = useAction();
  const submit = () =>
    act(async () => {
      try {
        await editor.save(note);
      } catch (failure) {
        if (failure instanceof ApiError && failure.status === 409) editor.look();
        throw failure;
      }
      onSaved();
    });
  return (
    <Dialog title={`Save version ${editor.base.version + 1}`} onClose={onClose}>
      <form className="stack" onSubmit={(event) => (event.preventDefault(), void submit())}>
        <Field label="Note (optional)" hint="Why, for the list of versions.">
          {(id) => <input id={id} value={note} maxLength={2000} onChange={(event) => setNote(event.target.value)} />}
        </Field>
        <Failure error={error} />
        <div className="bar">
          {editor.newer ? (
            <button type="button" className="primary" onClick={onNewer}>
              Show version {editor.newer.version}
            </button>
          ) : (
            <button className="primary" disabled={busy}>
              Save
            </button>
          )}
          <button type="button" onClick={onClose}>
            Back
          </button>
        </div>
      </form>
    </Dialog>
  );
}

export function CopyDialog({ editor, onClose, onSaved }: { editor: Editor; onClose: () => void; onSaved: (id: string) => void }) {
  const [id, setId] = useState(`${editor.id}-copy`);
  const [busy, error, act] = useAction();
  const submit = () => act(async () => (await editor.saveAs(id), onSaved(id)));
  return (
    <Dialog title="Save as a copy" onClose={onClose}>
      <form className="stack" onSubmit={(event) => (event.preventDefault(), void submit())}>
        <Field label="Id of the copy">{(field) => <input id={field} value={id} onChange={(event) => setId(event.target.value)} />}</Field>
        <Failure error={error} />
        <div className="bar">
          <button className="primary" disabled={busy || !id}>
            Save the copy
          </button>
          <button type="button" onClick={onClose}>
            Back
          </button>
        </div>
      </form>
    </Dialog>
  );
}

/** Starts a run of the version on the canvas; unsaved changes are saved first. */
export function RunPanel({ editor, running, status, onRun, onClose }: { editor: Editor; running: string | null; status: string | null; onRun: (id: string) => void; onClose: () => void }) {
  const [input, setInput] = useState("");
  const [asJson, setAsJson] = useState(false);
  const [limits, setLimits] = useState<Record<string, string>>({});
  const [busy, error, act] = useAction();
  const submit = () =>
    act(async () => {
      const given: Limits = readLimits(limits);
      const value = asJson ? parseJson(input) : input;
      const version = editor.isDirty || !editor.base.version ? (await editor.save("Saved to run it")).version : editor.base.version;
      const body: NewRun = { graph_id: editor.id, version, input: value, ...(Object.keys(given).length && { limits: given }) };
      onRun((await post<RunShown>("/api/runs", body)).id);
    });
  return (
    <section className="run-panel" aria-label="Run">
      <form className="stack" onSubmit={(event) => (event.preventDefault(), void submit())}>
        <div className="bar">
          <h2>Run</h2>
          {running && status && (
            <>
              <span role="status">
                <Status of={status} />
              </span>
              <a href={runLink(running)}>Open the run</a>
            </>
          )}
          <span className="grow" />
          <button type="button" aria-label="Close the run panel" onClick={onClose}>
            ✕
          </button>
        </div>
        <Field label="Input">{(id) => <textarea id={id} rows={2} value={input} onChange={(event) => setInput(event.target.value)} />}</Field>
        <label className="choice">
          <input type="checkbox" checked={asJson} onChange={(event) => setAsJson(event.target.checked)} />
          The input is JSON
        </label>
        <details>
          <summary>Limits</summary>
          <LimitFields values={limits} onChange={setLimits} />
        </details>
        <Failure error={error} />
        <div className="bar">
          <button className="primary" disabled={busy}>
            {editor.isDirty || !editor.base.version ? "Save and start" : "Start"}
          </button>
        </div>
      </form>
    </section>
  );
}
