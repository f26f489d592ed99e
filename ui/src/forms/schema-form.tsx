// A form made from a JSON Schema: a value goes in, and every change comes out with what is wrong in it.
//
//   <SchemaForm schema={schema} value={value} onChange={(value, problems) => …} errors={{ "$.model": "no such model" }}
//               pickers={{ model: ["cheap", "large"], "$.tools[]": { choices: tools, allowOther: true } }} />
//
// Fields that may be left out and are blank are left out of the value. Errors and problems are by JSON path, as the
// server writes them (`$.limits.max_steps`, `$.tools[0]`). A problem is shown once its field has been left; `showAll`
// shows them all, for a form that was submitted.

import { createContext, useContext, useId, useState, type ReactNode } from "react";
import { visible } from "../ui/visible.ts";
import "./forms.css";
import {
  blank,
  boundsOf,
  Draft,
  fieldOf,
  initialValue,
  isObject,
  isRequired,
  offered,
  pathOf,
  problemsOf,
  propertiesOf,
  propertyOf,
  readJson,
  readNumber,
  same,
  variantOf,
  withProperty,
  type FieldSpec,
  type Json,
  type Offered,
  type Pickers,
  type Problems,
  type Schema,
} from "./schema-model.ts";

export { Draft, initialValue, problemsOf } from "./schema-model.ts";
export type { Choice, Json, Picker, Pickers, Problems, Schema } from "./schema-model.ts";

export interface SchemaFormProps {
  schema: Schema;
  value: unknown;
  onChange: (value: unknown, problems: Problems) => void;
  /** Errors by path, such as the server's; `base` is the path of this form's value in them. */
  errors?: Problems;
  base?: string;
  /** Choices by hint or by path; see `offered`. */
  pickers?: Pickers;
  /** Name of the whole form, if it is one field or needs a heading. */
  label?: string;
  showAll?: boolean;
  disabled?: boolean;
  /** Properties of the outermost object that are not shown. */
  omit?: readonly string[];
}

interface FormContext {
  root: Schema;
  errors: Problems;
  problems: Problems;
  pickers: Pickers;
  showAll: boolean;
  disabled: boolean;
}

const Context = createContext<FormContext | null>(null);

function useForm(): FormContext {
  const context = useContext(Context);
  if (context === null) throw new Error("a field needs a SchemaForm around it");
  return context;
}

export function SchemaForm(props: SchemaFormProps) {
  const { schema, value, onChange, errors = {}, base = "$", pickers = {}, label = "" } = props;
  const problems = problemsOf(schema, value, schema, base);
  const form = { root: schema, errors, problems, pickers, showAll: props.showAll ?? false, disabled: props.disabled ?? false };
  const change = (next: unknown) => onChange(next, problemsOf(schema, next, schema, base));
  const spec = fieldOf(schema, schema, label, value);
  return (
    <Context.Provider value={form}>
      <div className="schema-form">
        {spec.kind === "object" && !spec.nullable ? (
          <Properties spec={spec} path={base} value={value} onChange={change} omit={props.omit ?? []} />
        ) : (
          <Field schema={schema} name={label} path={base} required value={value} onChange={change} />
        )}
        <Elsewhere base={base} schema={schema} value={value} />
      </div>
    </Context.Provider>
  );
}

/** Errors whose field is not in the form, so that none is lost. */
function Elsewhere({ base, schema, value }: { base: string; schema: Schema; value: unknown }) {
  const { errors } = useForm();
  const lost = Object.entries(errors).filter(([path]) => !isShown(path, base, schema, value));
  if (!lost.length) return null;
  return (
    <ul className="form-errors" role="alert">
      {lost.map(([path, message]) => (
        <li key={path}>
          <code>{visible(path)}</code>: {visible(message)}
        </li>
      ))}
    </ul>
  );
}

function isShown(path: string, base: string, schema: Schema, value: unknown): boolean {
  const places = new Set<string>();
  collect(schema, schema, base, value, places, 0);
  return places.has(path);
}

