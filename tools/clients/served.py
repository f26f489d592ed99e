"""Served to the clients: an agent and a graph in Python, on a scripted model that `assistant.json` uses too."""

from __future__ import annotations

from typing import Any

from penstock import Graph, Price
from penstock.agents import Agent, ModelRequest, ScriptedModel, ToolCall

ANSWER = {"city": "Rome", "celsius": 21}


def reply(request: ModelRequest) -> Any:
    """Call `weather` if it is offered and has no result yet; then answer in the requested way."""
    results = [message.text for message in request.messages if message.role == "tool"]
    names = [spec.name for spec in request.tools]
    if "weather" in names and not results:
        return ToolCall("0", "weather", {"city": "Rome"})
    structured = [name for name in names if name != "weather"]
    if structured:
        return ToolCall("1", structured[0], ANSWER)
    if "JSON Schema" in request.instructions:
        return '{"city": "Rome", "celsius": 21}'
    return f"In Rome: {results[-1]}." if results else "Hello."


models = {"scripted": ScriptedModel(reply)}
prices = {"scripted": Price("0.15", "0.60")}
agent = Agent(models["scripted"], name="helper")
graph = Graph("shouter")


@graph.step
def shout(context: Any) -> str:
    """Return the message in capital letters."""
    return str(context.input).upper()
