"""The ReAct loop: steps as text."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.agents.executor import Executor
from penstock.agents.formats import FormatError, JsonFormat
from penstock.agents.loop import Conversation
from penstock.agents.model import ModelRequest
from penstock.agents.react import STOP, ReActLoop
from penstock.agents.scripted import ScriptedModel
from penstock.agents.tools import tool
from tests.agents.scripts import priced

pytestmark = pytest.mark.requirement("T-6")


@tool
async def find(q: str) -> str:
    """Look something up."""
    return f"{q}: 60 m"


async def test_actions_are_run_and_observed_until_there_is_an_answer() -> None:
    prompts: list[str] = []

    def answer(request: ModelRequest) -> str:
        prompts.append(request.messages[-1].text)
        assert "- find: Look something up." in request.instructions
        assert (request.tools, request.settings.stop) == ((), (STOP,))
        if len(prompts) == 1:
            return 'Thought: look\nAction: find\nAction Input: {"q": "dam"}'
        return "Thought: known\nFinal Answer: 60 m"

    run = priced(data=Conversation("How high?"))
    result = await Executor(ReActLoop(ScriptedModel(answer), [find])).execute(run)
    assert result.result == "60 m"
    assert prompts == ["How high?", "Observation: dam: 60 m"]
    assert run.stats.tool_calls_by_name == {"find": 1}


async def test_a_wrong_action_is_observed() -> None:
    replies = ["Action: lose\nAction Input: {}", "Action: find\nAction Input: {", "Final Answer: sorry"]
    run = priced(data=Conversation("go"))
    assert (await Executor(ReActLoop(ScriptedModel(replies), [find])).execute(run)).result == "sorry"
    observations = [message.text for message in run.data.messages if message.role == "user"][1:]
    assert observations[0].startswith("Observation: error: there is no tool 'lose'")
    assert "not JSON" in observations[1]


@pytest.mark.requirement("T-9")
async def test_an_invalid_step_is_requested_again_up_to_the_maximum() -> None:
    run = priced(data=Conversation("go"))
    assert (await Executor(ReActLoop(ScriptedModel(["hm", "Final Answer: 3"]))).execute(run)).result == "3"
    model = ScriptedModel(lambda request: "hm")
    result = await Executor(ReActLoop(model, max_format_retries=2)).execute(priced(data=Conversation("go")))
    assert isinstance(result.error, FormatError)
    assert model.calls == 3


@pytest.mark.requirement("T-9")
async def test_the_final_answer_may_have_a_form_too() -> None:
    replies: list[Any] = ["Final Answer: about 60", 'Final Answer: {"metres": 60}']
    loop = ReActLoop(ScriptedModel(replies), output=JsonFormat(dict[str, int]))
    assert (await Executor(loop).execute(priced(data=Conversation("go")))).result == {"metres": 60}
