# mypy: disable-error-code="import-not-found"
"""Hamilton's async driver: a function per node, and what a function needs is in its signature."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from hamilton import ad_hoc_utils, async_driver

from benchmarks._graphs.shapes import Chain, Fan, Layers, Run

GIVEN = "given"


def chain(shape: Chain) -> Run:
    pause = shape.pause

    def step(need: str) -> Callable[..., Any]:
        async def work(**needed: int) -> int:
            if pause:
                await pause()
            return needed[need] + 1

        return work

    names = [GIVEN, *(f"s{number}" for number in range(shape.size))]
    return _driven([_node(step(need), name, [need]) for need, name in itertools.pairwise(names)])


def fan(shape: Fan) -> Run:
    pause = shape.pause

    def worker(place: int) -> Callable[..., Any]:
        async def work(**needed: int) -> int:
            if pause:
                await pause()
            return place + 1

        return work

    names = [f"w{place}" for place in range(shape.size)]
    workers = [_node(worker(place), name, [GIVEN]) for place, name in enumerate(names)]
    return _driven([*workers, _node(_total, "total", names)])


def layers(shape: Layers) -> Run:
    def step(name: str, needs: list[str]) -> Callable[..., Any]:
        async def work(**needed: int) -> int:
            await asyncio.sleep(shape.sleep_s[name])
            return shape.value(name, needed.values() if needs else ())

        return work

    steps = [_node(step(name, needs), name, needs or [GIVEN]) for name, needs in shape.depends_on.items()]
    return _driven([*steps, _node(_total, "total", shape.last)])


async def _total(**needed: int) -> int:
    return sum(needed.values())


def _node(function: Callable[..., Any], name: str, needs: Sequence[str]) -> Callable[..., Any]:
    """The function as if it had been written out with that name and these parameters."""
    parameters = [inspect.Parameter(need, inspect.Parameter.KEYWORD_ONLY, annotation=int) for need in needs]
    function.__name__ = name
    function.__annotations__ = {**dict.fromkeys(needs, int), "return": int}
    function.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
    return function


def _driven(nodes: Sequence[Callable[..., Any]]) -> Run:
    driver = async_driver.AsyncDriver({}, ad_hoc_utils.create_temporary_module(*nodes), result_builder=None)
    wanted = nodes[-1].__name__

    async def run() -> int:
        result: int = (await driver.raw_execute([wanted], inputs={GIVEN: 0}))[wanted]
        return result

    return run
