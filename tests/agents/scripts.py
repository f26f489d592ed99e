"""Shared by the tests of agents: prices, tool calls, and a hook that records every moment."""

from __future__ import annotations

from typing import Any

from penstock import Budget, ExecutionContext, Price, PriceBook
from penstock.agents.messages import ToolCall

PRICES = PriceBook(registered={"scripted": Price(1, 10)}, use_genai_prices=False)
"""A dollar for a million tokens in, ten for a million out: 1,000 and 10,000 nano-dollars each."""


def priced(budget: Budget | None = None, **options: Any) -> ExecutionContext:
    """A run in which the scripted model has a price."""
    return ExecutionContext(budget=budget, prices=PRICES, **options)


def use(name: str, call_id: str = "c1", **arguments: Any) -> ToolCall:
    """A tool call as a model makes it."""
    return ToolCall(call_id, name, arguments)


def kinds(context: ExecutionContext) -> list[str]:
    """The kinds of the context's events, in order."""
    return [event.kind for event in context.events]


class Diary:
    """A hook that records every moment."""

    def __init__(self) -> None:
        self.moments: list[str] = []
        self.results: list[Any] = []

    def before_execution(self, context: ExecutionContext) -> None:
        self.moments.append("before_execution")

    async def after_execution(self, context: ExecutionContext, result: Any) -> None:
        self.moments.append(f"after_execution {result.termination_reason}")
        self.results.append(result)

    async def before_iteration(self, context: ExecutionContext) -> None:
        self.moments.append(f"before_iteration {context.iteration}")

    def after_iteration(self, context: ExecutionContext, result: Any) -> None:
        self.moments.append(f"after_iteration {context.iteration} {result.action}")

    def before_model_call(self, context: ExecutionContext, request: Any) -> None:
        self.moments.append("before_model_call")

    def after_model_call(self, context: ExecutionContext, request: Any, response: Any, error: Any) -> None:
        self.moments.append(f"after_model_call {type(error or response).__name__}")

    def before_tool_call(self, context: ExecutionContext, call: Any) -> None:
        self.moments.append(f"before_tool_call {call.name}")

    async def after_tool_call(self, context: ExecutionContext, call: Any, result: Any) -> None:
        self.moments.append(f"after_tool_call {result.content}")
