// Every page by the first part of its route. Pages load when they are opened, so that the first one is small.

import { lazy, type ComponentType, type LazyExoticComponent } from "react";
import type { Me } from "../api/types.ts";
import type { Route } from "../router.ts";

export interface PageProps {
  route: Route;
  me: Me;
}

export interface Place {
  title: (id: string | undefined) => string;
  page: LazyExoticComponent<ComponentType<PageProps>>;
  /** Name in the navigation; pages without one are reached from others. */
  label?: string;
  /** The letter that opens the page after `g`. */
  key?: string;
  /** Whether this person may use the page; everybody may if it is left out. */
  isFor?: (me: Me) => boolean;
}

export const PLACES: Record<string, Place> = {
  runs: {
    title: (id) => (id ? `Run ${id}` : "Runs"),
    page: lazy(() => import("./runs.tsx")),
    label: "Runs",
    key: "r",
  },
  chat: { title: (id) => (id ? "Chat" : "New chat"), page: lazy(() => import("./chat/page.tsx")), label: "Chat", key: "c" },
  graphs: {
    title: (id) => (id ? `Graph ${id}` : "Graphs"),
    page: lazy(() => import("./graphs.tsx")),
    label: "Graphs",
    key: "e",
  },
  approvals: { title: () => "Approvals", page: lazy(() => import("./approvals.tsx")), label: "Approvals", key: "a" },
  diff: { title: () => "Two runs compared", page: lazy(() => import("./diff.tsx")) },
  money: { title: () => "Money", page: lazy(() => import("./money/page.tsx")), label: "Money", key: "m" },
  bills: { title: () => "Bills", page: lazy(() => import("./open-bills.tsx")) },
  start: {
    title: () => "Start a run",
    page: lazy(() => import("./start.tsx")),
    label: "Start a run",
    key: "n",
    isFor: (me) => me.role !== "viewer",
  },
  connect: { title: () => "Connect", page: lazy(() => import("./connect/page.tsx")), label: "Connect", key: "o" },
  admin: {
    title: () => "Server",
    page: lazy(() => import("./admin/page.tsx")),
    label: "Server",
    key: "s",
    isFor: (me) => me.role === "admin",
  },
};
