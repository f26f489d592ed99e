"""Renderers of a run's events: a log with one line per event, and the answer of a chat as it streams.

`render.local` has the third one, a live tree for a run in this process. All read the same stream of events.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from penstock.cli.render.call_tree import Calls, describe_call
from penstock.cli.render.events import RunEvent, ending, event_line, lead, reason
from penstock.cli.render.screen import Line, Screen, print_error, printable, write
from penstock.cli.render.text import multiline

QUIET = frozenset({"call.started", "call.waiting", "call.settled", "node.progress", "budget"})
"""Event types that have no line in a log unless every event is shown."""
ON_ONE_LINE = str.maketrans("\r\n\t", "   ")


class _StreamedText:
    """Text written in pieces, and whether it is at the start of a line."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._at_line_start = True

    def _write(self, text: str) -> None:
        if text:
            write(text, self._screen.stream, end="")
            self._at_line_start = text.endswith("\n")

    def _end_line(self) -> None:
        if not self._at_line_start:
            self._write("\n")


class EventLog(_StreamedText):
    """Prints events, one per line; text deltas of a node share a line until another event is printed.

    With `everything`, each event has a line of its own.
    """

    def __init__(self, screen: Screen, everything: bool = False) -> None:
        super().__init__(screen)
        self._everything = everything
        self._calls = Calls()
        self._speaker: str | None = None
        self._held: list[Line] = []
        self._stop = ""
        """Why the last call failed or was stopped; the limit that follows is not printed again."""

    def add(self, event: RunEvent) -> None:
        """Print the next event."""
        line = self._line(event)
        if event.type == "limit" and reason(event.data) == self._stop and not self._everything:
            return
        if _is_step(event) and not self._everything:
            return
        if event.type == "text.delta" and not self._everything:
            self._add_text(event)
        elif event.type in ("call.ended", "limit") and self._speaker is not None:
            # A model call ends just before its last text delta; hold its line until the text is complete.
            self._held.append(line)
        elif self._everything or not (event.type in QUIET or _is_root(event)):
            self.end_text()
            self._screen.show(line, whole=True)

    def notice(self, text: str) -> None:
        """Print a message that is not an event."""
        self.end_text()
        print_error(text)

    def end_text(self) -> None:
        """End the line of streamed text, and print the lines held until its end."""
        self._end_line()
        self._speaker = None
        if self._held:
            self._screen.show(*self._held, whole=True)
            self._held = []

    def _line(self, event: RunEvent) -> Line:
        call = self._calls.add(event)
        if event.type != "call.ended":
            return event_line(event)
        if self._everything or not _is_step(event):  # the limit that stopped a step is printed, as its call is not
            self._stop = "" if call is None else call.why
        return event_line(event, describe_call(event.data, call))

    def _add_text(self, event: RunEvent) -> None:
        speaker = str(event.data.get("node_id", ""))
        if speaker != self._speaker:
            self.end_text()
            self._write(f"{lead(event)}{event.type:<18} {printable(speaker)} ")
            self._speaker = speaker
        self._write(printable(str(event.data["text"]).translate(ON_ONE_LINE)))


def _is_root(event: RunEvent) -> bool:
    """Whether the event is about the call of the whole run, whose end is rendered with its results."""
    return event.type == "call.ended" and event.data["parent_id"] is None


def _is_step(event: RunEvent) -> bool:
    """Whether the event is about a step of a run on a server, whose nodes have events of their own."""
    return event.type == "call.ended" and event.data["kind"] == "system" and "duration_ms" in event.data


Speaker = tuple[str, str]
"""A node, and the agent in it."""


