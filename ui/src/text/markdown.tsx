// Markdown as React elements. Finished blocks are kept as they are; while a text grows, its last blocks are read again.

import { createElement, memo, useMemo, useRef, useState, type ReactNode } from "react";
import { blockSplitter, parseBlock, type Element, type Node } from "./blocks.ts";

export const Markdown = memo(function Markdown({ text }: { text: string }) {
  const split = useRef<ReturnType<typeof blockSplitter>>(null);
  split.current ??= blockSplitter();
  const blocks = split.current(text);
  return (
    <div className="markdown" dir="auto">
      {blocks.map((raw, index) => (
        <Block key={index} raw={raw} />
      ))}
    </div>
  );
});

const Block = memo(function Block({ raw }: { raw: string }) {
  return useMemo(() => render(parseBlock(raw)), [raw]);
});

function render(nodes: Node[]): ReactNode {
  return nodes.map((node, index) => (typeof node === "string" ? node : renderElement(node, index)));
}

function renderElement(element: Element, key: number): ReactNode {
  const { tag, children, href } = element;
  if (tag === "a") return href?.startsWith("#/") ? <a key={key} href={href}>{render(children)}</a> : <Outside key={key} href={href!}>{render(children)}</Outside>; // prettier-ignore
  if (tag === "pre") return <Code key={key} text={String(children[0])} language={element.language} />;
  if (tag === "table") return <Table key={key}>{render(children)}</Table>;
  if (tag === "hr" || tag === "br") return createElement(tag, { key });
  const properties: Record<string, unknown> = { key };
  if (element.start !== undefined) properties.start = element.start;
  if (element.align) properties.className = `to-${element.align}`;
  return createElement(tag, properties, render(children));
}

/** The address is in the title, so that it can be seen before it is opened. */
function Outside({ href, children }: { href: string; children: ReactNode }) {
  return (
    <a href={href} title={href} target="_blank" rel="noopener noreferrer">
      {children}
    </a>
  );
}

function Table({ children }: { children: ReactNode }) {
  return (
    <div className="table" tabIndex={0} role="region" aria-label="Table">
      <table>{children}</table>
    </div>
  );
}

function Code({ text, language }: { text: string; language: string | undefined }) {
  const [copied, setCopied] = useState(false);
  const copy = () => void navigator.clipboard?.writeText(text).then(() => setCopied(true));
  return (
    <div className="code">
      <div className="code-bar">
        <span>{language ?? "text"}</span>
        <button type="button" onClick={copy} onBlur={() => setCopied(false)}>
          {copied ? "Copied" : "Copy"}
        </button>
      </div>
      <pre tabIndex={0} role="region" aria-label={`Code${language ? `, ${language}` : ""}`}>
        <code>{text}</code>
      </pre>
    </div>
  );
}
