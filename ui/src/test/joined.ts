// Joins texts as the server does, for tests.

import type { Joined } from "../api/joined.ts";
import type { EventShown } from "../api/types.ts";

export type Shown = EventShown & { joined?: Joined };

/** Join neighbours of one text, except where `cuts` has true. */
export function joinedText(log: EventShown[], cuts: boolean[]): Shown[] {
  const groups: EventShown[][] = [];
  for (const [at, event] of log.entries()) {
    const last = groups.at(-1)?.at(-1);
    const isSame = last?.type === "text.delta" && event.type === "text.delta" && last.data.node_id === event.data.node_id;
    if (isSame && !cuts[at]) groups.at(-1)!.push(event);
    else groups.push([event]);
  }
  return groups.map((group) => {
    const last = group.at(-1)!;
    if (group.length === 1) return last;
    const joined = group.map(({ at_ms, data }) => [last.at_ms - at_ms, [...String(data.text)].length] as const);
    return { ...last, data: { ...last.data, text: group.map(({ data }) => String(data.text)).join("") }, joined };
  });
}