function collect(schema: unknown, root: Schema, path: string, value: unknown, places: Set<string>, depth: number): void {
  const spec = fieldOf(schema, root, "", value);
  if (spec.kind !== "object" || depth > 0) places.add(path);
  if (depth > 50) return;
  if (spec.kind === "variants") {
    const chosen = spec.variants[variantOf(spec.variants, value, root)];
    if (chosen) collect(chosen, root, path, value, places, depth + 1);
  } else if (spec.kind === "list" && Array.isArray(value)) {
    value.forEach((item, at) => collect(spec.schema.items, root, pathOf(path, at), item, places, depth + 1));
  } else if (spec.kind === "object" && (depth === 0 || isObject(value))) {
    for (const [name, property] of propertiesOf(spec.schema))
      collect(property, root, pathOf(path, name), propertyOf(value, name), places, depth + 1);
  } else if (spec.kind === "map" && isObject(value)) {
    for (const [name, part] of Object.entries(value))
      collect(spec.schema.additionalProperties, root, pathOf(path, name), part, places, depth + 1);
  }
}

interface FieldProps {
  schema: unknown;
  name: string;
  path: string;
  required: boolean;
  value: unknown;
  onChange: (value: unknown) => void;
  /** Shown without its own label, because a row or a legend has it. */
  bare?: boolean;
}

interface ControlProps extends Omit<FieldProps, "schema" | "bare"> {
  spec: FieldSpec;
  id: string;
  /** Attributes that join the control with its description and its error. */
  aria: { "aria-describedby"?: string; "aria-invalid"?: true; "aria-required"?: true; disabled: boolean };
  choices: Offered | null;
}

const CONTROLS: Record<Exclude<FieldSpec["kind"], "object">, (props: ControlProps) => ReactNode> = {
  const: ConstControl,
  enum: EnumControl,
  boolean: BooleanControl,
  number: NumberControl,
  text: TextControl,
  "long-text": LongTextControl,
  list: ListControl,
  map: MapControl,
  variants: VariantsControl,
  json: JsonControl,
};

const GROUPS = new Set<FieldSpec["kind"]>(["object", "list", "map", "variants"]);

function Field(props: FieldProps) {
  const { schema, name, path, required, value, onChange, bare = false } = props;
  const form = useForm();
  const id = useId();
  const [wasLeft, setWasLeft] = useState(false);
  const spec = fieldOf(schema, form.root, name, value);
  const isGroup = GROUPS.has(spec.kind);
  const late = wasLeft || form.showAll || value instanceof Draft;
  const error = form.errors[path] ?? (late || isGroup ? problemOf(form, path, spec, form.showAll) : undefined);
  const hint = bare ? "" : hintOf(spec, schema, required);
  const described = [hint && `${id}-hint`, error && `${id}-error`].filter(Boolean).join(" ");
  const aria: ControlProps["aria"] = {
    ...(described ? { "aria-describedby": described } : {}),
    ...(error ? { "aria-invalid": true as const } : {}),
    ...(required && !spec.nullable && !isGroup ? { "aria-required": true as const } : {}),
    disabled: form.disabled,
  };
  const choices = isChosen(spec, value) ? offered(form.pickers, spec.schema, path) : null;
  // The field of the chosen kind has the same path, and shows the error.
  const isInside = spec.kind === "variants" && !choices && value !== undefined && value !== null;
  const inner = { name, path, required, value, onChange, spec, id, aria, choices };
  const notes = (
    <>
      {hint && (
        <span className="muted small" id={`${id}-hint`}>
          {hint}
        </span>
      )}
      {error && !isInside && (
        <span className="form-error small" id={`${id}-error`}>
          ✕ {visible(error)}
        </span>
      )}
    </>
  );
  if (isGroup && !choices) {
    return <Group {...inner} notes={notes} bare={bare} />;
  }
  const Control = CONTROLS[spec.kind === "object" ? "json" : spec.kind];
  return (
    <div className={spec.kind === "boolean" ? "field form-check" : "field"} onBlur={() => setWasLeft(true)}>
      <label htmlFor={id} className={bare ? "hidden" : undefined}>
        {visible(spec.label)}
        {!required && !bare && spec.kind !== "boolean" && <span className="form-optional"> optional</span>}
      </label>
      <Control {...inner} />
      {notes}
    </div>
  );
}

/** Names are chosen from a list; an object or a map, such as a script where a model may be named, has fields of its own. */
function isChosen({ kind }: FieldSpec, value: unknown): boolean {
  return kind !== "object" && kind !== "map" && (kind !== "json" || typeof (value ?? "") === "string");
}

