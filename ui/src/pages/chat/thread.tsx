// One conversation: its messages, the answer that is being written, and where the next message is written.

import { useEffect, useLayoutEffect, useRef, useState, type RefObject } from "react";
import { chooseMessage, deleteChat, readPath, renameChat, type Turn } from "../../api/chat.ts";
import { ApiError, post } from "../../api/client.ts";
import type { AgentShown, ChatPath, ChatShown, Me, PlacedMessage } from "../../api/types.ts";
import { go, runLink, setParams, type Route } from "../../router.ts";
import { Dialog, Failure, Field, useAction, usePolled } from "../../ui/parts.tsx";
import { visible } from "../../ui/visible.ts";
import { ApprovalCard } from "../approvals.tsx";
import { useApprovals } from "../use-lists.ts";
import { isUnderWay, type Answer } from "./answer.ts";
import { Composer } from "./composer.tsx";
import { AnswerMessage, UserMessage, type Actions } from "./message.tsx";
import { useDetails, useLive, type Live } from "./use-live.ts";
import { usePath, type PathState } from "./use-path.ts";
import { useTurns } from "./use-turns.ts";

const WATCH_MS = 3_000;

export interface ThreadProps {
  id: string;
  route: Route;
  me: Me;
  agents: AgentShown[] | null;
  onChange: () => void;
}

export function Thread(props: ThreadProps) {
  const { id, route, me } = props;
  const path = usePath(id, route.params.get("m"));
  if (path.path) return <Open {...props} state={path} path={path.path} />;
  const gone = path.error instanceof ApiError && path.error.status === 404;
  return (
    <section className="thread" aria-label="Chat">
      <div className="begin-middle">
        <div className="column stack">
          <h1>{gone ? "There is no such chat" : "Chat"}</h1>
          {gone ? (
            <p className="muted">It was deleted, or it is not one of {me.name}.</p>
          ) : path.error ? (
            <Failure error={path.error} />
          ) : (
            <p className="muted">Loading…</p>
          )}
          <p>
            <a href="#/chat">All chats</a>
          </p>
        </div>
      </div>
    </section>
  );
}

function Open(props: ThreadProps & { state: PathState; path: ChatPath }) {
  const { id, route, me, agents, onChange, state, path } = props;
  const last = path.messages.at(-1);
  const writing = last?.data.state === "writing" ? String(last.data.run_id) : null;
  const live = useLive(writing, () => void state.refresh().then(onChange));
  const turns = useTurns(me, id);
  const [acting, actError, act] = useAction();
  const [editing, setEditing] = useState<string | null>(null);
  const scroll = useScroll(state);
  const canAnswer = agents === null || agents.some((one) => one.id === path.graph_id);
  const mayWrite = me.role !== "viewer";
  const mayAct = mayWrite && canAnswer;
  const started = async () => {
    scroll.stick();
    setParams(route, { m: null });
    await state.load();
    onChange();
  };
  const start = (turn: Turn) => turns.start(turn, started);
  const choose = (message: PlacedMessage, sibling: string) =>
    void act(async () => {
      scroll.keep(message);
      if (mayWrite) await chooseMessage(id, sibling); // for a viewer, only what is shown here changes
      await state.load({ around: sibling });
    });
  const actions: Actions = {
    mayAct,
    busy: acting || turns.busy || writing !== null,
    edit: (message, content) => start({ kind: "edit", chat: id, message: message.id, content }),
    retry: (message) => void start({ kind: "retry", chat: id, message: message.id }),
    goOn: (message) => void start({ kind: "continue", chat: id, message: message.id }),
    choose,
  };
  const lastOwn = path.messages.findLast((one) => one.role === "user");
  return (
    <section className="thread" aria-label="Chat">
      <Head path={path} state={state} me={me} onChange={onChange} />
      <div className="messages" ref={scroll.box} onScroll={scroll.onScroll} tabIndex={0} role="region" aria-label="Conversation">
        <div className="column">
          {path.has_earlier && (
            <button className="more" onClick={() => (scroll.keepFirst(), void state.earlier())}>
              Show earlier messages
            </button>
          )}
          <Messages path={path} live={live} actions={actions} editing={editing} onEditing={setEditing} mayWrite={mayWrite} />
          {path.has_later && (
            <button className="more" onClick={() => void state.later()}>
              Show later messages
            </button>
          )}
          {path.messages.length === 0 && <p className="empty">Nothing has been said yet.</p>}
        </div>
      </div>
      {scroll.isAway && (
        <button className="latest" onClick={() => (scroll.stick(), path.has_later ? void state.load() : scroll.toEnd())}>
          <span aria-hidden="true">↓</span> Latest
        </button>
      )}
      <div className="column">
        <Failure error={state.error} />
        <Failure error={actError} />
        <Elsewhere path={path} watched={!writing && !turns.busy && !acting} onShow={() => void state.load().then(onChange)} />
      </div>
      {mayAct ? (
        <Composer
          me={me}
          chat={id}
          turns={turns}
          onStop={writing ? () => void act(() => cancel(writing)) : undefined}
          onSend={(content, attachments) => start({ kind: "send", chat: id, parent: path.end_id, content, attachments })}
          onEditLast={() => lastOwn && setEditing(lastOwn.id)}
        />
      ) : (
        <ReadOnly path={path} canAnswer={canAnswer} />
      )}
      <p className="hidden" role="status">
        {spoken(live)}
      </p>
    </section>
  );
}

