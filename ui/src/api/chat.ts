// Chats, their messages and attachments over HTTP, for the pages that show them.

import { ApiError, get, post, query, send } from "./client.ts";
import { frameParser } from "./sse.ts";
import type { AgentPage, AgentShown, AttachmentShown, ChatPage, ChatPath, ChatShown, EventShown, Limits, TurnShown } from "./types.ts";

export const PAGE = 40;
/** The server takes this many runs on one stream. */
const MAX_RUNS = 50;

function chatPath(chatId: string, rest = ""): string {
  return `/api/chats/${encodeURIComponent(chatId)}${rest}`;
}

function messagePath(chatId: string, messageId: string, action: string): string {
  return chatPath(chatId, `/messages/${encodeURIComponent(messageId)}/${action}`);
}

export interface ChatFilter {
  q: string;
  graph: string;
}

export function listChats(filter: ChatFilter, limit: number, signal?: AbortSignal): Promise<ChatPage> {
  return get<ChatPage>(`/api/chats${query({ q: filter.q, graph_id: filter.graph, limit })}`, signal);
}

/** Every graph that can answer in a chat, those made for it first. */
export async function listAgents(signal?: AbortSignal): Promise<AgentShown[]> {
  const agents: AgentShown[] = [];
  let before: string | undefined;
  do {
    const page: AgentPage = await get<AgentPage>(`/api/agents${query({ before, limit: 200 })}`, signal);
    agents.push(...page.agents);
    before = page.next ?? undefined;
  } while (before);
  return agents.sort((one, other) => Number(other.made_for_chat) - Number(one.made_for_chat));
}

export type Window = { around: string } | { before: string } | { after: string } | Record<string, never>;

export function readPath(chatId: string, window: Window, limit: number, signal?: AbortSignal): Promise<ChatPath> {
  return get<ChatPath>(chatPath(chatId, `/path${query({ ...window, limit })}`), signal);
}

export async function renameChat(chatId: string, title: string): Promise<ChatShown> {
  const headers = { "Content-Type": "application/json", Accept: "application/json" };
  const response = await send(chatPath(chatId), { method: "PATCH", headers, body: JSON.stringify({ title }) });
  return (await response.json()) as ChatShown;
}

export async function deleteChat(chatId: string): Promise<void> {
  await send(chatPath(chatId), { method: "DELETE" });
}

export async function chooseMessage(chatId: string, messageId: string): Promise<void> {
  await send(messagePath(chatId, messageId, "choose"), { method: "POST" });
}

/** What a turn may say besides its text; the id of its run makes sending it again safe. */
export interface TurnOptions {
  run_id: string;
  limits?: Limits;
}

export type Turn =
  | { kind: "new"; graph: string; content: string; attachments: string[] }
  | { kind: "send"; chat: string; parent: string | null; content: string; attachments: string[] }
  | { kind: "edit"; chat: string; message: string; content: string }
  | { kind: "retry" | "continue"; chat: string; message: string };

export function startTurn(turn: Turn, options: TurnOptions): Promise<TurnShown> {
  switch (turn.kind) {
    case "new": {
      const path = `/api/agents/${encodeURIComponent(turn.graph)}/chat`;
      return post<TurnShown>(path, { content: turn.content, attachments: turn.attachments, ...options });
    }
    case "send": {
      const below = turn.parent === null ? {} : { parent_id: turn.parent };
      const body = { content: turn.content, attachments: turn.attachments, ...below, ...options };
      return post<TurnShown>(chatPath(turn.chat, "/messages"), body);
    }
    case "edit":
      return post<TurnShown>(messagePath(turn.chat, turn.message, "edit"), { content: turn.content, ...options });
    default:
      return post<TurnShown>(messagePath(turn.chat, turn.message, turn.kind), options);
  }
}

