"""Models against an independent fake provider that breaks on demand; skipped where it cannot be installed."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from benchmarks import _peers as peers
from penstock import CancelledError, contain
from penstock.agents import Agent, Message, TruncatedResponse, tool
from penstock.agents.messages import Delta
from penstock.providers.models import AnthropicModel, OpenAIModel, RemoteModel
from tests.providers.remote_models import texts

SPEC = "llmock==0.2.2"
SERVE = """
import socket, sys, threading, uvicorn
from llmock.main import create_app
listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen()
print(listener.getsockname()[1], flush=True)
server = uvicorn.Server(uvicorn.Config(create_app(), log_level="error"))
threading.Thread(target=lambda: (sys.stdin.read(), setattr(server, "should_exit", True)), daemon=True).start()
server.run(sockets=[listener])
"""


class Mock:
    """The server, and how it is configured."""

    def __init__(self, url: str) -> None:
        self.url = url

    def next(self, *behaviours: dict[str, Any]) -> None:
        """What happens to the requests to come."""
        import httpx2

        httpx2.post(f"{self.url}/_llmock/reset").raise_for_status()
        httpx2.post(f"{self.url}/_llmock/scenario", json={"behaviors": list(behaviours)}).raise_for_status()

    def requests(self) -> int:
        """How many requests have been served."""
        import httpx2

        return int(httpx2.get(f"{self.url}/_llmock/requests").json()["count"])


@pytest.fixture(scope="module")
def mock() -> Iterator[Mock]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(peers.PEERS, "llmock", SPEC)
        try:
            python = peers.python_of("llmock")
        except peers.NotInstalled:
            pytest.skip(f"{SPEC}: could not be installed from the package index")
    with subprocess.Popen(
        [python, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        yield Mock(f"http://127.0.0.1:{int(server.stdout.readline())}")
        server.stdin.close()


@pytest.fixture(params=["openai", "anthropic"])
def model(request: pytest.FixtureRequest, mock: Mock) -> RemoteModel:
    if request.param == "openai":
        return OpenAIModel("gpt-4o", base_url=f"{mock.url}/v1", api_key="k", retries=1)
    return AnthropicModel("claude-sonnet-4-5", base_url=f"{mock.url}/anthropic", api_key="k", retries=1)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_tool_loop_comes_to_its_answer(mock: Mock, model: RemoteModel, streams: bool) -> None:
    cities: list[str] = []

    @tool
    def weather(city: str) -> str:
        """The weather in a city."""
        cities.append(city)
        return "sunny"

    call = {"name": "weather", "arguments": {"city": "Paris"}}
    mock.next({"type": "reply", "tool_calls": [call]}, {"type": "reply", "text": "It is sunny."})
    async with contain() as run:
        agent = Agent(model, tools=[weather], on_delta=(lambda _: None) if streams else None)
        assert (await agent.run("What is the weather in Paris?", run)).output == "It is sunny."
    assert cities == ["Paris"]


async def test_a_rate_limit_is_tried_again_as_often_as_the_policy_says(mock: Mock, model: RemoteModel) -> None:
    refused = {"type": "fail", "status": 429, "retry_after": 0, "times": 5}
    mock.next(refused)
    async with contain() as run:
        with pytest.raises((openai.RateLimitError, anthropic.RateLimitError)):
            await model.generate(run, [Message.user("hi")])
    assert mock.requests() == 2


@pytest.mark.parametrize("kind", ["truncate", "disconnect", "malformed"])
async def test_a_broken_stream_is_no_answer(mock: Mock, model: RemoteModel, kind: str) -> None:
    mock.next(
        {"type": "reply", "text": "one two three four five six seven eight"},
        {"type": "stream_fault", "kind": kind, "after_chunks": 6},
    )
    deltas: list[Delta] = []
    async with contain() as run:
        with pytest.raises(TruncatedResponse) as broken:
            await model.generate(run, [Message.user("hi")], on_delta=deltas.append)
    assert broken.value.partial == "".join(texts(deltas)) != ""
    assert mock.requests() == 1


async def test_a_stream_that_stalls_can_be_cancelled(mock: Mock, model: RemoteModel) -> None:
    mock.next(
        {"type": "reply", "text": "one two three four five six seven eight"},
        {"type": "stream_fault", "kind": "stall", "after_chunks": 6, "stall_seconds": 5},
    )
    some = asyncio.Event()
    async with contain() as run:
        asking = asyncio.create_task(model.generate(run, [Message.user("hi")], on_delta=lambda _: some.set()))
        await some.wait()
        run.abort("enough")
        with pytest.raises(CancelledError):
            await asking
