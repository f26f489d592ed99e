import { useState } from "react";
import { get, signIn, signOut } from "../api/client.ts";
import type { Me } from "../api/types.ts";
import icon from "../icon.svg";
import { Failure, Field, useAction } from "../ui/parts.tsx";

export function SignIn({ message, onDone }: { message: string; onDone: (me: Me) => void }) {
  const [secret, setSecret] = useState("");
  const [keep, setKeep] = useState(false);
  const [busy, error, act] = useAction();
  const submit = () =>
    act(async () => {
      signIn(secret.trim(), keep);
      try {
        onDone(await get<Me>("/api/me"));
      } catch (failure) {
        signOut();
        throw failure;
      }
    });
  return (
    <main className="sign-in">
      <img src={icon} width="40" height="40" alt="" />
      <h1>Sign in to Penstock</h1>
      <p className="muted">This server has tokens. Paste yours; its operator can give you one.</p>
      {message && !error ? (
        <div className="note warn" role="alert">
          {message}
        </div>
      ) : null}
      <form className="stack" onSubmit={(event) => (event.preventDefault(), void submit())}>
        <Field label="Token">
          {(id) => (
            <input
              id={id}
              type="password"
              autoComplete="off"
              autoFocus
              required
              value={secret}
              onChange={(event) => setSecret(event.target.value)}
            />
          )}
        </Field>
        <label className="choice">
          <input type="checkbox" checked={keep} onChange={(event) => setKeep(event.target.checked)} />
          Keep it until this tab is closed
        </label>
        <Failure error={error} />
        <button className="primary" disabled={busy || !secret.trim()}>
          Sign in
        </button>
      </form>
    </main>
  );
}
