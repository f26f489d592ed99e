"""The graph that `langgraph dev` serves: one node that answers a constant."""

from __future__ import annotations

from typing import Any

from benchmarks._peers import load
from benchmarks._servers.words import ANSWER

library: Any = load("langgraph.graph")


async def answer(state: dict[str, Any]) -> dict[str, Any]:
    """Add the answer to the messages."""
    return {"messages": [{"role": "assistant", "content": ANSWER}]}


graph = library.StateGraph(library.MessagesState).add_node("answer", answer).add_edge(library.START, "answer").compile()
