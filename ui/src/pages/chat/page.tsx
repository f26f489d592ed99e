// Chats: the list of them beside one that is open, or beside a new one.

import { useEffect, useRef, useState } from "react";
import { listAgents } from "../../api/chat.ts";
import type { PageProps } from "../index.ts";
import { Dialog, usePolled } from "../../ui/parts.tsx";
import { Begin } from "./begin.tsx";
import { Thread } from "./thread.tsx";
import { Threads } from "./threads.tsx";
import "./chat.css";

const AGENTS_POLL_MS = 30_000;

export default function ChatPage({ route, me }: PageProps) {
  const id = route.parts[1];
  const agents = usePolled("agents", listAgents, AGENTS_POLL_MS);
  const [changes, setChanges] = useState(0);
  const onChange = () => setChanges((old) => old + 1);
  const [helps, setHelps] = useState(false);
  const root = useKeys(() => setHelps(true));
  return (
    <div className={`chat${id ? " opened" : ""}`} ref={root}>
      <Threads route={route} me={me} agents={agents.value ?? []} open={id ?? null} changes={changes} />
      {id ? (
        <Thread key={id} id={id} route={route} me={me} agents={agents.value} onChange={onChange} />
      ) : (
        <Begin route={route} me={me} agents={agents} onChange={onChange} />
      )}
      {helps && <Keys onClose={() => setHelps(false)} />}
    </div>
  );
}

const KEYS: [string, string][] = [
  ["Enter", "Send; Shift and Enter begins a new line"],
  ["↑", "In an empty message: edit your last one"],
  ["/", "Search chats"],
  ["j, k", "Next and previous message"],
  ["[, ]", "Previous and next version of the focused message"],
  ["e, r, c", "Edit, retry or continue the focused message"],
  [".", "Stop the answer"],
  ["g c", "New chat"],
];

function Keys({ onClose }: { onClose: () => void }) {
  return (
    <Dialog title="Keys" onClose={onClose}>
      <dl className="facts">
        {KEYS.map(([keys, meaning]) => (
          <div key={keys} className="pair">
            <dt>
              <kbd>{keys}</kbd>
            </dt>
            <dd>{meaning}</dd>
          </div>
        ))}
      </dl>
      <form method="dialog">
        <button className="primary">Close</button>
      </form>
    </Dialog>
  );
}

/** Keys that press a button of the page, or of the message that has the focus; not while a person types. */
const PRESSED: Record<string, string> = { ".": "stop", "[": "previous", "]": "next", e: "edit", r: "retry", c: "continue" };

function useKeys(onHelp: () => void) {
  const root = useRef<HTMLDivElement>(null);
  const help = useRef(onHelp);
  help.current = onHelp;
  useEffect(() => {
    let last = "";
    const onKey = (event: KeyboardEvent) => {
      const before = last;
      last = event.key;
      const target = event.target as Element;
      if (before === "g" || event.ctrlKey || event.metaKey || event.altKey) return;
      if (target.closest("input, textarea, select, dialog")) return;
      if (root.current && handle(root.current, event.key, target, help.current)) event.preventDefault();
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, []);
  return root;
}

function handle(root: HTMLElement, key: string, target: Element, help: () => void): boolean {
  if (key === "?") return help(), true;
  if (key === "/") return focus(root.querySelector<HTMLElement>("input[type=search]"));
  if (key === "j" || key === "k") return move(root, target, key === "j" ? 1 : -1);
  const action = PRESSED[key];
  if (!action) return false;
  const within = action === "stop" ? root : target.closest("article");
  const button = within?.querySelector<HTMLElement>(`[data-action=${action}]`);
  button?.click();
  return button != null;
}

function move(root: HTMLElement, target: Element, by: number): boolean {
  const all = [...root.querySelectorAll<HTMLElement>("article")];
  const at = all.indexOf(target.closest("article") as HTMLElement);
  return focus(at < 0 ? all.at(-1) : all[Math.max(0, Math.min(all.length - 1, at + by))]);
}

function focus(element: HTMLElement | null | undefined): boolean {
  element?.focus();
  return element != null;
}