/** Says that another tab or person has gone on with the chat, and leaves what is read in its place. */
function Elsewhere({ path, watched, onShow }: { path: ChatPath; watched: boolean; onShow: () => void }) {
  const newest = usePolled(path.id, (signal) => readPath(path.id, {}, 1, signal), WATCH_MS);
  if (!watched || !newest.value || newest.value.updated_ms <= path.updated_ms) return null;
  return (
    <div className="note warn bar" role="status">
      <span className="grow">This chat has changed elsewhere.</span>
      <button onClick={onShow}>Show it as it is now</button>
    </div>
  );
}

async function cancel(runId: string): Promise<void> {
  await post(`/api/runs/${encodeURIComponent(runId)}/cancel`, { reason: "stopped in the chat" });
}

/** What a screen reader says of the answer: its state, and not its words. */
function spoken(live: Live | null): string {
  if (!live) return "";
  if (live.connection === "lost") return "Not connected";
  if (live.answer.status === "waiting") return "The answer waits for you";
  return isUnderWay(live.answer.status) ? "The answer is being written" : "The answer is finished";
}

function ReadOnly({ path, canAnswer }: { path: ChatPath; canAnswer: boolean }) {
  return (
    <div className="composer">
      <div className="column">
        <div className="note warn" role="note">
          {canAnswer ? (
            <p>Your role can read this chat, and not write in it.</p>
          ) : (
            <p>
              The graph <code>{visible(path.graph_id)}</code> cannot answer any more: it was removed or archived, or it is not valid now. The
              conversation can still be read. <a href="#/chat">Begin a new chat</a> with another graph, or save this one again.
            </p>
          )}
        </div>
      </div>
    </div>
  );
}

interface MessagesProps {
  path: ChatPath;
  live: Live | null;
  actions: Actions;
  editing: string | null;
  onEditing: (id: string | null) => void;
  mayWrite: boolean;
}

function Messages({ path, live, actions, editing, onEditing, mayWrite }: MessagesProps) {
  const finished = path.messages.filter((one) => one.role === "assistant" && one.data.state !== "writing");
  const details = useDetails(finished.map(runOf).filter((one) => one !== null));
  return (
    <ol>
      {path.messages.map((message) => {
        const common = { message, graph: path.graph_id, actions, editing: editing === message.id, onEditing };
        const isLive = live !== null && message.data.state === "writing";
        const waiting = isLive && live.answer.status === "waiting" && runOf(message);
        // Versions of a message have the same key, so that the focus stays where it is when another one is chosen.
        return (
          <li key={message.parent_id ?? ""} data-parent={message.parent_id ?? ""}>
            {message.role === "assistant" ? (
              <AnswerMessage
                {...common}
                live={isLive ? live : null}
                details={detailsOf(details, message)}
                approvals={waiting && <Approvals runId={waiting} mayAct={mayWrite} />}
              />
            ) : (
              <UserMessage {...common} />
            )}
          </li>
        );
      })}
    </ol>
  );
}

function runOf(message: PlacedMessage): string | null {
  return typeof message.data.run_id === "string" ? message.data.run_id : null;
}

function detailsOf(details: Map<string, Answer>, message: PlacedMessage): Answer | null {
  const run = runOf(message);
  return run === null ? null : (details.get(run) ?? null);
}

function Approvals({ runId, mayAct }: { runId: string; mayAct: boolean }) {
  const approvals = useApprovals(runId);
  return (
    <>
      <Failure error={approvals.error} />
      {approvals.value?.approvals.map((one) => (
        <ApprovalCard key={one.id} approval={one} mayAct={mayAct} onAnswered={approvals.again} inRun />
      ))}
      {approvals.value?.approvals.length === 0 && (
        <p className="muted">
          It waits for an answer that you cannot give. <a href={runLink(runId)}>Run</a>
        </p>
      )}
    </>
  );
}

