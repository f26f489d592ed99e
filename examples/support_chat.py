"""A support chat whose refunds wait for a person, also while its server restarts.

    python examples/support_chat.py

A customer asks for money back. The agent looks the order up and proposes a refund, which the tool's `needs_approval`
turns into a question. The server stops before it is answered. A colleague approves another amount, and the next server
pays exactly that, once. The model is scripted: no key, no network.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from typing import Any

from penstock import Agent, Price, PriceBook, ToolCall, Usage, tool
from penstock.agents import ModelRequest, ScriptedModel
from penstock.chat import ChatService
from penstock.hosting import HostSettings, RunHost, RunLimits
from penstock.nodes import Program
from penstock.stores import Stores, open_stores

PRICES = PriceBook(registered={"support": Price("0.15", "0.60")}, use_genai_prices=False)
ORDERS = {"A-17": 80}
paid: list[tuple[str, int]] = []


@tool
def look_up(order: str) -> int:
    """Return what an order cost, in dollars."""
    return ORDERS[order]


@tool(needs_approval=True)
def refund(order: str, dollars: int) -> str:
    """Pay money back."""
    paid.append((order, dollars))
    return f"${dollars} paid back for {order}"


def reply(request: ModelRequest) -> Any:
    """Answer as a model would: look up, propose a refund, report what was done."""
    results = [message.text for message in request.messages if message.role == "tool"]
    if not results:
        return ToolCall("1", "look_up", {"order": "A-17"})
    if len(results) == 1:
        return ToolCall("2", "refund", {"order": "A-17", "dollars": int(results[0])})
    return f"Done: {results[-1]}."


agent = Agent(
    ScriptedModel(reply, name="support", usage=Usage(300, 40)),
    "Help customers. Look orders up before you refund them.",
    [look_up, refund],
    name="support",
)


def host_on(stores: Stores) -> RunHost:
    """Return a host that serves the agent; a stop leaves what waits to the next one."""
    settings = HostSettings(drain_s=0)
    return RunHost(stores, services={"programs": {"support": Program.of(agent)}}, prices=PRICES, settings=settings)


async def ask(database: str) -> tuple[str, str, str]:
    """The first server: a customer writes, and the run waits for a person."""
    async with await open_stores(database) as stores:
        await stores.graphs.save("support", "shop", "Support", Program.of(agent).document(), now_ms=0)
        host = host_on(stores)
        chats = ChatService(host, stores.chats)
        async with host:
            limits = RunLimits(max_cost_usd="0.01")
            turn = await chats.stream_agent_chat("support", "My kettle is broken.", owner="ann", limits=limits)
            async for event in turn.events():
                if event.type == "approval.requested":
                    question = event.data["approval"]["value"]
                    print(f"waits      {question['tool']}({json.dumps(question['arguments'])})")
                if event.type == "run.waiting":
                    return turn.chat_id, turn.run_id, event.data["approval_id"]
    raise AssertionError("the agent did not ask")


async def answer(database: str, chat_id: str, run_id: str, approval_id: str) -> str:
    """The next server: a colleague approves half, and the chat gets its answer."""
    async with await open_stores(database) as stores:
        host = host_on(stores)
        chats = ChatService(host, stores.chats)
        async with host:
            await host.answer(approval_id, "edited", answer={"order": "A-17", "dollars": 40}, by="eve")
            run = await host.wait(run_id)
            print(f"run        {run.status}, ${run.cost_nanos / 1e9} of $0.01")
            (_, message) = (await chats.tree(chat_id)).active_path()
            return message.content


def main() -> int:
    """Ask one server, and let the next one answer."""
    with tempfile.TemporaryDirectory() as folder:
        database = f"{folder}/support.db"
        waiting = asyncio.run(ask(database))
        print(f"paid       {paid} when the server stops")
        content = asyncio.run(answer(database, *waiting))
    print(f"paid       {paid}\nanswer     {content}")
    return 0 if paid == [("A-17", 40)] and content == "Done: $40 paid back for A-17." else 1


if __name__ == "__main__":
    sys.exit(main())
