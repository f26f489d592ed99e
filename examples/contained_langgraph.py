"""A LangGraph program under a ceiling: sixteen branches at once, one dollar, and not a line of the graph changed.

Needs `pip install langgraph langchain-openai`. The model is a server on this machine that charges $0.25 a call.
"""

from __future__ import annotations

import operator
from typing import Annotated, Any, TypedDict

from penstock import BudgetExceededError, contain
from penstock.providers import contained
from penstock.testing.provider import FakeProviderServer

try:
    from langchain_openai import ChatOpenAI  # type: ignore[import-not-found]
    from langgraph.graph import END, START, StateGraph  # type: ignore[import-not-found]
    from langgraph.types import Send  # type: ignore[import-not-found]
except ImportError as missing:
    print(f"{missing}: pip install langgraph langchain-openai")
    raise SystemExit(0) from None


class State(TypedDict):
    """What the branches have found."""

    found: Annotated[list[str], operator.add]


def program(model: Any) -> Any:
    """The program that exists already: a branch per topic, each of which asks the model."""

    def research(branch: dict[str, str]) -> dict[str, list[str]]:
        return {"found": [model.invoke(f"What is new in {branch['topic']}?").text]}

    def fan_out(_: State) -> list[Any]:
        return [Send("research", {"topic": f"topic {number}"}) for number in range(16)]

    graph = StateGraph(State)
    graph.add_node("research", research)
    graph.add_conditional_edges(START, fan_out, ["research"])
    graph.add_edge("research", END)
    return graph.compile()


with FakeProviderServer.flat(0.25) as server:
    app = program(ChatOpenAI(model="fake-1", base_url=server.openai_url, api_key="none"))

    with contain(max_cost_usd=1.00, prices=server.provider.prices) as run:
        try:
            with contained(run):
                app.invoke({"found": []})
        except BudgetExceededError as stopped:
            print(f"stopped: {stopped.reason}\n")

    charged_usd = run.balance.spent_usd + run.balance.unresolved_usd
    print(run.explain())
    print(f"\ninvoice ${server.invoice.total_usd:.2f}, ledger ${charged_usd:.2f}, ceiling $1.00")
    raise SystemExit(0 if 0 < server.invoice.total_usd <= charged_usd <= 1.00 else 1)
