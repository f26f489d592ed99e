"""Tools of a run that is resumed: what was recorded counts for the same tool with the same arguments alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from penstock.agents.agent import Agent
from penstock.agents.loop import Approval
from penstock.agents.messages import ToolCall, ToolResult
from penstock.agents.scripted import ScriptedModel
from penstock.agents.tools import Tool, Tools, execute_one
from penstock.runtime.context import ExecutionContext
from penstock.runtime.durable.journal import Journal
from penstock.runtime.durable.keys import idempotency_key
from tests.runtime.durable.journalled import JsonJournals, context_for

pytestmark = pytest.mark.requirement("X-3")


class Bank:
    """Two tools, and what they really did."""

    def __init__(self) -> None:
        self.did: list[Any] = []
        self.keys: list[str | None] = []

    async def pay(self, amount: int, to: str = "ann") -> str:
        self.did.append(("pay", amount, to))
        self.keys.append(idempotency_key())
        return f"paid {amount} to {to}"

    async def weather(self, city: str) -> str:
        self.did.append(("weather", city))
        self.keys.append(idempotency_key())
        return f"sunny in {city}"


async def first_result(store: JsonJournals, bank: Bank, model: str, call: ToolCall) -> str:
    """The result of the model's first tool call; the run stops at the second turn."""

    def answer(request: Any) -> Any:
        results = [message.text for message in request.messages if message.role == "tool"]
        return results[0] if results else call

    agent = Agent(ScriptedModel(answer, name=model), tools=[bank.pay, bank.weather], name="clerk")
    with context_for(await Journal.open(store, "r")) as context:
        return str((await agent.run("go", context)).output)


def forget_after_tools(store: JsonJournals) -> None:
    """As if the process had died when the tools had run and were recorded."""
    for key in store.keys_of():
        if "tool:" not in key:
            del store.kept["r"][key]


async def test_a_recorded_result_is_not_handed_to_another_tool_under_the_same_id() -> None:
    store, bank = JsonJournals(), Bank()
    assert await first_result(store, bank, "w1", ToolCall("call_0", "pay", {"amount": 5})) == "paid 5 to ann"
    forget_after_tools(store)
    assert await first_result(store, bank, "w2", ToolCall("call_0", "weather", {"city": "Bern"})) == "sunny in Bern"
    assert bank.did == [("pay", 5, "ann"), ("weather", "Bern")]
    assert len(set(bank.keys)) == 2, "a key of its own"


@pytest.mark.parametrize(
    "arguments", [{"amount": 50}, {"amount": 5, "to": "bob"}, '{"amount": 5, "to": "\ud83d"}', {"amount": 10**300}]
)
async def test_a_recorded_result_is_not_handed_to_other_arguments(arguments: Mapping[str, Any] | str) -> None:
    store, bank = JsonJournals(), Bank()
    await first_result(store, bank, "w1", ToolCall("call_0", "pay", {"amount": 5}))
    forget_after_tools(store)
    await first_result(store, bank, "w2", ToolCall("call_0", "pay", arguments))
    assert len(bank.did) == 2
    forget_after_tools(store)
    await first_result(store, bank, "w3", ToolCall("call_0", "pay", arguments))
    await first_result(store, bank, "w4", ToolCall("call_0", "pay", {"amount": 5}))
    assert len(bank.did) == 2, "both are recorded"


async def test_the_same_call_finds_its_result_whatever_the_order_of_its_arguments() -> None:
    store, bank = JsonJournals(), Bank()
    await first_result(store, bank, "w1", ToolCall("call_0", "pay", {"amount": 5, "to": "bob"}))
    forget_after_tools(store)
    assert (
        await first_result(store, bank, "w2", ToolCall("call_0", "pay", {"to": "bob", "amount": 5})) == "paid 5 to bob"
    )
    assert len(bank.did) == 1


async def test_an_approval_applies_only_to_its_call() -> None:
    store, bank, keys = JsonJournals(), Bank(), list[str]()

    async def approve(context: ExecutionContext, call: ToolCall) -> Approval:
        assert context._run.journal is not None
        keys.append(context._run.journal.key("approval"))
        return Approval.allow()

    for amount in (5, 5, 500):
        model = ScriptedModel([ToolCall("call_0", "pay", {"amount": amount}), "done"])
        agent = Agent(model, tools=[Tool(bank.pay, needs_approval=True)], name="clerk", approve=approve)
        with context_for(await Journal.open(store, "r")) as context:
            await agent.run("go", context)
        store.kept.clear()
    assert keys[0] == keys[1] != keys[2]


async def test_a_call_with_arguments_that_are_not_json_runs_once_too() -> None:
    store, seen = JsonJournals(), list[Any]()
    odd: Mapping[Any, Any] = {"what": {1: float("nan"), "two": b"\xff"}}
    chain = Tools([Tool(lambda what: str(seen.append(what)), name="look", description="", parameters={})])
    results: list[ToolResult] = []
    for _ in range(2):
        with context_for(await Journal.open(store, "r")) as context:
            results.append(await execute_one(chain, context, ToolCall("c", "look", odd)))
    assert len(seen) == 1
    assert results[0].content == results[1].content == "None"
