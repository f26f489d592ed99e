// A new chat: which graph answers, and the first message.

import { useState } from "react";
import type { AgentShown, Me } from "../../api/types.ts";
import { chatLink, go, type Route } from "../../router.ts";
import { Failure, Field } from "../../ui/parts.tsx";
import { visible } from "../../ui/visible.ts";
import { Composer } from "./composer.tsx";
import { moveLimits } from "./draft.ts";
import { useTurns } from "./use-turns.ts";

const NEW = "new";
/** More graphs than this are chosen from a list. */
const MAX_CARDS = 8;

export function Begin(props: {
  route: Route;
  me: Me;
  agents: { value: AgentShown[] | null; error: unknown };
  onChange: () => void;
}) {
  const { route, me, agents, onChange } = props;
  const [picked, setPicked] = useState(route.params.get("with") ?? "");
  const turns = useTurns(me, NEW);
  const known = agents.value ?? [];
  const graph = known.some((one) => one.id === picked) ? picked : (known[0]?.id ?? "");
  const begin = (content: string, attachments: string[]) =>
    turns.start({ kind: "new", graph, content, attachments }, (turn) => {
      moveLimits(me.name, NEW, turn.chat_id);
      onChange();
      go(chatLink(turn.chat_id));
    });
  return (
    <section className="thread begin" aria-label="New chat">
      <div className="begin-middle">
        <div className="column stack">
          <h1>{me.role === "viewer" ? "Chats" : "New chat"}</h1>
          <Failure error={agents.error} />
          {me.role === "viewer" ? (
            <p className="muted">Your role can read chats, and not write in them. Choose one from the list.</p>
          ) : agents.value && known.length === 0 ? (
            <div className="panel empty">
              <p>
                No graph can answer in a chat yet. <a href="#/graphs">Make one</a> that begins with a chat start and ends with a text.
              </p>
            </div>
          ) : (
            known.length > 0 && <Choice agents={known} graph={graph} onPick={setPicked} />
          )}
        </div>
      </div>
      {me.role !== "viewer" && known.length > 0 && (
        <Composer me={me} chat={NEW} turns={turns} onSend={begin} />
      )}
    </section>
  );
}

function Choice({ agents, graph, onPick }: { agents: AgentShown[]; graph: string; onPick: (id: string) => void }) {
  if (agents.length > MAX_CARDS) {
    return (
      <Field label="Who answers">
        {(id) => (
          <select id={id} value={graph} onChange={(event) => onPick(event.target.value)}>
            {agents.map((one) => (
              <option key={one.id} value={one.id}>
                {visible(one.id === one.name ? one.id : `${one.id}: ${one.name}`)}
              </option>
            ))}
          </select>
        )}
      </Field>
    );
  }
  return (
    <fieldset className="offers">
      <legend>Who answers</legend>
      {agents.map((one) => (
        <label key={one.id} className="offer">
          <input type="radio" name="graph" value={one.id} checked={one.id === graph} onChange={() => onPick(one.id)} />
          <span>
            <b>{visible(one.id)}</b>
            {one.name !== one.id && <span className="muted small">{visible(one.name)}</span>}
          </span>
        </label>
      ))}
    </fieldset>
  );
}
