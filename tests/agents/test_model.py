"""A model traces itself, holds its worst case, and asks for no more output than can be paid for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock import (
    Agent,
    Budget,
    BudgetExceededError,
    CancelledError,
    ExecutionConfig,
    ExecutionContext,
    Halted,
    ModelCallTrace,
    PriceBook,
    Usage,
)
from penstock.agents.messages import Message, TextDelta, ToolCall, Transcript
from penstock.agents.model import ModelRequest, ModelResponse, ModelSettings, TruncatedResponse
from penstock.agents.scripted import ScriptedModel
from penstock.events import DivergenceDetector
from penstock.testing import explore, sim_run
from tests.agents.scripts import PRICES, priced, use

PROMPT = [Message.user("How high is it?")]


def model_calls(context: ExecutionContext) -> list[ModelCallTrace]:
    return [event for event in context.events if isinstance(event, ModelCallTrace)]


@pytest.mark.requirement("T-8")
async def test_a_model_call_traces_itself() -> None:
    run = priced()
    response = await ScriptedModel(["60 m"], usage=Usage(100, 20)).generate(run, PROMPT)
    assert response.text == "60 m"
    (call,) = model_calls(run)
    assert (call.name, call.model, call.input_tokens, call.output_tokens) == ("scripted", "scripted", 100, 20)
    assert call.cost == pytest.approx(100e-6 + 200e-6)
    assert run.stats.input_tokens_by_model == {"scripted": 100}


@pytest.mark.requirement("T-8")
async def test_a_failed_model_call_is_traced_with_what_it_cost() -> None:
    class Broke(Exception):
        usage = Usage(100, 20)

    run = priced()
    with pytest.raises(Broke):
        await ScriptedModel([Broke()]).generate(run, PROMPT)
    (call,) = model_calls(run)
    assert (call.status, call.error, call.output_tokens) == ("fail", "Broke", 20)
    assert run.stats.total_cost == pytest.approx(300e-6)


async def test_a_model_without_a_price_is_counted_as_unknown() -> None:
    run = ExecutionContext(prices=PriceBook(use_genai_prices=False))
    await ScriptedModel(["hm"]).generate(run, PROMPT)
    assert "cost unknown (1 call)" in run.explain()


async def test_the_cost_of_an_agent_is_none_while_nothing_of_it_is_known() -> None:
    result = await Agent(ScriptedModel(["hm"])).run("?", ExecutionContext(prices=PriceBook(use_genai_prices=False)))
    assert (result.output, result.cost_usd) == ("hm", None)
    assert (await Agent(ScriptedModel(["hm"])).run("?", priced())).cost_usd == pytest.approx(20e-6, rel=1)


@pytest.mark.requirement("X-1")
async def test_the_requested_output_is_limited_to_what_the_budget_can_pay() -> None:
    run = priced(Budget(max_cost_dollars=0.001))
    model = ScriptedModel(["hm"])
    await model.generate(run, PROMPT)
    assert model.last_request is not None
    tokens_in = model.count_input(model.last_request)
    assert model.last_request.max_output_tokens == (1_000_000 - tokens_in * 1_000) // 10_000 < 100
    assert model.last_request.is_clamped


@pytest.mark.requirement("X-1")
async def test_a_call_that_cannot_pay_for_the_least_output_is_refused_unsent() -> None:
    run = priced(Budget(max_cost_dollars=0.0001))
    model = ScriptedModel(["hm"])
    with pytest.raises(BudgetExceededError, match="would hold"):
        await model.generate(run, PROMPT)
    assert model.calls == 0


@pytest.mark.requirement("X-1")
@pytest.mark.parametrize("max_tokens", [60, 200])
async def test_the_requested_output_is_limited_to_what_the_token_limit_leaves(max_tokens: int) -> None:
    run = priced(Budget(max_tokens=max_tokens))
    model = ScriptedModel(lambda request: ModelResponse("hm", usage=Usage(10, request.max_output_tokens)))
    await model.generate(run, PROMPT)
    assert model.last_request is not None
    assert model.last_request.max_output_tokens == max_tokens - model.count_input(model.last_request)


@pytest.mark.requirement("X-1")
async def test_used_tokens_reduce_the_requested_output() -> None:
    run = priced(Budget(max_tokens=300))
    model = ScriptedModel(lambda request: ModelResponse("hm", usage=Usage(100, 50)))
    await model.generate(run, PROMPT)
    await model.generate(run, PROMPT)
    assert model.last_request is not None
    assert model.last_request.max_output_tokens == 150 - model.count_input(model.last_request)


@pytest.mark.requirement("X-1")
async def test_a_call_that_has_no_tokens_left_for_the_least_output_is_refused_unsent() -> None:
    run = priced(Budget(max_tokens=20))
    model = ScriptedModel(["hm"])
    with pytest.raises(BudgetExceededError, match="tokens"):
        await model.generate(run, PROMPT)
    assert model.calls == 0


@pytest.mark.requirement("X-1")
def test_sixteen_at_once_never_pass_the_ceiling() -> None:
    """Each answer uses everything it was allowed; the ceiling pays for about three of them."""

    async def main(seed: int) -> int:
        run = priced(Budget(max_cost_dollars=0.12))
        seen: list[int] = []

        async def answer(request: ModelRequest) -> ModelResponse:
            await asyncio.sleep(0.01)
            seen.append(run.ledger.root.committed)
            return ModelResponse("hm", usage=Usage(10, request.max_output_tokens))

        async def agent() -> None:
            model = ScriptedModel(answer)
            try:
                for _ in range(3):
                    await model.generate(run, PROMPT)
            except BudgetExceededError:
                pass

        async with asyncio.TaskGroup() as group:
            for _ in range(16):
                group.create_task(agent())
        run.end()
        balance = run.balance
        assert balance.held_nanos == balance.unresolved_nanos == 0
        assert max(seen) <= 120_000_000
        assert balance.spent_nanos <= 120_000_000
        return len(seen)

    assert all(made >= 3 for made in explore(main, schedules=20))


async def test_settings_bound_the_output_too() -> None:
    model = ScriptedModel(["hm"])
    await model.generate(priced(), PROMPT, settings=ModelSettings(max_output_tokens=7))
    assert model.last_request is not None
    assert (model.last_request.max_output_tokens, model.last_request.is_clamped) == (7, False)


@pytest.mark.requirement("T-10")
async def test_a_streamed_answer_comes_in_pieces_with_their_source() -> None:
    run = priced()
    deltas: list[object] = []
    model = ScriptedModel(["sixty metres high"], piece_characters=6)
    child = run.spawn_child("researcher")
    response = await model.generate(child, PROMPT, on_delta=deltas.append)
    assert response.text == "sixty metres high"
    assert deltas == [TextDelta(text, "main/researcher") for text in ("sixty ", "metres", " high")]


@pytest.mark.requirement("T-10")
async def test_a_stream_without_its_end_marker_is_truncated_and_keeps_what_came() -> None:
    run = priced()
    model = ScriptedModel(["sixty metres high"], piece_characters=6, breaks_off_after=2)
    with pytest.raises(TruncatedResponse) as broken:
        await model.generate(run, PROMPT, on_delta=lambda delta: None)
    assert broken.value.partial == "sixty metres"
    (call,) = model_calls(run)
    assert (call.status, call.error) == ("fail", "TruncatedResponse")
    assert run.balance.unresolved_nanos > 0, "no usage was reported: the maximum cost stays held"


async def test_a_broken_stream_costs_the_usage_it_has_reported() -> None:
    class Counting(ScriptedModel):
        async def request_stream(self, request: ModelRequest):  # type: ignore[no-untyped-def]
            yield "six"
            yield Usage(100, 1)
            yield "ty"
            yield Usage(100, 2)

    run = priced()
    with pytest.raises(TruncatedResponse):
        await Counting([]).generate(run, PROMPT, on_delta=lambda delta: None)
    assert (run.balance.tokens_in, run.balance.tokens_out, run.balance.unresolved_nanos) == (100, 2, 0)


async def test_what_a_whole_stream_says_at_its_end_is_its_bill() -> None:
    class Counting(ScriptedModel):
        async def request_stream(self, request: ModelRequest):  # type: ignore[no-untyped-def]
            yield "sixty"
            yield Usage(100, 1)
            yield ModelResponse("sixty", usage=Usage(100, 7))

    run = priced()
    await Counting([]).generate(run, PROMPT, on_delta=lambda delta: None)
    assert (run.balance.tokens_in, run.balance.tokens_out) == (100, 7)


async def test_who_watches_an_answer_cannot_break_it() -> None:
    run, deltas = priced(), 0

    def watch(delta: object) -> None:
        nonlocal deltas
        deltas += 1
        raise RuntimeError("no more")

    model = ScriptedModel(["sixty metres high"], piece_characters=6)
    assert (await model.generate(run, PROMPT, on_delta=watch)).text == "sixty metres high"
    assert deltas == 1
    assert [event.message for event in run.events if event.kind == "error"] == ["on_delta: no more"]


async def test_a_cancel_reaches_a_model_that_is_waiting() -> None:
    run = priced()
    waiting = asyncio.create_task(ScriptedModel(["late"], latency_s=60).generate(run, PROMPT))
    await asyncio.sleep(0)
    run.abort("enough")
    with pytest.raises(CancelledError):
        await waiting


async def test_a_failed_request_is_sent_again_as_often_as_the_model_says() -> None:
    run = priced()
    model = ScriptedModel([ConnectionRefusedError(), "60 m"])
    model.retries = 1
    assert (await model.generate(run, PROMPT)).text == "60 m"
    assert [call.status for call in model_calls(run)] == ["fail", "success"]


class BusyAtFirst(Exception):
    """What a provider's client raises for a rate limit."""

    status_code = 429

    def __init__(self, retry_after_s: float = 0) -> None:
        self.response = SimpleNamespace(status_code=429, headers={"retry-after": str(retry_after_s)})


