"""Artifacts that are made once, and who waits for whom meanwhile.

Pure bookkeeping for one run. Several consumers may ask for the same artifact at the same time: the first makes it, the
others wait. A circle is a consumer that, through whatever waits for whatever, waits for itself; two consumers that wait
for the same thing are none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from penstock.errors import PenstockError

Key = tuple[str, str]
"""A node and its output handle."""


class LinkCycle(PenstockError):
    """Artifacts need each other in a circle."""

    def __init__(self, path: Sequence[str]) -> None:
        self.path = tuple(path)
        super().__init__(f"the links need each other: {' → '.join(self.path)}")


@dataclass(frozen=True, slots=True)
class Made:
    """The artifact is there; None may well be its value."""

    artifact: Any


class LinkTable:
    """What has been made, what is being made, and for whom."""

    __slots__ = ("_made", "_making", "_waits_for")

    def __init__(self) -> None:
        self._made: dict[Key, Made] = {}
        self._making: set[Key] = set()
        self._waits_for: dict[Key, set[Key]] = {}

    def ask(self, key: Key, consumer: Key | None) -> Made | Literal["make", "wait"]:
        """What the consumer is to do: take it, make it, or wait for whoever makes it. LinkCycle if that never ends."""
        made = self._made.get(key)
        if made is not None:
            return made
        if consumer is not None:
            self._refuse_circle(key, consumer)
            self._waits_for.setdefault(consumer, set()).add(key)
        if key in self._making:
            return "wait"
        self._making.add(key)
        return "make"

    def done(self, key: Key, artifact: Any) -> None:
        """The artifact has been made."""
        self._made[key] = Made(artifact)
        self._forget(key)

    def failed(self, key: Key) -> None:
        """Making it failed; who asks again makes it again."""
        self._forget(key)

    def _forget(self, key: Key) -> None:
        self._making.discard(key)
        self._waits_for.pop(key, None)
        for waiting in self._waits_for.values():
            waiting.discard(key)

    def _refuse_circle(self, key: Key, consumer: Key) -> None:
        path = self._path(key, consumer)
        if path is not None:
            raise LinkCycle([f"{node}.{handle}" for node, handle in [consumer, *path]])

    def _path(self, start: Key, goal: Key) -> list[Key] | None:
        """How `start` waits for `goal`, if it does."""
        stack, seen = [[start]], {start}
        while stack:
            path = stack.pop()
            if path[-1] == goal:
                return path
            for after in self._waits_for.get(path[-1], ()):
                if after not in seen:
                    seen.add(after)
                    stack.append([*path, after])
        return None
