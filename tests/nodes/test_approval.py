"""Approvals: asking, answering, and being cancelled while waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager
from threading import Thread
from typing import Any

import pytest

from penstock.agents.messages import ToolCall
from penstock.agents.scripted import ScriptedModel
from penstock.agents.tools import Tool
from penstock.errors import CancelledError, InvalidValue
from penstock.nodes import ApprovalGone, ApprovalRequest, Approvals
from penstock.nodes.approval import Answer, as_edited
from penstock.nodes.parts.services import ServiceMissing
from penstock.runtime.context import ExecutionContext
from penstock.testing import sim_run
from tests.nodes.graphs import Json, events_of, graph, node, output_of, problems


def asks(**data: Any) -> Json:
    return graph([node("in", "input"), node("ok", "approval", **data)], ["in > ok"])


async def first(approvals: Approvals) -> ApprovalRequest:
    """The first question that waits, as soon as one does."""
    while not approvals.list():  # noqa: ASYNC110  it has no event for this, and needs none
        await asyncio.sleep(0)
    return approvals.list()[0]


async def answered(document: Json, input: Any, answer: Callable[[Approvals, str], None], **services: Any) -> Any:
    approvals = Approvals()
    running = asyncio.ensure_future(output_of(document, input, services={"approvals": approvals, **services}))
    request = await first(approvals)
    answer(approvals, request.id)
    result = await running
    assert approvals.list() == ()
    return result


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        (lambda a, id: a.approve(id), {"approved": 3}),
        (lambda a, id: a.edit(id, "four"), {"approved": "four"}),
        (lambda a, id: a.edit(id, None), {"approved": None}),
        (lambda a, id: a.reject(id, "too high"), {"rejected": {"value": 3, "reason": "too high"}}),
        (lambda a, id: a.reject(id), {"rejected": {"value": 3, "reason": "rejected"}}),
    ],
)
async def test_an_answered_value_is_passed_on(answer: Callable[[Approvals, str], None], result: Json) -> None:
    assert await answered(asks(), 3, answer) == result


async def test_a_question_is_listed_and_emitted() -> None:
    approvals = Approvals()
    running = asyncio.ensure_future(
        events_of(asks(question="Blast {{ input.where }}?"), {"where": "here"}, services={"approvals": approvals})
    )
    request = await first(approvals)
    assert (request.run_id, request.node_id, request.question) == ("r", "ok", "Blast here?")
    assert approvals.list("r") == (request,)
    assert approvals.list("another run") == ()
    approvals.approve(request.id)
    events, _ = await running
    assert [one.data for one in events if one.event_type == "approval_requested"] == [request.to_dict()]


async def test_an_answer_may_come_from_another_thread() -> None:
    def from_a_thread(approvals: Approvals, id: str) -> None:
        thread = Thread(target=approvals.approve, args=(id,))
        thread.start()
        thread.join()

    assert await answered(asks(), 3, from_a_thread) == {"approved": 3}


async def test_the_first_answer_counts() -> None:
    def twice(approvals: Approvals, id: str) -> None:
        approvals.reject(id, "first")
        with pytest.raises(ApprovalGone):
            approvals.approve(id)

    assert (await answered(asks(), 3, twice))["rejected"]["reason"] == "first"


def test_answering_an_unknown_question_fails() -> None:
    with pytest.raises(ApprovalGone, match="there is no open question 'nope'"):
        Approvals().approve("nope")


async def test_a_cancel_while_waiting_withdraws_the_question() -> None:
    approvals = Approvals()
    with ExecutionContext(input=3) as run:
        running = asyncio.ensure_future(output_of(asks(), run=run, services={"approvals": approvals}))
        request = await first(approvals)
        run.abort("enough")
        with pytest.raises(CancelledError):
            await running
    assert approvals.list() == ()
    with pytest.raises(ApprovalGone):
        approvals.approve(request.id)


async def test_an_answer_that_crosses_a_cancel_does_no_harm() -> None:
    approvals = Approvals()
    with ExecutionContext(input=3) as run:
        running = asyncio.ensure_future(output_of(asks(), run=run, services={"approvals": approvals}))
        request = await first(approvals)
        approvals.approve(request.id)
        run.abort("enough")
        with pytest.raises(CancelledError):
            await running
    assert approvals.list() == ()


def test_an_answer_to_a_loop_that_is_gone_does_no_harm() -> None:
    approvals = Approvals()

    async def ask() -> None:
        approvals.ask("r", "n", "?", None)

    asyncio.run(ask())
    approvals.approve(approvals.list()[0].id)


def test_a_question_not_answered_in_time_is_rejected() -> None:
    async def unanswered() -> Any:
        approvals = Approvals()
        result = await output_of(asks(timeout_s=3600), 3, services={"approvals": approvals})
        assert approvals.list() == ()
        return result

    assert sim_run(unanswered, seed=0)["rejected"]["reason"] == "not answered within 3600 s"


async def test_without_an_approvals_service_the_error_names_what_the_node_needs() -> None:
    with pytest.raises(ServiceMissing, match=r"node 'ok' needs services\['approvals'\]"):
        await output_of(asks(), 3)


def test_a_question_that_cannot_be_read_is_found_before_the_run() -> None:
    found = problems(asks(question="{{ input", timeout_s=0))
    assert [path for path, _ in found] == ["$.nodes[1].data.timeout_s"]
    found = problems(asks(question="{{ input"))
    assert [path for path, _ in found] == ["$.nodes[1].data.question"]


BLAST = Tool(lambda where: f"boom at {where}", name="blast", description="", needs_approval=True, parameters={})


@pytest.mark.parametrize(
    ("answer", "output"),
    [
        (lambda a, id: a.approve(id), "boom at here"),
        (lambda a, id: a.edit(id, {"where": "there"}), "boom at there"),
        (lambda a, id: a.edit(id, {"tool": "blast", "arguments": {"where": "there"}}), "boom at there"),
        (lambda a, id: a.reject(id, "on Monday"), "not run: on Monday"),
    ],
)
async def test_an_agent_asks_about_tools_that_need_approval(
    answer: Callable[[Approvals, str], None], output: str
) -> None:
    coming = iter([ToolCall("1", "blast", {"where": "here"})])
    model = ScriptedModel(lambda request: next(coming, None) or request.messages[-1].text)
    document = graph([node("a", "agent", model="m", tools=["blast"])])
    assert await answered(document, "go", answer, models={"m": model}, tools={"blast": BLAST}) == output


def pays(amount: int, to: str = "ann") -> str:
    return f"paid {amount} to {to}"


PAY = Tool(pays, name="pay", description="", needs_approval=True)


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        ("seven", "an object with the arguments of pay by name, not 'seven'"),
        ([1], "an object with the arguments"),
        (None, "an object with the arguments"),
        ({}, "amount: missing"),
        ({"amount": "seven"}, "amount: expected integer, not string"),
        ({"amount": None}, "amount: expected integer, not null"),
        ({"amount": 7, "\ud83d": 1}, "not a known name; known are amount, to"),
        ({"tool": "pay", "arguments": {"amount": "seven"}}, "amount: expected integer, not string"),
        ({"tool": "pay", "arguments": None}, "an object with the arguments"),
        ({"tool": "blast", "arguments": {"amount": 7}}, "only the arguments of pay"),
        ({"tool": "pay", "arguments": {"amount": 7}, "more": 1}, "tool: not a known name"),
    ],
)
async def test_an_edit_that_the_tool_could_not_take_is_refused_and_the_question_still_waits(
    value: Any, wrong: str
) -> None:
    def answer(approvals: Approvals, id: str) -> None:
        with pytest.raises(InvalidValue, match="answer must be") as refused:
            approvals.edit(id, value)
        assert wrong in str(refused.value)
        assert [request.id for request in approvals.list()] == [id]
        approvals.edit(id, {"amount": 7})

    assert await answered(PAYS, "go", answer, **paying()) == "paid 7 to ann"


PAYS = graph([node("a", "agent", model="m", tools=["pay"])])


def paying() -> Json:
    """A model that pays once, and answers with the result."""
    coming = iter([ToolCall("1", "pay", {"amount": 5})])
    model = ScriptedModel(lambda request: next(coming, None) or request.messages[-1].text)
    return {"models": {"m": model}, "tools": {"pay": PAY}}


async def test_the_question_of_an_agent_inside_knows_the_tool_as_well() -> None:
    coming = iter([ToolCall("1", "payer", {"task": "pay"}), ToolCall("2", "pay", {"amount": 5})])
    model = ScriptedModel(lambda request: next(coming, None) or request.messages[-1].text)
    inner = node("payer", "agent", model="m", tools=["pay"], description="pays")
    document = graph([inner, node("boss", "agent", model="m")], link=["payer.tool > boss.tools"])

    def answer(approvals: Approvals, id: str) -> None:
        with pytest.raises(InvalidValue, match="amount: expected integer"):
            approvals.edit(id, {"amount": "seven"})
        approvals.approve(id)

    services = {"models": {"m": model}, "tools": {"pay": PAY}}
    assert await answered(document, "go", answer, **services) == "paid 5 to ann"


def test_a_tool_with_parameters_named_tool_and_arguments_receives_them() -> None:
    words = {"tool": {"type": "string"}, "arguments": {"type": "object"}}
    expects = {"tool": "call", "parameters": {"type": "object", "properties": words}}
    sent = {"tool": "other", "arguments": {"tool": "call", "arguments": {}}}
    assert as_edited(expects, sent) == sent


async def test_an_edit_that_a_custom_service_does_not_check_is_not_run() -> None:
    class Careless(Approvals):
        def edit(self, id: str, value: Any) -> None:
            self._answer(id, Answer(True, value, edited=True))

    approvals = Careless()
    services = {"approvals": approvals, **paying()}
    running = asyncio.ensure_future(output_of(PAYS, "go", services=services))
    approvals.edit((await first(approvals)).id, 3)
    assert await running == "not run: the edited value is not an object of arguments"


def test_a_question_that_has_waited_before_is_given_the_rest_of_its_time() -> None:
    class Kept:
        """Questions that were put some time ago, by a process that is gone."""

        def __init__(self, waited_s: float, is_answered: bool = False) -> None:
            self.waited_s = waited_s
            self.is_answered = is_answered

        @asynccontextmanager
        async def ask(self, run_id: str, node_id: str, question: str, value: Any, expects: Any = None) -> Any:
            self.request = ApprovalRequest("q", run_id, node_id, question, value, expects, self.waited_s)
            yield self

        async def answer(self) -> Answer:
            return Answer(True) if self.is_answered else await asyncio.Event().wait()  # type: ignore[return-value]

        async def at_last(self) -> Answer | None:
            return None

    async def story(kept: Kept) -> tuple[Any, float]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        return await output_of(asks(timeout_s=6), 3, services={"approvals": kept}), loop.time() - began

    late = {"rejected": {"value": 3, "reason": "not answered within 6 s"}}
    for waited_s, takes_s in ((0, 6), (4.5, 1.5), (6, 0), (10**9, 0)):
        outcome = sim_run(lambda waited_s=waited_s: story(Kept(waited_s)), seed=1)  # type: ignore[misc]
        assert outcome == (late, pytest.approx(takes_s))
        there = sim_run(lambda waited_s=waited_s: story(Kept(waited_s, True)), seed=1)  # type: ignore[misc]
        assert there[0] == {"approved": 3}, "an answer that was given counts"
