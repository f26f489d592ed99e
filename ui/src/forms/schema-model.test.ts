import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import {
  boundsOf,
  Draft,
  fieldOf,
  initialValue,
  labelOf,
  offered,
  problemsOf,
  propertyOf,
  readJson,
  readNumber,
  resolve,
  variantOf,
  withProperty,
  type Schema,
} from "./schema-model.ts";

const NODE: Schema = {
  $defs: {
    Budget: {
      type: "object",
      title: "BudgetData",
      description: "What one run may use.",
      additionalProperties: false,
      properties: { max_cost_usd: { anyOf: [{ type: "number", minimum: 0, maximum: 10 }, { type: "null" }], default: null } },
    },
    Tree: {
      type: "object",
      required: ["name"],
      properties: { name: { type: "string" }, below: { type: "array", items: { $ref: "#/$defs/Tree" } } },
    },
  },
  type: "object",
  additionalProperties: false,
  required: ["model", "count"],
  properties: {
    model: { type: "string", minLength: 1, title: "Model" },
    count: { type: "integer", minimum: 1, maximum: 5 },
    budget: { anyOf: [{ $ref: "#/$defs/Budget" }, { type: "null" }], default: null },
    mode: { enum: ["list", "first"], default: "list" },
    tree: { $ref: "#/$defs/Tree" },
  },
};

const kind = (schema: Schema, value?: unknown) => fieldOf(schema, schema, "x", value).kind;

test("each shape of pydantic has its field", () => {
  const cases: [Schema, string][] = [
    [{ const: "a" }, "const"],
    [{ enum: ["a", "b"] }, "enum"],
    [{ type: "boolean" }, "boolean"],
    [{ type: "integer" }, "number"],
    [{ anyOf: [{ type: "number" }, { type: "null" }] }, "number"],
    [{ type: ["string", "null"] }, "text"],
    [{ type: "string", maxLength: 100_000 }, "long-text"],
    [{ type: "array", items: { type: "string" } }, "list"],
    [{ type: "object", properties: { a: {} } }, "object"],
    [{ type: "object", additionalProperties: { type: "string" } }, "map"],
    [{ type: "object", additionalProperties: true }, "json"],
    [{ anyOf: [{ type: "number" }, { type: "string", pattern: "^\\d+$" }, { type: "null" }] }, "text"],
    [{ anyOf: [{ type: "string" }, { type: "object", properties: { script: {} } }] }, "variants"],
    [{ allOf: [{ type: "integer" }], default: 3 }, "number"],
    [{}, "json"],
  ];
  for (const [schema, expected] of cases) assert.equal(kind(schema), expected, JSON.stringify(schema));
  assert.equal(kind({ type: "string" }, "two\nlines"), "long-text");
});

test("a reference is followed, keeps what is written beside it, and may be missing or go in circles", () => {
  assert.equal(resolve({ $ref: "#/$defs/Budget", title: "Own" }, NODE).title, "Own");
  assert.deepEqual(resolve({ $ref: "#/$defs/Missing" }, NODE), {});
  assert.deepEqual(resolve({ $ref: "https://elsewhere.example/schema" }, NODE), {});
  const circle: Schema = { $defs: { A: { $ref: "#/$defs/A" } } };
  assert.deepEqual(resolve({ $ref: "#/$defs/A" }, circle), {});
  const budget = fieldOf((NODE.properties as Record<string, Schema>).budget, NODE, "budget");
  assert.deepEqual([budget.kind, budget.nullable, budget.description], ["object", true, "What one run may use."]);
});

test("a schema that leads to itself, and a value without end, are read in bounded work", () => {
  const own = { $ref: "#" };
  const endless: Schema[] = [
    { anyOf: [own] },
    { anyOf: [own, { type: "string" }] },
    { anyOf: [own, { type: "null" }] },
    { oneOf: [own, own] },
    { allOf: [own, own, own] },
    { allOf: Array(3).fill({ allOf: Array(3).fill(own) }) },
    { anyOf: Array(9).fill({ anyOf: Array(9).fill({ anyOf: Array(9).fill({ type: "null" }) }) }) },
  ];
  for (const schema of endless) {
    assert.equal(fieldOf(schema, schema, "x", 1).kind, "json", JSON.stringify(schema));
    assert.deepEqual(problemsOf(schema, { a: 1 }), {});
    initialValue(schema);
  }
  const required: Schema = { type: "object", required: ["a", "b"], properties: { a: own, b: own } };
  for (const schema of [required, { type: "array", minItems: 3, items: own }])
    assert.ok(JSON.stringify(initialValue(schema)).length < 20_000);
  const json: Schema = { anyOf: [{ type: "array", items: own }, { type: "array", items: own, minItems: 1 }, { type: "string" }] };
  let value: unknown = 3;
  for (let depth = 0; depth < 60; depth += 1) value = [value];
  assert.ok(problemsOf(json, value));
  assert.deepEqual(problemsOf({ type: "string", pattern: "^(a+)+$" }, `${"a".repeat(60)}!`), {});
});

test("labels say what people would say, with the unit", () => {
  const cases = [
    ["max_cost_usd", "Max Cost Usd", "Maximum cost, US dollars"],
    ["timeout_s", "Timeout S", "Timeout, seconds"],
    ["includeUserTools", "Includeusertools", "Include user tools"],
    ["when", "When", "When"],
    ["q", "The question", "The question"],
    ["", undefined, "Value"],
  ] as const;
  for (const [name, title, label] of cases) assert.equal(labelOf(name, title), label);
});

