"""The team node: its three modes, in pipelines, in chats and as a tool."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.agents.messages import ToolCall
from penstock.agents.model import ModelRequest, ModelResponse, TruncatedResponse
from penstock.agents.scripted import ScriptedModel
from penstock.chat.scope import ChatScope
from penstock.containment.limits import BudgetExceededError
from penstock.errors import InvalidValue
from penstock.kernel.document import parse_graph
from penstock.kernel.executor import PartialValue
from penstock.nodes.team import MemberFailed
from penstock.runtime.billing.usage import Usage
from penstock.runtime.context import ExecutionContext
from tests.nodes.graphs import Json, events_of, graph, node, output_of, problems

MEMBERS = [node("high", "agent", model="high"), node("wide", "agent", model="wide")]
LINKS = ["high.tool > t.members", "wide.tool > t.members"]


def team(*more: Json, links: list[str] = LINKS, **data: Any) -> Json:
    return graph([node("in", "input"), node("t", "team", **data), *MEMBERS, *more], ["in > t"], links)


def models(*lead: Any, **others: Any) -> Json:
    return {
        "models": {
            "lead": ScriptedModel(list(lead)),
            "high": ScriptedModel(lambda request: f"high: {request.messages[-1].text}"),
            "wide": ScriptedModel(lambda request: f"wide: {request.messages[-1].text}"),
            **others,
        }
    }


def call(name: str, task: str) -> ToolCall:
    return ToolCall(name, name, {"task": task})


@pytest.mark.requirement("K-16")
async def test_a_lead_asks_members_and_answers_itself() -> None:
    prompts: list[str] = []

    def lead(request: ModelRequest) -> Any:
        prompts.append(request.messages[-1].text)
        return [call("high", "h?"), call("wide", "w?")] if len(prompts) == 1 else "both"

    services = models(lead=ScriptedModel(lead))
    assert await output_of(team(model="lead"), "Tell me", services=services) == "both"
    assert prompts == ["Tell me", "wide: w?"]


@pytest.mark.requirement("K-16")
async def test_a_routing_lead_hands_the_task_on_and_the_members_answer_is_the_teams() -> None:
    services = models([call("wide", "w?"), call("high", "h?")])
    assert await output_of(team(model="lead", mode="route"), "Tell me", services=services) == "wide: w?"
    assert services["models"]["lead"].calls == 1
    assert services["models"]["high"].calls == 0


async def test_a_routing_lead_retries_after_an_error_and_answers_itself_without_a_call() -> None:
    services = models(call("stranger", "?"), call("high", "h?"))
    assert await output_of(team(model="lead", mode="route"), "Tell me", services=services) == "high: h?"
    assert await output_of(team(model="lead", mode="route"), "Hello", services=models("Hello!")) == "Hello!"


@pytest.mark.parametrize("mode", ["coordinate", "route", "parallel"])
async def test_an_answer_truncated_by_the_limit_of_the_lead_is_incomplete(mode: str) -> None:
    services = models(ModelResponse("Hel", usage=Usage(1, 1), finish_reason="length"))
    _, result = await events_of(team(model="lead", mode=mode), "Hello", services=services)
    assert result.outputs["output"] == PartialValue("text", "Hel", "length")


async def test_a_routing_lead_that_is_cut_in_its_call_hands_nothing_on() -> None:
    cut = ModelResponse("", (ToolCall("1", "high", '{"ta'),), Usage(1, 1), "length")
    services = models(cut)
    with pytest.raises(TruncatedResponse, match="in the middle of a tool call"):
        await output_of(team(model="lead", mode="route"), "Hello", services=services)
    assert services["models"]["high"].calls == 0


@pytest.mark.requirement("K-16")
async def test_all_members_are_given_the_task_and_a_lead_makes_one_answer_of_theirs() -> None:
    prompts: list[str] = []
    lead = ScriptedModel(lambda request: prompts.append(request.messages[-1].text) or "one")
    assert await output_of(team(model="lead", mode="parallel"), "Tell me", services=models(lead=lead)) == "one"
    assert prompts == ["Tell me\n\nhigh answered:\nhigh: Tell me\n\nwide answered:\nwide: Tell me"]


async def test_without_a_lead_the_answers_go_on_by_name() -> None:
    answers = await output_of(team(mode="parallel"), "Tell me", services=models())
    assert answers == {"high": "high: Tell me", "wide": "wide: Tell me"}


async def test_only_a_lead_can_do_without_a_member_that_fails() -> None:
    prompts: list[str] = []
    lead = ScriptedModel(lambda request: prompts.append(request.messages[-1].text) or "one")
    broken = {"high": ScriptedModel([ValueError("cracked")] * 2)}
    assert await output_of(team(model="lead", mode="parallel"), "x", services=models(lead=lead, **broken)) == "one"
    assert "high failed:\nValueError: cracked" in prompts[0]
    with pytest.raises(MemberFailed, match="'high' of the team gave no answer: ValueError: cracked"):
        await output_of(team(mode="parallel"), "x", services=models(**broken))
    all_broken = {name: ScriptedModel([ValueError("cracked")]) for name in ("high", "wide")}
    with pytest.raises(MemberFailed):
        await output_of(team(model="lead", mode="parallel"), "x", services=models(lead=lead, **all_broken))


async def test_the_budget_of_a_team_holds_for_its_members() -> None:
    document = team(mode="parallel", budget={"max_api_calls": 1})
    with pytest.raises(BudgetExceededError):
        await output_of(document, "x", services=models())


async def test_a_team_can_be_a_member_of_another_team() -> None:
    outer = [node("in2", "input"), node("boss", "team", model="boss", mode="route")]
    document = graph(
        [*outer, node("t", "team", mode="parallel", description="Knows dams."), *MEMBERS],
        ["in2 > boss"],
        [*LINKS, "t.tool > boss.members"],
    )
    boss = ScriptedModel([call("t", "both")])
    with ExecutionContext(input="x") as run:
        _, result = await events_of(document, run=run, services=models(boss=boss))
    assert result.outputs["output"].value == {"high": "high: both", "wide": "wide: both"}
    assert boss.last_request is not None
    assert boss.last_request.tools[0].description == "Knows dams."


async def test_deltas_of_the_lead_and_of_the_member_it_routes_to_are_emitted() -> None:
    services = models(call("wide", "w?"))
    events, _ = await events_of(team(model="lead", mode="route", stream=True), "x", services=services)
    pieces = [one.data for one in events if one.event_type == "delta"]
    assert [one["source"] for one in pieces] == ["main/t", "main/t/wide"]
    assert pieces[1]["text"] == "wide: w?"


async def test_the_user_talks_to_the_team_and_not_to_an_agent_downstream_of_it() -> None:
    nodes = [node("start", "chat-start"), node("t", "team", model="lead"), node("B", "agent", model="lead"), *MEMBERS]
    document = graph(nodes, ["start > t", "t > B"], LINKS)
    assert ChatScope(parse_graph(document)).entry_agent_ids == {"t"}


@pytest.mark.parametrize("mode", ["coordinate", "parallel"])
async def test_the_lead_is_given_the_history_and_members_their_task(mode: str) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    document = graph(
        [node("start", "chat-start"), node("t", "team", model="lead", mode=mode), *MEMBERS], ["start > t"], LINKS
    )
    prompts: list[list[str]] = []
    lead = ScriptedModel(lambda request: prompts.append([one.text for one in request.messages]) or "done")
    services = {"chat_scope": ChatScope(parse_graph(document)), "chat_input": {"messages": messages}}
    await output_of(document, services={**models(lead=lead), **services})
    assert prompts[0][:3] == ["a", "b", "c"]
    assert len(prompts[0]) == (3 if mode == "coordinate" else 4)
    if mode == "parallel":
        assert prompts[0][3] == "high answered:\nhigh: c\n\nwide answered:\nwide: c"


async def test_a_plain_tool_cannot_be_given_a_task() -> None:
    async def add(a: int) -> int:
        return a

    document = team(node("plain", "tool", tool="add"), links=["plain.tool > t.members"], mode="parallel")
    with pytest.raises(InvalidValue, match="'add'"):
        await output_of(document, "x", services={**models(), "tools": {"add": add}})


def test_invalid_data_is_reported_before_the_run() -> None:
    assert [path for path, _ in problems(team(mode="route"))] == ["$.nodes[1].data.model"]
    assert [path for path, _ in problems(team(mode="route", model="m", tools=["x"]))] == ["$.nodes[1].data.tools"]
    ((_, problem),) = problems(team(links=[], model="lead"))
    assert "members" in problem
