// JSON that is written back as it was read: every byte of what was not changed stays, numbers as they were spelled.
//
// `read` gives plain values and remembers the text of each. `write` compares a changed value with the one that was read:
// parts that are the same object are written as they were, changed objects keep the order, spacing and spelling of the
// members that are still there. It knows nothing of graphs, except that items of a list are matched by their `id`.

type Container = Record<string, unknown> | unknown[];

interface Member {
  key: string | number;
  /** Whitespace before the member, and what is between its name and its value. */
  before: string;
  colon: string;
  after: string;
  value: unknown;
  text: string;
  name: string;
}

interface Source {
  text: string;
  members: Member[];
  close: string;
}

export interface Origin {
  value: unknown;
  sources: WeakMap<object, Source>;
  /** What one level of indentation is; null for JSON on one line. */
  indent: string | null;
  head: string;
  tail: string;
}

export class JsonInvalid extends Error {}

/** The text of every value that was read. Values never change: one that comes back by undoing is written as it was read. */
const SOURCES: Origin["sources"] = new WeakMap();
const ORIGINS = new WeakMap<object, Origin>();

const SPACE = /[ \t\n\r]*/y;
const NUMBER = /-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?/y;
const WORDS: Record<string, unknown> = { true: true, false: false, null: null };
const MAX_DEPTH = 200;

export function read(text: string): Origin {
  const sources = SOURCES;
  let at = 0;
  const match = (pattern: RegExp): string => {
    pattern.lastIndex = at;
    const found = pattern.exec(text)?.[0] ?? "";
    at += found.length;
    return found;
  };
  const fail = (what: string): never => {
    const before = text.slice(0, at).split("\n");
    throw new JsonInvalid(`line ${before.length}, column ${before.at(-1)!.length + 1}: ${what}`);
  };
  const string = (): string => {
    const start = at;
    if (text[at] !== '"') fail("a name in quotes is expected");
    for (at++; text[at] !== '"'; at++) {
      if (at >= text.length) fail("the text has no closing quote");
      if (text[at] === "\\") at++;
    }
    at++;
    return JSON.parse(text.slice(start, at)) as string;
  };
  const container = (depth: number): Container => {
    const start = at;
    const isList = text[at++] === "[";
    const members: Member[] = [];
    const found: Container = isList ? [] : {};
    for (;;) {
      const before = match(SPACE);
      if (text[at] === (isList ? "]" : "}") && !members.length) {
        at++;
        sources.set(found, { text: text.slice(start, at), members, close: before });
        return found;
      }
      const nameAt = at;
      const key = isList ? members.length : string();
      const name = text.slice(nameAt, at);
      const colonAt = at;
      if (!isList) {
        match(SPACE);
        if (text[at++] !== ":") fail("a colon is expected");
        match(SPACE);
      }
      const colon = text.slice(colonAt, at);
      const valueAt = at;
      const item = value(depth + 1);
      const member = { key, before, colon, value: item, text: text.slice(valueAt, at), name, after: "" };
      members.push(member);
      put(found, key, item);
      const after = match(SPACE);
      if (text[at] === ",") {
        member.after = after;
        at++;
        continue;
      }
      if (text[at] !== (isList ? "]" : "}")) fail(`a comma or ${isList ? "]" : "}"} is expected`);
      at++;
      sources.set(found, { text: text.slice(start, at), members, close: after });
      return found;
    }
  };
  const value = (depth: number): unknown => {
    if (depth > MAX_DEPTH) fail("it is nested too deeply");
    const sign = text[at] ?? "";
    if (sign === "{" || sign === "[") return container(depth);
    if (sign === '"') return string();
    const word = Object.keys(WORDS).find((one) => text.startsWith(one, at));
    if (word) return (at += word.length), WORDS[word];
    const number = match(NUMBER);
    return number ? Number(number) : fail(sign ? `${JSON.stringify(sign)} is not expected here` : "the text ends too early");
  };
  const head = match(SPACE);
  const found = value(0);
  const end = at;
  match(SPACE);
  if (at < text.length) fail("there is more text after the value");
  const origin = { value: found, sources, indent: indentOf(found, sources), head, tail: text.slice(end) };
  if (isContainer(found)) ORIGINS.set(found, origin);
  return origin;
}

