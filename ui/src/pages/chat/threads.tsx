// The list of chats: searched, filtered by graph, most recently used first.

import { useEffect, useRef, useState } from "react";
import { listChats } from "../../api/chat.ts";
import type { AgentShown, ChatListed, ChatPage, Me } from "../../api/types.ts";
import { chatLink, setParams, type Route } from "../../router.ts";
import { usePolled, when } from "../../ui/parts.tsx";
import { visible } from "../../ui/visible.ts";

const POLL_MS = 5_000;
const TYPING_MS = 200;
const PAGE = 30;
const MAX_LISTED = 300;

export function Threads(props: { route: Route; me: Me; agents: AgentShown[]; open: string | null; changes: number }) {
  const { route, me, agents, open, changes } = props;
  const [text, setText] = useState(route.params.get("q") ?? "");
  const [pages, setPages] = useState(1);
  const [graph, setGraph] = useState(route.params.get("graph") ?? "");
  const q = useSettled(text.trim());
  const latest = useRef(route);
  latest.current = route;
  useEffect(() => {
    const { params } = latest.current;
    if ((params.get("q") ?? "") !== q || (params.get("graph") ?? "") !== graph) setParams(latest.current, { q, graph });
  }, [q, graph]);
  const found = usePolled(`${q} ${graph} ${pages} ${changes}`, (signal) => listChats({ q, graph }, PAGE * pages, signal), POLL_MS);
  const [last, setLast] = useState<ChatPage | null>(null);
  if (found.value && found.value !== last) setLast(found.value);
  return (
    <nav className="threads" aria-label="Chats">
      <div className="threads-top">
        <div className="bar">
          <h2>Chats</h2>
          <span className="grow" />
          {me.role !== "viewer" && (
            <a className="button" href="#/chat" {...(open ? {} : { "aria-current": "page" as const })}>
              <span aria-hidden="true">+</span> New chat
            </a>
          )}
        </div>
        <input
          type="search"
          aria-label="Search chats"
          placeholder="Search titles and messages"
          maxLength={200}
          value={text}
          onChange={(event) => (setPages(1), setText(event.target.value))}
        />
        {(graph || agents.length > 1) && (
          <select
            aria-label="Graph"
            value={graph}
            onChange={(event) => (setPages(1), setGraph(event.target.value))}
          >
            <option value="">All graphs</option>
            {graph && !agents.some((one) => one.id === graph) && <option value={graph}>{visible(graph)}</option>}
            {agents.map((one) => (
              <option key={one.id} value={one.id}>
                {visible(one.id)}
              </option>
            ))}
          </select>
        )}
      </div>
      <List page={found.value ?? last} error={found.error} open={open} me={me} filtered={!!q || !!graph} />
      {(found.value ?? last)?.next && PAGE * pages < MAX_LISTED && (
        <button className="more" onClick={() => setPages(pages + 1)}>
          Show older chats
        </button>
      )}
    </nav>
  );
}

function List(props: { page: ChatPage | null; error: unknown; open: string | null; me: Me; filtered: boolean }) {
  const { page, error, open, me, filtered } = props;
  const count = page?.chats.length ?? 0;
  return (
    <>
      <p className="hidden" role="status">
        {page && filtered ? `${count}${page.next ? " or more" : ""} chats found` : ""}
      </p>
      {!page && <p className="threads-note">{error ? "The list cannot be read now." : "Loading…"}</p>}
      {page && count === 0 && (
        <p className="threads-note">{filtered ? "No chat has this in its title or messages." : "Your chats are listed here."}</p>
      )}
      <ul>
        {page?.chats.map((chat) => (
          <li key={chat.id}>
            <a href={chatLink(chat.id)} {...(chat.id === open ? { "aria-current": "page" as const } : {})}>
              <span className="thread-title">{visible(chat.title) || "Without a title"}</span>
              <Last chat={chat} />
              <span className="thread-facts">
                {visible(chat.graph_id)} · {ago(chat.updated_ms)}
                {chat.owner !== me.name && ` · ${chat.owner}`}
              </span>
            </a>
          </li>
        ))}
      </ul>
    </>
  );
}

const STATES: Record<string, [string, string]> = {
  writing: ["◐", "being answered"],
  partial: ["■", "stopped"],
  halted: ["■", "stopped by a limit"],
  failed: ["✕", "failed"],
};

function Last({ chat: { last } }: { chat: ChatListed }) {
  if (!last) return <span className="thread-last">Nothing has been said yet</span>;
  const state = STATES[last.state ?? ""];
  return (
    <span className="thread-last">
      {state && (
        <b className={`status ${last.state === "writing" ? "running" : last.state === "failed" ? "failed" : "halted"}`}>
          <i aria-hidden="true">{state[0]}</i>
          {state[1]}{" "}
        </b>
      )}
      {last.role === "user" && "You: "}
      {excerpt(last.content)}
    </span>
  );
}

/** The beginning of a message without the signs of markdown. */
function excerpt(content: string): string {
  const plain = content.replace(/^\s*(?:#{1,6}|>+|[-*+])\s+/gm, "").replace(/\]\([^)]*\)|!?\[|[*`|]+|-{2,}:?/g, "");
  return visible(plain.replace(/\s+/g, " "));
}

function ago(ms: number): string {
  const minutes = Math.floor((Date.now() - ms) / 60_000);
  if (minutes < 1) return "now";
  if (minutes < 60) return `${minutes} min ago`;
  return minutes < 24 * 60 ? `${Math.floor(minutes / 60)} h ago` : when(ms).split(",")[0]!;
}

/** The value, once it has not changed for a moment. */
function useSettled(value: string): string {
  const [settled, setSettled] = useState(value);
  useEffect(() => {
    const timer = setTimeout(() => setSettled(value), TYPING_MS);
    return () => clearTimeout(timer);
  }, [value]);
  return settled;
}
