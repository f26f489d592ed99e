"""The built-in model: the same answer each time, at a price, in pieces."""

from __future__ import annotations

import pytest

from penstock.agents.agent import Agent
from penstock.agents.messages import Message
from penstock.agents.model import ModelSettings
from penstock.containment.limits import Budget
from penstock.nodes.parts.chat import GO_ON
from penstock.runtime.context import ExecutionContext
from penstock.server.examples import EXAMPLE_PRICE, ExampleModel


def quick() -> ExampleModel:
    return ExampleModel(words_per_second=0)


async def answer_to(*messages: Message, model: ExampleModel | None = None) -> str:
    with ExecutionContext() as run:
        return (await (model or quick()).generate(run, list(messages))).text


async def test_the_answer_repeats_the_question_and_names_the_model() -> None:
    answer = await answer_to(Message.user("Is the gate\n open?"))
    assert answer.startswith("You wrote: “Is the gate open?”.")
    assert "example model" in answer


async def test_it_counts_on_request() -> None:
    assert await answer_to(Message.user("please count slowly to 5")) == "1, 2, 3, 4, 5."


async def test_counting_has_a_maximum() -> None:
    assert (await answer_to(Message.user("count to 999999"))).endswith(" 1000.")


async def test_the_answer_has_the_number_of_the_message() -> None:
    answer = await answer_to(Message.user("one"), Message.assistant("…"), Message.user("two"))
    assert "message 2 of our conversation" in answer


async def test_the_answer_is_streamed_word_by_word() -> None:
    pieces: list[str] = []
    with ExecutionContext() as run:
        answer = await quick().generate(
            run, [Message.user("count to 3")], on_delta=lambda delta: pieces.append(getattr(delta, "text", ""))
        )
    assert pieces == ["1, ", "2, ", "3."]
    assert "".join(pieces) == answer.text


async def test_it_calls_a_tool_that_the_message_names() -> None:
    def lookup(what: str) -> str:
        """Look something up."""
        return f"{len(what)} letters"

    result = await Agent(quick(), tools=[lookup]).run("use lookup for the gate")
    assert result.text == "The tool lookup says: 23 letters"


async def test_it_has_a_price_and_a_budget_stops_it() -> None:
    with ExecutionContext(budget=Budget(max_cost_dollars="1")) as run:
        await quick().generate(run, [Message.user("hello")])
        assert 0 < run.get_snapshot().cost_usd_accumulated < 0.01


async def test_an_answer_over_the_output_limit_is_truncated_and_says_so() -> None:
    with ExecutionContext() as run:
        answer = await quick().generate(run, [Message.user("count to 50")], settings=ModelSettings(max_output_tokens=3))
    assert (answer.text, answer.finish_reason) == ("1, 2, 3, ", "length")


@pytest.mark.parametrize("text", ["", " ", "\ud800", "count to", "🌊" * 10_000])
async def test_every_message_is_answered(text: str) -> None:
    assert await answer_to(Message.user(text))


async def test_it_continues_counting_where_it_stopped() -> None:
    stopped = [Message.user("count to 5"), Message.assistant("1, 2, ")]
    assert await answer_to(*stopped, Message.user(GO_ON)) == "3, 4, 5."
    done = [Message.user("count to 5"), Message.assistant("1, 2, 3, 4, 5.")]
    assert "no more to it" in await answer_to(*done, Message.user(GO_ON))


def test_the_reported_cost_matches_the_price() -> None:
    assert EXAMPLE_PRICE.worst_case_nanos(1_000_000, 1_000_000) == 750_000_000
