// Text of a model as a tree of harmless elements: what of markdown is shown, and how.
//
// Only marked's lexer is used, and its tokens become a tree with tags of a closed list. HTML is text, a link goes to the
// web, to mail or to a page of this UI, and a picture is a link that nobody has to follow. Pure: no React, no DOM.

import { Lexer, type Token, type Tokens } from "marked";

export type Tag =
  | "p" | "h3" | "h4" | "h5" | "h6" | "strong" | "em" | "del" | "code" | "pre" | "blockquote" | "ul" | "ol" | "li"
  | "table" | "thead" | "tbody" | "tr" | "th" | "td" | "hr" | "br" | "a" | "span"; // prettier-ignore

export interface Element {
  tag: Tag;
  children: Node[];
  /** Of links: an address that `safeHref` let through. */
  href?: string;
  /** Of code: its language, as written. */
  language?: string;
  /** Of ordered lists. */
  start?: number;
  align?: "left" | "center" | "right";
}

export type Node = string | Element;

/** Beyond this, a text is shown as it is written. */
export const MAX_TEXT = 200_000;
/** A run of text without a break that is longer is not searched for emphasis and links: that takes quadratic time. */
export const MAX_INLINE = 6_000;
const MAX_DEPTH = 40;
/** Containers within containers on one line, or a list item far to the right: nobody writes so, and it takes long. */
const TOO_NESTED = /^(?:[ \t]*(?:>|[-*+](?=[ \t])|\d{1,9}[.)](?=[ \t]))){17,}|^[ \t]{65,}(?:[-*+]|\d{1,9}[.)])[ \t]/m;
/**
 * Characters that hide or reorder others, and tags, which carry text that cannot be seen. Tab, line feed and carriage
 * return are not among them, nor are the joiners that emoji and several scripts need.
 */
const INVISIBLE =
  /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\u{e0000}-\u{e007f}]/gu;
const ENTITIES: Record<string, string> = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };

