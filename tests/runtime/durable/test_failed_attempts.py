"""Attempts that failed, in a journal: a run that is resumed goes on with the next one, and counts those before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from penstock import ErrorPolicy, ExecutionConfig, ExecutionContext, FunctionNode, Graph
from penstock.kernel.executor import DataValue
from penstock.runtime.durable.journal import Journal
from penstock.testing import crash_points
from tests.nodes.graphs import Json, events_of, graph, node
from tests.runtime.durable.journalled import PRICES, JsonJournals, Log, Thinker

COST = 200_000
"""What the model is paid for one answer."""


class Crash(BaseException):
    """The end of the process, as far as a test in one process can have it."""


class Flaky:
    """Fails so often over all processes, and counts in the state what it saw."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.ran = 0

    def execute(self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: Any) -> DataValue:
        self.ran += 1
        context.state["attempts"] = context.state.get("attempts", 0) + 1
        if self.ran <= self.failures:
            raise ValueError(f"failure {self.ran}")
        return DataValue("number", context.state["attempts"])


def document(**policy: Any) -> Json:
    """A model and a node that fails, inside a subgraph that has the policy."""
    inner = graph([node("ask", "llm-completion", model="thinker"), node("f", "flaky")], ["ask > f"])
    return graph([node("n", "subgraph", graph=inner, error_policy={"retry_delay_ms": 0, **policy})])


async def one_process(store: JsonJournals, given: Json, flaky: Flaky, log: Log) -> tuple[Any, list[Any], Any]:
    context = ExecutionContext(
        ExecutionConfig(None, None, 9), input="go", prices=PRICES, journal=await Journal.open(store, "r")
    )
    services = {"models": {"thinker": Thinker(log)}}
    events, result = await events_of(given, run=context, services=services, more={"flaky": flaky})
    context.end()
    return {name: one.value for name, one in result.outputs.items()}, events, context


@contextmanager
def crash_at(point: str) -> Iterator[None]:
    def die() -> None:
        raise Crash

    crash_points.arm(point, die=die)
    try:
        with pytest.raises(Crash):
            yield
    finally:
        crash_points.disarm()


async def points_of(given: Json, failures: int) -> list[str]:
    """Every point that a run passes, each time it does."""
    with crash_points.watching() as passed:
        await one_process(JsonJournals(), given, Flaky(failures), Log())
    return [f"{name}:{number}" for name, times in passed.items() for number in range(1, times + 1)]


@pytest.mark.requirement("P-E5")
@pytest.mark.parametrize(
    ("policy", "failures", "output"),
    [
        ({"on_error": "retry", "retry_count": 2}, 2, 3),
        ({"on_error": "fallback", "fallback_value": "none", "retry_count": 1}, 9, "none"),
        ({"on_error": "continue"}, 9, {"error": "ValueError", "message": "failure 1"}),
    ],
    ids=["retry", "fallback", "continue"],
)
async def test_a_crash_anywhere_repeats_no_attempt_that_was_recorded(policy: Json, failures: int, output: Any) -> None:
    given = document(**policy)
    flaky, log = Flaky(failures), Log()
    value, _, undisturbed = await one_process(JsonJournals(), given, flaky, log)
    assert value == {"output": output}
    attempts, requests = flaky.ran, len(log)
    for point in await points_of(given, failures):
        store, flaky, log = JsonJournals(), Flaky(failures), Log()
        with crash_at(point):
            await one_process(store, given, flaky, log)
        failed = [key for key in store.keys_of() if key.startswith(("n/failed:", "n~")) and "/failed:" in key]
        is_done = not {"n", "n/f", "n~2/f", "n~3/f"}.isdisjoint(store.keys_of())
        before = flaky.ran
        flaky.ran = len(failed)  # what failed and was not recorded fails again, as it did
        value, _, resumed = await one_process(store, given, flaky, log)
        assert value == {"output": output}, point
        assert flaky.ran == (len(failed) if is_done else attempts), point
        assert before <= attempts, point
        assert len(log) <= requests + 1, point  # the answer that was under way
        assert resumed.get_snapshot().retries_used == undisturbed.get_snapshot().retries_used, point
        assert resumed.balance.spent_nanos == requests * COST, point


@pytest.mark.requirement("P-E5")
async def test_a_resumed_run_shows_earlier_attempts_and_continues_with_the_next() -> None:
    store, flaky = JsonJournals(), Flaky(2)
    given = document(on_error="retry", retry_count=2)
    with crash_at("value.after_append:1"):
        await one_process(store, given, flaky, Log())
    assert store.keys_of()[-1] == "n/failed:1"
    _, events, context = await one_process(store, given, flaky, Log())
    assert [one.data["attempt"] for one in events if one.event_type == "retry"] == [2]
    attempts = [call for call in context.graph.calls()[1] if call.name == "n"]
    assert [(call.status, (call.metadata or {}).get("attempt", 1)) for call in attempts] == [
        ("fail", 1),
        ("fail", 2),
        ("success", 3),
    ]
    assert (attempts[0].metadata or {})["replayed"] is True
    assert attempts[0].stop_reason == "failure 1"


@pytest.mark.requirement("P-E5")
async def test_a_found_fallback_counts_the_retries_that_came_before_it() -> None:
    store, flaky = JsonJournals(), Flaky(9)
    given = document(on_error="fallback", fallback_value="none", retry_count=3)
    _, _, first = await one_process(store, given, flaky, Log())
    value, events, again = await one_process(store, given, flaky, Log())
    assert (value, flaky.ran) == ({"output": "none"}, 4)
    assert [one.event_type for one in events] == ["started", "completed"]
    assert all(one.replayed for one in events)
    assert again.get_snapshot().retries_used == first.get_snapshot().retries_used == 4


async def test_the_last_attempt_of_a_policy_that_fails_is_made_again() -> None:
    store, flaky = JsonJournals(), Flaky(2)
    given = document(on_error="retry", retry_count=1)
    with pytest.raises(ValueError, match="failure 2"):
        await one_process(store, given, flaky, Log())
    value, _, _ = await one_process(store, given, flaky, Log())
    assert (value, flaky.ran) == ({"output": 2}, 3)  # what the last one did to the state was not recorded either


@pytest.mark.requirement("P-E5")
@pytest.mark.parametrize("blocking", [False, True])
async def test_steps_of_python_graphs_continue_in_the_same_way(blocking: bool) -> None:
    store, ran = JsonJournals(), []

    def act(ctx: ExecutionContext) -> int:
        ran.append(1)
        raise ValueError("never")

    def steps(act: Callable[[ExecutionContext], int]) -> Graph:
        one = FunctionNode("n", act)
        one.blocking = blocking  # type: ignore[attr-defined]
        policy = ErrorPolicy("continue", retry_count=2, retry_delay_ms=0)
        return Graph("g").add_step(one, "s", error_policy=policy)

    with crash_at("value.after_append:3"), ExecutionContext(journal=await Journal.open(store, "r")) as context:
        await steps(act).execute(context)
    assert (len(ran), store.keys_of()) == (3, ["s/failed:1", "s~2/failed:2", "s~3/failed:3"])
    with ExecutionContext(journal=await Journal.open(store, "r")) as context:
        assert await steps(act).execute(context) == {"s": {"error": "ValueError", "message": "never"}}
    assert len(ran) == 3
