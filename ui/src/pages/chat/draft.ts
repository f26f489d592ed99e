// What somebody has typed and not sent, and the limits they set for a chat, kept in this browser over reloads.

import { useEffect, useRef, useState } from "react";
import type { AttachmentShown } from "../../api/types.ts";

export interface Draft {
  text: string;
  attachments: AttachmentShown[];
}

const EMPTY: Draft = { text: "", attachments: [] };
/** Longer texts are not kept: storage is small, and shared by all chats. */
const MAX_KEPT = 100_000;

function read<T>(key: string, otherwise: T): T {
  try {
    const text = localStorage.getItem(key);
    return text === null ? otherwise : { ...otherwise, ...(JSON.parse(text) as T) };
  } catch {
    return otherwise;
  }
}

function write(key: string, value: unknown): void {
  try {
    if (value === null) localStorage.removeItem(key);
    else localStorage.setItem(key, JSON.stringify(value));
  } catch {
    // Full or switched off: the page works, and only a reload forgets.
  }
}

function useKept<T>(key: string, empty: T, isEmpty: (value: T) => boolean): [T, (value: T) => void] {
  const [state, setState] = useState(() => ({ key, value: read(key, empty) }));
  const value = state.key === key ? state.value : read(key, empty);
  useEffect(() => setState((old) => (old.key === key ? old : { key, value: read(key, empty) })), [key, empty]);
  const set = (next: T) => {
    setState({ key, value: next });
    write(key, isEmpty(next) ? null : next);
  };
  return [value, set];
}

export function useDraft(user: string, chat: string): [Draft, (draft: Draft) => void] {
  return useKept(`penstock.draft.${user}.${chat}`, EMPTY, (draft) => {
    return (!draft.text && draft.attachments.length === 0) || draft.text.length > MAX_KEPT;
  });
}

const NO_LIMITS: Record<string, string> = {};

/** Limits of each further answer in a chat, by name, as they were typed. */
export function useLimits(user: string, chat: string): [Record<string, string>, (limits: Record<string, string>) => void] {
  return useKept(`penstock.limits.${user}.${chat}`, NO_LIMITS, (limits) => Object.values(limits).every((one) => !one.trim()));
}

/** Limits that were set before a chat was begun belong to it from then on. */
export function moveLimits(user: string, from: string, to: string): void {
  const limits = localStorage.getItem(`penstock.limits.${user}.${from}`);
  if (limits === null) return;
  localStorage.setItem(`penstock.limits.${user}.${to}`, limits);
  localStorage.removeItem(`penstock.limits.${user}.${from}`);
}

/** An id for a run. The same request gets the same id until it was taken, so that sending it again adds nothing. */
export function useRunIds(): { idFor: (request: unknown) => string; taken: () => void } {
  const last = useRef<{ request: string; id: string } | null>(null);
  return {
    idFor(request) {
      const text = JSON.stringify(request);
      if (last.current?.request !== text) last.current = { request: text, id: newId() };
      return last.current.id;
    },
    taken() {
      last.current = null;
    },
  };
}

function newId(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return `ui-${Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}