/** A blank field that is needed is no error before somebody submits: people see that from the label. */
function problemOf(form: FormContext, path: string, spec: FieldSpec, all: boolean): string | undefined {
  const problem = form.problems[path];
  return problem === "This is needed." && !all && spec.kind !== "json" ? undefined : problem;
}

function hintOf(spec: FieldSpec, schema: unknown, required: boolean): string {
  const standard = isObject(schema) && schema.default !== undefined && schema.default !== null ? schema.default : undefined;
  const shown =
    required || standard === undefined || typeof standard === "object" || standard === ""
      ? ""
      : `If left blank: ${visible(String(standard))}`;
  const parts = [visible(spec.description), boundsOf(spec), spec.kind === "boolean" ? "" : shown].filter(Boolean);
  return parts.map((part) => part.replace(/\.$/, "")).join(". ") + (parts.length ? "." : "");
}

// ---- groups: fields inside fields

function Group(props: ControlProps & { notes: ReactNode; bare: boolean }) {
  const { spec, value, onChange, required, notes, bare, path } = props;
  const { root, disabled } = useForm();
  const isSet = value !== undefined && value !== null;
  const mayBeUnset = !required || spec.nullable;
  const set = () =>
    onChange(
      initialValue({ ...spec.schema, default: undefined, ...(spec.variants.length ? { anyOf: spec.variants } : {}) }, root) ??
        {},
    );
  return (
    <fieldset className="form-group">
      <legend className={bare ? "hidden" : undefined}>
        {visible(spec.label)}
        {!required && !bare && <span className="form-optional"> optional</span>}
      </legend>
      {notes}
      {isSet || !mayBeUnset ? (
        <>
          {spec.kind === "object" && <Properties spec={spec} path={path} value={value} onChange={onChange} omit={[]} />}
          {spec.kind === "list" && <ListControl {...props} />}
          {spec.kind === "map" && <MapControl {...props} />}
          {spec.kind === "variants" && <VariantsControl {...props} />}
          {mayBeUnset && !bare && !disabled && (
            <button type="button" className="form-small" onClick={() => onChange(blank(spec, required))}>
              Leave out {visible(spec.label).toLowerCase()}
            </button>
          )}
        </>
      ) : (
        <button type="button" className="form-small" disabled={disabled} onClick={set}>
          Set {visible(spec.label).toLowerCase()}
        </button>
      )}
    </fieldset>
  );
}

function Properties(props: {
  spec: FieldSpec;
  path: string;
  value: unknown;
  onChange: (value: unknown) => void;
  omit: readonly string[];
}) {
  const { spec, path, value, onChange, omit } = props;
  const known = propertiesOf(spec.schema);
  const shown = known.filter(([name]) => !omit.includes(name));
  if (!known.length) return <p className="muted small">It has no fields.</p>;
  return (
    <>
      {shown.map(([name, property]) => (
        <Field
          key={name}
          schema={property}
          name={name}
          path={pathOf(path, name)}
          required={isRequired(spec.schema, name)}
          value={propertyOf(value, name)}
          onChange={(part) => onChange(withProperty(value, name, part))}
        />
      ))}
      <Extras spec={spec} path={path} value={value} onChange={onChange} known={known.map(([name]) => name)} />
    </>
  );
}

/** What a value has beside the properties of its schema: shown, and kept, never dropped. */
function Extras(props: { spec: FieldSpec; path: string; value: unknown; onChange: (value: unknown) => void; known: string[] }) {
  const { spec, path, value, onChange, known } = props;
  const extra = Object.entries(isObject(value) ? value : {}).filter(([name]) => !known.includes(name));
  const schema = isObject(spec.schema.additionalProperties) ? spec.schema.additionalProperties : {};
  return extra.map(([name, part]) => (
    <div className="form-row" key={name}>
      <Field
        schema={{ title: name, ...schema }}
        name={name}
        path={pathOf(path, name)}
        required={false}
        value={part}
        onChange={(next) => onChange(withProperty(value, name, next))}
      />
      <button type="button" className="form-small" onClick={() => onChange(withProperty(value, name, undefined))}>
        Remove {visible(name)}
      </button>
    </div>
  ));
}