class Faltering(ScriptedModel):
    """A model whose streams yield one piece, and then fail the given number of times."""

    def __init__(self, piece: str | ToolCall | Usage, failures: int = 1) -> None:
        super().__init__(["60 m"] * 9)
        self.retries, self.piece, self.failures = 3, piece, failures

    async def request_stream(self, request: ModelRequest) -> AsyncIterator[str | ToolCall | Usage | ModelResponse]:
        if self.calls < self.failures:
            await self.request(request)
            yield self.piece
            raise ConnectionResetError("gone")
        async for piece in super().request_stream(request):
            yield piece


def streamed_retrying(*replies: object, retries: int = 1) -> ScriptedModel:
    model = ScriptedModel(cast("list[Any]", replies))
    model.retries = retries
    return model


async def test_a_streamed_request_that_fails_before_its_first_piece_is_sent_again_and_answered_once() -> None:
    run, deltas = priced(), [TextDelta("")]
    deltas.clear()
    model = streamed_retrying(BusyAtFirst(), "60 m")
    assert (await model.generate(run, PROMPT, on_delta=deltas.append)).text == "60 m"
    assert [delta.text for delta in deltas] == ["60 m"]
    assert [call.status for call in model_calls(run)] == ["fail", "success"]
    assert (run.balance.attempts, run.balance.retries) == (2, 1)


