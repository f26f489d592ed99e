import { useState } from "react";

/** A button that copies text; where the browser forbids it, the text can still be selected. */
export function Copy({ text, what }: { text: string; what: string }) {
  const [state, setState] = useState<"" | "copied" | "refused">("");
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      setState("copied");
    } catch {
      setState("refused");
    }
  };
  return (
    <>
      <button type="button" onClick={() => void copy()} aria-label={`Copy ${what}`}>
        {state === "copied" ? "Copied" : "Copy"}
      </button>
      <span className="small muted" role="status">
        {state === "refused" && "The browser does not allow it: select the text and copy it."}
        {state === "copied" && <span className="hidden">Copied {what}</span>}
      </span>
    </>
  );
}
