// Every page by the first part of its route. Pages load when they are opened, so that the first one is small.

import { createElement, type ComponentType } from "react";
import type { Me } from "../api/types.ts";
import type { Route } from "../router.ts";
import { later } from "../ui/later.tsx";

export interface PageProps {
  route: Route;
  me: Me;
}

export interface Place {
  title: (id: string | undefined) => string;
  page: ComponentType<PageProps>;
  /** Name in the navigation; pages without one are reached from others. */
  label?: string;
  /** The letter that opens the page after `g`. */
  key?: string;
  /** Whether this person may use the page; everybody may if it is left out. */
  isFor?: (me: Me) => boolean;
}

const opened = (load: () => Promise<{ default: ComponentType<PageProps> }>) =>
  later(load, createElement("p", { className: "muted" }, "Loading…"));

export const PLACES: Record<string, Place> = {
  runs: {
    title: (id) => (id ? `Run ${id}` : "Runs"),
    page: opened(() => import("./runs.tsx")),
    label: "Runs",
    key: "r",
  },
  chat: { title: (id) => (id ? "Chat" : "New chat"), page: opened(() => import("./chat/page.tsx")), label: "Chat", key: "c" },
  graphs: {
    title: (id) => (id ? `Graph ${id}` : "Graphs"),
    page: opened(() => import("./graphs.tsx")),
    label: "Graphs",
    key: "e",
  },
  approvals: { title: () => "Approvals", page: opened(() => import("./approvals.tsx")), label: "Approvals", key: "a" },
  diff: { title: () => "Two runs compared", page: opened(() => import("./diff.tsx")) },
  money: { title: () => "Money", page: opened(() => import("./money/page.tsx")), label: "Money", key: "m" },
  bills: { title: () => "Bills", page: opened(() => import("./open-bills.tsx")) },
  start: {
    title: () => "Start a run",
    page: opened(() => import("./start.tsx")),
    label: "Start a run",
    key: "n",
    isFor: (me) => me.role !== "viewer",
  },
  connect: { title: () => "Connect", page: opened(() => import("./connect/page.tsx")), label: "Connect", key: "o" },
  admin: {
    title: () => "Server",
    page: opened(() => import("./admin/page.tsx")),
    label: "Server",
    key: "s",
    isFor: (me) => me.role === "admin",
  },
};
