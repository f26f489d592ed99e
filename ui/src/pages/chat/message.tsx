// One message of a conversation, and what can be done with it.

import { useState, type KeyboardEvent, type ReactNode } from "react";
import type { PlacedMessage } from "../../api/types.ts";
import { formatCount, formatDuration, formatUsd, toNanos } from "../../model/money.ts";
import { runLink } from "../../router.ts";
import { Markdown } from "../../text/markdown.tsx";
import { Money, Status, Track, when } from "../../ui/parts.tsx";
import { visible } from "../../ui/visible.ts";
import { isUnderWay, textOf, type Answer } from "./answer.ts";
import { attachedTo, Attachments } from "./files.tsx";
import { Tools } from "./tools.tsx";
import type { Live } from "./use-live.ts";

export interface Actions {
  /** Whether the graph can answer, and this person may ask it. */
  mayAct: boolean;
  busy: boolean;
  edit: (message: PlacedMessage, content: string) => Promise<boolean>;
  retry: (message: PlacedMessage) => void;
  goOn: (message: PlacedMessage) => void;
  choose: (message: PlacedMessage, sibling: string) => void;
}

const ROLES: Record<string, string> = { user: "You", system: "Instructions", tool: "Tool result" };

interface MessageProps {
  message: PlacedMessage;
  graph: string;
  actions: Actions;
  /** Whether it is the one being edited, and how to begin and end that. */
  editing: boolean;
  onEditing: (id: string | null) => void;
}

export function UserMessage({ message, actions, editing, onEditing }: MessageProps) {
  const name = ROLES[message.role] ?? visible(message.role);
  return (
    <article className={`message ${message.role === "user" ? "user" : "other"}`} tabIndex={-1} aria-label={name}>
      {message.role !== "user" && <div className="who">{name}</div>}
      {editing ? (
        <Edit message={message} actions={actions} onDone={() => onEditing(null)} />
      ) : (
        <>
          <Attachments files={attachedTo(message.data)} />
          <div className="bubble" dir="auto">
            {visible(message.content)}
          </div>
          <div className="bar acts">
            <Siblings message={message} actions={actions} what="message" />
            {actions.mayAct && message.role === "user" && (
              <button className="quiet" data-action="edit" disabled={actions.busy} onClick={() => onEditing(message.id)}>
                Edit
              </button>
            )}
            <span className="muted small">{when(message.at_ms)}</span>
          </div>
        </>
      )}
    </article>
  );
}

function Edit({ message, actions, onDone }: { message: PlacedMessage; actions: Actions; onDone: () => void }) {
  const [text, setText] = useState(message.content);
  const submit = async () => {
    if (text.trim() && !actions.busy && (await actions.edit(message, text))) onDone();
  };
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.nativeEvent.isComposing) return;
    if (event.key === "Escape") onDone();
    if (event.key !== "Enter" || event.shiftKey) return;
    event.preventDefault();
    void submit();
  };
  return (
    <form className="edit stack" onSubmit={(event) => (event.preventDefault(), void submit())}>
      <textarea aria-label="Edit your message" autoFocus rows={3} value={text} onChange={(event) => setText(event.target.value)} onKeyDown={onKeyDown} />
      <div className="bar">
        <span className="muted small grow">The message as it was stays beside the new one, with everything below it.</span>
        <button type="button" onClick={onDone}>
          Cancel
        </button>
        <button className="primary" disabled={actions.busy || !text.trim()}>
          Send
        </button>
      </div>
    </form>
  );
}

/** ‹2/3›: the versions of a message. */
function Siblings({ message, actions, what }: { message: PlacedMessage; actions: Actions; what: string }) {
  const { number, count, previous_id, next_id } = message.place;
  if (count < 2) return null;
  const step = (to: string | null, name: "previous" | "next", sign: string) => (
    <button
      className="quiet"
      data-action={name}
      aria-label={`${name === "next" ? "Next" : "Previous"} version of this ${what}`}
      aria-disabled={to === null}
      onClick={() => to !== null && actions.choose(message, to)}
    >
      {sign}
    </button>
  );
  return (
    <span className="siblings" role="group" aria-label={`Versions of this ${what}`}>
      {step(previous_id, "previous", "‹")}
      <span aria-live="polite">
        <span className="hidden">Version </span>
        {number}/{count}
      </span>
      {step(next_id, "next", "›")}
    </span>
  );
}

