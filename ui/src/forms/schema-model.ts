// What a form shows for a JSON Schema, and what is wrong with a value. Knows nothing of React.
//
// It reads the part of JSON Schema that pydantic and tools write: $ref and $defs, anyOf with null, enum, const, bounds,
// arrays, objects and maps. What it does not know it leaves to the server, which checks every value again.

export type Json = null | boolean | number | string | Json[] | { [name: string]: Json };
export type Schema = Record<string, unknown>;

export type FieldKind =
  "const" | "enum" | "boolean" | "number" | "text" | "long-text" | "list" | "object" | "map" | "variants" | "json";

export interface FieldSpec {
  kind: FieldKind;
  /** Without references, and without the null of an optional field. */
  schema: Schema;
  /** Whether null is a value of the field. */
  nullable: boolean;
  label: string;
  description: string;
  /** The other shapes a value may have, of kind `variants`. */
  variants: Schema[];
}

/** Text of a field that is not a value yet, such as JSON while it is written. A form that has one is not complete. */
export class Draft {
  readonly text: string;
  readonly message: string;
  constructor(text: string, message: string) {
    this.text = text;
    this.message = message;
  }
}

export type Problems = Record<string, string>;

const MAX_DEPTH = 24;
const LONG_TEXT = 10_000;
const MAX_PATTERN_TEXT = 10_000;
/** A schema may refer to itself, and a value may be deep: what takes more steps is left to the server. */
const MAX_SHAPES = 500;
const MAX_PARTS = 1_000;
const MAX_CHECKS = 20_000;

interface Work {
  left: number;
}

// ---- reading a schema

/** Follows references and joins allOf; keywords beside a reference take precedence. */
export function resolve(schema: unknown, root: Schema, depth = 0): Schema {
  if (!isObject(schema) || depth > MAX_DEPTH) return {};
  if (depth === 0 && isEndless([schema], root)) return {};
  if (typeof schema.$ref === "string") {
    const { $ref, ...own } = schema;
    return { ...resolve(pointer(root, $ref), root, depth + 1), ...own };
  }
  if (Array.isArray(schema.allOf)) {
    const { allOf, ...own } = schema;
    return [...allOf.map((part) => resolve(part, root, depth + 1)), own].reduce<Schema>(joined, {});
  }
  return schema;
}

/** Whether a value could never have one of these shapes: they lead to themselves before they come to a part of it. */
function isEndless(shapes: unknown[], root: Schema, above: readonly string[] = [], work: Work = { left: MAX_SHAPES }): boolean {
  return shapes.some((given) => {
    let shape = given;
    let seen = above;
    while (isObject(shape) && typeof shape.$ref === "string") {
      if (seen.includes(shape.$ref)) return true;
      seen = [...seen, shape.$ref];
      shape = pointer(root, shape.$ref);
    }
    if ((work.left -= 1) < 0) return true;
    if (!isObject(shape)) return false;
    const { anyOf, oneOf, allOf } = shape;
    const inner = [anyOf, oneOf, allOf].flatMap((some) => (Array.isArray(some) ? (some as unknown[]) : []));
    return inner.length > 0 && isEndless(inner, root, seen, work);
  });
}

function joined(left: Schema, right: Schema): Schema {
  const both: Schema = { ...left, ...right };
  if (isObject(left.properties) && isObject(right.properties)) both.properties = { ...left.properties, ...right.properties };
  if (Array.isArray(left.required) && Array.isArray(right.required)) both.required = [...left.required, ...right.required];
  return both;
}

function pointer(root: Schema, reference: string): unknown {
  if (reference === "#") return root;
  if (!reference.startsWith("#/")) return {};
  let found: unknown = root;
  for (const part of reference.slice(2).split("/")) {
    const name = part.replaceAll("~1", "/").replaceAll("~0", "~");
    found = isObject(found) && Object.hasOwn(found, name) ? found[name] : undefined;
  }
  return found;
}

/** What a field of this schema shows. `value` decides only whether text needs more than one line. */
export function fieldOf(schema: unknown, root: Schema, name = "", value?: unknown): FieldSpec {
  const whole = resolve(schema, root);
  const { core, nullable, variants } = withoutNull(whole, root);
  const kind = kindOf(core, variants, value);
  return {
    kind,
    schema: core,
    nullable,
    variants: kind === "variants" ? variants : [],
    label: labelOf(name, whole.title ?? (variants.length > 1 ? undefined : core.title)),
    description: textOf(whole.description) || textOf(core.description),
  };
}

