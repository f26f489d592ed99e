"""Models behind APIs, over real HTTP: answers, streams, tools, limits, broken answers, cancels."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import openai
import pytest

from penstock import CancelledError, Halted, StopReason, contain, contained
from penstock.agents import (
    Agent,
    Media,
    Message,
    ModelRequest,
    ModelSettings,
    ToolCallDelta,
    Transcript,
    TruncatedByBudget,
    TruncatedResponse,
    tool,
)
from penstock.agents.messages import Delta, ToolCall
from penstock.providers.models import AnthropicModel, OpenAIModel, UnsupportedRequest, close_connections
from penstock.testing.provider import Cut, Fail, FakeProviderServer, Garble, Hang, RefuseFree, Say, Truncate
from penstock.testing.provider import ToolCall as RequestedTool
from tests.providers.remote_models import Make, ask, chat, each_api, messages, responses, streamed_or_not, texts

TEXT = "four score and seven years ago"


@pytest.mark.requirement("T-8")
@each_api
@streamed_or_not
async def test_an_answer_comes_with_its_usage_and_is_a_call_of_the_run(make: Make, streams: bool) -> None:
    async with FakeProviderServer(script=[TEXT]) as server:
        async with contain(max_cost_usd=1, prices=server.provider.prices) as run:
            answer = await ask(make(server), run, streams)
        (line,) = server.invoice.lines
        assert (answer.text, answer.finish_reason, answer.model) == (TEXT, "stop", "fake-1")
        assert answer.usage is not None
        assert (answer.usage.input_tokens, answer.usage.output_tokens) == (line.input_tokens, line.output_tokens)
        assert run.balance.spent_nanos == server.invoice.total_nanos
        assert run.balance.unresolved_nanos == 0


@pytest.mark.requirement("T-10")
@each_api
async def test_a_stream_comes_in_pieces_and_then_whole(make: Make) -> None:
    deltas: list[Delta] = []
    async with FakeProviderServer(script=[TEXT]) as server:
        async with contain() as run:
            answer = await make(server).generate(run, [Message.user("hi")], on_delta=deltas.append)
        assert server.requests[0].streams
    assert len(deltas) > 3
    assert "".join(texts(deltas)) == answer.text == TEXT


@pytest.mark.requirement("X-1")
@each_api
@streamed_or_not
async def test_the_request_says_how_much_output_the_budget_pays_for(make: Make, streams: bool) -> None:
    async with FakeProviderServer(script=[Say(output_tokens=10_000)]) as server:
        price = server.provider.prices
        ceiling_nanos = price.worst_case_nanos("fake-1", 60, 100)
        assert ceiling_nanos is not None
        async with contain(max_cost_usd=ceiling_nanos / 1e9, prices=price) as run:
            with pytest.raises(TruncatedByBudget) as cut:
                await ask(make(server), run, streams)
        cap = server.requests[0].max_tokens
        assert cap is not None
        assert 16 < cap < 160
        assert cut.value.text
        assert cut.value.stop_reason is StopReason.BUDGET_EXCEEDED
        assert server.invoice.total_nanos <= ceiling_nanos


@pytest.mark.parametrize(
    ("make", "field"), [(chat, "max_completion_tokens"), (responses, "max_output_tokens"), (messages, "max_tokens")]
)
async def test_the_output_limit_is_sent_in_the_field_of_the_api(make: Make, field: str) -> None:
    async with FakeProviderServer() as server:
        async with contain() as run:
            await make(server, max_output_tokens=77).generate(run, [Message.user("hi")])
        assert server.requests[0].fields[field] == 77


@pytest.mark.requirement("T-8")
@each_api
@streamed_or_not
async def test_an_agent_calls_its_tools_and_answers(make: Make, streams: bool) -> None:
    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    calls = (RequestedTool("add", {"a": 2, "b": 3}), RequestedTool("add", {"a": 20, "b": 30}))
    deltas: list[Delta] = []
    async with FakeProviderServer(script=[Say("let me see", tool_calls=calls), "5 and 50"]) as server:
        async with contain(max_cost_usd=1, prices=server.provider.prices) as run:
            agent = Agent(make(server), "You add.", [add], on_delta=deltas.append if streams else None)
            result = await agent.run("what is 2+3 and 20+30?", run)
        assert result.output == "5 and 50"
        assert run.balance.spent_nanos == server.invoice.total_nanos
        first, second = server.requests
        assert first.connection == second.connection
        assert '"content":"5"' in second.raw.decode() or '"output":"5"' in second.raw.decode()
        assert len({message.tool_call_id for message in result.messages if message.role == "tool"}) == 2
        calls = [delta.call for delta in deltas if isinstance(delta, ToolCallDelta)]
        assert [call.arguments for call in calls] == ([{"a": 2, "b": 3}, {"a": 20, "b": 30}] if streams else [])


@each_api
@streamed_or_not
async def test_arguments_that_are_not_json_are_returned_to_the_model_as_an_error(make: Make, streams: bool) -> None:
    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    wrong = Say(tool_calls=(RequestedTool("add", '{"a": 2,'),))
    deltas: list[Delta] = []
    async with FakeProviderServer(script=[wrong, "sorry"]) as server:
        async with contain() as run:
            agent = Agent(make(server), tools=[add], on_delta=deltas.append if streams else None)
            assert (await agent.run("2+3?", run)).output == "sorry"
        assert "not JSON" in server.requests[1].raw.decode()


@each_api
async def test_a_tool_call_without_arguments_has_none(make: Make) -> None:
    script = [Say(tool_calls=(RequestedTool("now", "", id="one"),))] * 2
    async with FakeProviderServer(script=script) as server, contain() as run:
        for streams in (False, True):
            answer = await ask(make(server), run, streams)
            assert answer.tool_calls == (ToolCall("one", "now", {}),)
            assert answer.finish_reason == "tool_calls"


# Failures.


@each_api
@streamed_or_not
async def test_a_refusal_keeps_its_status_and_costs_nothing(make: Make, streams: bool) -> None:
    async with FakeProviderServer(script=[RefuseFree(400)]) as server:
        async with contain(max_cost_usd=1, prices=server.provider.prices) as run:
            with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)):
                await ask(make(server), run, streams)
            assert (run.balance.spent_nanos, run.balance.unresolved_nanos) == (0, 0)
        assert len(server.requests) == 1


@each_api
@streamed_or_not
async def test_one_retry_policy_makes_exactly_its_attempts(make: Make, streams: bool) -> None:
    async with FakeProviderServer(script=lambda _: RefuseFree(429, retry_after_s=0.01)) as server:
        async with contain(max_cost_usd=1, prices=server.provider.prices) as run:
            with pytest.raises((openai.RateLimitError, anthropic.RateLimitError)):
                await ask(make(server, retries=2), run, streams)
            assert (run.balance.attempts, run.balance.unresolved_nanos) == (3, 0)
        assert len(server.requests) == 3


@each_api
@streamed_or_not
async def test_a_retry_waits_as_long_as_the_server_asks(make: Make, streams: bool) -> None:
    async with FakeProviderServer(script=[RefuseFree(429, retry_after_s=0.3), "fine"]) as server:
        async with contain() as run:
            assert (await ask(make(server, retries=1), run, streams)).text == "fine"
        first, second = server.requests
        assert second.at_ns - first.at_ns >= 300_000_000


@each_api
async def test_a_stream_that_broke_off_after_a_piece_is_not_requested_again(make: Make) -> None:
    async with FakeProviderServer(script=[Say("sixty metres high", then=Cut(after=2)), "fine"]) as server:
        async with contain() as run:
            with pytest.raises((openai.APIError, anthropic.APIError, TruncatedResponse)):
                await ask(make(server, retries=3), run, streams=True)
        assert len(server.requests) == 1


@each_api
async def test_without_a_retry_policy_there_is_one_attempt(make: Make) -> None:
    for fate in (RefuseFree(429, retry_after_s=0), Say(then=Fail(500)), Say(then=Cut())):
        for streams in (False, True):
            async with FakeProviderServer(script=lambda _, fate=fate: fate) as server:
                async with contain() as run:
                    with pytest.raises((openai.APIError, anthropic.APIError)):
                        await ask(make(server), run, streams)
                assert len(server.requests) == 1


@pytest.mark.requirement("T-10")
@each_api
@pytest.mark.parametrize("fault", [Truncate(2), Cut(2), Garble(2)])
async def test_a_stream_that_breaks_off_is_no_answer_and_what_came_is_kept(make: Make, fault: Any) -> None:
    deltas: list[Delta] = []
    async with (
        FakeProviderServer(script=[Say(TEXT, then=fault)]) as server,
        contain(max_cost_usd=1, prices=server.provider.prices) as run,
    ):
        result = await Agent(make(server), on_delta=deltas.append).run("hi", run)
        assert isinstance(result.error, TruncatedResponse)
        assert result.partial == result.text == result.error.partial == "".join(texts(deltas)) == TEXT[:8]
        (call,) = run.get_snapshot().nodes
        assert call.status == "error"
        taken = run.balance.spent_nanos + run.balance.unresolved_nanos
        assert taken >= server.invoice.total_nanos > 0


@pytest.mark.requirement("T-10")
@each_api
async def test_a_stream_that_breaks_off_before_its_first_piece_is_truncated(make: Make) -> None:
    async with FakeProviderServer(script=[Say(TEXT, then=Truncate(0))]) as server, contain() as run:
        with pytest.raises(TruncatedResponse, match="after 0 characters"):
            await ask(make(server), run, streams=True)


@each_api
@pytest.mark.parametrize("fault", [Truncate(), Garble(), Cut(0)])
async def test_half_a_plain_answer_is_no_answer(make: Make, fault: Any) -> None:
    async with (
        FakeProviderServer(script=[Say(TEXT, then=fault)]) as server,
        contain(max_cost_usd=1, prices=server.provider.prices) as run,
    ):
        with pytest.raises((TruncatedResponse, openai.APIConnectionError, anthropic.APIConnectionError)):
            await ask(make(server), run, streams=False)
        assert run.balance.unresolved_nanos >= server.invoice.total_nanos > 0


async def test_a_server_that_is_not_there_costs_nothing() -> None:
    async with FakeProviderServer() as server:
        url = server.openai_url
    async with contain(max_cost_usd=1, prices=server.provider.prices) as run:
        with pytest.raises(openai.APIConnectionError):
            await ask(OpenAIModel("fake-1", base_url=url, api_key="k"), run, streams=False)
        assert (run.balance.spent_nanos, run.balance.unresolved_nanos) == (0, 0)


# Cancels.


@each_api
@pytest.mark.parametrize("fault", [Hang(None), Hang(2)], ids=["before the headers", "in the middle"])
@streamed_or_not
async def test_a_cancel_closes_the_connection_and_keeps_what_came(make: Make, fault: Hang, streams: bool) -> None:
    some = asyncio.Event()
    deltas: list[Delta] = []

    def on_delta(delta: Delta) -> None:
        deltas.append(delta)
        if len(deltas) == 2:
            some.set()

    async with FakeProviderServer(script=[Say(TEXT, then=fault)]) as server:
        async with contain(max_cost_usd=1, prices=server.provider.prices) as run:
            agent = Agent(make(server), on_delta=on_delta if streams else None)
            running = asyncio.create_task(agent.run("hi", run))
            if streams and fault.after:
                await some.wait()
            await server.until(lambda: server.in_flight)
            run.abort("enough")
            with pytest.raises(CancelledError):
                await running
            await server.until(lambda: server.disconnects)
            assert "".join(texts(deltas)) == (TEXT[:8] if streams and fault.after else "")
            assert run.balance.spent_nanos + run.balance.unresolved_nanos >= server.invoice.total_nanos > 0
        await server.until(lambda: not server.open_connections)


@each_api
async def test_a_deadline_ends_a_stream_that_stalls(make: Make) -> None:
    async with FakeProviderServer(script=[Say(TEXT, then=Hang(2))]) as server:
        async with contain(timeout_s=1, prices=server.provider.prices) as run:
            result = await Agent(make(server), on_delta=lambda _: None).run("hi", run)
            assert isinstance(result.error, Halted)
            assert result.partial is None or TEXT[:8].startswith(result.partial)
        await server.until(lambda: server.disconnects)


# What is sent.


@pytest.mark.parametrize(
    ("make", "schema"),
    [
        (chat, lambda body: body["response_format"]["json_schema"]["schema"]),
        (responses, lambda body: body["text"]["format"]["schema"]),
        (messages, lambda body: body["output_config"]["format"]["schema"]),
    ],
)
async def test_an_output_schema_is_sent_in_the_field_of_the_api(make: Make, schema: Any) -> None:
    wanted = {"type": "object", "properties": {"a": {"type": "integer"}}}
    settings = ModelSettings(output_schema=wanted, temperature=0.5, extra={"seed": 7})
    async with FakeProviderServer() as server:
        async with contain() as run:
            await make(server).generate(run, [Message.user("hi")], settings=settings)
        body = server.requests[0].fields
        assert schema(body) == wanted
        assert (body["temperature"], body["seed"]) == (0.5, 7)


@pytest.mark.parametrize("name", ["n", "max_tokens", "max_completion_tokens", "max_output_tokens", "stream"])
@each_api
async def test_settings_cannot_ask_for_more_than_was_held(make: Make, name: str) -> None:
    async with FakeProviderServer() as server:
        async with contain(max_cost_usd=1, prices=server.provider.prices) as run:
            with pytest.raises(UnsupportedRequest, match=name):
                await make(server).generate(run, [Message.user("hi")], settings=ModelSettings(extra={name: 100_000}))
            assert run.balance.unresolved_nanos == 0
        assert server.requests == ()


@each_api
async def test_pictures_go_by_address_and_by_their_bytes(make: Make) -> None:
    pictures = [Media("image/png", url="http://pictures/1.png"), Media("image/png", data=b"\x89PNG")]
    async with FakeProviderServer() as server:
        async with contain() as run:
            await make(server).generate(run, [Message.user(["look", *pictures])])
        body = server.requests[0].raw.decode()
    assert "http://pictures/1.png" in body
    assert "iVBORw==" in body


@each_api
async def test_a_request_that_the_api_cannot_express_is_refused_before_it_is_sent(make: Make) -> None:
    film = Media("video/mp4", url="http://films/1.mp4")
    async with FakeProviderServer() as server:
        async with contain(max_cost_usd=1, prices=server.provider.prices) as run:
            with pytest.raises(UnsupportedRequest, match="video/mp4 by address"):
                await make(server).generate(run, [Message.user([film])])
            assert run.balance.unresolved_nanos == 0
        assert server.requests == ()


# Clients.


def test_a_model_works_on_one_loop_after_the_other() -> None:
    with FakeProviderServer() as server:
        model = chat(server)

        async def once() -> str:
            async with contain() as run:
                return (await ask(model, run, streams=True)).text

        assert asyncio.run(once()) == asyncio.run(once())
        server.wait_until(lambda: server.open_connections == 0)  # the server hears of a close a moment later


def test_a_model_works_on_several_loops_at_once() -> None:
    with FakeProviderServer(script=lambda request: request.last_text) as server:
        model = chat(server)

        async def several(prompt: str) -> set[str]:
            async with contain() as run:
                answers = await asyncio.gather(*(ask(model, run, True, prompt) for _ in range(5)))
            return {answer.text for answer in answers}

        with ThreadPoolExecutor(4) as threads:
            answers = list(threads.map(lambda prompt: asyncio.run(several(prompt)), "abcd"))
    assert answers == [{"a"}, {"b"}, {"c"}, {"d"}]


async def test_connections_can_be_closed_before_the_loop_ends() -> None:
    async with FakeProviderServer() as server:
        model = chat(server)
        async with contain() as run:
            await ask(model, run, streams=False)
            await close_connections()
            await server.until(lambda: not server.open_connections)
            await ask(model, run, streams=False)
        assert [request.connection for request in server.requests] == [1, 2]


async def test_models_of_one_account_share_their_connections() -> None:
    async with FakeProviderServer() as server, contain() as run:
        for _ in range(5):
            await ask(chat(server), run, streams=True)
        assert {request.connection for request in server.requests} == {1}


async def test_a_client_of_ones_own_is_used_without_its_retries() -> None:
    async with FakeProviderServer(script=lambda _: RefuseFree(503)) as server:
        async with (
            openai.AsyncOpenAI(base_url=server.openai_url, api_key="mine") as one,
            anthropic.AsyncAnthropic(base_url=server.url, api_key="mine") as other,
            contain() as run,
        ):
            for model in (OpenAIModel("fake-1", client=one), AnthropicModel("fake-1", client=other)):
                with pytest.raises((openai.InternalServerError, anthropic.InternalServerError)):
                    await ask(model, run, streams=False)
            assert one.max_retries == 2
        assert len(server.requests) == 2


@each_api
async def test_many_streams_share_one_loop(make: Make) -> None:
    async with FakeProviderServer(script=lambda request: request.last_text * 10) as server:
        model = make(server)
        async with contain() as run:
            answers = await asyncio.gather(*(ask(model, run, True, f"topic {n}") for n in range(16)))
    assert [answer.text for answer in answers] == [f"topic {n}" * 10 for n in range(16)]


@each_api
async def test_a_consumer_that_stops_reading_closes_the_connection(make: Make) -> None:
    async with FakeProviderServer(script=[Say(TEXT, then=Hang(2))]) as server:
        request = ModelRequest(Transcript([Message.user("hi")]), max_output_tokens=100)
        pieces = make(server).request_stream(request)
        assert [await anext(pieces), await anext(pieces)] == [TEXT[:4], TEXT[4:8]]
        await pieces.aclose()
        await server.until(lambda: server.disconnects)


@each_api
@streamed_or_not
async def test_a_model_inside_contained_is_held_and_billed_once(make: Make, streams: bool) -> None:
    async with FakeProviderServer.flat(0.10) as server:
        async with contain(max_cost_usd=0.15, prices=server.provider.prices) as run:
            with contained(run):
                await ask(make(server), run, streams)
        assert run.balance.spent_nanos == server.invoice.total_nanos
        assert run.balance.api_calls == 1
