"""Rollback for the stores in memory: the changes of a failed transaction are undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

MISSING = object()


class UndoLog:
    """The undo steps of the open transaction; outside a transaction nothing is recorded."""

    __slots__ = ("_steps",)

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] | None = None

    @property
    def is_open(self) -> bool:
        """Whether a transaction is open."""
        return self._steps is not None

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Undo all changes made in the block if the block raises."""
        if self._steps is not None:
            raise RuntimeError("a transaction cannot be opened inside another one")
        steps: list[Callable[[], object]] = []
        self._steps = steps
        try:
            yield
        except BaseException:
            for step in reversed(steps):
                step()
            raise
        finally:
            self._steps = None

    def step(self, undo: Callable[[], object]) -> None:
        """Register `undo` to be called if the open transaction fails."""
        if self._steps is not None:
            self._steps.append(undo)

    def entry(self, entries: dict[Any, Any], key: object) -> None:
        """Record the value of a key that is about to be changed or removed."""
        if self._steps is None:
            return
        before = entries.get(key, MISSING)
        if before is MISSING:
            self._steps.append(partial(entries.pop, key, None))
        else:
            self._steps.append(partial(entries.__setitem__, key, before))