function withoutNull(whole: Schema, root: Schema): { core: Schema; nullable: boolean; variants: Schema[] } {
  const options = Array.isArray(whole.anyOf) ? whole.anyOf : Array.isArray(whole.oneOf) ? whole.oneOf : null;
  if (options === null) return { ...singleType(whole), variants: [] };
  const all = options.map((option) => resolve(option, root));
  const variants = all.filter((option) => option.type !== "null" && !("const" in option && option.const === null));
  const nullable = variants.length < all.length;
  const { anyOf: _any, oneOf: _one, ...own } = whole;
  if (variants.length !== 1) return { core: own, nullable, variants };
  const inner = withoutNull(variants[0]!, root);
  const core = { ...inner.core, ...own, description: own.description ?? inner.core.description };
  return { core, nullable: nullable || inner.nullable, variants: inner.variants };
}

function singleType(schema: Schema): { core: Schema; nullable: boolean } {
  if (!Array.isArray(schema.type)) return { core: schema, nullable: schema.type === "null" };
  const types = schema.type.filter((type) => type !== "null");
  const core = { ...schema, type: types.length === 1 ? types[0] : types };
  return { core, nullable: types.length < schema.type.length };
}

function kindOf(schema: Schema, variants: Schema[], value: unknown): FieldKind {
  if ("const" in schema) return "const";
  if (Array.isArray(schema.enum)) return "enum";
  if (variants.length > 1) return isNumberOrText(variants) ? "text" : "variants";
  switch (schema.type) {
    case "boolean":
      return "boolean";
    case "integer":
    case "number":
      return "number";
    case "string":
      return isLong(schema, value) ? "long-text" : "text";
    case "array":
      return isObject(schema.items) ? "list" : "json";
    case "object":
      return objectKind(schema);
    default:
      return isObject(schema.properties) ? "object" : "json";
  }
}

function objectKind(schema: Schema): FieldKind {
  if (isObject(schema.properties) && Object.keys(schema.properties).length) return "object";
  if (isObject(schema.additionalProperties) && Object.keys(schema.additionalProperties).length) return "map";
  return schema.additionalProperties === false ? "object" : "json";
}

/** Amounts of money are numbers, or text that keeps every digit. */
function isNumberOrText(variants: Schema[]): boolean {
  const types = variants.map((variant) => variant.type);
  return types.includes("string") && types.every((type) => type === "string" || type === "number" || type === "integer");
}

function isLong(schema: Schema, value: unknown): boolean {
  if (schema["x-penstock-widget"] === "text" || schema.format === "uri") return false;
  if (schema["x-penstock-widget"] === "long-text" || schema.format === "textarea") return true;
  if (typeof value === "string" && (value.includes("\n") || value.length > 80)) return true;
  return typeof schema.maxLength === "number" && schema.maxLength >= LONG_TEXT;
}

const UNITS: Record<string, string> = { usd: "US dollars", s: "seconds", ms: "milliseconds" };

/** A label that a person would write: pydantic's own titles only repeat the name. */
export function labelOf(name: string, title?: unknown): string {
  if (typeof title === "string" && title && (!name || plain(title) !== plain(name))) return title;
  const words = name
    .replace(/([a-z0-9])([A-Z])/g, "$1_$2")
    .split(/[_\s]+/)
    .filter(Boolean)
    .map((word) => word.toLowerCase());
  if (!words.length) return "Value";
  const unit = words.length > 1 ? UNITS[words.at(-1)!] : undefined;
  const text = (unit ? words.slice(0, -1) : words).join(" ").replace(/^max /, "maximum ").replace(/^min /, "minimum ");
  return `${text[0]!.toUpperCase()}${text.slice(1)}${unit ? `, ${unit}` : ""}`;
}

function plain(text: string): string {
  return text.toLowerCase().replace(/[^a-z0-9]/g, "");
}

/** The properties of an object in the order of its schema, then what a value has beside them. */
export function propertiesOf(schema: Schema): [string, Schema][] {
  return isObject(schema.properties)
    ? Object.entries(schema.properties).filter((entry): entry is [string, Schema] => isObject(entry[1]))
    : [];
}