@pytest.mark.parametrize("piece", ["60", use("find")], ids=["text", "a tool call"])
async def test_a_streamed_request_is_not_retried_after_its_first_delta(piece: str | ToolCall) -> None:
    run, deltas, model = priced(), [TextDelta("")], Faltering(piece)
    deltas.clear()
    with pytest.raises(ConnectionResetError):
        await model.generate(run, PROMPT, on_delta=deltas.append)
    assert (len(deltas), model.calls) == (1, 1)


async def test_what_a_stream_has_used_is_no_piece_of_its_answer() -> None:
    run, deltas, model = priced(), [TextDelta("")], Faltering(Usage(100, 1))
    deltas.clear()
    assert (await model.generate(run, PROMPT, on_delta=deltas.append)).text == "60 m"
    assert (len(deltas), model.calls) == (1, 2)
    assert model_calls(run)[0].cost_nanos == 110_000


async def test_a_stream_is_not_sent_again_behind_a_piece_that_an_earlier_attempt_did_not_have() -> None:
    run, model = priced(), Faltering("60")
    model.retries = 5
    request = ModelRequest(Transcript(PROMPT))
    with pytest.raises(ConnectionResetError):
        await model.send(run, request, on_delta=lambda delta: None)
    model.failures = 9
    model.piece = Usage(1, 1)
    with pytest.raises(ConnectionResetError):
        await model.send(run, request, on_delta=lambda delta: None)
    assert model.calls == 1 + 6


