"""The loop is open to the user's own; a conversation remembers everything and sends what is in use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from penstock import ExecutionContext, InvalidValue
from penstock.agents.executor import Executor
from penstock.agents.loop import (
    AgentLoop,
    AgentLoopResult,
    Conversation,
    Iteration,
    LoopAction,
    LoopData,
    data_of,
    remember,
    transcript_of,
)
from penstock.agents.messages import ContentPart, Media, Message
from penstock.agents.scripted import ScriptedModel
from penstock.agents.tool_calling import ToolCallingLoop
from penstock.agents.tools import tool
from tests.agents.scripts import priced, use

pytestmark = pytest.mark.requirement("T-6")


def texts(messages: Any) -> list[str]:
    return [message.text for message in messages]


def test_a_conversation_sends_the_iterations_in_use_and_keeps_all_messages() -> None:
    data = Conversation("go", history=[Message.user("hello"), Message.assistant("hi")])
    remember(data, [Message.assistant("one")])
    remember(data, [Message.assistant("two")])
    assert isinstance(data, LoopData)
    assert texts(data.transcript) == ["hello", "hi", "go", "one", "two"]
    data.set_iterations([Iteration((Message.user("summary"),)), data.iterations[-1]])
    assert texts(data.transcript) == ["hello", "hi", "go", "summary", "two"]
    assert texts(data.messages) == ["hello", "hi", "go", "one", "two"]
    assert len(data.iteration_history) == 2
    assert data.transcript.weight == sum(message.weight for message in data.transcript)


def test_an_input_may_have_pictures() -> None:
    picture = Media("image/png", url="https://x/y.png")
    data = Conversation(["What is this?", picture])
    assert data.transcript[0].content == ("What is this?", picture)


def test_a_conversation_about_nothing_begins_with_nothing() -> None:
    assert len(Conversation().transcript) == 0


class Notes:
    """Loop data of one's own."""

    def __init__(self, prompt: str) -> None:
        self.original_input: Sequence[ContentPart] = (prompt,)
        self.iteration_history: list[Iteration] = []
        self.iterations: Sequence[Iteration] = ()
        self.found: list[str] = []

    def add_iteration_history(self, iteration: Iteration) -> None:
        self.iteration_history.append(iteration)

    def set_iterations(self, iterations: Sequence[Iteration]) -> None:
        self.iterations = tuple(iterations)


async def test_the_loops_that_are_there_work_on_data_of_ones_own() -> None:
    @tool
    async def note(text: str, ctx: ExecutionContext) -> str:
        ctx.data.found.append(text)
        return "noted"

    notes = Notes("go")
    assert isinstance(notes, LoopData)
    loop = ToolCallingLoop(ScriptedModel([use("note", text="60 m"), "done"]), [note])
    assert (await Executor(loop).execute(notes)).result == "done"
    assert notes.found == ["60 m"]
    assert texts(transcript_of(notes)) == ["go", "", "noted", "done"]


async def test_a_loop_of_ones_own_uses_models_as_it_likes() -> None:
    class Debate:
        async def next(self, context: ExecutionContext) -> AgentLoopResult:
            data = data_of(context)
            response = await ScriptedModel([f"point {context.iteration}"]).generate(context, transcript_of(data))
            remember(data, [response.message])
            if context.iteration < 3:
                return AgentLoopResult(LoopAction.CONTINUE)
            return AgentLoopResult(LoopAction.TERMINATE, result=texts(transcript_of(data)))

    assert isinstance(Debate(), AgentLoop)
    run = priced(data=Conversation("Dams?"))
    result = await Executor(Debate()).execute(run)
    assert result.result == ["Dams?", "point 1", "point 2", "point 3"]
    assert run.stats.model_call_count == 3


def test_data_that_cannot_remember_is_refused() -> None:
    with pytest.raises(InvalidValue, match="LoopData"):
        data_of(ExecutionContext(data={"not": "data"}))