export function isRequired(schema: Schema, name: string): boolean {
  return Array.isArray(schema.required) && schema.required.includes(name);
}

/** A sentence on what a field accepts, for its hint. */
export function boundsOf({ kind, schema }: FieldSpec): string {
  const number = (name: string) => (typeof schema[name] === "number" ? (schema[name] as number) : null);
  if (kind === "number") {
    const low = number("minimum") ?? number("exclusiveMinimum");
    const high = number("maximum") ?? number("exclusiveMaximum");
    const shown = (value: number) => value.toLocaleString("en-US", { maximumFractionDigits: 9 });
    if (low !== null && high !== null) return `${shown(low)} to ${shown(high)}`;
    if (low !== null) return `At least ${shown(low)}`;
    return high === null ? "" : `At most ${shown(high)}`;
  }
  if (kind === "list") {
    const [low, high] = [number("minItems") ?? 0, number("maxItems")];
    if (low && high !== null) return `${low} to ${high} items`;
    if (low) return low === 1 ? "At least one item" : `At least ${low} items`;
  }
  return "";
}

// ---- values

/** A value to begin with: the default, or the smallest thing that has the required parts. */
export function initialValue(
  schema: unknown,
  root: Schema = isObject(schema) ? schema : {},
  depth = 0,
  work: Work = { left: MAX_PARTS },
): Json | undefined {
  if ((work.left -= 1) < 0) return null;
  const spec = fieldOf(schema, root);
  const whole = resolve(schema, root);
  if (whole.default !== undefined) return structuredClone(whole.default) as Json;
  if (spec.nullable || depth > MAX_DEPTH) return null;
  switch (spec.kind) {
    case "const":
      return spec.schema.const as Json;
    case "enum":
      return (spec.schema.enum as Json[])[0];
    case "boolean":
      return false;
    case "text":
    case "long-text":
      return "";
    case "list": {
      const least = typeof spec.schema.minItems === "number" ? Math.min(spec.schema.minItems, 100) : 0;
      return Array.from({ length: least }, () => initialValue(spec.schema.items, root, depth + 1, work) ?? null);
    }
    case "object":
      return requiredParts(spec.schema, root, depth, work);
    case "map":
      return {};
    case "variants":
      return initialValue(spec.variants[0], root, depth + 1, work);
    case "json":
      return spec.schema.type === "object" ? {} : spec.schema.type === "array" ? [] : undefined;
    default:
      return undefined;
  }
}

function requiredParts(schema: Schema, root: Schema, depth: number, work: Work): Json {
  const parts: [string, Json][] = [];
  for (const [name, property] of propertiesOf(schema)) {
    if (!isRequired(schema, name)) continue;
    const value = initialValue(property, root, depth + 1, work);
    if (value !== undefined) parts.push([name, value]);
  }
  return Object.fromEntries(parts);
}

/** The object with one property set, or left out if the value is undefined. Never changes the object itself. */
export function withProperty(value: unknown, name: string, part: unknown): Record<string, unknown> {
  const entries = Object.entries(isObject(value) ? value : {});
  const at = entries.findIndex(([key]) => key === name);
  if (part === undefined) return Object.fromEntries(entries.filter(([key]) => key !== name));
  if (at < 0) entries.push([name, part]);
  else entries[at] = [name, part];
  return Object.fromEntries(entries);
}

export function propertyOf(value: unknown, name: string): unknown {
  return isObject(value) && Object.hasOwn(value, name) ? value[name] : undefined;
}

/** What a blank field stands for: it is left out where it may be, and null where only null may stand. */
export function blank(spec: FieldSpec, required: boolean): null | undefined {
  return required && spec.nullable ? null : undefined;
}

/** Reads a number as it is typed; text that is none stays text, and is a problem. */
export function readNumber(text: string): number | string {
  const trimmed = text.trim();
  return /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(trimmed) ? Number(trimmed) : trimmed;
}

export function readJson(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch (error) {
    return new Draft(text, `This is not JSON: ${error instanceof Error ? error.message : String(error)}`);
  }
}

// ---- problems

export function pathOf(path: string, step: string | number): string {
  return typeof step === "number" ? `${path}[${step}]` : `${path}.${step}`;
}

