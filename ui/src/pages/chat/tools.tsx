// The tools that an answer called: with what, what became of it, how long it took, and what it cost.

import { formatDuration } from "../../model/money.ts";
import { Money, Status, Value } from "../../ui/parts.tsx";
import { visible } from "../../ui/visible.ts";
import type { ToolCard } from "./answer.ts";

const STATUS: Record<ToolCard["state"], [string, string]> = {
  requested: ["queued", "requested"],
  running: ["running", "running"],
  done: ["success", "done"],
  failed: ["failed", "failed"],
  refused: ["refused", "refused"],
  interrupted: ["interrupted", "interrupted"],
};

export function Tools({ tools }: { tools: ToolCard[] }) {
  if (tools.length === 0) return null;
  return (
    <ul className="tools" aria-label="Tools">
      {tools.map((tool, index) => (
        <li key={index}>
          <Tool tool={tool} />
        </li>
      ))}
    </ul>
  );
}

function Tool({ tool }: { tool: ToolCard }) {
  const [status, word] = STATUS[tool.state];
  const isBad = tool.state === "failed" || tool.state === "refused";
  return (
    <details className={`tool${isBad ? " bad" : ""}`}>
      <summary>
        <span className="kind tool">tool</span>
        <b>{visible(tool.name)}</b>
        <Status of={status} word={word} />
        <span className="muted small">
          {tool.durationMs !== null && formatDuration(tool.durationMs)}
          {tool.costNanos > 0 && (
            <>
              {" "}
              · <Money nanos={tool.costNanos} />
            </>
          )}
        </span>
      </summary>
      <div className="stack pad">
        {tool.arguments !== undefined && <Part name="Called with" value={tool.arguments} tool={tool.name} />}
        {tool.message && <p className="error">{visible(tool.message)}</p>}
        {tool.arguments === undefined && !tool.message && <p className="muted">Its arguments were not recorded.</p>}
      </div>
    </details>
  );
}

function Part({ name, value, tool }: { name: string; value: unknown; tool: string }) {
  const shown = typeof value === "string" ? visible(value) : visible(JSON.stringify(value, null, 2) ?? "");
  return (
    <div>
      <div className="muted small">{name}</div>
      <Value of={shown} label={`${name}, ${visible(tool)}`} />
    </div>
  );
}