export function AnswerMessage(props: MessageProps & { live: Live | null; details: Answer | null; approvals: ReactNode }) {
  const { message, graph, actions, live, details, approvals } = props;
  const state = String(message.data.state ?? "complete");
  const writing = state === "writing";
  const answer = live?.answer ?? details;
  const text = writing && live ? textOf(live.answer) : message.content;
  return (
    <article className={`message answer${live?.answer.status === "running" ? " typing" : ""}`} tabIndex={-1} aria-label={`Answer of ${visible(graph)}`} aria-busy={writing}>
      <div className="who">
        {visible(graph)}
        {writing && <Status of={live?.answer.status ?? "queued"} word={WRITING[live?.answer.status ?? "queued"] ?? "writing"} />}
      </div>
      {answer && <Tools tools={answer.tools} />}
      {text ? <Markdown text={text} /> : !writing && <p className="muted">{state === "complete" ? "The answer is empty." : "Nothing was written."}</p>}
      <Attachments files={attachedTo(message.data)} />
      {approvals}
      <Ending message={message} state={state} />
      {writing && live?.connection === "lost" && (
        <div className="note warn" role="status">
          Not connected: {live.message}. The answer is kept by the server, and goes on here as soon as it can be reached.
        </div>
      )}
      <div className="bar acts">
        <Siblings message={message} actions={actions} what="answer" />
        {!writing && <AnswerActions message={message} actions={actions} state={state} />}
        <Facts message={message} answer={answer} writing={writing} />
      </div>
    </article>
  );
}

const WRITING: Record<string, string> = {
  queued: "waits to begin",
  running: "writing",
  waiting: "waits for you",
  parked: "parked until a server takes it up",
  completed: "finishing",
};

const ENDINGS: Record<string, string> = {
  partial: "Stopped before it was finished.",
  halted: "Stopped by a limit.",
  failed: "The answer failed.",
};

function Ending({ message, state }: { message: PlacedMessage; state: string }) {
  const ending = ENDINGS[state];
  if (!ending) return null;
  const error = typeof message.data.error === "string" ? message.data.error.replace(" of 'main'", " of this answer") : "";
  const run = typeof message.data.run_id === "string" ? message.data.run_id : null;
  return (
    <div className={`note ${state === "partial" ? "warn" : "bad"}`}>
      <p>
        <b>{ending}</b> {state !== "partial" && visible(error)}
      </p>
      {state === "halted" && run && (
        <p className="small">
          <a href={runLink(run)}>Whose limit it was, and what helps</a>
        </p>
      )}
    </div>
  );
}

function AnswerActions({ message, actions, state }: { message: PlacedMessage; actions: Actions; state: string }) {
  const [copied, setCopied] = useState(false);
  const copy = () => void navigator.clipboard?.writeText(message.content).then(() => setCopied(true));
  return (
    <>
      {actions.mayAct && (
        <>
          {state !== "complete" && (
            <button data-action="continue" disabled={actions.busy} onClick={() => actions.goOn(message)}>
              Continue
            </button>
          )}
          <button className="quiet" data-action="retry" disabled={actions.busy} onClick={() => actions.retry(message)}>
            Retry
          </button>
          {state === "complete" && (
            <button className="quiet" data-action="continue" disabled={actions.busy} onClick={() => actions.goOn(message)}>
              Continue
            </button>
          )}
        </>
      )}
      {message.content && (
        <button className="quiet" onClick={copy} onBlur={() => setCopied(false)}>
          {copied ? "Copied" : "Copy"}
        </button>
      )}
    </>
  );
}

function Facts({ message, answer, writing }: { message: PlacedMessage; answer: Answer | null; writing: boolean }) {
  const run = typeof message.data.run_id === "string" ? message.data.run_id : null;
  const live = writing && answer !== null;
  const known = message.data.cost_usd !== null;
  const spent = live ? answer.spentNanos : toNanos(message.data.cost_usd);
  const unknown = live ? answer.unknownCosts > 0 : Number(message.data.unknown_costs ?? 0) > 0;
  const tokens = answer ? answer.tokensIn + answer.tokensOut : 0;
  const took = answer?.startedMs != null && answer.endedMs != null ? answer.endedMs - answer.startedMs : null;
  return (
    <span className="cost small">
      {live && isUnderWay(answer.status) && <Budget answer={answer} />}
      <span className="hidden">Cost: </span>
      <b>{known || live ? <Money nanos={spent} unknown={unknown} /> : "unknown cost"}</b>
      {live && answer.heldNanos > 0 && <span className="muted">{formatUsd(answer.heldNanos)} held</span>}
      {tokens > 0 && <span className="muted">{formatCount(tokens)} tokens</span>}
      {took !== null && <span className="muted">{formatDuration(took)}</span>}
      {answer && answer.models.length > 0 && <span className="muted">{visible(answer.models.join(", "))}</span>}
      {run && <a href={runLink(run)}>Run</a>}
    </span>
  );
}

function Budget({ answer }: { answer: Answer }) {
  const money = [...answer.budgets.values()].find((one) => one.level === "run")?.units.find((one) => one.unit === "usd");
  if (!money || money.limit === null) return null;
  return <Track name="Money of this answer" spent={answer.spentNanos} held={answer.heldNanos} limit={money.limit} format={formatUsd} thin />;
}