/** Every problem of a value by its path, such as `$.limits.max_steps` or `$.tools[0]`. */
export function problemsOf(
  schema: unknown,
  value: unknown,
  root: Schema = isObject(schema) ? schema : {},
  path = "$",
  work: Work = { left: MAX_CHECKS },
): Problems {
  const problems: Problems = {};
  check(fieldOf(schema, root, "", value), value, root, path, problems, 0, work);
  return problems;
}

function check(spec: FieldSpec, value: unknown, root: Schema, path: string, problems: Problems, depth: number, work: Work): void {
  const wrong = (message: string) => void (problems[path] ??= message);
  if (depth > 200 || (work.left -= 1) < 0) return;
  if (value instanceof Draft) return wrong(value.message);
  if (value === null && (spec.nullable || acceptsNull(spec))) return;
  if (value === undefined) return wrong("This is needed.");
  switch (spec.kind) {
    case "const":
      if (!same(value, spec.schema.const)) wrong(`This must be ${JSON.stringify(spec.schema.const)}.`);
      return;
    case "enum":
      if (!(spec.schema.enum as unknown[]).some((choice) => same(choice, value))) wrong("Choose one of the list.");
      return;
    case "boolean":
      if (typeof value !== "boolean") wrong("This is either true or false.");
      return;
    case "number":
      return checkNumber(spec.schema, value, wrong);
    case "text":
    case "long-text":
      return checkText(spec, value, wrong);
    case "variants":
      return checkVariants(spec, value, root, path, problems, depth, work);
    case "list":
      return checkList(spec.schema, value, root, path, problems, depth, work, wrong);
    case "object":
    case "map":
      return checkObject(spec.schema, value, root, path, problems, depth, work, wrong);
    case "json":
      return checkType(spec.schema.type, value, wrong);
  }
}

function acceptsNull({ kind, schema }: FieldSpec): boolean {
  return kind === "json" && schema.type === undefined;
}

type Wrong = (message: string) => void;

function checkNumber(schema: Schema, value: unknown, wrong: Wrong): void {
  if (typeof value !== "number" || !Number.isFinite(value)) return wrong("Write a number, such as 0.5.");
  if (schema.type === "integer" && !Number.isInteger(value)) return wrong("Write a whole number.");
  const bound = (name: string) => (typeof schema[name] === "number" ? (schema[name] as number) : null);
  const [low, above, high, below] = [bound("minimum"), bound("exclusiveMinimum"), bound("maximum"), bound("exclusiveMaximum")];
  if (low !== null && value < low) wrong(`This is at least ${low}.`);
  if (above !== null && value <= above) wrong(`This is more than ${above}.`);
  if (high !== null && value > high) wrong(`This is at most ${high}.`);
  if (below !== null && value >= below) wrong(`This is less than ${below}.`);
}

function checkText({ schema, variants }: FieldSpec, value: unknown, wrong: Wrong): void {
  if (typeof value !== "string") {
    if (typeof value !== "number" || schema.type === "string") wrong("This is text.");
    return;
  }
  const length = [...value].length;
  if (typeof schema.minLength === "number" && length < schema.minLength)
    return wrong(schema.minLength === 1 ? "This is needed." : `Write at least ${schema.minLength} characters.`);
  if (typeof schema.maxLength === "number" && length > schema.maxLength)
    return wrong(`Write at most ${schema.maxLength} characters.`);
  if (!variants.length && typeof schema.pattern === "string" && !fits(schema.pattern, value))
    wrong(`This does not fit the pattern ${schema.pattern}`);
}

/** Patterns that this browser cannot read, or not in bounded time, are left to the server. */
function fits(pattern: string, text: string): boolean {
  if (text.length > MAX_PATTERN_TEXT || /\)[*+{]/.test(pattern)) return true; // a repeated group may take forever
  try {
    return new RegExp(pattern, "u").test(text);
  } catch {
    return true;
  }
}

function checkVariants(
  spec: FieldSpec,
  value: unknown,
  root: Schema,
  path: string,
  problems: Problems,
  depth: number,
  work: Work,
): void {
  const chosen = spec.variants[variantOf(spec.variants, value, root, work)];
  if (chosen) check(fieldOf(chosen, root, "", value), value, root, path, problems, depth + 1, work);
}

