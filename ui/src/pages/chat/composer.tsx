// Where a message is written: its text, its attachments, the limits of the answer.

import { useEffect, useId, useRef, useState, type ClipboardEvent, type DragEvent, type KeyboardEvent, type ReactNode } from "react";
import { ACCEPTED, attach, detach, MAX_ATTACHMENTS } from "../../api/chat.ts";
import type { Me } from "../../api/types.ts";
import { formatBytes } from "../../model/money.ts";
import { Failure, useAction } from "../../ui/parts.tsx";
import { visible } from "../../ui/visible.ts";
import { LimitFields, type LimitName } from "../limits.tsx";
import { useDraft } from "./draft.ts";
import type { Turns } from "./use-turns.ts";

const LIMITED: LimitName[] = ["max_cost_usd", "max_tokens", "max_steps", "timeout_s"];
const MAX_TEXT = 1_000_000;

export interface ComposerProps {
  me: Me;
  chat: string;
  turns: Turns;
  /** Whether an answer is being written, which can be stopped. */
  onStop?: (() => void) | undefined;
  /** Returns whether the message was taken. */
  onSend: (content: string, attachments: string[]) => Promise<boolean>;
  onEditLast?: () => void;
}

export function Composer({ me, chat, turns, onStop, onSend, onEditLast }: ComposerProps) {
  const [draft, setDraft] = useDraft(me.name, chat);
  const latest = useRef(draft);
  latest.current = draft;
  const [uploading, failed, upload] = useAction();
  const [over, setOver] = useState(false);
  const field = useRef<HTMLTextAreaElement>(null);
  const id = useId();
  useEffect(() => field.current?.focus({ preventScroll: true }), [chat]);
  const add = (files: Iterable<File>) =>
    upload(async () => {
      for (const file of files) {
        if (latest.current.attachments.length >= MAX_ATTACHMENTS) throw new Error(`a message has at most ${MAX_ATTACHMENTS} attachments`);
        const added = await attach(file);
        latest.current = { ...latest.current, attachments: [...latest.current.attachments, added] };
        setDraft(latest.current);
      }
    });
  const remove = (gone: string) => {
    setDraft({ ...draft, attachments: draft.attachments.filter((one) => one.id !== gone) });
    void detach(gone).catch(() => undefined); // what no message refers to is removed by the server in time
    field.current?.focus();
  };
  const canSend = !turns.busy && !uploading && !onStop && draft.text.trim() !== "";
  const submit = async () => {
    if (!canSend) return;
    const sent = await onSend(draft.text, draft.attachments.map((one) => one.id)); // prettier-ignore
    if (sent) setDraft({ text: "", attachments: [] });
    field.current?.focus();
  };
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.nativeEvent.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      void submit();
    } else if (event.key === "ArrowUp" && draft.text === "" && onEditLast) {
      event.preventDefault();
      onEditLast();
    }
  };
  const onPaste = (event: ClipboardEvent) => {
    if (event.clipboardData.files.length === 0) return;
    event.preventDefault();
    void add([...event.clipboardData.files]);
  };
  const onDrop = (event: DragEvent) => {
    event.preventDefault();
    setOver(false);
    void add([...event.dataTransfer.files]);
  };
  return (
    <form
      className={`composer${over ? " over" : ""}`}
      aria-label="Message"
      onSubmit={(event) => (event.preventDefault(), void submit())}
      onDragOver={(event) => (event.preventDefault(), setOver(true))}
      onDragLeave={() => setOver(false)}
      onDrop={onDrop}
    >
      <div className="column stack">
        <Failure error={turns.error} />
        <Failure error={failed} />
        <div className="box">
          {draft.attachments.length > 0 && (
            <ul className="files" aria-label="Attachments of this message">
              {draft.attachments.map((one) => (
                <li key={one.id} className="file">
                  {visible(one.name)} <span className="muted">{formatBytes(one.size)}</span>
                  <button type="button" onClick={() => remove(one.id)} aria-label={`Remove ${visible(one.name)}`}>
                    ✕
                  </button>
                </li>
              ))}
            </ul>
          )}
          <label className="hidden" htmlFor={id}>
            Message
          </label>
          <textarea
            id={id}
            ref={field}
            rows={2}
            maxLength={MAX_TEXT}
            placeholder="Write a message"
            value={draft.text}
            onChange={(event) => setDraft({ ...draft, text: event.target.value })}
            onKeyDown={onKeyDown}
            onPaste={onPaste}
          />
          <Tools turns={turns} uploading={uploading} onFiles={add}>
            {onStop ? (
              <button type="button" className="danger" data-action="stop" onClick={onStop}>
                <span aria-hidden="true">■</span> Stop
              </button>
            ) : (
              <button className="primary" disabled={!canSend}>
                {turns.busy ? "Sending…" : "Send"}
              </button>
            )}
          </Tools>
        </div>
      </div>
    </form>
  );
}

function Tools(props: { turns: Turns; uploading: boolean; onFiles: (files: File[]) => void; children: ReactNode }) {
  const { turns, uploading, onFiles, children } = props;
  const [open, setOpen] = useState(false);
  const input = useRef<HTMLInputElement>(null);
  const id = useId();
  const set = Object.values(turns.limits).filter((one) => one.trim()).length;
  const typed = turns.limits.max_cost_usd?.trim();
  const money = typed && Number(typed) > 0 ? typed : "";
  return (
    <>
      {open && (
        <div id={id} className="limits stack">
          <p className="small muted">
            For each further answer in this chat, kept in this browser. The server's own limits apply where a field is empty.
          </p>
          <LimitFields values={turns.limits} onChange={turns.setLimits} names={LIMITED} />
        </div>
      )}
      <div className="bar">
        <input
          ref={input}
          type="file"
          multiple
          hidden
          accept={ACCEPTED}
          aria-label="Files to attach"
          onChange={(event) => {
            onFiles([...(event.target.files ?? [])]);
            event.target.value = "";
          }}
        />
        <button type="button" className="quiet" disabled={uploading} onClick={() => input.current?.click()}>
          {uploading ? "Attaching…" : "Attach"}
        </button>
        <button type="button" className="quiet" aria-expanded={open} aria-controls={id} onClick={() => setOpen(!open)}>
          {money ? `Limit: $${money} an answer` : set ? `Limits: ${set} set` : "Limits"}
        </button>
        <span className="grow" />
        <span className="muted small keys">Enter sends · ? shows keys</span>
        {children}
      </div>
    </>
  );
}