test("a new value has the required parts and the defaults of what is required", () => {
  assert.deepEqual(initialValue(NODE), { model: "" });
  assert.deepEqual(
    initialValue({
      type: "object",
      required: ["a"],
      properties: { a: { type: "string", default: "x" }, b: { type: "string" } },
    }),
    { a: "x" },
  );
  assert.deepEqual(initialValue({ type: "array", minItems: 2, items: { type: "boolean" } }), [false, false]);
});

test("problems name their place and what to write", () => {
  assert.deepEqual(problemsOf(NODE, { model: "", count: 9, budget: { max_cost_usd: 11, more: 1 }, mode: "none", other: 1 }), {
    "$.model": "This is needed.",
    "$.count": "This is at most 5.",
    "$.budget.max_cost_usd": "This is at most 10.",
    "$.budget.more": "There is no such field.",
    "$.mode": "Choose one of the list.",
    "$.other": "There is no such field.",
  });
  assert.deepEqual(problemsOf(NODE, { model: "m", count: 2, budget: null, tree: { name: "a", below: [{ name: "b" }, {}] } }), {
    "$.tree.below[1].name": "This is needed.",
  });
  assert.deepEqual(problemsOf(NODE, { model: "m", count: "2x" }), { "$.count": "Write a number, such as 0.5." });
  assert.deepEqual(problemsOf({ type: "integer" }, 0.5), { $: "Write a whole number." });
  assert.deepEqual(problemsOf({ type: "array", items: { type: "string" }, minItems: 1 }, []), { $: "Add at least one item." });
});

test("a pattern that the browser cannot read is left to the server", () => {
  assert.deepEqual(problemsOf({ type: "string", pattern: "(?P<a>x)" }, "y"), {});
  assert.equal(Object.keys(problemsOf({ type: "string", pattern: "^a+$" }, "b")).length, 1);
});

test("JSON while it is written is kept, and is a problem", () => {
  const draft = readJson('{"a": ');
  assert.ok(draft instanceof Draft);
  assert.equal(draft.text, '{"a": ');
  const schema: Schema = { type: "object", properties: { any: {} } };
  assert.match(problemsOf(schema, { any: draft })["$.any"] ?? "", /not JSON/);
  assert.deepEqual(problemsOf(schema, { any: null }), {});
});

test("numbers are read as people type them, and other text stays text", () => {
  assert.deepEqual(["1", " 2.5 ", "0.", "1e3", "-4"].map(readNumber), [1, 2.5, 0, 1000, -4]);
  assert.deepEqual(["1,5", "0x10", "1_000", "Infinity", "--1"].map(readNumber), ["1,5", "0x10", "1_000", "Infinity", "--1"]);
});

test("the variant of a value is the one that it fits", () => {
  const variants: Schema[] = [
    { type: "string" },
    { type: "object", required: ["script"], properties: { script: { type: "array", items: {} } } },
    { type: "object", required: ["kind"], properties: { kind: { const: "b" } } },
  ];
  assert.deepEqual(
    ["x", { script: [] }, { kind: "b" }, {}, 7].map((value) => variantOf(variants, value, {})),
    [0, 1, 2, 1, 0],
  );
});

test("choices are found by hint, by path and by the path of any item", () => {
  const pickers = {
    model: ["cheap"],
    "$.tools[]": [{ value: "search", description: "looks it up" }],
    graph: { choices: ["a"], allowOther: true },
  };
  assert.deepEqual(offered(pickers, { "x-penstock-picker": "model" }, "$.anything")?.choices, [
    { value: "cheap", label: "cheap" },
  ]);
  assert.deepEqual(offered(pickers, {}, "$.tools[3]")?.choices, [{ value: "search", label: "search: looks it up" }]);
  assert.equal(offered(pickers, {}, "$.graph")?.allowOther, true);
  assert.equal(offered(pickers, {}, "$.constructor"), null);
});

test("a hint says the bounds", () => {
  const bounds = (schema: Schema) => boundsOf(fieldOf(schema, schema));
  assert.equal(bounds({ type: "integer", minimum: 1, maximum: 10_000 }), "1 to 10,000");
  assert.equal(bounds({ type: "number", minimum: 0.001 }), "At least 0.001");
  assert.equal(bounds({ type: "string" }), "");
});

test("setting a property changes a copy, keeps the order, and any name is a name", () => {
  const names = fc.constantFrom("a", "b", "__proto__", "constructor", "", "ä");
  fc.assert(
    fc.property(fc.dictionary(names, fc.integer()), names, fc.integer(), (old, name, part) => {
      const before = JSON.stringify(old);
      const next = withProperty(old, name, part);
      assert.equal(JSON.stringify(old), before);
      assert.equal(propertyOf(next, name), part);
      assert.equal(propertyOf(withProperty(next, name, undefined), name), undefined);
      assert.equal(Object.getPrototypeOf(next), Object.prototype);
    }),
  );
});

test("any schema and any value are read without an exception", () => {
  const word = fc.constantFrom(
    "type",
    "anyOf",
    "enum",
    "const",
    "items",
    "properties",
    "required",
    "$ref",
    "default",
    "allOf",
    "minItems",
    "pattern",
  );
  const part = fc.oneof(
    fc.constantFrom("string", "object", "array", "number", "null", "#", "#/properties/type", 3, null, true),
    fc.array(fc.constantFrom("a", "null", "string")),
  );
  const { schema } = fc.letrec((tie) => ({
    schema: fc.dictionary(word, fc.oneof({ maxDepth: 4 }, part, tie("schema"), fc.array(tie("schema"), { maxLength: 3 })), {
      maxKeys: 4,
    }),
  }));
  fc.assert(
    fc.property(schema, fc.jsonValue(), (found, value) => {
      fieldOf(found, found as Schema, "x", value);
      problemsOf(found, value);
      initialValue(found);
    }),
    { numRuns: 300 },
  );
});
