"""The graphs that are run, each with the result that it must have.

Knows nothing of those who run them, and is imported in every peer's environment. A contestant is a module with a
function `chain`, `fan` or `layers` for each shape that it can express: given the shape it builds its graph, and returns
what runs it once.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

Pause = Callable[[], Awaitable[None]]
Run = Callable[[], Awaitable[int]]
"""One run from the first step to the result."""
Recorded = Callable[[], int]
"""How many steps the trace of the last run has."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Steps one after the other, each adding 1 to what it gets."""

    size: int
    pause: Pause | None = None

    @property
    def steps(self) -> int:
        return self.size

    @property
    def expected(self) -> int:
        return self.size


@dataclass(frozen=True, slots=True)
class Fan:
    """One step, then many at once, of which the i-th gives i + 1, then one that sums."""

    size: int
    pause: Pause | None = None

    @property
    def steps(self) -> int:
        return self.size

    @property
    def expected(self) -> int:
        return self.size * (self.size + 1) // 2


@dataclass(frozen=True, slots=True)
class Layers:
    """Ten layers of steps, each needing three of the layer before it and sleeping 1 to 20 ms, then one that sums."""

    size: int
    depends_on: dict[str, list[str]]
    sleep_s: dict[str, float]

    DEPTH: ClassVar[int] = 10
    NEEDS: ClassVar[int] = 3

    @classmethod
    def of(cls, size: int) -> Layers:
        chance = random.Random(12_345)
        depends_on: dict[str, list[str]] = {}
        for name in cls._names(0, size):
            depends_on[name] = []
        for layer in range(1, cls.DEPTH):
            for name in cls._names(layer, size):
                depends_on[name] = chance.sample(cls._names(layer - 1, size), cls.NEEDS)
        return cls(size, depends_on, {name: chance.uniform(0.001, 0.020) for name in depends_on})

    @staticmethod
    def _names(layer: int, size: int) -> list[str]:
        return [f"l{layer:02d}_{place:03d}" for place in range(size)]

    def layer(self, number: int) -> list[str]:
        return self._names(number, self.size)

    @property
    def last(self) -> list[str]:
        return self.layer(self.DEPTH - 1)

    @property
    def steps(self) -> int:
        return len(self.depends_on)

    @staticmethod
    def value(name: str, needed: Iterable[int]) -> int:
        """What the step of that name makes of what it needs, in whichever order that comes."""
        return (sum(needed) + int(name[1:3]) * 7 + int(name[4:])) % 1_000_003

    @property
    def expected(self) -> int:
        values: dict[str, int] = {}
        for name, needs in self.depends_on.items():
            values[name] = self.value(name, (values[need] for need in needs))
        return sum(values[name] for name in self.last)

    @property
    def critical_path_s(self) -> float:
        """The least that any scheduler can take."""
        ends: dict[str, float] = {}
        for name, needs in self.depends_on.items():
            ends[name] = self.sleep_s[name] + max((ends[need] for need in needs), default=0.0)
        return max(ends[name] for name in self.last)


Shape = Chain | Fan | Layers


def shape_of(name: str, size: int, sleep_s: float = 0.0) -> Shape:
    """The shape that a worker is to time."""
    if name == "layers":
        return Layers.of(size)
    pause = functools.partial(asyncio.sleep, sleep_s) if sleep_s else None
    return (Chain if name == "chain" else Fan)(size, pause)
