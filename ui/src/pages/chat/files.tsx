// Attachments of messages. Pictures are read by the page itself and shown from memory; everything else is saved.

import { useEffect, useState } from "react";
import { attachmentBytes } from "../../api/chat.ts";
import { formatBytes } from "../../model/money.ts";
import { Failure, useAction } from "../../ui/parts.tsx";
import { visible } from "../../ui/visible.ts";

export interface Attached {
  id: string;
  name: string;
  media_type: string;
  size: number;
}

/** Types that a browser decodes without executing anything; an SVG is not among them. */
const PICTURES = new Set(["image/png", "image/jpeg", "image/gif", "image/webp"]);
const MAX_PICTURE = 8 * 1024 * 1024;

export function attachedTo(data: Record<string, unknown>): Attached[] {
  return Array.isArray(data.attachments) ? (data.attachments as Attached[]).filter((one) => typeof one?.id === "string") : [];
}

export function Attachments({ files }: { files: Attached[] }) {
  if (files.length === 0) return null;
  return (
    <ul className="files" aria-label="Attachments">
      {files.map((file) => (
        <li key={file.id}>{PICTURES.has(file.media_type) && file.size <= MAX_PICTURE ? <Picture file={file} /> : <Saved file={file} />}</li>
      ))}
    </ul>
  );
}

function Picture({ file }: { file: Attached }) {
  const [url, setUrl] = useState<string | null>(null);
  const [failed, setFailed] = useState(false);
  useEffect(() => {
    const abort = new AbortController();
    let made: string | null = null;
    attachmentBytes(file.id, abort.signal).then(
      (blob) => {
        if (abort.signal.aborted || !PICTURES.has(blob.type)) return setFailed(true);
        setUrl((made = URL.createObjectURL(blob)));
        setFailed(false);
      },
      () => abort.signal.aborted || setFailed(true),
    );
    return () => {
      abort.abort();
      if (made) URL.revokeObjectURL(made);
    };
  }, [file.id]);
  if (failed || url === null) return <Saved file={file} />;
  return <img className="picture" src={url} alt={visible(file.name)} onError={() => setFailed(true)} />;
}

function Saved({ file }: { file: Attached }) {
  const [busy, error, act] = useAction();
  const save = () =>
    act(async () => {
      const url = URL.createObjectURL(await attachmentBytes(file.id));
      const link = Object.assign(document.createElement("a"), { href: url, download: file.name });
      link.click();
      URL.revokeObjectURL(url);
    });
  return (
    <>
      <button className="file" disabled={busy} onClick={() => void save()}>
        <span aria-hidden="true">⇩</span> {visible(file.name)} <span className="muted">{formatBytes(file.size)}</span>
        <span className="hidden">, save</span>
      </button>
      <Failure error={error} />
    </>
  );
}