function ListControl({ spec, path, value, onChange }: ControlProps) {
  const form = useForm();
  const items = Array.isArray(value) ? value : [];
  const item = spec.schema.items;
  const itemSpec = fieldOf(item, form.root);
  const choices = offered(form.pickers, itemSpec.schema, pathOf(path, 0)) ?? enumChoices(itemSpec);
  const full = typeof spec.schema.maxItems === "number" && items.length >= spec.schema.maxItems;
  if (choices && !choices.allowOther)
    return <Ticks choices={choices} items={items} onChange={onChange} disabled={form.disabled} />;
  const replaced = (at: number, next: unknown) => onChange(items.map((old, index) => (index === at ? next : old)));
  return (
    <>
      {items.length > 0 && (
        <ol className="form-items">
          {items.map((part, at) => (
            <li key={at} className="form-row">
              <Field
                schema={item}
                name={`${spec.label} ${at + 1}`}
                path={pathOf(path, at)}
                required
                value={part}
                onChange={(next) => replaced(at, next === undefined ? null : next)}
                bare
              />
              {!form.disabled && (
                <span className="form-actions">
                  <button
                    type="button"
                    className="form-small"
                    disabled={at === 0}
                    aria-label={`Move item ${at + 1} up`}
                    onClick={() => onChange(swapped(items, at))}
                  >
                    ↑
                  </button>
                  <button
                    type="button"
                    className="form-small"
                    aria-label={`Remove item ${at + 1}`}
                    onClick={() => onChange(items.filter((_, index) => index !== at))}
                  >
                    ✕
                  </button>
                </span>
              )}
            </li>
          ))}
        </ol>
      )}
      <button
        type="button"
        className="form-small"
        disabled={full || form.disabled}
        onClick={() => onChange([...items, initialValue(item, form.root) ?? emptyItem(itemSpec)])}
      >
        Add to {visible(spec.label).toLowerCase()}
      </button>
    </>
  );
}

function emptyItem(spec: FieldSpec): Json {
  return spec.kind === "json" || spec.kind === "number" ? null : "";
}

function swapped(items: unknown[], at: number): unknown[] {
  const next = [...items];
  [next[at - 1], next[at]] = [next[at], next[at - 1]];
  return next;
}

function enumChoices(spec: FieldSpec): Offered | null {
  if (spec.kind !== "enum") return null;
  const values = spec.schema.enum as unknown[];
  if (!values.every((value) => typeof value === "string")) return null;
  return { choices: values.map((value) => ({ value, label: value })), allowOther: false };
}

/** A list whose items come from a list of choices: one box each. What is not offered any more stays until unticked. */
function Ticks({
  choices,
  items,
  onChange,
  disabled,
}: {
  choices: Offered;
  items: unknown[];
  onChange: (items: unknown) => void;
  disabled: boolean;
}) {
  const gone = items.filter((item) => !choices.choices.some(({ value }) => value === item));
  const all = [...choices.choices, ...gone.map((item) => ({ value: String(item), label: `${String(item)} (not offered)` }))];
  if (!all.length) return <p className="muted small">There is nothing to choose from.</p>;
  return (
    <div className="form-ticks">
      {all.map(({ value, label }) => (
        <label className="choice" key={value}>
          <input
            type="checkbox"
            disabled={disabled}
            checked={items.includes(value)}
            onChange={(event) =>
              onChange(event.target.checked ? [...items, value] : items.filter((item) => String(item) !== value))
            }
          />
          {visible(label)}
        </label>
      ))}
    </div>
  );
}

