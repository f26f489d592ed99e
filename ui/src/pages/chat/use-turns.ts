// Turns of a chat: sent once, with the limits that are set for the chat.

import { startTurn, type Turn } from "../../api/chat.ts";
import type { Me, TurnShown } from "../../api/types.ts";
import { useAction } from "../../ui/parts.tsx";
import { readLimits } from "../limits.tsx";
import { useLimits, useRunIds } from "./draft.ts";

export interface Turns {
  busy: boolean;
  error: unknown;
  /** Limits of each further answer, as they were typed. */
  limits: Record<string, string>;
  setLimits: (limits: Record<string, string>) => void;
  /** Returns whether the turn was taken; its error is shown if not. */
  start: (turn: Turn, onStarted: (turn: TurnShown) => void | Promise<void>) => Promise<boolean>;
}

export function useTurns(me: Me, chat: string): Turns {
  const [limits, setLimits] = useLimits(me.name, chat);
  const [busy, error, act] = useAction();
  const ids = useRunIds();
  const start: Turns["start"] = async (turn, onStarted) => {
    let taken = false;
    await act(async () => {
      const given = readLimits(limits);
      const options = Object.keys(given).length ? { limits: given } : {};
      const started = await startTurn(turn, { ...options, run_id: ids.idFor([turn, given]) });
      ids.taken();
      taken = true;
      await onStarted(started);
    });
    return taken;
  };
  return { busy, error, limits, setLimits, start };
}
