"""What is recorded, what is found, and what a found thing does to the run."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from contextlib import aclosing
from enum import IntEnum
from typing import Any

import pytest

from penstock.agents.agent import Agent
from penstock.agents.messages import Message, TextDelta, ToolCall
from penstock.agents.model import ModelResponse, TruncatedByBudget
from penstock.agents.scripted import ScriptedModel
from penstock.agents.tools import Tool
from penstock.containment.accounts import Balance
from penstock.containment.ledger import MemoryLedgerStore
from penstock.containment.limits import Budget, BudgetExceededError
from penstock.containment.safety import Decision
from penstock.containment.shield import ShieldPipeline
from penstock.errors import CancelledError, InvalidValue, PenstockError
from penstock.flow.graph import Graph
from penstock.flow.node import FunctionNode
from penstock.kernel.executor import DataValue, ExecutionResult, PartialValue
from penstock.policies import ErrorPolicy
from penstock.runtime.billing.usage import Usage
from penstock.runtime.context import ExecutionContext
from penstock.runtime.durable import journal as journal_module
from penstock.runtime.durable.journal import (
    Journal,
    JournalMissing,
    NotRecordable,
    fork_journal,
    is_json,
    must_be_json,
    shortened,
)
from penstock.runtime.durable.keys import entry_node, idempotency_key, scope
from penstock.runtime.durable.ports import JournalEntry
from penstock.runtime.durable.shared import SharedBudget
from penstock.runtime.graphs.graph_runtime import FlowContext
from penstock.runtime.graphs.node_execution import run_flow
from penstock.stops import StopReason
from penstock.tracing.events import ModelCallTrace
from tests.nodes.graphs import events_of, graph, node, registry
from tests.runtime.durable.journalled import MANY_PARTS, PRICES, JsonJournals, Log, Thinker, context_for, run

ONE_AGENT = graph([node("agent", "agent", model="thinker", tools=["look", "count"])])


class Given:
    """An executor that does what it is given."""

    def __init__(self, act: Any) -> None:
        self.execute = act


# Found instead of run.


@pytest.mark.requirement("X-3")
async def test_recorded_work_is_replayed_and_neither_runs_nor_is_paid_again() -> None:
    store, log, again = JsonJournals(), Log(), Log()
    came_to, _, first, journal = await run(store, MANY_PARTS, log)
    repeated, _, second, found = await run(store, MANY_PARTS, again)
    assert repeated == came_to
    assert (len(again), found.recorded, found.replayed) == (0, 0, journal.recorded)
    assert len(store.keys_of()) == journal.recorded
    assert second.balance.spent_nanos == first.balance.spent_nanos > 0
    assert second.balance.tokens_in == first.balance.tokens_in
    assert second.balance.api_calls == first.balance.api_calls
    assert second.stats.total_cost == first.stats.total_cost


@pytest.mark.requirement("X-3")
async def test_a_replayed_call_is_not_charged_at_the_store_again() -> None:
    store, ledger = JsonJournals(), MemoryLedgerStore()
    ledger.open_account("run:r", Budget(max_cost_dollars=100.0).limits())

    async def pass_over(epoch: int) -> tuple[Balance, Balance]:
        shared = SharedBudget(ledger, "run:r", prefix=f"r/{epoch}")
        shared.recover()
        _, _, context, _ = await run(store, MANY_PARTS, Log(), shared_budget=shared)
        await shared.aflush()
        return ledger.balance("run:r"), context.balance

    counted, here = await pass_over(1)
    assert counted.spent_nanos == here.spent_nanos > 0
    assert (await pass_over(2))[0] == counted
    del store.kept["r"]["right"], store.kept["r"]["right/llm:thinker"]
    again, its_own = await pass_over(3)
    assert again.spent_nanos == counted.spent_nanos + 200_000
    assert again.api_calls == counted.api_calls + 1
    assert its_own.spent_nanos == here.spent_nanos


PURE = {"in", "list", "both", "out"}
"""The nodes of MANY_PARTS that are computed again rather than recorded."""
PURE_ONLY = graph([node("new", "text", text="I am new"), node("end", "output")], ["new > end"])


async def test_a_replayed_node_emits_started_and_completed_and_is_marked_replayed() -> None:
    store = JsonJournals()
    _, events, _, _ = await run(store, MANY_PARTS, Log())
    _, again, _, _ = await run(store, MANY_PARTS, Log())
    assert not any(event.replayed for event in events)
    assert {event.node_id for event in again if not event.replayed} == PURE
    nodes = {event.node_id for event in again}
    for one in nodes:
        assert [event.event_type for event in again if event.node_id == one] == ["started", "completed"]
    assert next(event for event in again if event.node_id == "left").to_dict()["replayed"] is True
    assert "replayed" not in events[0].to_dict()


async def test_a_node_that_gives_the_same_each_time_is_computed_again_and_not_recorded() -> None:
    store = JsonJournals()
    await run(store, MANY_PARTS, Log())
    assert PURE.isdisjoint(store.keys_of("r"))
    context = ExecutionContext(journal=await Journal.open(store, "r", replay_only=True))
    async with context, aclosing(run_flow(PURE_ONLY, context, registry())) as stream:
        *_, result = [event async for event in stream]
    assert isinstance(result, ExecutionResult)
    assert result.outputs["output"].value == "I am new"


async def test_a_way_that_was_not_taken_is_not_taken_again() -> None:
    store, ran = JsonJournals(), Log()

    def act(data: Any, inputs: Any, context: Any) -> DataValue:
        ran.ran()
        return DataValue("text", context.node_id)

    fork = node("fork", "conditional", when="input == 'go'")
    document = graph(
        [node("in", "input"), fork, node("a", "act"), node("b", "act"), node("none", "none"), node("c", "act")],
        ["in > fork", "fork.true > a", "fork.false > b", "none > c"],
    )
    more = {"act": Given(act), "none": Given(lambda data, inputs, context: None)}
    for _ in range(2):
        came_to, events, *_ = await run(store, document, Log(), more=more)
        assert came_to == {"a.output": "a"}
        assert {event.node_id for event in events if event.event_type == "skipped"} == {"b", "c"}
    assert ran.lines == ["r/a"]


async def test_found_calls_are_in_the_tree_with_what_they_cost_then() -> None:
    store = JsonJournals()
    await run(store, ONE_AGENT, Log())
    del store.kept["r"]["agent"]  # as if it had died before the node was done
    _, _, context, journal = await run(store, ONE_AGENT, Log())
    _, calls = context.graph.calls()
    found = [call for call in calls if (call.metadata or {}).get("replayed")]
    assert [(call.kind, call.name) for call in found] == [
        ("llm", "thinker"),
        ("tool", "look"),
        ("tool", "count"),
        ("llm", "thinker"),
        ("tool", "look"),
        ("tool", "count"),
        ("llm", "thinker"),
    ]
    assert [call.cost for call in found] == [200_000, 1_000, 0, 201_000, 1_000, 0, 202_000]
    assert all(call.status == "success" for call in found)
    assert context.balance.spent_nanos == 605_000
    assert (journal.replayed, journal.recorded) == (7, 1)


async def test_replayed_work_is_not_refused_by_limits_or_hooks_but_new_work_is() -> None:
    store = JsonJournals()
    two = graph([node("a", "llm-completion", model="thinker"), node("b", "llm-completion", model="thinker")], ["a > b"])
    await run(store, two, Log())
    tight = Budget(max_cost_dollars=0.0001, max_steps=1)

    class Denies:
        def before_llm_call(self, ctx: Any) -> Decision:
            return Decision.HALT

        def before_tool_call(self, ctx: Any) -> Decision:
            return Decision.HALT

    log = Log()
    guarded = ShieldPipeline(pre_dispatch=Denies(), tool_dispatch=Denies())
    came_to, _, context, _ = await run(store, two, log, budget=tight, pipeline=guarded)
    assert came_to == {"output": "<<go>>"}
    assert len(log) == 0
    assert context.balance.spent_nanos == 400_000
    assert context.balance.steps == 4
    del store.kept["r"]["b"], store.kept["r"]["b/llm:thinker"]
    with pytest.raises(BudgetExceededError) as refused:
        await run(store, two, log, budget=tight)
    assert refused.value.stop.reason is StopReason.BUDGET_EXCEEDED
    assert len(log) == 0


async def test_a_replayed_answer_is_not_paid_again_by_the_call_that_returns_it() -> None:
    store = JsonJournals()

    async def pass_over() -> Balance:
        with context_for(await Journal.open(store, "r")) as context:
            model = Thinker(Log())
            answer = await context.allm(lambda: model.generate(context, []), name="handed on")
            assert answer.text == "<>"
            return context.balance

    first = await pass_over()
    assert first.spent_nanos == 200_000
    assert await pass_over() == first


async def test_a_replayed_answer_is_emitted_as_one_piece() -> None:
    store, pieces = JsonJournals(), [TextDelta("")]

    async def ask(run_id: str) -> ModelResponse:
        with context_for(await Journal.open(store, run_id)) as context:
            model = ScriptedModel(["a long answer that comes in several pieces"], name="thinker")
            pieces.clear()
            return await model.generate(context, [], on_delta=pieces.append)

    first = await ask("r")
    assert len(pieces) > 1
    again = await ask("r")
    assert [piece.text for piece in pieces] == [first.text] == [again.text]
    assert (again.usage, again.finish_reason, again.raw) == (first.usage, first.finish_reason, None)


async def test_a_streamed_answer_requested_twice_is_one_entry() -> None:
    store, pieces = JsonJournals(), [TextDelta("")]

    async def ask(*replies: str | Exception) -> str:
        with context_for(await Journal.open(store, "r")) as context:
            model = ScriptedModel(replies, name="thinker")
            model.retries = 1
            pieces.clear()
            return (await model.generate(context, [], on_delta=pieces.append)).text

    assert await ask(ConnectionRefusedError(), "60 m") == "60 m"
    assert ([piece.text for piece in pieces], len(store.keys_of())) == (["60 m"], 1)
    assert await ask() == "60 m"


@pytest.mark.requirement("X-3")
async def test_a_truncated_answer_is_paid_and_requested_again_when_the_budget_is_raised() -> None:
    store, log = JsonJournals(), Log()

    def answer(request: Any) -> ModelResponse:
        log.ran()
        text, most = "all of an answer", request.max_output_tokens
        is_whole = most >= 100
        usage = Usage(10, 100 if is_whole else most, model="thinker")
        return ModelResponse(
            text if is_whole else text[:8], usage=usage, finish_reason="stop" if is_whole else "length"
        )

    async def ask(max_cost: float) -> tuple[Any, int]:
        with context_for(await Journal.open(store, "r"), budget=Budget(max_cost_dollars=max_cost)) as context:
            result = await Agent(ScriptedModel(answer, name="thinker")).run("go", context)
            return result, context.balance.spent_nanos

    cut, spent = await ask(0.0005)
    assert (type(cut.error), cut.partial, len(log)) == (TruncatedByBudget, "all of a", 1)
    again, counted = await ask(0.0005)
    assert isinstance(again.error, BudgetExceededError)
    assert (counted, len(log)) == (spent, 1), "what was paid is counted, so that nothing is left to ask with"
    whole, all_of_it = await ask(0.01)
    assert (whole.output, all_of_it, len(log)) == ("all of an answer", spent + 1_010_000, 2)
    replayed, counted = await ask(0.01)
    assert (replayed.output, counted, len(log)) == ("all of an answer", all_of_it, 2)
    assert store.keys_of() == ["agent:agent/turn:1/llm:thinker", "agent:agent/turn:1/llm:thinker?2"]


async def test_a_truncated_answer_that_is_requested_again_does_not_take_another_entry() -> None:
    store, log = JsonJournals(), Log()

    def answer(request: Any) -> ModelResponse:
        log.ran()
        prompt, most = request.messages[-1].content, request.max_output_tokens
        is_whole = prompt == "short" or most >= 100
        usage = Usage(10, min(most, 100) if prompt == "long" else 1, model="thinker")
        return ModelResponse(f"to {prompt}", usage=usage, finish_reason="stop" if is_whole else "length")

    async def ask(long_usd: float) -> list[str]:
        texts, thinker = [], ScriptedModel(answer, name="thinker")
        with context_for(await Journal.open(store, "r")) as context:
            for prompt, most in (("long", long_usd), ("short", 1.0)):
                with context.spawn_child(prompt, budget=Budget(max_cost_dollars=most)) as child:
                    try:
                        texts.append((await thinker.generate(child, [Message.user(prompt)])).text)
                    except TruncatedByBudget as cut:
                        texts.append(f"{cut.text}, cut")
        return texts

    assert await ask(0.0005) == ["to long, cut", "to short"]
    assert await ask(1.0) == ["to long", "to short"]
    assert len(log) == 3, "a recorded answer is not requested again"


async def test_a_value_that_is_not_whole_is_found_as_one_and_so_is_the_call_that_gave_it() -> None:
    store = JsonJournals()
    document = graph([node("a", "llm-completion", model="thinker", max_output_tokens=5)])
    cut = ModelResponse("half", usage=Usage(1, 5, model="thinker"), finish_reason="length")

    async def once(*replies: ModelResponse) -> tuple[Any, list[str | None]]:
        with context_for(await Journal.open(store, "r")) as context:
            services = {"models": {"thinker": ScriptedModel(replies, name="thinker")}}
            _, result = await events_of(document, run=context, services=services)
            ended = [event.finish_reason for event in context.history() if isinstance(event, ModelCallTrace)]
            return result.outputs["output"], ended

    assert await once(cut) == await once() == (PartialValue("text", "half", "length"), ["length"])
    for entry in shortened(await store.load("r")):
        assert entry.value == {"name": "thinker", "model": None, "finish_reason": "length"}
        store.kept["r"][entry.key] = json.dumps(entry.value)
    assert await once() == (PartialValue("text", "half", "length"), ["length"])


async def test_a_replayed_tool_failure_is_the_one_the_model_received_and_is_not_retried() -> None:
    store, tried = JsonJournals(), Log()

    async def broken() -> None:
        tried.ran()
        raise ValueError("no")

    async def once() -> Any:
        model = ScriptedModel(lambda request: ToolCall("c", "broken", {}) if len(request.messages) == 1 else "gave up")
        with context_for(await Journal.open(store, "r")) as context:
            return (await Agent(model, tools=[broken]).run("go", context)).messages

    first = await once()
    del store.kept["r"]["agent:agent/turn:2/llm:scripted"]
    assert await once() == first
    assert len(tried) == 1


async def test_a_tool_may_return_a_value_that_is_not_json_as_the_model_receives_text() -> None:
    store = JsonJournals()

    async def odd() -> Any:
        return {1, 2}

    async def once() -> Any:
        model = ScriptedModel(lambda request: ToolCall("c", "odd", {}) if len(request.messages) == 1 else "done")
        with context_for(await Journal.open(store, "r")) as context:
            return (await Agent(model, tools=[odd]).run("go", context)).messages

    assert await once() == await once()


async def test_the_parts_of_a_run_can_be_read_from_its_keys() -> None:
    store = JsonJournals()
    await run(store, MANY_PARTS, Log())
    keys = {re.sub(r"(tool:\d+:[^:/]+):[0-9a-f]{16}\b", r"\1", key) for key in store.keys_of()}
    assert {"left/agent:left/turn:2/tool:1:t1-count", "right/llm:thinker", "each/2/ask/llm:thinker"} <= keys
    assert {"again/round:1/ask", "again/round:2/ask/llm:thinker"} <= keys
    assert "boss/agent:boss/turn:1/tool:0:t0-helper/agent:helper/turn:2/tool:0:t1-look" in keys


async def test_work_knows_the_key_that_it_will_be_recorded_under() -> None:
    store, log = JsonJournals(), Log()
    await run(store, ONE_AGENT, log)
    assert log.lines == [f"r/{key}" for key in store.keys_of() if ":" in key]
    assert idempotency_key() is None


async def test_an_unpaired_surrogate_and_a_huge_number_survive() -> None:
    store, ran = JsonJournals(), Log()
    odd = {"\ud800": [None, 0, -0.0, 2**4000, "\x00", {}], "": "ü" * 10_000}

    def act(data: Any, inputs: Any, context: Any) -> DataValue:
        ran.ran()
        return DataValue("any", odd)

    document = graph([node("é/#~:", "odd")])
    for _ in range(2):
        came_to, *_ = await run(store, document, Log(), more={"odd": Given(act)})
        assert came_to == {"output": odd}
    assert len(ran) == 1


# What cannot be recorded.


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (object(), "a value of type object"),
        (float("nan"), "nan, for which JSON has no number"),
        ({"a": [float("-inf")]}, "-inf"),
        ((1, 2), "tuple, which would come back as a list"),
        ({1: "a"}, "a key of type int"),
        (b"bytes", "type bytes"),
        (1 << 5_000, "a whole number of 5001 bits"),
    ],
)
async def test_a_value_that_is_not_json_fails_the_node_and_names_it_and_its_handle(value: Any, problem: str) -> None:
    store = JsonJournals()
    odd = Given(lambda data, inputs, context: ExecutionResult({"left": DataValue("any", value)}))
    with pytest.raises(NotRecordable, match="node 'n', handle 'left' cannot be written to the journal") as failed:
        await run(store, graph([node("n", "odd")]), Log(), more={"odd": odd})
    assert problem in str(failed.value)
    assert store.keys_of() == []
    without, result = await events_of(graph([node("n", "odd")]), more={"odd": odd})
    assert without[-1].event_type == "completed"
    assert result.outputs["left"].value is value


class Word(str):
    """A text that is more than one."""


class Few(dict[Any, Any]):
    """A mapping that shows less than it holds."""

    def items(self) -> Any:
        return {}.items()


DEEPEST: Any = "x"
for _ in range(journal_module.MAX_DEPTH):
    DEEPEST = [DEEPEST]


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        ({"a": [1, -1.5, None, True, "b", {}, []], Word("c"): {Word("d"): Word("e")}}, None),
        ([(1 << 4_096) - 1, {"a": IntEnum("Number", "ONE")["ONE"]}], None),
        ([1 << 4_096], "a whole number of 4097 bits"),
        ({"a": 1, "b": -(1 << 4_096)}, "a whole number of 4097 bits"),
        ([1.0, float("inf")], "inf, for which JSON has no number"),
        ({"a": float("nan")}, "nan, for which JSON has no number"),
        ({"a": {"b": (1,)}}, "a value of type tuple, which would come back as a list"),
        ({"a": b"", 1: "b"}, "a value of type bytes"),  # the first problem is reported, be it a key or a value
        ({1: b""}, "a key of type int"),
        ({"a": 1, None: 2}, "a key of type NoneType"),
        ({True: 1}, "a key of type bool"),
        (Few({1: object()}), None),
        (DEEPEST, None),
        ([DEEPEST], "more than 90 levels deep"),
        ({"a": DEEPEST}, "more than 90 levels deep"),
    ],
)
def test_values_that_are_not_json_are_rejected_with_the_path_of_the_fault(value: Any, wrong: str | None) -> None:
    assert is_json(value) is (wrong is None)
    if wrong is None:
        must_be_json("it", value)
    else:
        with pytest.raises(NotRecordable, match="it cannot be written to the journal") as refused:
            must_be_json("it", value)
        assert refused.value.what == wrong


async def test_a_value_that_holds_itself_fails_the_node() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert not is_json(endless)
    odd = Given(lambda data, inputs, context: DataValue("list", endless))
    with pytest.raises(NotRecordable, match="more than 90 levels"):
        await run(JsonJournals(), graph([node("n", "odd")]), Log(), more={"odd": odd})


async def test_a_step_whose_value_is_not_json_fails() -> None:
    steps = Graph("g").add_step(FunctionNode("n", lambda ctx: object()), "s")
    journal = await Journal.open(JsonJournals(), "r")
    with context_for(journal) as context, pytest.raises(NotRecordable, match="step 's' of graph 'g'"):
        await steps.execute(context)


# What failed.


async def test_a_node_that_failed_runs_again_and_finds_the_calls_it_had_made() -> None:
    store, log, fails = JsonJournals(), Log(), [True]

    async def act(data: Any, inputs: Any, context: FlowContext) -> DataValue:
        model = context.services["models"]["thinker"]
        response = await model.generate(context.execution, [])
        if fails:
            fails.pop()
            raise ValueError("not yet")
        return DataValue("text", response.text)

    document = graph([node("n", "once")])
    with pytest.raises(ValueError, match="not yet"):
        await run(store, document, log, more={"once": Given(act)})
    assert store.keys_of() == ["n/llm:thinker"]
    came_to, _, context, _ = await run(store, document, log, more={"once": Given(act)})
    assert (came_to, len(log)) == ({"output": "<>"}, 1)
    assert context.balance.spent_nanos == 200_000


@pytest.mark.parametrize("blocking", [False, True])
async def test_each_attempt_at_a_step_has_a_place_of_its_own(blocking: bool) -> None:
    store, keys = JsonJournals(), [""]

    def act(ctx: ExecutionContext) -> int:
        keys.append(str(idempotency_key()))
        if len(keys) < 3:
            raise ValueError("again")
        return 7

    def steps() -> Graph:
        made = Graph("g")
        retried = FunctionNode("n", act)
        retried.blocking = blocking  # type: ignore[attr-defined]
        return made.add_step(retried, "s", error_policy=ErrorPolicy(on_error="retry", retry_count=3, retry_delay_ms=0))

    for _ in range(2):
        keys.clear()
        with context_for(await Journal.open(store, "r")) as context:
            assert await steps().execute(context) == {"s": 7}
        if keys:
            assert keys == ["r/s", "r/s~2", "r/s~3"]
    assert keys == []
    assert store.keys_of() == ["s/failed:1", "s~2/failed:2", "s"]


async def test_the_replacement_of_a_step_is_recorded_like_a_value() -> None:
    store, ran = JsonJournals(), Log()

    def act(ctx: ExecutionContext) -> int:
        ran.ran()
        raise ValueError("never")

    for _ in range(2):
        with context_for(await Journal.open(store, "r")) as context:
            policy = ErrorPolicy(on_error="fallback", fallback_value=3)
            assert await Graph("g").add_step(FunctionNode("n", act), "s", error_policy=policy).execute(context) == {
                "s": 3
            }
    assert len(ran) == 1


# Steps.


async def test_steps_of_a_graph_in_python_are_found_and_a_second_graph_has_places_of_its_own() -> None:
    store, ran = JsonJournals(), Log()

    async def act(ctx: ExecutionContext) -> Any:
        ran.ran()
        return [ctx.input, "x"]

    def steps() -> Graph:
        return Graph("g").add_step(FunctionNode("n", act), "a").add_step(FunctionNode("m", act), "b", depends_on=["a"])

    for _ in range(2):
        with context_for(await Journal.open(store, "r")) as context:
            for _ in range(2):
                assert await steps().execute(context) == {"a": ["go", "x"], "b": [["go", "x"], "x"]}
            assert idempotency_key() is None
    assert store.keys_of() == ["a", "b", "#2/a", "#2/b"]
    assert len(ran) == 4


async def test_a_graph_inside_a_step_has_keys_inside_those_of_the_step() -> None:
    store = JsonJournals()
    inner = Graph("inner").add_step(FunctionNode("n", lambda ctx: str(idempotency_key())), "deep")

    async def outer(ctx: ExecutionContext) -> Any:
        return [dict(await inner.execute(ctx)), str(idempotency_key())]

    with context_for(await Journal.open(store, "r")) as context:
        came_to = await Graph("g").add_step(FunctionNode("o", outer), "top").execute(context)
    assert came_to == {"top": [{"deep": "r/top/deep"}, "r/top"]}
    assert store.keys_of() == ["top/deep", "top"]


async def test_branches_that_code_makes_itself_have_the_places_it_gives_them() -> None:
    store, log = JsonJournals(), Log()

    async def act(data: Any, inputs: Any, context: FlowContext) -> DataValue:
        model = context.services["models"]["thinker"]

        async def branch(number: int) -> None:
            with scope(f"branch {number}"):
                await model.generate(context.execution, [])

        await asyncio.gather(*(branch(number) for number in range(3)))
        return DataValue("any", None)

    await run(store, graph([node("n", "many")]), log, more={"many": Given(act)})
    assert sorted(store.keys_of()) == ["n", *(f"n/scope:branch {number}/llm:thinker" for number in range(3))]


async def test_an_artifact_for_a_link_has_the_scope_of_the_node_that_creates_it() -> None:
    store = JsonJournals()

    class Lends:
        def execute(self, data: Any, inputs: Any, context: FlowContext) -> None:
            return None

        async def materialize(self, data: Any, handle: str, context: FlowContext) -> Tool:
            response = await context.services["models"]["thinker"].generate(context.execution, [])

            async def lent(what: str) -> str:
                return response.text + what

            return Tool(lent)

    both = [node(one, "agent", model="thinker") for one in ("a", "b")]
    document = graph([*both, node("lender", "lends")], [], ["lender.tool > a.tools", "lender.tool > b.tools"])
    log = Log()
    came_to, *_ = await run(store, document, log, more={"lends": Lends()})
    assert "lender/link:tool/llm:thinker" in store.keys_of()
    assert {entry_node(key) for key in store.keys_of()} == {"a", "b", "lender"}
    del store.kept["r"]["b"]
    again, *_ = await run(store, document, (second := Log()), more={"lends": Lends()})
    assert (again, len(second)) == (came_to, 0)


# State.


def counting(data: Any, inputs: Any, context: FlowContext) -> DataValue:
    """Adds to what nodes share."""
    state = context.state
    state["count"] = state.get("count", 0) + 1
    state.setdefault("seen", []).append(context.node_id)
    state.pop("first", None)
    return DataValue("number", state["count"])


async def passed(store: JsonJournals, document: Any, state: dict[str, Any], act: Any = counting) -> dict[str, Any]:
    context = context_for(await Journal.open(store, "r"))
    flow = FlowContext(run_id="r", state=state, execution=context)
    async with aclosing(run_flow(document, flow, registry({"count": Given(act)}))) as everything:
        async for _ in everything:
            pass
    context.end()
    return state


async def test_shared_state_is_restored_as_the_nodes_left_it() -> None:
    store = JsonJournals()
    document = graph([node("a", "count"), node("b", "count"), node("c", "count")], ["a > b", "b > c"])
    left = await passed(store, document, {"first": True})
    assert left == {"count": 3, "seen": ["a", "b", "c"]}
    assert await passed(store, document, {"first": True}) == left
    del store.kept["r"]["c"]
    assert await passed(store, document, {"first": True}) == left
    del store.kept["r"]["b"], store.kept["r"]["c"]
    assert await passed(store, document, {"first": True}) == left


async def test_state_is_restored_in_the_order_it_was_changed_whatever_order_nodes_are_found_in() -> None:
    store, second_is_done = JsonJournals(), asyncio.Event()

    async def act(data: Any, inputs: Any, context: FlowContext) -> DataValue:
        if context.node_id == "first":
            await second_is_done.wait()
        value = counting(data, inputs, context)
        second_is_done.set()
        return value

    document = graph([node("first", "count"), node("second", "count")])
    left = await passed(store, document, {}, act)
    assert left["seen"] == ["second", "first"]
    assert store.keys_of() == ["second", "first"]
    assert await passed(store, document, {}, act) == left


async def test_state_changed_inside_a_nested_graph_is_restored_with_the_outer_node() -> None:
    store = JsonJournals()
    inside = graph([node("x", "count"), node("y", "count")], ["x > y"])
    document = graph([node("sub", "subgraph", graph=inside), node("z", "count")], ["sub > z"])
    left = await passed(store, document, {})
    assert left["seen"] == ["x", "y", "z"]
    assert await passed(store, document, {}) == left
    del store.kept["r"]["z"]
    assert await passed(store, document, {}) == left


async def test_state_that_did_not_change_is_not_written_again() -> None:
    store = JsonJournals()

    def idle(data: Any, inputs: Any, context: FlowContext) -> DataValue:
        return DataValue("number", 1)

    await passed(store, graph([node("a", "count")]), {"big": "x" * 1_000}, idle)
    assert "big" not in store.kept["r"]["a"]


async def test_state_that_is_not_json_fails_the_node_that_set_it() -> None:
    def act(data: Any, inputs: Any, context: FlowContext) -> None:
        context.state["it"] = object()

    with pytest.raises(NotRecordable, match=r"state\['it'\]"):
        await passed(JsonJournals(), graph([node("a", "count")]), {}, act)


# Only what was.


async def test_a_run_that_is_only_replayed_runs_nothing_new() -> None:
    store, log = JsonJournals(), Log()
    came_to, *_ = await run(store, MANY_PARTS, log)
    again, *_ = await run(store, MANY_PARTS, Log(), replay_only=True)
    assert again == came_to
    (counted,) = [key for key in store.keys_of() if key.startswith("left/agent:left/turn:2/tool:1:t1-count")]
    del store.kept["r"]["left"], store.kept["r"][counted]
    nothing = Log()
    with pytest.raises(JournalMissing, match="has no record of 'left'") as missing:
        await run(store, MANY_PARTS, nothing, replay_only=True)
    assert missing.value.key == "left"
    assert len(nothing) == 0


@pytest.mark.parametrize("on_error", ["skip", "fallback"])
async def test_no_error_policy_handles_a_missing_result(on_error: Any) -> None:
    store, nothing = JsonJournals(), Log()
    policy = ErrorPolicy(on_error=on_error, fallback_value=3, retry_count=2, retry_delay_ms=0)
    steps = Graph("g").add_step(FunctionNode("n", lambda ctx: nothing.ran()), "s", error_policy=policy)
    journal = await Journal.open(store, "r", replay_only=True)
    with context_for(journal) as context, pytest.raises(JournalMissing, match="has no record of 's'"):
        await steps.execute(context)
    assert (len(nothing), store.appends) == (0, 0)


@pytest.mark.parametrize("what", ["model", "tool", "value"])
async def test_a_call_that_is_not_recorded_is_missing_too(what: str) -> None:
    ran = Log()

    def answer(request: Any) -> str:
        ran.ran()
        return "no"

    journal = await Journal.open(JsonJournals(), "r", replay_only=True)
    with context_for(journal) as context, pytest.raises(JournalMissing):
        if what == "value":
            await journal.value("now", ran.ran)
        else:
            (await Agent(ScriptedModel(answer)).run("go", context)).output  # noqa: B018
    assert len(ran) == 0


# Values.


async def test_a_value_is_made_once() -> None:
    store, made = JsonJournals(), Log()

    async def now() -> int:
        made.ran()
        return len(made)

    for _ in range(2):
        journal = await Journal.open(store, "r")
        assert [await journal.value("now", now), await journal.value("now", now)] == [1, 2]
        assert await journal.value("plain", lambda: "x") == "x"
        assert journal.key("now") == "value:now#3"
    with pytest.raises(NotRecordable, match="value 'odd'"):
        await journal.value("odd", object)


# Forks.


async def test_a_fork_has_what_was_before_and_runs_the_rest() -> None:
    store, log = JsonJournals(), Log()
    came_to, *_ = await run(store, MANY_PARTS, log)
    behind = {"left", "both", "out"}
    given = await fork_journal(store, "r", "fork", without=lambda entry: entry_node(entry.key) in behind)
    assert {entry_node(entry.key) for entry in given}.isdisjoint(behind)
    ran = Log()
    again, events, *_ = await run(store, MANY_PARTS, ran, run_id="fork")
    assert again == came_to
    assert {line.split("/")[1] for line in ran.lines} == {"left"}
    assert {event.node_id for event in events if not event.replayed} == behind | PURE
    assert await fork_journal(store, "r", "fork2") == await store.load("r")
    assert len(await run_keys(store, "r")) == len(await run_keys(store, "fork"))


async def run_keys(store: JsonJournals, run_id: str) -> set[str]:
    return set(store.keys_of(run_id))


async def test_a_run_is_not_forked_onto_itself_and_one_of_nothing_has_nothing() -> None:
    with pytest.raises(InvalidValue, match="another run"):
        await fork_journal(JsonJournals(), "r", "r")
    assert await fork_journal(JsonJournals(), "unknown", "r") == []


# When the store cannot.


class Failing(JsonJournals):
    """Refuses one append."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    async def append(self, run_id: str, entries: Sequence[JournalEntry], *, epoch: int = 0) -> None:
        if self.appends == self.at:
            self.appends += 1
            raise StoreIsFull("the disk is full")
        await super().append(run_id, entries, epoch=epoch)


