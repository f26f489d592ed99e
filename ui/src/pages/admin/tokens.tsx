// Tokens of people and programs, and keys of the gateway: listed, created, revoked. A secret is shown once.

import { useState } from "react";
import { get, post, query } from "../../api/client.ts";
import type { CreatedToken, NewToken, TokenList, TokenShown } from "../../api/types.ts";
import { formatUsd, toNanos } from "../../model/money.ts";
import { Dialog, Failure, Field, Status, Track, useAction, usePolled, when } from "../../ui/parts.tsx";
import { visible } from "../../ui/visible.ts";
import { Copy } from "../../ui/copy.tsx";

const PAGE = 100;
const MAX = 500;
const POLL_MS = 10_000;
const STATES: Record<TokenShown["state"], [string, string]> = {
  active: ["completed", "active"],
  expired: ["halted", "expired"],
  revoked: ["cancelled", "revoked"],
};
const ROLES = { viewer: "viewer: reads their own things", user: "user: also starts runs and saves graphs", admin: "admin: everything" } as const;

export function Tokens() {
  const [kind, setKind] = useState<"user" | "gateway">("user");
  const [pages, setPages] = useState(1);
  const [isNew, setNew] = useState(false);
  const path = `/api/tokens${query({ kind, limit: Math.min(PAGE * pages, MAX) })}`;
  const tokens = usePolled(path, (signal) => get<TokenList>(path, signal), POLL_MS);
  const found = tokens.value?.tokens;
  const isGateway = kind === "gateway";
  return (
    <>
      {tokens.value && !tokens.value.needs_tokens && (
        <div className="note warn">
          <span>
            No token is needed: everybody on the server's machine may do everything. Create an admin's token to end that, and keep its secret.
          </span>
        </div>
      )}
      <div className="bar">
        <div className="chips" role="group" aria-label="Kind of tokens">
          <button aria-pressed={!isGateway} onClick={() => (setPages(1), setKind("user"))}>
            People and programs
          </button>
          <button aria-pressed={isGateway} onClick={() => (setPages(1), setKind("gateway"))}>
            Gateway keys
          </button>
        </div>
        <span className="grow" />
        <button className="primary" onClick={() => setNew(true)}>
          {isGateway ? "New gateway key" : "New token"}
        </button>
      </div>
      <Failure error={tokens.error} />
      {found?.length === 0 ? (
        <p className="panel empty">
          {isGateway ? "No gateway keys yet. A key lets a program call models through the gateway, up to a budget." : "No tokens yet."}
        </p>
      ) : !found && tokens.error ? null : (
        <section className="panel" aria-label={isGateway ? "Gateway keys" : "Tokens"}>
          <table>
            <thead>
              <tr>
                <th scope="col">Name</th>
                {isGateway ? <th scope="col">Today</th> : <th scope="col">Role</th>}
                <th scope="col">State</th>
                <th scope="col">Created</th>
                <th scope="col">Last used</th>
                <th scope="col">
                  <span className="hidden">Actions</span>
                </th>
              </tr>
            </thead>
            <tbody>
              {found?.map((token) => (
                <Row key={token.id} token={token} onChange={tokens.again} />
              ))}
            </tbody>
          </table>
        </section>
      )}
      {tokens.value?.next && PAGE * pages < MAX && <button onClick={() => setPages(pages + 1)}>Show more</button>}
      {isNew && <Create kind={kind} needsTokens={tokens.value?.needs_tokens ?? true} onClose={() => (setNew(false), tokens.again())} />}
    </>
  );
}

function Row({ token, onChange }: { token: TokenShown; onChange: () => void }) {
  const [isAsking, setAsking] = useState(false);
  const [busy, error, act] = useAction();
  const name = visible(token.name);
  const revoke = () =>
    act(async () => {
      await post(`/api/tokens/${encodeURIComponent(token.id)}/revoke`);
      setAsking(false);
      onChange();
    });
  return (
    <tr className={token.state === "active" ? "" : "over"}>
      <th scope="row" className="row">
        {name} {token.is_yours && <span className="muted small">yours</span>}
        <div className="muted small mono">{token.id}</div>
        {token.note && <div className="muted small">{visible(token.note)}</div>}
      </th>
      <td>{token.gateway ? <Budget of={token} /> : token.role}</td>
      <td>
        <Status of={STATES[token.state][0]} word={STATES[token.state][1]} />
        {token.state === "active" && token.expires && <div className="muted small">until {when(Date.parse(token.expires))}</div>}
        {token.state === "revoked" && (
          <div className="muted small">
            {when(token.revoked_ms ?? null)} by {visible(token.revoked_by ?? "")}
          </div>
        )}
      </td>
      <td>
        {token.source === "environment" ? (
          <span className="muted">in the server's environment</span>
        ) : (
          <>
            {when(token.created_ms ?? null)}
            <div className="muted small">by {visible(token.created_by ?? "")}</div>
          </>
        )}
      </td>
      <td>{token.last_used_ms ? when(token.last_used_ms) : <span className="muted">{token.source === "environment" ? "not known" : "never"}</span>}</td>
      <td className="number">
        {token.state === "active" && token.source === "database" && !token.is_yours && (
          <button className="danger" onClick={() => setAsking(true)} aria-label={`Revoke ${name}, ${token.id}`}>
            Revoke
          </button>
        )}
        {isAsking && (
          <Dialog title={`Revoke the token of ${name}?`} onClose={() => setAsking(false)}>
            <p>Whoever uses it is refused within a second, for good. {token.kind === "user" && "Runs that it started go on."}</p>
            <Failure error={error} />
            <div className="bar">
              <button className="danger" disabled={busy} onClick={() => void revoke()}>
                Revoke it
              </button>
              <button onClick={() => setAsking(false)}>Back</button>
            </div>
          </Dialog>
        )}
      </td>
    </tr>
  );
}

