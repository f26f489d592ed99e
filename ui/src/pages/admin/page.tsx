// The server for its operators: health, models, tokens and settings.

import { go } from "../../router.ts";
import type { PageProps } from "../index.ts";
import { Health } from "./health.tsx";
import { Models } from "./models.tsx";
import { Settings } from "./settings.tsx";
import { Tokens } from "./tokens.tsx";
import "../money/money.css";
import "./admin.css";

const PARTS = { health: "Health", models: "Models", tokens: "Tokens", settings: "Settings" } as const;
type Part = keyof typeof PARTS;

export default function AdminPage({ route, me }: PageProps) {
  const part = (route.parts[1] ?? "health") as Part;
  if (me.role !== "admin")
    return (
      <>
        <h1>Server</h1>
        <p className="panel empty">These pages are for admins. Sign in with an admin's token to see them.</p>
      </>
    );
  return (
    <>
      <h1>Server</h1>
      <div className="chips" role="group" aria-label="Parts of the server">
        {(Object.keys(PARTS) as Part[]).map((name) => (
          <button key={name} aria-pressed={name === part} onClick={() => go(`#/admin/${name}`)}>
            {PARTS[name]}
          </button>
        ))}
      </div>
      {part === "health" && <Health />}
      {part === "models" && <Models />}
      {part === "tokens" && <Tokens />}
      {part === "settings" && <Settings />}
      {!(part in PARTS) && <p className="panel empty">There is no such page.</p>}
    </>
  );
}