/** Text with every character that hides or reorders others written out, such as ⟨U+202E⟩. */
export function visible(text: string): string {
  return text.replace(INVISIBLE, (one) => `⟨U+${one.codePointAt(0)!.toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

/** The address of a link if it is one of the web, of mail, or of this UI; null for any other. */
export function safeHref(href: string): string | null {
  const text = href.trim();
  if (visible(text) !== text || /\s/.test(text)) return null;
  if (/^#\//.test(text) || /^\/(?![/\\])/.test(text)) return text.includes("\\") ? null : text;
  if (/^mailto:[^/]/i.test(text)) return text;
  if (!/^https?:\/\//i.test(text) || text.includes("\\")) return null;
  try {
    const url = new URL(text);
    // A name before the host makes one address look like another.
    return url.username || url.password || !url.hostname ? null : url.href;
  } catch {
    return null;
  }
}

/** The top-level blocks of a text, as written. Joined again they are the text. */
export function splitBlocks(text: string): string[] {
  if (text.length > MAX_TEXT) return [...splitBlocks(text.slice(0, MAX_TEXT)), text.slice(MAX_TEXT)];
  if (TOO_NESTED.test(text)) return [text];
  const blocks: string[] = [];
  let found = "";
  for (const token of blockTokens(text).tokens) {
    if (token.type === "space" && blocks.length) blocks[blocks.length - 1] += token.raw;
    else blocks.push(token.raw);
    found += token.raw;
  }
  // The lexer normalises some line ends; what it changed is shown in one piece instead of being guessed at.
  return found === text ? blocks : [text];
}

/** Splits a text that grows: blocks that are finished are not looked at again. */
export function blockSplitter(): (text: string) => string[] {
  let finished: string[] = [];
  let before = "";
  return (text) => {
    if (!text.startsWith(before)) [finished, before] = [[], ""];
    const rest = splitBlocks(text.slice(before.length));
    if (rest.length > 1) {
      // The block before the last may still be continued by it, as a list is.
      const done = rest.slice(0, -2);
      finished = [...finished, ...done];
      before += done.join("");
      return [...finished, ...rest.slice(-2)];
    }
    return [...finished, ...rest];
  };
}

/** One block as a tree; a block that would take too long to read is shown as it is written. */
export function parseBlock(raw: string): Node[] {
  if (raw.length > MAX_TEXT || TOO_NESTED.test(raw)) return [plain(raw)];
  try {
    const lexer = blockTokens(raw);
    for (const { src, tokens } of lexer.inlineQueue) {
      if (src.length > MAX_INLINE) tokens.push({ type: "text", raw: src, text: src } as Tokens.Text);
      else lexer.inlineTokens(src, tokens);
    }
    return blocksOf(lexer.tokens, 0);
  } catch {
    return [plain(raw)];
  }
}

function blockTokens(text: string): Lexer {
  const lexer = new Lexer({ gfm: true });
  lexer.blockTokens(text.replace(/\r\n|\r/g, "\n"), lexer.tokens);
  return lexer;
}

function plain(text: string): Element {
  return { tag: "p", children: [visible(text)] };
}

function blocksOf(tokens: Token[], depth: number): Node[] {
  return tokens.flatMap((token) => blockOf(token, depth));
}

function blockOf(token: Token, depth: number): Node[] {
  if (depth > MAX_DEPTH) return [visible(token.raw)];
  switch (token.type) {
    case "space":
    case "def":
    case "checkbox":
      return [];
    case "hr":
      return [{ tag: "hr", children: [] }];
    case "heading":
      return [{ tag: headingTag(token.depth as number), children: inline(token.tokens, depth) }];
    case "paragraph":
      return [{ tag: "p", children: inline(token.tokens, depth) }];
    case "code":
      return [codeOf(token as Tokens.Code)];
    case "blockquote":
      return [{ tag: "blockquote", children: blocksOf(token.tokens ?? [], depth + 1) }];
    case "list":
      return [listOf(token as Tokens.List, depth)];
    case "table":
      return [tableOf(token as Tokens.Table, depth)];
    case "html":
      return [plain(token.raw.trimEnd())];
    case "text":
      return token.tokens ? inline(token.tokens, depth) : [textOf(token.text as string)];
    default:
      return [visible(token.raw)];
  }
}

function headingTag(depth: number): Tag {
  return (["h3", "h4", "h5"] as const)[depth - 1] ?? "h6";
}

function codeOf(token: Tokens.Code): Element {
  const element: Element = { tag: "pre", children: [visible(token.text)] };
  const language = visible(token.lang ?? "").trim().slice(0, 40);
  return language ? { ...element, language } : element;
}

function listOf(token: Tokens.List, depth: number): Element {
  const items = token.items.map((item): Element => {
    const children = blocksOf(item.tokens, depth + 1);
    return { tag: "li", children: item.task ? [item.checked ? "☑ " : "☐ ", ...children] : children };
  });
  if (!token.ordered) return { tag: "ul", children: items };
  return { tag: "ol", children: items, ...(Number(token.start) !== 1 ? { start: Number(token.start) || 0 } : {}) };
}

function tableOf(token: Tokens.Table, depth: number): Element {
  const cell = (tag: "th" | "td") => (one: Tokens.TableCell) => {
    const element: Element = { tag, children: inline(one.tokens, depth) };
    return one.align ? { ...element, align: one.align } : element;
  };
  const row = (tag: "th" | "td", cells: Tokens.TableCell[]): Element => ({ tag: "tr", children: cells.map(cell(tag)) });
  const head: Element = { tag: "thead", children: [row("th", token.header)] };
  return { tag: "table", children: [head, { tag: "tbody", children: token.rows.map((cells) => row("td", cells)) }] };
}

function inline(tokens: Token[] | undefined, depth: number): Node[] {
  return (tokens ?? []).flatMap((token) => inlineOf(token, depth + 1));
}

function inlineOf(token: Token, depth: number): Node[] {
  if (depth > MAX_DEPTH) return [visible(token.raw)];
  switch (token.type) {
    case "strong":
    case "em":
    case "del":
      return [{ tag: token.type, children: inline(token.tokens, depth) }];
    case "codespan":
      return [{ tag: "code", children: [visible(token.text as string)] }];
    case "br":
      return [{ tag: "br", children: [] }];
    case "link":
      return linkOf(token as Tokens.Link, inline(token.tokens, depth));
    case "image":
      return linkOf(token as Tokens.Image, ["Picture: ", textOf((token.text as string) || token.href as string)]);
    case "escape":
      return [visible(token.text as string)];
    case "text":
      return token.tokens ? inline(token.tokens, depth) : [textOf(token.text as string)];
    default: // HTML among them
      return [visible(token.raw)];
  }
}

/** A link that is not let through stays as it is written, so that nobody takes its text for something it is not. */
function linkOf(token: Tokens.Link | Tokens.Image, children: Node[]): Node[] {
  const href = safeHref(token.href);
  return href === null ? [visible(token.raw)] : [{ tag: "a", href, children: withoutLinks(children) }];
}

function withoutLinks(nodes: Node[]): Node[] {
  return nodes.flatMap((node) => {
    if (typeof node === "string") return [node];
    return node.tag === "a" ? withoutLinks(node.children) : [{ ...node, children: withoutLinks(node.children) }];
  });
}

function textOf(text: string): string {
  return visible(text.replace(/&(?:#(\d{1,7})|#x([0-9a-f]{1,6})|(\w{2,5}));/gi, decoded));
}

function decoded(whole: string, decimal?: string, hex?: string, name?: string): string {
  if (name) return ENTITIES[name] ?? whole;
  const code = decimal ? Number(decimal) : parseInt(hex!, 16);
  return code > 0 && code <= 0x10ffff && !(code >= 0xd800 && code <= 0xdfff) ? String.fromCodePoint(code) : whole;
}
