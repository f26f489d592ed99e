// Names and ids from elsewhere may hold characters that cannot be seen, or that turn the text around them: they are
// shown as their code points, so that two different names never look alike. React escapes the rest.

const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu;
/** Line ends, tabs, and the joiners that emoji and several scripts need. */
const OF_TEXT: ReadonlySet<string> = new Set(["\n", "\r", "\t", "\u200c", "\u200d"]);

/** A name with control, format and bidirectional characters written out, such as ⟨U+202E⟩; tabs and line ends stay. */
export function visible(text: string): string {
  return text.replace(HIDDEN, (found) => (found === "\n" || found === "\t" ? found : `⟨U+${code(found)}⟩`));
}

/** The same for text that people and models write, in any script. */
export function visibleText(text: string): string {
  return text.replace(HIDDEN, (found) => (OF_TEXT.has(found) ? found : `⟨U+${code(found)}⟩`));
}

function code(character: string): string {
  return character.codePointAt(0)!.toString(16).toUpperCase().padStart(4, "0");
}
