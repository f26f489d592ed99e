"""Publishes notices when a person approves."""

from __future__ import annotations

from penstock import Agent, tool
from penstock.server.examples import ExampleModel


@tool(needs_approval=True)
def publish(text: str) -> str:
    """Publish a notice."""
    return f"published: {text}"


agent = Agent(ExampleModel(), "Publish what you are given.", [publish], name="desk")
