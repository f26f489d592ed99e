"""Joins pieces of text that follow each other in the log of a run into one event.

Only neighbours of one text are joined: of the same node and source, without any other event between them. So a joined
event stands for a range of the log without gaps, and a position after it is a position in the log, from which a client
resumes without a repetition or a loss. It says how long ago and how long each of its pieces was, so that a client can
also take it apart again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.hosting.event_pipeline import PIECE
from penstock.hosting.ports import HostedEvent
from penstock.server.sse import event_json

MAX_CHARACTERS = 16_000
"""Maximum length of a joined text; a piece that is longer is sent alone."""
MAX_PIECES = 500
"""Maximum number of pieces in one event."""

Group = Sequence[HostedEvent]
"""Events that are sent as one."""


class TextJoiner:
    """Takes the events of a run in order, and returns them in groups, each of them once and in the same order."""

    def __init__(self) -> None:
        self._waiting: list[HostedEvent] = []
        self._characters = 0

    @property
    def is_waiting(self) -> bool:
        """Whether there is text that waits for more."""
        return bool(self._waiting)

    def add(self, event: HostedEvent) -> list[Group]:
        """Take the next event; return what is to be sent now. A piece of text waits until `flush`."""
        if event.type != PIECE or not isinstance(event.data.get("text"), str):
            return [*self.flush(), (event,)]
        size = len(event.data["text"])
        ready = [] if self._has_room(event, size) else self.flush()
        self._waiting.append(event)
        self._characters += size
        return ready

    def flush(self) -> list[Group]:
        """Return the text that waits."""
        ready: list[Group] = [self._waiting] if self._waiting else []
        self._waiting, self._characters = [], 0
        return ready

    def _has_room(self, event: HostedEvent, size: int) -> bool:
        if not self._waiting:
            return True
        last = self._waiting[-1]
        is_same = all(last.data.get(name) == event.data.get(name) for name in ("node_id", "source"))
        has_room = len(self._waiting) < MAX_PIECES and self._characters + size <= MAX_CHARACTERS
        return is_same and has_room and event.seq == last.seq + 1


def group_json(group: Group) -> dict[str, Any]:
    """Return a group as the JSON of its last event, with the text of all.

    `joined` has a pair for each piece: how many milliseconds before the last it was emitted, and its characters.
    """
    last = group[-1]
    shown = event_json(last)
    if len(group) > 1:
        shown["data"]["text"] = "".join(event.data["text"] for event in group)
        shown["joined"] = [[last.at_ms - event.at_ms, len(event.data["text"])] for event in group]
    return shown