/** Types that can be attached, and what they are stored as: an SVG is a text, because it can execute. */
const ATTACHABLE: [RegExp, (type: string) => string][] = [
  [/^image\/(png|jpeg|gif|webp)$/, (type) => type],
  [/^application\/pdf$/, (type) => type],
  [/^image\/svg\+xml$/, () => "text/plain"],
  [/^(text\/.+|application\/(json|xml|yaml|x-yaml|x-sh|javascript|x-python|toml))$/, () => "text/plain"],
];
const TEXT_NAMES = /\.(txt|md|csv|tsv|json|jsonl|xml|ya?ml|toml|ini|log|py|ts|tsx|js|jsx|sh|sql|html?|css|rs|go|java|c|h|cpp|rb)$/i;
export const ACCEPTED = "image/png,image/jpeg,image/gif,image/webp,image/svg+xml,application/pdf,text/*,.json,.yaml,.yml,.toml,.md,.log";
export const MAX_BYTES = 20 * 1024 * 1024;
export const MAX_ATTACHMENTS = 20;

/** The media type that a file is attached with; null if files of its type are not taken. */
export function attachedType(file: { name: string; type: string }): string | null {
  const found = ATTACHABLE.find(([pattern]) => pattern.test(file.type));
  if (found) return found[1](file.type);
  return file.type === "" && TEXT_NAMES.test(file.name) ? "text/plain" : null;
}

export async function attach(file: File): Promise<AttachmentShown> {
  const type = attachedType(file);
  if (type === null) throw new Error(`${file.name}: only pictures (PNG, JPEG, GIF, WebP), PDF and text can be attached`);
  if (file.size > MAX_BYTES) throw new Error(`${file.name}: at most 20 MB can be attached`);
  const name = file.name.replace(/[\u0000-\u001f\u007f/\\]/g, "_").slice(0, 255) || "file";
  const path = `/api/attachments${query({ name, media_type: type })}`;
  const response = await send(path, { method: "POST", headers: { "Content-Type": type }, body: file });
  return (await response.json()) as AttachmentShown;
}

/** Remove what no message refers to; what one does refer to stays, and that is no error. */
export async function detach(id: string): Promise<void> {
  try {
    await send(`/api/attachments/${encodeURIComponent(id)}`, { method: "DELETE" });
  } catch (error) {
    if (!(error instanceof ApiError) || (error.status !== 404 && error.status !== 409)) throw error;
  }
}

export async function attachmentBytes(id: string, signal?: AbortSignal): Promise<Blob> {
  const response = await send(`/api/attachments/${encodeURIComponent(id)}`, { signal: signal ?? null });
  return response.blob();
}

/** Events of these types that there are by now, of several runs; runs that are gone have none. */
export async function eventsOf(runIds: string[], types: string[], signal?: AbortSignal): Promise<Map<string, EventShown[]>> {
  const found = new Map<string, EventShown[]>(runIds.map((id) => [id, []]));
  for (let at = 0; at < runIds.length; at += MAX_RUNS) {
    const part = runIds.slice(at, at + MAX_RUNS);
    const path = `/api/stream${query({ runs: part.map((id) => `${id}@0`).join(","), types, follow: "false" })}`;
    const text = await streamed(path, signal);
    if (text === null && part.length > 1) {
      // One of them is gone: ask for each alone.
      for (const id of part) for (const [key, events] of await eventsOf([id], types, signal)) found.set(key, events);
    } else if (text !== null) {
      for (const frame of frameParser()(text)) {
        const event = JSON.parse(frame.data) as EventShown & { run_id: string };
        found.get(event.run_id)?.push(event);
      }
    }
  }
  return found;
}

async function streamed(path: string, signal?: AbortSignal): Promise<string | null> {
  try {
    const response = await send(path, { headers: { Accept: "text/event-stream" }, signal: signal ?? null });
    return await response.text();
  } catch (error) {
    if (error instanceof ApiError && error.status === 404) return null;
    throw error;
  }
}
