// Colours of the theme for a canvas, which cannot read CSS variables.

import { useEffect, useState } from "react";

const NAMES = {
  bg3: "--bg3",
  fg: "--fg",
  llm: "--llm",
  tool: "--tool",
  step: "--track",
  bad: "--bad-fill",
  held: "--held",
  onFill: "--bg3",
} as const;

export type Colours = Record<keyof typeof NAMES, string>;

function read(): Colours {
  const probe = document.createElement("i");
  document.body.append(probe);
  const found = Object.entries(NAMES).map(([name, variable]) => {
    probe.style.color = `var(${variable})`;
    return [name, getComputedStyle(probe).color];
  });
  probe.remove();
  return Object.fromEntries(found) as Colours;
}

export function useColours(): Colours {
  const [colours, setColours] = useState(read);
  useEffect(() => {
    const refresh = () => setColours(read());
    const observer = new MutationObserver(refresh);
    observer.observe(document.documentElement, { attributeFilter: ["data-theme"] });
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", refresh);
    return () => {
      observer.disconnect();
      dark.removeEventListener("change", refresh);
    };
  }, []);
  return colours;
}