function MapControl({ spec, path, value, onChange }: ControlProps) {
  const { root, disabled } = useForm();
  const [name, setName] = useState("");
  const entries = Object.entries(isObject(value) ? value : {});
  const inner = spec.schema.additionalProperties;
  const isTaken = entries.some(([key]) => key === name);
  const add = () => {
    if (!name || isTaken) return;
    onChange(withProperty(value, name, initialValue(inner, root) ?? ""));
    setName("");
  };
  return (
    <>
      {entries.map(([key, part]) => (
        <div className="form-row" key={key}>
          <Field
            schema={isObject(inner) ? { ...inner, title: key } : inner}
            name={key}
            path={pathOf(path, key)}
            required
            value={part}
            onChange={(next) => onChange(withProperty(value, key, next ?? null))}
          />
          {!disabled && (
            <button
              type="button"
              className="form-small"
              aria-label={`Remove ${visible(key)}`}
              onClick={() => onChange(withProperty(value, key, undefined))}
            >
              ✕
            </button>
          )}
        </div>
      ))}
      {!disabled && (
        <div className="form-row">
          <input
            aria-label={`Name of a new entry in ${visible(spec.label).toLowerCase()}`}
            placeholder="name"
            value={name}
            onChange={(event) => setName(event.target.value)}
            onKeyDown={(event) => event.key === "Enter" && (event.preventDefault(), add())}
          />
          <button type="button" className="form-small" disabled={!name || isTaken} onClick={add}>
            Add
          </button>
        </div>
      )}
    </>
  );
}

function VariantsControl({ spec, path, value, onChange, name }: ControlProps) {
  const { root, disabled } = useForm();
  const id = useId();
  const [picked, setPicked] = useState<number | null>(null);
  const found = variantOf(spec.variants, value, root);
  const at = picked ?? found;
  const chosen = spec.variants[at] ?? spec.variants[0]!;
  return (
    <>
      <div className="field">
        <label htmlFor={id} className="small">
          Kind of {visible(spec.label).toLowerCase()}
        </label>
        <select
          id={id}
          value={at}
          disabled={disabled}
          onChange={(event) => {
            const next = Number(event.target.value);
            setPicked(next);
            onChange(initialValue(spec.variants[next], root) ?? null);
          }}
        >
          {spec.variants.map((variant, index) => (
            <option key={index} value={index}>
              {visible(variantName(variant, root))}
            </option>
          ))}
        </select>
      </div>
      <Field key={at} schema={chosen} name={name} path={path} required value={value} onChange={onChange} bare />
    </>
  );
}

const TYPE_NAMES: Record<string, string> = { string: "text", integer: "whole number", array: "list" };

function variantName(variant: Schema, root: Schema): string {
  const { schema } = fieldOf(variant, root);
  if (typeof schema.title === "string") return schema.title.replace(/(Data|Shown)$/, "").replace(/([a-z])([A-Z])/g, "$1 $2");
  if ("const" in schema) return String(schema.const);
  if (schema.type === "array") return `list of ${variantName(isObject(schema.items) ? schema.items : {}, root)}`;
  return typeof schema.type === "string" ? (TYPE_NAMES[schema.type] ?? schema.type) : "any value";
}

// ---- single fields

function ConstControl({ spec, id }: ControlProps) {
  return <input id={id} value={visible(String(spec.schema.const))} readOnly />;
}

function EnumControl({ spec, id, aria, value, onChange, required }: ControlProps) {
  const values = spec.schema.enum as unknown[];
  const at = values.findIndex((choice) => same(choice, value));
  const mayBeBlank = !required || spec.nullable || at < 0;
  const isUnknown = at < 0 && value !== undefined && value !== null;
  return (
    <select
      id={id}
      {...aria}
      value={at < 0 ? "" : at}
      onChange={(event) => onChange(event.target.value === "" ? blank(spec, required) : values[Number(event.target.value)])}
    >
      {mayBeBlank && <option value="">{isUnknown ? `${visible(String(value))} (not in the list)` : blankLabel(spec)}</option>}
      {values.map((choice, index) => (
        <option key={index} value={index}>
          {choice === null ? "none" : visible(String(choice))}
        </option>
      ))}
    </select>
  );
}

function blankLabel({ schema }: FieldSpec): string {
  return schema.default === undefined || schema.default === null ? "" : `${visible(String(schema.default))} (default)`;
}

function BooleanControl({ spec, id, aria, value, onChange, required }: ControlProps) {
  const hasDefault = typeof spec.schema.default === "boolean";
  if ((required && !spec.nullable) || (hasDefault && !spec.nullable)) {
    const checked = typeof value === "boolean" ? value : spec.schema.default === true;
    return <input id={id} type="checkbox" {...aria} checked={checked} onChange={(event) => onChange(event.target.checked)} />;
  }
  const shown = typeof value === "boolean" ? String(value) : "";
  return (
    <select
      id={id}
      {...aria}
      value={shown}
      onChange={(event) => onChange(event.target.value === "" ? blank(spec, required) : event.target.value === "true")}
    >
      <option value="">not set</option>
      <option value="true">yes</option>
      <option value="false">no</option>
    </select>
  );
}

