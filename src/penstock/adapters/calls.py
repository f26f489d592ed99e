"""Run a foreign tool as a call of a run.

The call belongs to the innermost open context of the run. A sync tool runs on a worker if the run can be stopped while
it runs: its caller is released, and the tool's late result is discarded. An async tool is interrupted where it waits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

from penstock.runtime.admission import after_end
from penstock.runtime.call import CallSpec
from penstock.runtime.calls import Calls
from penstock.runtime.context import ExecutionContext, current_call, innermost
from penstock.runtime.execution import run_async
from penstock.tracing.record import OPEN


def call_tool(run: ExecutionContext, name: str, arguments: object, work: Callable[[], Any]) -> Any:
    """Return the result of `work`, run as a tool call of the run; `arguments` is recorded as the call's input."""
    return _place(run).tool(lambda _: _paid(work()), arguments, name=name)


async def acall_tool(run: ExecutionContext, name: str, arguments: object, work: Callable[[], Awaitable[Any]]) -> Any:
    """Like `call_tool`, for work that is awaited."""

    async def awaited(_: object) -> Any:
        return _paid(await work())

    return await _place(run).atool(awaited, arguments, name=name)


async def call_tool_on_worker(run: ExecutionContext, name: str, arguments: object, work: Callable[[], Any]) -> Any:
    """Like `call_tool`, for a task that waits for sync work; a stop abandons the worker."""
    place = innermost(run)
    if place._base.end_seq != OPEN:
        return after_end(place, f"tool call {name!r}").result()
    spec = CallSpec("tool", name)
    return (await run_async(place, spec, lambda _: _paid(work()), (arguments,), on_worker=True)).result()


def _place(run: ExecutionContext) -> Calls:
    return cast(Calls, innermost(run))


def _paid(value: Any) -> Any:
    """Return `value`, whose usage is not billed: the model requests of a tool are calls of their own."""
    call = current_call()
    assert call is not None
    call.billed_below = [*(call.billed_below or ()), value]
    return value