class Answer(_StreamedText):
    """Prints an answer while it streams, with the text of each agent kept apart.

    A run that another server takes over streams unfinished text again from its beginning. Only the part beyond the
    text already shown is printed; if the text differs, all of it is printed after a note that it begins again.
    """

    def __init__(self, screen: Screen) -> None:
        super().__init__(screen)
        self._speaker: Speaker | None = None
        self._texts: dict[Speaker, list[str]] = {}
        """Text shown so far, by speaker."""
        self._tool_calls: list[tuple[Speaker, Any]] = []
        self._texts_before: dict[Speaker, str] = {}
        """Text of each speaker when the run was resumed, to match against the repeated text."""
        self._repeated: dict[Speaker, int] = {}
        """Number of characters of `_texts_before` that have been repeated, by speaker."""
        self._tool_calls_before: list[tuple[Speaker, Any]] = []

    def add(self, event: RunEvent) -> None:
        """Print the next event, as far as it is part of the answer."""
        speaker = str(event.data.get("node_id", "")), str(event.data.get("source", ""))
        if event.type == "text.delta":
            self._add_text(speaker, str(event.data["text"]))
        elif event.type == "tool.call":
            self._add_tool_call(speaker, event.data["call"])
        elif event.type == "run.resumed":
            self._expect_repetition()
        elif event.type == "approval.requested":
            self._end_line()

    def notice(self, text: str) -> None:
        """Report a problem that delays the rest of the answer."""
        if self._screen.moves:  # in a pipe, standard output has only the answer, without extra line ends
            self._end_line()
        print_error(text)

    def end(self, event: RunEvent) -> None:
        """Print output that was not streamed, and how the run ended if it did not complete."""
        self._end_line()
        if event.type != "run.completed":
            self._screen.show(*ending(event), whole=True)
            return
        output = _text_of(event.data.get("output"))
        streamed = "".join(self._texts.get(self._speaker or ("", ""), ()))
        if not streamed.strip().endswith(output.strip()):
            if any(count < len(self._texts_before.get(who, "")) for who, count in self._repeated.items()):
                self._begin_again()  # the repeated text was shorter than before
            self._write(multiline(output))
            self._end_line()

    def _expect_repetition(self) -> None:
        """Expect text that was shown before: the run was resumed."""
        self._texts_before = {speaker: "".join(pieces) for speaker, pieces in self._texts.items()}
        self._repeated = {}
        self._tool_calls_before = [*self._tool_calls]

    def _add_text(self, speaker: Speaker, text: str) -> None:
        text = self._new_part(speaker, text)
        if not text:
            return
        if speaker != self._speaker:
            self._note(self._name_of(speaker))
        self._speaker = speaker
        self._texts.setdefault(speaker, []).append(text)
        self._write(multiline(text))

    def _name_of(self, speaker: Speaker) -> str:
        """Return the name of a new speaker, the node or the agent in it; empty for the first speaker."""
        if self._speaker is None:
            return ""
        (before, _), (node_id, source) = self._speaker, speaker
        return node_id if node_id != before else source.rpartition("/")[2]

    def _add_tool_call(self, speaker: Speaker, call: Mapping[str, Any]) -> None:
        if (speaker, call) in self._tool_calls_before:
            self._tool_calls_before.remove((speaker, call))
            return
        self._tool_calls.append((speaker, call))
        self._note(f"calls {call['name']}")

    def _new_part(self, speaker: Speaker, text: str) -> str:
        """Return the part not shown yet; all text since the resume if it differs from the text before."""
        before, repeated = self._texts_before.get(speaker, ""), self._repeated.get(speaker, 0)
        left = len(before) - repeated
        if not left or not text:
            return text
        if before.startswith(text[:left], repeated):
            self._repeated[speaker] = repeated + min(len(text), left)
            return text[left:]
        self._begin_again()
        self._texts[speaker] = []
        return before[:repeated] + text

    def _begin_again(self) -> None:
        self._texts_before, self._tool_calls_before = {}, []
        self._note("it begins again")

    def _note(self, text: str) -> None:
        """Print a note between two pieces of text, on its own line."""
        self._end_line()
        if text:
            self._screen.show([(f"· {printable(text)}", "dim")])


def _text_of(output: Any) -> str:
    if isinstance(output, Mapping) and len(output) == 1:
        (output,) = output.values()
    if output is None or isinstance(output, str):
        return output or ""
    return json.dumps(output, ensure_ascii=False)