async def test_a_stream_that_goes_on_failing_is_sent_as_often_as_the_model_says() -> None:
    run = priced()
    model = streamed_retrying(*[BusyAtFirst()] * 9, retries=2)
    with pytest.raises(BusyAtFirst):
        await model.generate(run, PROMPT, on_delta=lambda delta: None)
    assert model.calls == 3


async def test_streamed_requests_draw_on_the_budget_for_retries() -> None:
    run = ExecutionContext(ExecutionConfig(max_cost_usd=1, max_steps=9, max_retries_total=1), prices=PRICES)
    model = streamed_retrying(*[BusyAtFirst()] * 9, retries=5)
    with pytest.raises(Halted, match="the retry budget has nothing left"):
        await model.generate(run, PROMPT, on_delta=lambda delta: None)
    assert (model.calls, run.balance.retries) == (2, 1)


def test_a_stream_is_sent_again_when_the_provider_says_and_a_cancel_ends_that_pause() -> None:
    async def ask(is_cancelled: bool) -> tuple[float, int]:
        run, model = priced(), streamed_retrying(BusyAtFirst(30), "60 m")
        asking = asyncio.create_task(model.generate(run, PROMPT, on_delta=lambda delta: None))
        await asyncio.sleep(10)
        if is_cancelled:
            run.abort("enough")
        with pytest.raises(CancelledError) if is_cancelled else nullcontext():
            assert (await asking).text == "60 m"
        return asyncio.get_running_loop().time(), model.calls

    for seed in range(5):
        assert sim_run(lambda: ask(False), seed=seed) == (30.0, 2)
        assert sim_run(lambda: ask(True), seed=seed) == (10.0, 1)


async def test_turns_of_one_conversation_are_not_taken_for_repetition() -> None:
    run = ExecutionContext(prices=PRICES, divergence=DivergenceDetector(repeats=3, halts=True))
    model, transcript = ScriptedModel(lambda request: "hm"), Transcript(PROMPT)
    for _ in range(10):
        await model.generate(run, transcript)
        transcript.append(Message.assistant("hm"))
    assert run.stop is None


async def test_a_script_that_is_too_short_says_so() -> None:
    with pytest.raises(Exception, match="no more replies"):
        await ScriptedModel([]).generate(priced(), PROMPT)


async def test_a_scripted_function_may_be_async_and_call_tools() -> None:
    async def answer(request: ModelRequest) -> object:
        return [use("find", q="dams")]

    response = await ScriptedModel(answer).generate(priced(), PROMPT)
    assert (response.finish_reason, response.tool_calls) == ("tool_calls", (use("find", q="dams"),))