function NumberControl({ spec, id, aria, value, onChange, required }: ControlProps) {
  const [typed, setTyped] = useState("");
  const text = value === undefined || value === null ? "" : readNumber(typed) === value ? typed : String(value);
  const change = (next: string) => {
    setTyped(next);
    onChange(next.trim() === "" ? blank(spec, required) : readNumber(next));
  };
  const step = spec.schema.type === "integer" ? ("numeric" as const) : ("decimal" as const);
  return (
    <input
      id={id}
      {...aria}
      inputMode={step}
      autoComplete="off"
      value={text}
      onChange={(event) => change(event.target.value)}
    />
  );
}

/** A blank optional text is left out, unless the schema has a default that is not blank: then blank is a value. */
function readText(spec: FieldSpec, text: string, required: boolean): unknown {
  if (text !== "" || (required && !spec.nullable)) return text;
  return blank(spec, required);
}

function TextControl({ spec, id, aria, value, onChange, required, choices }: ControlProps) {
  const text = value === undefined || value === null ? "" : String(value);
  if (choices && !choices.allowOther) return <PickerControl {...{ spec, id, aria, value, onChange, required, choices }} />;
  return (
    <>
      <input
        id={id}
        {...aria}
        autoComplete="off"
        value={text}
        {...(choices ? { list: `${id}-list` } : {})}
        onChange={(event) => onChange(readText(spec, event.target.value, required))}
      />
      {choices && (
        <datalist id={`${id}-list`}>
          {choices.choices.map(({ value: choice, label }) => (
            <option key={choice} value={choice}>
              {visible(label)}
            </option>
          ))}
        </datalist>
      )}
    </>
  );
}

function PickerControl({
  spec,
  id,
  aria,
  value,
  onChange,
  required,
  choices,
}: Pick<ControlProps, "spec" | "id" | "aria" | "value" | "onChange" | "required"> & { choices: Offered }) {
  const text = value === undefined || value === null ? "" : String(value);
  const isOffered = choices.choices.some((choice) => choice.value === text);
  return (
    <select
      id={id}
      {...aria}
      value={text}
      onChange={(event) => onChange(event.target.value === "" ? blank(spec, required) : event.target.value)}
    >
      {(!required || spec.nullable || text === "") && (
        <option value="">{required && !spec.nullable ? "Choose…" : blankLabel(spec)}</option>
      )}
      {!isOffered && text !== "" && <option value={text}>{visible(text)} (not offered)</option>}
      {choices.choices.map((choice) => (
        <option key={choice.value} value={choice.value}>
          {visible(choice.label)}
        </option>
      ))}
    </select>
  );
}

function LongTextControl(props: ControlProps) {
  const { spec, id, aria, value, onChange, required, choices } = props;
  if (choices) return <TextControl {...props} />;
  const text = value === undefined || value === null ? "" : String(value);
  return (
    <textarea
      id={id}
      {...aria}
      className="form-long"
      rows={2}
      value={text}
      onChange={(event) => onChange(readText(spec, event.target.value, required))}
    />
  );
}

function JsonControl(props: ControlProps) {
  const { spec, id, aria, value, onChange, required, choices } = props;
  const [typed, setTyped] = useState<string | null>(null);
  if (choices) return <TextControl {...props} />;
  const written = value === undefined ? "" : JSON.stringify(value, null, 2);
  const isTyped = typed !== null && (value instanceof Draft ? value.text === typed : same(readOr(typed), value));
  const text = value instanceof Draft ? value.text : isTyped ? typed : written;
  const change = (next: string) => {
    setTyped(next);
    onChange(next.trim() === "" ? blank(spec, required) : readJson(next));
  };
  return (
    <textarea
      id={id}
      {...aria}
      className="form-json"
      rows={3}
      spellCheck={false}
      placeholder="JSON"
      value={text}
      onChange={(event) => change(event.target.value)}
    />
  );
}

function readOr(text: string): unknown {
  const read = readJson(text);
  return read instanceof Draft ? undefined : read;
}
