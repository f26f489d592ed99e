import { StrictMode, useEffect, useRef, useState } from "react";
import { createRoot } from "react-dom/client";
import { ApiError, get, hasToken, signOut, whenSignedOut } from "./api/client.ts";
import type { Me } from "./api/types.ts";
import { PLACES, type PageProps } from "./pages/index.ts";
import { SignIn } from "./pages/sign-in.tsx";
import { useApprovals, useTopic } from "./pages/use-lists.ts";
import { useRoute, type Route } from "./router.ts";
import { Boundary } from "./ui/boundary.tsx";
import { later } from "./ui/later.tsx";
import { Failure } from "./ui/parts.tsx";
import icon from "./icon.svg";
import "./ui/tokens.css";

const THEME = "penstock.theme";

function App() {
  const [me, setMe] = useState<Me | null>(null);
  const [needsToken, setNeedsToken] = useState<string | null>(null);
  const [error, setError] = useState<unknown>(null);
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    whenSignedOut((message) => {
      setMe(null);
      setNeedsToken(message);
    });
    get<Me>("/api/me").then(setMe, (failure: unknown) => {
      if (!(failure instanceof ApiError) || failure.status !== 401) setError(failure);
    });
  }, [turn]);
  if (me) return <Shell me={me} />;
  if (needsToken !== null) return <SignIn message={needsToken} onDone={(found) => (setMe(found), setNeedsToken(null))} />;
  return (
    <main className="sign-in">
      <h1>Penstock</h1>
      {error ? (
        <>
          <Failure error={error} />
          <button onClick={() => (setError(null), setTurn(turn + 1))}>Try again</button>
        </>
      ) : (
        <p className="muted">Connecting…</p>
      )}
    </main>
  );
}

function Shell({ me }: { me: Me }) {
  const route = useRoute();
  const approvals = useApprovals();
  const waiting = approvals.value?.approvals.length ?? 0;
  const main = useRef<HTMLElement>(null);
  const page = route.parts[0] ?? "runs";
  const place = route.parts.join("/");
  const shown = useRef(place);
  const [open, setOpen] = useState<"palette" | "keys" | null>(null);
  useEffect(() => {
    document.title = `${titleOf(route)} · Penstock`;
    if (shown.current !== place) main.current?.focus(); // a new page is read from its beginning
    shown.current = place;
  }, [place, route]);
  useEffect(() => setOpen(null), [place]);
  useShortcuts(setOpen);
  const hasNewer = useNewerPage();
  const link = (to: string, label: string, count = 0) => (
    <a key={to} href={`#/${to}`} {...(page === to ? { "aria-current": "page" as const } : {})}>
      {label}
      {count > 0 && (
        <span className="badge">
          {count}
          <span className="hidden"> waiting</span>
        </span>
      )}
    </a>
  );
  return (
    <div className="shell">
      <a className="skip" href="#main" onClick={(event) => (event.preventDefault(), main.current?.focus())}>
        Skip to the page
      </a>
      <header className="rail">
        <a className="brand" href="#/runs">
          <img src={icon} width="24" height="24" alt="" />
          Penstock
        </a>
        <nav aria-label="Pages">
          {Object.entries(PLACES).map(
            ([name, { label, isFor }]) =>
              label && (isFor?.(me) ?? true) && link(name, label, name === "approvals" ? waiting : 0),
          )}
          <a href="docs">API</a>
        </nav>
        <footer>
          <button onClick={() => setOpen("palette")}>
            Go to… <kbd>Ctrl K</kbd>
          </button>
          <Theme />
          <span className="muted">
            {me.name}, {me.role}
            {me.until && <> until {new Date(me.until).toLocaleDateString()}</>}
          </span>
          {hasToken() && <button onClick={() => signOut()}>Sign out</button>}
        </footer>
      </header>
      <main ref={main} tabIndex={-1}>
        {hasNewer && (
          <div className="note warn" role="status">
            The server has another version of this page. What you see is right, but reload it before you rely on new features.
            <div>
              <button onClick={() => location.reload()}>Reload the page</button>
            </div>
          </div>
        )}
        <Boundary place={place}>
          <Page route={route} me={me} />
        </Boundary>
      </main>
      {open && (
        <Boundary place={open}>
          {open === "palette" ? <Palette me={me} onClose={() => setOpen(null)} /> : <Keys me={me} onClose={() => setOpen(null)} />}
        </Boundary>
      )}
    </div>
  );
}

const Palette = later(() => import("./palette.tsx"), null);
const Keys = later(async () => ({ default: (await import("./palette.tsx")).Keys }), null);

function Page(props: PageProps) {
  const place = PLACES[props.route.parts[0] ?? "runs"];
  if (place) return <place.page {...props} />;
  return (
    <>
      <h1>There is no such page</h1>
      <p>
        <a href="#/runs">Runs</a>
      </p>
    </>
  );
}

function titleOf({ parts: [page = "runs", id] }: Route): string {
  return PLACES[page]?.title(id) ?? "Not found";
}

/** Keys that work on every page; letters do nothing while somebody types. `g` and a letter goes to a page. */
function useShortcuts(open: (what: "palette" | "keys") => void): void {
  useEffect(() => {
    let began = false;
    const onKey = (event: KeyboardEvent) => {
      if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") {
        event.preventDefault();
        open("palette");
        return;
      }
      const typing = event.target instanceof Element && event.target.closest("input, textarea, select, dialog, [contenteditable]");
      if (typing || event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
      const place = Object.entries(PLACES).find(([, { key }]) => key === event.key);
      if (began && place) location.hash = `#/${place[0]}`;
      else if (event.key === "?" && !document.querySelector("dialog[open], .editor, .threads")) open("keys");
      else if (event.key === "/") {
        const search = document.querySelector<HTMLElement>("main input[type=search]");
        if (search) event.preventDefault();
        search?.focus();
      }
      began = event.key === "g";
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, [open]);
}

const SCRIPT = /<script[^>]+src="([^"]+)"/;
const NEWER_MS = 10_000;

/** Whether the server has another page than this one, as after an upgrade; looked at when a connection is made again. */
function useNewerPage(): boolean {
  const [hasNewer, setNewer] = useState(false);
  const look = async () => {
    const own = document.querySelector<HTMLScriptElement>("script[type=module]")?.getAttribute("src");
    try {
      const found = SCRIPT.exec(await (await fetch("./", { cache: "no-cache" })).text())?.[1];
      if (own && found) setNewer(found !== own);
    } catch {
      // The server is away; it is looked at again after the next connection.
    }
  };
  useTopic("approvals", () => void look(), NEWER_MS);
  return hasNewer;
}

function Theme() {
  const [theme, setTheme] = useState(() => localStorage.getItem(THEME) ?? "");
  useEffect(() => {
    if (theme) {
      document.documentElement.dataset.theme = theme;
      localStorage.setItem(THEME, theme);
    } else {
      delete document.documentElement.dataset.theme;
      localStorage.removeItem(THEME);
    }
  }, [theme]);
  return (
    <select aria-label="Theme" value={theme} onChange={(event) => setTheme(event.target.value)}>
      <option value="">As the system</option>
      <option value="light">Light</option>
      <option value="dark">Dark</option>
    </select>
  );
}

createRoot(document.getElementById("root")!).render(
  <StrictMode>
    <App />
  </StrictMode>,
);