function Budget({ of: { name, id, gateway } }: { of: TokenShown }) {
  const { today, daily_usd, max_cost_usd, models, team } = gateway!;
  const limit = today?.limit_usd ?? null;
  const budgets = [
    daily_usd !== null && `${formatUsd(toNanos(daily_usd))} a day`,
    max_cost_usd !== null && `${formatUsd(toNanos(max_cost_usd))} in all`,
    team && `team ${visible(team)}`,
    models.length > 0 && models.map(visible).join(", "),
  ].filter(Boolean);
  return (
    <>
      {today ? (
        <>
          {formatUsd(toNanos(today.spent_usd))} {limit === null ? "spent" : `of ${formatUsd(toNanos(limit))}`}
          {limit !== null && (
            <Track
              thin
              name={`Budget of ${name}, ${id}`}
              spent={toNanos(today.spent_usd)}
              held={toNanos(today.held_usd)}
              unresolved={toNanos(today.unresolved_usd)}
              limit={toNanos(limit)}
              format={formatUsd}
            />
          )}
        </>
      ) : (
        <span className="muted">the ledger does not answer</span>
      )}
      <div className="muted small">{budgets.join(", ") || "no budget of its own"}</div>
    </>
  );
}

function Create({ kind, needsTokens, onClose }: { kind: "user" | "gateway"; needsTokens: boolean; onClose: () => void }) {
  const [values, setValues] = useState({ name: "", role: needsTokens ? "user" : "admin", expires: "", note: "", daily: "", total: "", models: "", team: "" });
  const [isAnother, setAnother] = useState(false);
  const [created, setCreated] = useState<CreatedToken | null>(null);
  const [busy, error, act] = useAction();
  const isGateway = kind === "gateway";
  const set = (name: keyof typeof values) => (event: { target: { value: string } }) => setValues({ ...values, [name]: event.target.value });
  const submit = () => act(async () => setCreated(await post<CreatedToken>("/api/tokens", bodyOf(kind, values, isAnother))));
  if (created) return <Created of={created} onClose={onClose} />;
  return (
    <Dialog title={isGateway ? "New gateway key" : "New token"} onClose={onClose}>
      <form className="stack" onSubmit={(event) => (event.preventDefault(), void submit())}>
        <Field label="Name" hint={isGateway ? "Whose costs these are." : "Whoever has the token sees and owns what has this name."}>
          {(id) => <input id={id} value={values.name} maxLength={64} required onChange={set("name")} />}
        </Field>
        {isGateway ? (
          <>
            <div className="grid2">
              <Field label="Budget a day, US dollars">{(id) => <input id={id} inputMode="decimal" placeholder="5" value={values.daily} onChange={set("daily")} />}</Field>
              <Field label="Budget in all, US dollars">{(id) => <input id={id} inputMode="decimal" placeholder="none" value={values.total} onChange={set("total")} />}</Field>
            </div>
            <Field label="Models" hint="Patterns with commas between them, such as gpt-*; empty for all.">
              {(id) => <input id={id} className="mono" value={values.models} onChange={set("models")} />}
            </Field>
            <Field label="Team" hint="Whose daily budget the key spends from as well; may stay empty.">
              {(id) => <input id={id} value={values.team} maxLength={64} onChange={set("team")} />}
            </Field>
          </>
        ) : (
          <Field label="Role">
            {(id) => (
              <select id={id} value={values.role} onChange={set("role")}>
                {Object.entries(ROLES).map(([role, words]) => (
                  <option key={role} value={role}>
                    {words}
                  </option>
                ))}
              </select>
            )}
          </Field>
        )}
        <Field label="Last day" hint="In UTC; empty for a token that does not end.">
          {(id) => <input id={id} type="date" value={values.expires} onChange={set("expires")} />}
        </Field>
        <Field label="Note">{(id) => <input id={id} value={values.note} maxLength={500} placeholder="What it is for" onChange={set("note")} />}</Field>
        {!isGateway && (
          <label className="choice">
            <input type="checkbox" checked={isAnother} onChange={(event) => setAnother(event.target.checked)} />
            Also if the name has an active token already
          </label>
        )}
        <Failure error={error} />
        <div className="bar">
          <button className="primary" disabled={busy || !values.name.trim()}>
            Create
          </button>
          <button type="button" onClick={onClose}>
            Back
          </button>
        </div>
      </form>
    </Dialog>
  );
}

function bodyOf(kind: "user" | "gateway", values: Record<string, string>, another: boolean): NewToken {
  const text = (name: string) => values[name]!.trim();
  const body: NewToken = { kind, name: text("name"), note: text("note"), another, ...(text("expires") && { expires: text("expires") }) };
  if (kind === "user") return { ...body, role: text("role") as keyof typeof ROLES };
  const models = text("models").split(",").map((one) => one.trim()).filter(Boolean);
  return { ...body, models, team: text("team"), ...(text("daily") && { daily_usd: text("daily") }), ...(text("total") && { max_cost_usd: text("total") }) };
}

function Created({ of: { token, secret }, onClose }: { of: CreatedToken; onClose: () => void }) {
  return (
    <Dialog title={`The token of ${visible(token.name)}`} onClose={onClose}>
      <p>It is in force now. Its secret is shown this once, and is stored nowhere:</p>
      <Field label="Secret">{(id) => <input id={id} className="mono" readOnly value={secret} onFocus={(event) => event.target.select()} />}</Field>
      <div className="bar">
        <Copy text={secret} what="the secret" />
        <button className="primary" onClick={onClose}>
          I have kept it
        </button>
      </div>
    </Dialog>
  );
}