class StoreIsFull(PenstockError):
    """As a store says it."""


@pytest.mark.parametrize("at", range(0, 40, 3))
async def test_when_the_store_refuses_the_result_is_not_visible_and_the_run_continues_later(at: int) -> None:
    store, log = Failing(at), Log()
    try:
        came_to, *_ = await run(store, MANY_PARTS, log)
    except StoreIsFull:
        recorded = {f"r/{key}" for key in store.keys_of()}
        ran = Log()
        came_to, *_ = await run(store, MANY_PARTS, ran)
        assert recorded.isdisjoint(ran.lines)
    whole, *_ = await run(JsonJournals(), MANY_PARTS, Log())
    assert came_to == whole


class Slow(JsonJournals):
    """Keeps an entry, and never answers."""

    def __init__(self) -> None:
        super().__init__()
        self.appended = asyncio.Event()

    async def append(self, run_id: str, entries: Sequence[JournalEntry], *, epoch: int = 0) -> None:
        await super().append(run_id, entries, epoch=epoch)
        self.appended.set()
        await asyncio.Event().wait()


async def test_a_cancel_reaches_a_run_that_waits_for_its_store() -> None:
    store, log = Slow(), Log()
    journal = await Journal.open(store, "r")
    context = context_for(journal)

    async def once() -> None:
        services = {"models": {"thinker": ScriptedModel(["hm"], name="thinker")}}
        document = graph([node("a", "llm-completion", model="thinker")])
        await events_of(document, run=context, services=services)

    task = asyncio.create_task(once())
    await store.appended.wait()
    context.abort("enough")
    with pytest.raises(CancelledError):
        await task
    context.end()
    kept = JsonJournals()
    kept.kept, kept.figures = store.kept, store.figures
    came_to, *_ = await run(kept, graph([node("a", "llm-completion", model="thinker")]), log)
    assert (came_to, len(log)) == ({"output": "hm"}, 0)


