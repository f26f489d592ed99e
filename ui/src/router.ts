// Routes live in the fragment, so that one page serves them all and a link from anywhere opens.

import { useSyncExternalStore } from "react";

export interface Route {
  parts: string[];
  params: URLSearchParams;
}

function parse(hash: string): Route {
  const [path = "", search = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  return { parts: path.split("/").filter(Boolean).map(decode), params: new URLSearchParams(search) };
}

/** Text that somebody mistyped in the address is looked for as it is. */
function decode(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function subscribe(listener: () => void): () => void {
  addEventListener("hashchange", listener);
  return () => removeEventListener("hashchange", listener);
}

export function useRoute(): Route {
  return parse(useSyncExternalStore(subscribe, () => location.hash));
}

export function go(hash: string): void {
  location.hash = hash;
}

/** Change what is looked at on a page without a new entry in the history; nothing if the page was left meanwhile. */
export function setParams(route: Route, changes: Record<string, string | null>): void {
  const { parts, params } = parse(location.hash);
  if (parts.join("/") !== route.parts.join("/")) return;
  for (const [name, value] of Object.entries(changes)) {
    if (value) params.set(name, value);
    else params.delete(name);
  }
  const search = params.toString();
  const path = route.parts.map(encodeURIComponent).join("/");
  history.replaceState(null, "", `#/${path}${search && `?${search}`}`);
  dispatchEvent(new HashChangeEvent("hashchange"));
}

export function runLink(id: string): string {
  return `#/runs/${encodeURIComponent(id)}`;
}

export function diffLink(one: string, other: string): string {
  return `#/diff/${encodeURIComponent(one)}/${encodeURIComponent(other)}`;
}

export function chatLink(id: string): string {
  return `#/chat/${encodeURIComponent(id)}`;
}
