"""A loop that was written without limits, under limits.

`agent` is code as it exists everywhere: it asks a model, calls a tool, and goes on until the model says it is done.
This model never does. The ten lines below it are all that changes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from penstock import Halted, Price, PriceBook, contain
from penstock.testing import Answer, FakeProvider

client = FakeProvider(lambda number: Answer(f"search: page {number + 1}", input_tokens=900, output_tokens=120))


def search(query: str) -> str:
    """A tool."""
    return f"what {query} says"


def agent(ask: Callable[[str], Any], tool: Callable[[str], str], goal: str) -> str:
    """The code that exists already: no limits, no idea of money."""
    notes = goal
    while True:
        answer = ask(notes).choices[0].message.content
        if not answer.startswith("search: "):
            return str(answer)
        notes = tool(answer.removeprefix("search: "))


prices = PriceBook(registered={client.model: Price(3, 15)})
worst_usd = client.worst_case_usd(input_tokens=1_000, max_tokens=200)
with contain(max_cost_usd=0.05, max_steps=100, prices=prices) as run:
    ask = partial(run.llm, partial(client.complete, max_tokens=200), name="ask", cost_hint_usd=worst_usd)
    tool = partial(run.tool, search)
    try:
        print(agent(ask, tool, "what is a penstock?"))
    except Halted as stopped:
        print(f"stopped   {stopped}")

print(f"ledger    ${run.balance.spent_usd:.6f} for {run.balance.api_calls} model calls, {run.balance.steps} steps")
print(f"invoice   ${client.invoice.total_usd:.6f} for {client.invoice.calls} model calls")