# Small print.


async def test_a_run_inside_a_run_has_its_own_journal_or_none() -> None:
    store = JsonJournals()

    async def act(data: Any, inputs: Any, context: FlowContext) -> DataValue:
        model = ScriptedModel(["one", "two"])
        with ExecutionContext(prices=PRICES) as plain:
            first = await model.generate(plain, [])
        with ExecutionContext(prices=PRICES, journal=await Journal.open(store, "inner")) as own:
            second = await model.generate(own, [])
        return DataValue("text", first.text + second.text)

    await run(store, graph([node("n", "runs")]), Log(), more={"runs": Given(act)})
    assert store.keys_of("r") == ["n"]
    assert store.keys_of("inner") == ["llm:scripted"]


@pytest.mark.parametrize("wrong", ["", None, 3])
async def test_a_journal_is_of_a_run(wrong: Any) -> None:
    with pytest.raises(InvalidValue, match="run_id"):
        await Journal.open(JsonJournals(), wrong)


def test_a_context_takes_a_journal_and_nothing_else() -> None:
    with pytest.raises(InvalidValue, match="journal"):
        ExecutionContext(journal="r")  # type: ignore[arg-type]


def test_entries_inside_a_replayed_node_are_only_counted() -> None:
    entries = [
        JournalEntry("a/llm:m", "llm", {"name": "m", "model": "m-1", "text": "long"}, cost_nanos=7),
        JournalEntry("a~2/tool:0:x", "tool", {"name": "t", "content": "e" * 900, "is_error": True, "value": 1}),
        JournalEntry("a", "node", {"name": "a", "value": "whole"}),
        JournalEntry("b/llm:m", "llm", {"name": "m", "text": "b failed, and asks for this again"}),
        JournalEntry("#2/c/d", "node", {"name": "d", "value": 1, "state": {"version": 1}}),
        JournalEntry("#2/c", "node", {"name": "c", "value": 1}),
    ]
    assert [(one.key, one.value, one.cost_nanos) for one in shortened(entries)] == [
        ("a/llm:m", {"name": "m", "model": "m-1"}, 7),
        ("a~2/tool:0:x", {"name": "t", "is_error": True, "content": "e" * 500}, 0),
        ("#2/c/d", {"name": "d", "state": {"version": 1}}, 0),
    ]
    assert shortened([*shortened(entries), *(one for one in entries if "/" not in one.key)]) == []


async def test_a_journal_that_wrote_everything_itself_knows_what_can_be_shortened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = JsonJournals()
    journal = await Journal.open(store, "r")
    await journal.append("a/llm:m", "llm", {"name": "m", "text": "long"}, 7)
    await journal.append("b/llm:m", "llm", {"name": "m", "text": "b failed, and asks for this again"})
    await journal.append("a~2/tool:0:x", "tool", {"name": "t", "content": "e" * 900, "is_error": True})
    await journal.append("a", "node", {"name": "a", "value": "whole"})
    await journal.append("#2/c", "node", {"name": "c", "value": 1})
    assert journal.shortened() == shortened(await store.load("r"))
    assert [entry.key for entry in journal.shortened() or ()] == ["a/llm:m", "a~2/tool:0:x"]
    assert (await Journal.open(store, "r")).shortened() is None, "it would have to look at what it found"
    monkeypatch.setattr(journal_module, "MAX_SHORT", 2)
    long = await Journal.open(store, "long")
    for number in range(4):
        await long.append(f"n{number}", "node", {"name": "n", "value": 1})
    assert long.shortened() is None, "it does not remember so many"
