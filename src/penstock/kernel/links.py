"""Artifacts that are made once, and the consumers that wait for them meanwhile.

Pure bookkeeping for one run, for one thread at a time. Several consumers may request the same artifact at the same
time: the first makes it, the others wait. A cycle is an artifact that needs itself through any chain of waiting
consumers; two consumers that wait for the same artifact are not a cycle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from penstock.errors import InvalidValue, PenstockError
from penstock.kernel.plan import way

Key = tuple[str, str]
"""A node and its output handle."""


class LinkCycle(PenstockError):
    """Artifacts need each other in a cycle."""

    def __init__(self, path: Sequence[str]) -> None:
        self.path = tuple(path)
        """The artifacts of the cycle as node.handle, each needing the next; the first is repeated at the end."""
        super().__init__(f"the links need each other: {way(self.path)}")


@dataclass(frozen=True, slots=True)
class Made:
    """A finished artifact; its value may be None."""

    artifact: Any


class LinkTable:
    """What has been made, what is being made, and for whom.

    Waits are recorded in both directions, and only until the artifact is made or has failed: a wait that has ended must
    not look like half of a cycle later.
    """

    __slots__ = ("_made", "_making", "_waited_for_by", "_waits_for")

    def __init__(self) -> None:
        self._made: dict[Key, Made] = {}
        self._making: set[Key] = set()
        self._waits_for: dict[Key, dict[Key, None]] = {}
        self._waited_for_by: dict[Key, dict[Key, None]] = {}

    def ask(self, key: Key, consumer: Key | None) -> Made | Literal["make", "wait"]:
        """Return whether the consumer takes the artifact, makes it, or waits for its maker; raises LinkCycle for an
        endless wait.

        The consumer is the artifact being made that needs this one; None is a running node, which no artifact waits
        for.
        """
        made = self._made.get(key)
        if made is not None:
            return made
        if consumer is not None:
            path = self._path(key, consumer)
            if path is not None:
                raise LinkCycle([f"{node}.{handle}" for node, handle in [consumer, *path]])
            self._waits_for.setdefault(consumer, {})[key] = None
            self._waited_for_by.setdefault(key, {})[consumer] = None
        if key in self._making:
            return "wait"
        self._making.add(key)
        return "make"

    def done(self, key: Key, artifact: Any) -> None:
        """Record that the artifact was made."""
        self._end(key)
        self._made[key] = Made(artifact)

    def failed(self, key: Key) -> None:
        """Record that making it failed; the next consumer tries again."""
        self._end(key)

    def _end(self, key: Key) -> None:
        if key not in self._making:
            raise InvalidValue("key", key, "that of an artifact that is being made")
        self._making.remove(key)
        for consumer in self._waited_for_by.pop(key, ()):
            self._waits_for.get(consumer, {}).pop(key, None)
        for needed in self._waits_for.pop(key, ()):
            self._waited_for_by.get(needed, {}).pop(key, None)

    def _path(self, start: Key, goal: Key) -> list[Key] | None:
        """Return the chain of waits from `start` to `goal`, if there is one."""
        came_from: dict[Key, Key | None] = {start: None}
        todo = [start]
        while todo:
            one = todo.pop()
            if one == goal:
                return _walk_back(one, came_from)
            for needed in self._waits_for.get(one, ()):
                if needed not in came_from:
                    came_from[needed] = one
                    todo.append(needed)
        return None


def _walk_back(last: Key, came_from: dict[Key, Key | None]) -> list[Key]:
    path: list[Key] = []
    one: Key | None = last
    while one is not None:
        path.append(one)
        one = came_from[one]
    return path[::-1]
