"""Sixteen branches of a LangGraph graph, each of which asks a model."""

from __future__ import annotations

import asyncio
import operator
import sys
from typing import Annotated, Any, TypedDict

from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send

from penstock import BudgetExceededError, Price, PriceBook, contain
from penstock.providers import contained

url, api = sys.argv[1:]
model: Any
if api == "openai":
    model = ChatOpenAI(model="fake-1", base_url=f"{url}/v1", api_key="k")  # type: ignore[arg-type]
else:
    model = ChatAnthropic(model_name="fake-1", base_url=url, api_key="k")  # type: ignore[arg-type]


class State(TypedDict):
    """The answers of the branches."""

    answers: Annotated[list[str], operator.add]


def ask(state: dict[str, int]) -> dict[str, list[str]]:
    return {"answers": [model.invoke(f"branch {state['branch']}").text]}


async def aask(state: dict[str, int]) -> dict[str, list[str]]:
    return {"answers": [(await model.ainvoke(f"branch {state['branch']}")).text]}


def fan_out(node: str) -> Any:
    graph: Any = StateGraph(State)
    graph.add_node("ask", ask if node == "sync" else aask)
    graph.add_conditional_edges(START, lambda _: [Send("ask", {"branch": n}) for n in range(16)], ["ask"])
    graph.add_edge("ask", END)
    return graph.compile()


prices = PriceBook(unknown="assume", assumed=Price(0, 0, request_usd=0.50), use_genai_prices=False)
for way in ("sync", "async"):
    app, found = fan_out(way), {}
    with contain(max_cost_usd=1.00, prices=prices) as run:
        try:
            with contained(run):
                app.invoke({"answers": []}) if way == "sync" else asyncio.run(app.ainvoke({"answers": []}))
        except BudgetExceededError as error:
            found = {type(error).__name__: 1}
    sys.stdout.write(f"{found, run.balance.spent_usd + run.balance.unresolved_usd}\n")