function indentOf(value: unknown, sources: Origin["sources"]): string | null {
  const first = isContainer(value) ? sources.get(value)?.members[0]?.before : undefined;
  return first?.includes("\n") ? first.slice(first.lastIndexOf("\n") + 1) : null;
}

/** The text of a value that was made from `origin.value`. */
export function write(value: unknown, origin: Origin): string {
  const { head, tail } = (isContainer(value) && ORIGINS.get(value)) || origin;
  return head + part(value, origin.value, undefined, origin, 0) + tail;
}

function part(value: unknown, old: unknown, raw: string | undefined, origin: Origin, depth: number): string {
  if (!isContainer(value)) return raw !== undefined && Object.is(value, old) ? raw : JSON.stringify(value ?? null);
  const asRead = origin.sources.get(value);
  if (asRead) return asRead.text;
  const source = isContainer(old) && Array.isArray(old) === Array.isArray(value) ? origin.sources.get(old) : undefined;
  const entries: [string | number, unknown][] = Array.isArray(value) ? [...value.entries()] : Object.entries(value);
  const kept = entries.filter(([, item]) => Array.isArray(value) || item !== undefined);
  if (!kept.length) return source && !source.members.length ? source.text : Array.isArray(value) ? "[]" : "{}";
  const pieces = kept.map(([key, item], at) => {
    const member = source && counterpart(source, key, item);
    const style = member ?? source?.members[0] ?? null;
    const before = style?.before ?? lineBefore(origin, depth + 1);
    const name = typeof key === "number" ? "" : (member?.name ?? JSON.stringify(key));
    const colon = typeof key === "number" ? "" : (style?.colon ?? (origin.indent === null ? ":" : ": "));
    const text = part(item, member?.value, member?.text, origin, depth + 1);
    return before + name + colon + text + (at < kept.length - 1 ? (member?.after ?? "") : "");
  });
  const close = source?.members.length ? source.close : lineBefore(origin, depth);
  const [open, end] = Array.isArray(value) ? "[]" : "{}";
  return open + pieces.join(",") + close + end;
}

function lineBefore(origin: Origin, depth: number): string {
  return origin.indent === null ? "" : `\n${origin.indent.repeat(depth)}`;
}

/** The member that an item was: of the same name, the same id, or at the same place. */
function counterpart(source: Source, key: string | number, item: unknown): Member | undefined {
  if (typeof key === "string") return source.members.findLast((member) => member.key === key);
  const same = source.members.find((member) => member.value === item && isContainer(item));
  if (same) return same;
  const id = idOf(item);
  return id === undefined ? source.members[key] : source.members.find((member) => idOf(member.value) === id);
}

function idOf(value: unknown): unknown {
  return isContainer(value) && !Array.isArray(value) ? value.id : undefined;
}

/** The same JSON with two spaces a level and a line feed at its end, numbers as they are spelled. */
export function pretty(origin: Origin, value: unknown = origin.value): string {
  const print = (item: unknown, raw: string | undefined, margin: string): string => {
    if (!isContainer(item)) return raw ?? JSON.stringify(item);
    const members = origin.sources.get(item)?.members ?? [];
    if (!members.length) return Array.isArray(item) ? "[]" : "{}";
    const inner = `${margin}  `;
    const lines = members.map((member) => `${inner}${member.name && `${member.name}: `}${print(member.value, member.text, inner)}`);
    const [open, close] = Array.isArray(item) ? "[]" : "{}";
    return `${open}\n${lines.join(",\n")}\n${margin}${close}`;
  };
  return `${print(value, undefined, "")}\n`;
}

function put(container: Container, key: string | number, value: unknown): void {
  if (Array.isArray(container)) container.push(value);
  // An own property, whatever its name: `__proto__` would set the prototype.
  else Object.defineProperty(container, key, { value, writable: true, enumerable: true, configurable: true });
}

function isContainer(value: unknown): value is Container {
  return typeof value === "object" && value !== null;
}
