// Node types to choose from, by category: a click or Enter adds one, and each can be dragged onto the canvas.

import { useMemo, useState, type Ref } from "react";
import type { NodeTypeShown } from "../api/types.ts";
import { DRAGGED } from "./canvas.tsx";
import type { Catalog } from "./types.ts";

export function Palette({ catalog, onAdd, search }: { catalog: Catalog; onAdd: (type: string) => void; search: Ref<HTMLInputElement> }) {
  const [text, setText] = useState("");
  const groups = useMemo(() => groupsOf(catalog, text), [catalog, text]);
  const first = bestOf(groups.flatMap(([, types]) => types), text);
  const [near, setNear] = useState<NodeTypeShown | null>(null);
  const about = near ?? (text ? first : null);
  return (
    <section className="palette" aria-label="Node types">
      <input
        ref={search}
        type="search"
        aria-label="Find a node type"
        placeholder="Find a node type (a)"
        value={text}
        onChange={(event) => setText(event.target.value)}
        onKeyDown={(event) => {
          if (event.key === "Enter" && text && first) (onAdd(first.type), setText(""));
          if (event.key === "Escape") (event.preventDefault(), setText(""));
        }}
      />
      <div className="groups">
        {groups.map(([category, types]) => (
          <div key={category} role="group" aria-label={category} className={`c-${category.toLowerCase().replaceAll(" ", "-")}`}>
            <h2>{category}</h2>
            {types.map((type) => (
              <button
                key={type.type}
                title={type.description}
                draggable
                onDragStart={(event) => event.dataTransfer.setData(DRAGGED, type.type)}
                onClick={() => onAdd(type.type)}
                onFocus={() => setNear(type)}
                onBlur={() => setNear(null)}
                onPointerEnter={() => setNear(type)}
                onPointerLeave={() => setNear(null)}
              >
                {type.title}
              </button>
            ))}
          </div>
        ))}
        {!groups.length && <p className="muted small">No node type has “{text}” in its name.</p>}
      </div>
      <p className="about">
        {about ? (
          <>
            <b>{about.title}.</b> {about.description}
          </>
        ) : (
          "Click a type to add it beside the selected node, or drag it onto the canvas."
        )}
      </p>
    </section>
  );
}

/** The type whose title begins with the text, else the first that was found. */
function bestOf(types: NodeTypeShown[], text: string): NodeTypeShown | undefined {
  const wanted = text.trim().toLowerCase();
  return types.find((type) => type.title.toLowerCase().startsWith(wanted)) ?? types[0];
}

function groupsOf(catalog: Catalog, text: string): [string, NodeTypeShown[]][] {
  const wanted = text.trim().toLowerCase();
  const groups = new Map<string, NodeTypeShown[]>();
  for (const type of catalog.types.values()) {
    const words = `${type.title} ${type.type} ${type.category} ${type.description}`.toLowerCase();
    if (words.includes(wanted)) groups.set(type.category, [...(groups.get(type.category) ?? []), type]);
  }
  return [...groups];
}
