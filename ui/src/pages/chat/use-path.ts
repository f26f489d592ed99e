// The part of a conversation that is on the screen: a window of one path through its tree, which moves when it is scrolled.

import { useCallback, useEffect, useRef, useState } from "react";
import { ApiError } from "../../api/client.ts";
import { PAGE, readPath, type Window } from "../../api/chat.ts";
import type { ChatPath, ChatShown, PlacedMessage } from "../../api/types.ts";

/** Messages that are kept on the page; beyond that, the far end is let go, and read again when it is scrolled to. */
export const MAX_SHOWN = 200;
const AGAIN_MS = 2_000;

export interface PathState {
  path: ChatPath | null;
  error: unknown;
  load: (window?: Window) => Promise<void>;
  /** Read the end of the path again, and as many messages as are shown. */
  refresh: () => Promise<void>;
  earlier: () => Promise<void>;
  later: () => Promise<void>;
  renamed: (chat: ChatShown) => void;
}

export function usePath(chatId: string, around: string | null): PathState {
  const [state, setState] = useState<{ id: string; path: ChatPath | null; error: unknown }>({ id: chatId, path: null, error: null });
  const busy = useRef(false);
  const current = useRef(state);
  current.current = state;
  const load = useCallback(
    async (window: Window = {}, count: number = PAGE) => {
      try {
        const path = await readPath(chatId, window, count);
        setState({ id: chatId, path, error: null });
      } catch (error) {
        setState((old) => ({ id: chatId, path: old.id === chatId ? old.path : null, error }));
      }
    },
    [chatId],
  );
  const refresh = useCallback(() => load({}, Math.max(PAGE, current.current.path?.messages.length ?? 0)), [load]);
  useEffect(() => {
    void load(around === null ? {} : { around });
  }, [load, around]);
  const unreachable = state.error instanceof ApiError && (state.error.status === 0 || state.error.status >= 500);
  useEffect(() => {
    if (!unreachable) return;
    const timer = setInterval(() => void load(around === null ? {} : { around }), AGAIN_MS);
    return () => clearInterval(timer);
  }, [unreachable, load, around]);
  const more = useCallback(
    async (end: "earlier" | "later") => {
      const { path } = current.current;
      const edge = end === "earlier" ? path?.messages[0] : path?.messages.at(-1);
      if (!path || !edge || busy.current) return;
      busy.current = true;
      try {
        const page = await readPath(chatId, end === "earlier" ? { before: edge.id } : { after: edge.id }, PAGE);
        setState((old) => (old.path === path ? { ...old, path: joined(path, page, end) } : old));
      } catch (error) {
        setState((old) => ({ ...old, error }));
      } finally {
        busy.current = false;
      }
    },
    [chatId],
  );
  const shown = state.id === chatId;
  return {
    path: shown ? state.path : null,
    error: shown ? state.error : null,
    load,
    refresh,
    earlier: () => more("earlier"),
    later: () => more("later"),
    renamed: ({ title, updated_ms }) => setState((old) => (old.path ? { ...old, path: { ...old.path, title, updated_ms } } : old)),
  };
}

/** The window with a page added at one end, and without what is too far at the other. */
export function joined(path: ChatPath, page: ChatPath, end: "earlier" | "later"): ChatPath {
  if (end === "earlier") {
    const messages: PlacedMessage[] = [...page.messages, ...path.messages];
    const cut = messages.length > MAX_SHOWN;
    return { ...path, messages: messages.slice(0, MAX_SHOWN), has_earlier: page.has_earlier, has_later: path.has_later || cut };
  }
  const messages = [...path.messages, ...page.messages];
  const cut = messages.length > MAX_SHOWN;
  return {
    ...path,
    messages: messages.slice(-MAX_SHOWN),
    has_earlier: path.has_earlier || cut,
    has_later: page.messages.length > 0 && page.has_later,
    end_id: page.end_id ?? path.end_id,
  };
}