function Head({ path, state, me, onChange }: { path: ChatPath; state: PathState; me: Me; onChange: () => void }) {
  const [dialog, setDialog] = useState<"rename" | "delete" | null>(null);
  useEffect(() => {
    document.title = `${visible(path.title) || "Chat"} · Penstock`;
  }, [path.title]);
  const close = () => setDialog(null);
  return (
    <header className="thread-head">
      <a className="back" href="#/chat">
        <span aria-hidden="true">‹</span> All chats
      </a>
      <div className="titles">
        <h1>{visible(path.title) || "Without a title"}</h1>
        <p className="small muted">
          with <code>{visible(path.graph_id)}</code>
          {path.owner !== me.name && ` · of ${path.owner}`}
        </p>
      </div>
      {me.role !== "viewer" && (
        <div className="bar">
          <button className="quiet" onClick={() => setDialog("rename")}>
            Rename
          </button>
          <button className="quiet" onClick={() => setDialog("delete")}>
            Delete
          </button>
        </div>
      )}
      {dialog === "rename" && <Rename path={path} onClose={close} onDone={(chat) => (state.renamed(chat), onChange(), close())} />}
      {dialog === "delete" && <Delete path={path} onClose={close} onDone={() => (onChange(), go("#/chat"))} />}
    </header>
  );
}

function Rename({ path, onClose, onDone }: { path: ChatPath; onClose: () => void; onDone: (chat: ChatShown) => void }) {
  const [title, setTitle] = useState(path.title);
  const [busy, error, act] = useAction();
  const save = () => act(async () => onDone(await renameChat(path.id, title.trim())));
  return (
    <Dialog title="Rename this chat" onClose={onClose}>
      <form className="stack" onSubmit={(event) => (event.preventDefault(), void save())}>
        <Field label="Title">
          {(id) => <input id={id} maxLength={1000} value={title} onChange={(event) => setTitle(event.target.value)} />}
        </Field>
        <Failure error={error} />
        <div className="bar">
          <button className="primary" disabled={busy || !title.trim()}>
            Rename
          </button>
          <button type="button" onClick={onClose}>
            Cancel
          </button>
        </div>
      </form>
    </Dialog>
  );
}

function Delete({ path, onClose, onDone }: { path: ChatPath; onClose: () => void; onDone: () => void }) {
  const [busy, error, act] = useAction();
  const remove = () =>
    act(async () => {
      await deleteChat(path.id);
      onDone();
    });
  return (
    <Dialog title="Delete this chat?" onClose={onClose}>
      <p>All its messages are deleted, in every version, with the attachments used only here. Its runs and their cost stay.</p>
      <Failure error={error} />
      <div className="bar">
        <button className="danger" disabled={busy} onClick={() => void remove()}>
          Delete the chat
        </button>
        <button onClick={onClose}>Cancel</button>
      </div>
    </Dialog>
  );
}

const NEAR_END = 80;

/** Follows the end while a person is there, and else keeps what they look at in its place. */
function useScroll(state: PathState) {
  const box = useRef<HTMLDivElement>(null);
  const follows = useRef(true);
  const anchor = useRef<{ element: Element; top: number } | null>(null);
  const [isAway, setAway] = useState(false);
  const toEnd = () => box.current?.scrollTo({ top: box.current.scrollHeight });
  useLayoutEffect(() => {
    const kept = anchor.current;
    if (kept?.element.isConnected) box.current!.scrollTop += kept.element.getBoundingClientRect().top - kept.top;
    anchor.current = null;
  }, [state.path]);
  useGrowth(box, () => follows.current && toEnd());
  const keepElement = (element: Element | null | undefined) => {
    follows.current = false;
    anchor.current = element ? { element, top: element.getBoundingClientRect().top } : null;
  };
  return {
    box,
    isAway,
    toEnd,
    stick: () => (follows.current = true),
    keep: (message: PlacedMessage) => keepElement(box.current?.querySelector(`li[data-parent="${CSS.escape(message.parent_id ?? "")}"]`)),
    keepFirst: () => keepElement(box.current?.querySelector("li")),
    onScroll: () => {
      const { scrollHeight, scrollTop, clientHeight } = box.current!;
      const distance = scrollHeight - scrollTop - clientHeight;
      follows.current = distance < NEAR_END;
      setAway(distance > clientHeight);
    },
  };
}

/** Calls `onGrown` whenever what is in the box has another size. */
function useGrowth(box: RefObject<HTMLDivElement | null>, onGrown: () => void): void {
  const latest = useRef(onGrown);
  latest.current = onGrown;
  useEffect(() => {
    const inner = box.current?.firstElementChild;
    if (!inner) return;
    const observer = new ResizeObserver(() => latest.current());
    observer.observe(inner);
    return () => observer.disconnect();
  }, [box]);
}