/** The variant that a value has: one it fits, else one of its type, else the first. */
export function variantOf(variants: Schema[], value: unknown, root: Schema, work: Work = { left: MAX_CHECKS }): number {
  const fitting = variants.findIndex((variant) => !Object.keys(problemsOf(variant, value, root, "$", work)).length);
  if (fitting >= 0) return fitting;
  const ofType = variants.findIndex((variant) => hasType(fieldOf(variant, root).schema.type, value));
  return Math.max(0, ofType);
}

function checkList(
  schema: Schema,
  value: unknown,
  root: Schema,
  path: string,
  problems: Problems,
  depth: number,
  work: Work,
  wrong: Wrong,
): void {
  if (!Array.isArray(value)) return wrong("This is a list.");
  if (typeof schema.minItems === "number" && value.length < schema.minItems)
    wrong(schema.minItems === 1 ? "Add at least one item." : `Add at least ${schema.minItems} items.`);
  if (typeof schema.maxItems === "number" && value.length > schema.maxItems)
    wrong(`There are more than ${schema.maxItems} items.`);
  value.forEach((item, at) => check(fieldOf(schema.items, root, "", item), item, root, pathOf(path, at), problems, depth + 1, work));
}

function checkObject(
  schema: Schema,
  value: unknown,
  root: Schema,
  path: string,
  problems: Problems,
  depth: number,
  work: Work,
  wrong: Wrong,
): void {
  if (!isObject(value)) return wrong("This is an object.");
  const known = propertiesOf(schema);
  for (const [name, property] of known) {
    const part = propertyOf(value, name);
    if (part === undefined && !isRequired(schema, name)) continue;
    check(fieldOf(property, root, name, part), part, root, pathOf(path, name), problems, depth + 1, work);
  }
  const names = new Set(known.map(([name]) => name));
  for (const [name, part] of Object.entries(value)) {
    if (names.has(name)) continue;
    if (schema.additionalProperties === false) problems[pathOf(path, name)] ??= "There is no such field.";
    else if (isObject(schema.additionalProperties))
      check(fieldOf(schema.additionalProperties, root, name, part), part, root, pathOf(path, name), problems, depth + 1, work);
  }
}

function checkType(type: unknown, value: unknown, wrong: Wrong): void {
  const types = (Array.isArray(type) ? type : [type]).filter((one) => typeof one === "string");
  if (types.length && !types.some((one) => hasType(one, value))) wrong(`This must be ${types.join(" or ")}.`);
}

function hasType(type: unknown, value: unknown): boolean {
  if (type === "array") return Array.isArray(value);
  if (type === "object") return isObject(value);
  if (type === "null") return value === null;
  if (type === "integer") return Number.isInteger(value);
  return type === typeof value;
}

export function same(left: unknown, right: unknown): boolean {
  return left === right || JSON.stringify(left) === JSON.stringify(right);
}

export function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value) && !(value instanceof Draft);
}

function textOf(value: unknown): string {
  return typeof value === "string" ? value : "";
}

// ---- choices

export type Choice = string | { value: string; label?: string; description?: string };
/** Choices for a field; with `allowOther` they are suggestions, and any text may be written. */
export type Picker = readonly Choice[] | { choices: readonly Choice[]; allowOther?: boolean };
export type Pickers = Readonly<Record<string, Picker>>;

export interface Offered {
  choices: { value: string; label: string }[];
  allowOther: boolean;
}

/** The choices of a field: by its hint `x-penstock-picker`, or by its path, in which `[]` is any position of a list. */
export function offered(pickers: Pickers, schema: Schema, path: string): Offered | null {
  const hint = schema["x-penstock-picker"];
  const general = path.replace(/\[\d+\]/g, "[]");
  const names = [...(typeof hint === "string" ? [hint] : []), path, general, general.replace(/^\$\.?/, "")];
  const found = names.find((name) => Object.hasOwn(pickers, name));
  if (found === undefined) return null;
  const picker = pickers[found]!;
  const [choices, allowOther] = "choices" in picker ? [picker.choices, picker.allowOther ?? false] : [picker, false];
  return { choices: choices.map(choiceOf), allowOther };
}

function choiceOf(choice: Choice): { value: string; label: string } {
  if (typeof choice === "string") return { value: choice, label: choice };
  const label = choice.label ?? choice.value;
  return { value: choice.value, label: choice.description ? `${label}: ${choice.description}` : label };
}
