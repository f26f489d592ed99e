"""Approvals: asking, answering, and being cancelled while waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest

from penstock.agents.messages import ToolCall
from penstock.agents.scripted import ScriptedModel
from penstock.agents.tools import Tool
from penstock.errors import CancelledError
from penstock.nodes import ApprovalGone, ApprovalRequest, Approvals
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
async def test_what_was_answered_goes_on(answer: Callable[[Approvals, str], None], result: Json) -> None:
    assert await answered(asks(), 3, answer) == result


async def test_a_question_is_listed_and_told_as_it_is_asked() -> None:
    approvals = Approvals()
    running = asyncio.ensure_future(
        events_of(asks(question="Blast {{ input.where }}?"), {"where": "here"}, services={"approvals": approvals})
    )
    request = await first(approvals)
    assert (request.run_id, request.node_id, request.question) == ("r", "ok", "Blast here?")
    assert approvals.list("r") == (request,)
    assert approvals.list("another run") == ()
    approvals.approve(request.id)
    told, _ = await running
    assert [one.data for one in told if one.event_type == "approval_requested"] == [request.to_dict()]


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


def test_what_was_never_asked_cannot_be_answered() -> None:
    with pytest.raises(ApprovalGone, match="nobody waits for an answer to 'nope'"):
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


def test_nobody_answers_in_time_is_a_rejection() -> None:
    async def unanswered() -> Any:
        approvals = Approvals()
        result = await output_of(asks(timeout_s=3600), 3, services={"approvals": approvals})
        assert approvals.list() == ()
        return result

    assert sim_run(unanswered, seed=0)["rejected"]["reason"] == "nobody answered within 3600 s"


async def test_without_anybody_to_ask_the_node_says_what_it_needs() -> None:
    with pytest.raises(ServiceMissing, match=r"node 'ok' needs services\['approvals'\]"):
        await output_of(asks(), 3)


def test_a_question_that_cannot_be_read_is_found_before_the_run() -> None:
    found = problems(asks(question="{{ input", timeout_s=0))
    assert [path for path, _ in found] == ["$.nodes[1].data.timeout_s"]
    found = problems(asks(question="{{ input"))
    assert [path for path, _ in found] == ["$.nodes[1].data.question"]


BLAST = Tool(lambda where: f"boom at {where}", name="blast", description="", needs_approval=True, parameters={})


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda a, id: a.approve(id), "boom at here"),
        (lambda a, id: a.edit(id, {"where": "there"}), "boom at there"),
        (lambda a, id: a.edit(id, 3), "not run: what it was changed to is no object of arguments"),
        (lambda a, id: a.reject(id, "on Monday"), "not run: on Monday"),
    ],
)
async def test_an_agent_asks_about_tools_that_need_approval(
    answer: Callable[[Approvals, str], None], said: str
) -> None:
    coming = iter([ToolCall("1", "blast", {"where": "here"})])
    model = ScriptedModel(lambda request: next(coming, None) or request.messages[-1].text)
    document = graph([node("a", "agent", model="m", tools=["blast"])])
    assert await answered(document, "go", answer, models={"m": model}, tools={"blast": BLAST}) == said
