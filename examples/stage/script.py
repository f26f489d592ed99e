"""What the scripted model says, what it takes, and what it charges for.

Stands in for a model API and a search engine; knows nothing of limits.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from dataclasses import dataclass
from typing import Any

from penstock import Price
from penstock.testing import Answer, FakeProvider

FAST = os.environ.get("PENSTOCK_EXAMPLE_FAST") == "1"
PACE = 0.02 if FAST else 1.0
"""Real seconds for a scripted one: fast is the same story in a fiftieth of the time."""

QUESTION = "How can a city keep a windy night for a still day?"
PRICE = Price(input_usd_per_mtok=3, output_usd_per_mtok=15)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question to the model, with the answer it is going to get."""

    name: str
    input_tokens: int
    max_tokens: int
    output_tokens: int
    seconds: float
    answer: str


class ScriptedModel:
    """A model client; `invoice` is what its provider charges."""

    name = "fake-1"

    def __init__(self) -> None:
        self._upcoming: deque[Answer] = deque()
        self._provider = FakeProvider(
            iter(self._upcoming.popleft, None),
            model=self.name,
            input_usd_per_mtok=PRICE.input_usd_per_mtok,
            output_usd_per_mtok=PRICE.output_usd_per_mtok or 0,
            shape="responses",
        )
        self.invoice = self._provider.invoice

    async def answer(self, prompt: Prompt) -> Any:
        """The answer to `prompt`, after a while."""
        answer = Answer(prompt.answer, prompt.input_tokens, prompt.output_tokens, prompt.seconds * PACE)
        self._upcoming.append(answer)
        return await self._provider.acomplete(prompt.name, max_tokens=prompt.max_tokens)

    def worst_case_usd(self, prompt: Prompt) -> float:
        """The most that `prompt` can cost: its input, and all the output it may have."""
        return self._provider.worst_case_usd(prompt.input_tokens, prompt.max_tokens)


@dataclass(frozen=True, slots=True)
class Topic:
    """What one researcher studies."""

    name: str
    search_seconds: float
    read: Prompt
    conclude: Prompt


async def search(topic: Topic) -> list[str]:
    """Pages about the topic."""
    await asyncio.sleep(topic.search_seconds * PACE)
    return [f"{topic.name}: page {number}" for number in range(1, 6)]


def _topic(name: str, search_seconds: float, read_seconds: float, pages: int, finding: str) -> Topic:
    read = Prompt("read", pages * 1_500, 600, 400 + 20 * pages, read_seconds, f"notes on {name}")
    conclude = Prompt("conclude", 3_500, 1_900, 1_500 + 30 * pages, 2.6 - read_seconds / 2, finding)
    return Topic(name, search_seconds, read, conclude)


PLAN = Prompt("plan", 1_200, 1_000, 700, 0.9, "twelve ways to store electricity")
WRITE = Prompt("write", 9_000, 4_000, 3_200, 1.5, "the report")

TOPICS = (
    _topic("Pumped hydro", 0.4, 1.1, 6, "Most of the world's stored power; needs a hill and lakes."),
    _topic("Lithium-ion", 0.9, 1.4, 5, "Answers in milliseconds; cheap for hours, dear for days."),
    _topic("Flow battery", 0.6, 1.7, 4, "Power and capacity sized apart; tanks are cheap to enlarge."),
    _topic("Compressed air", 2.3, 1.9, 5, "Needs a cavern, and a way to keep the heat of compression."),
    _topic("Liquid air", 1.2, 1.2, 4, "Plain tanks at -196 °C, anywhere; about half comes back."),
    _topic("Hydrogen", 3.6, 1.5, 6, "Keeps for a season; about a third of the power comes back."),
    _topic("Molten salt", 1.0, 1.8, 5, "Holds heat for ten hours and drives a turbine after sunset."),
    _topic("Flywheel", 1.6, 1.0, 4, "Minutes, not hours; hundreds of thousands of cycles."),
    _topic("Lifted weights", 4.1, 1.4, 5, "A tonne raised by 100 m is a quarter of a kilowatt-hour."),
    _topic("Sodium-ion", 2.0, 1.6, 5, "No lithium and no cobalt; heavier for the same charge."),
    _topic("Supercapacitor", 3.2, 1.3, 6, "Seconds of very high power, a million times over."),
    _topic("Ice storage", 4.6, 1.5, 5, "Freeze water at night, cool the offices by day."),
)


def price_without_ceiling_usd() -> float:
    """What the program would spend if nothing stopped it."""
    prompts = [PLAN, *(prompt for topic in TOPICS for prompt in (topic.read, topic.conclude)), WRITE]
    tokens_in = sum(prompt.input_tokens for prompt in prompts)
    tokens_out = sum(prompt.output_tokens for prompt in prompts)
    return (tokens_in * float(PRICE.input_usd_per_mtok) + tokens_out * float(PRICE.output_usd_per_mtok or 0)) / 1e6
