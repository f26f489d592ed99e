"""The fake provider: it does what its script says, and it bills for what it generated."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.money import to_nanos
from penstock.testing import (
    Answer,
    Behaviour,
    FailAfterBilling,
    FakeProvider,
    InvoiceLine,
    LieAboutUsage,
    NoUsage,
    ProviderHTTPError,
    Raise,
    RefuseFree,
    ScriptEnded,
    ServerError,
    Stall,
    sim_run,
)

PRICE = 100 * 1_000 + 50 * 2_000
"""100 input tokens at $1 and 50 output tokens at $2 per million, in nano-dollars."""

CASES: list[tuple[Behaviour, type[BaseException] | None, int]] = [
    (Answer(), None, PRICE),
    (Answer(cost_usd="0.25"), None, 250_000_000),
    (Answer(input_tokens=0, output_tokens=0), None, 0),
    (NoUsage(), None, PRICE),
    (LieAboutUsage(1, 1, real_input=100, real_output=50), None, PRICE),
    (Stall(30, then=Answer()), None, PRICE),
    (Stall(30, then=Stall(30, then=FailAfterBilling())), ConnectionResetError, PRICE),
    (FailAfterBilling(TimeoutError("too late")), TimeoutError, PRICE),
    (ServerError(billed=True), ProviderHTTPError, PRICE),
    (ServerError(billed=False), ProviderHTTPError, 0),
    (RefuseFree(401), ProviderHTTPError, 0),
    (Raise(OSError), OSError, 0),
]


def provider(*script: Behaviour, **options: Any) -> FakeProvider:
    return FakeProvider(script or None, input_usd_per_mtok=1, output_usd_per_mtok=2, sleep=lambda _: None, **options)


def ask(fake: FakeProvider, **options: Any) -> Any:
    return fake.complete("hello", **options)


def ask_async(fake: FakeProvider, **options: Any) -> Any:
    return sim_run(lambda: fake.acomplete("hello", **options), seed=1)


@pytest.mark.parametrize("door", [ask, ask_async])
@pytest.mark.parametrize(("behaviour", "error", "cost_nanos"), CASES, ids=lambda case: repr(case)[:50])
def test_each_behaviour_raises_its_error_and_costs_its_price(
    behaviour: Behaviour, error: type[BaseException] | None, cost_nanos: int, door: Callable[[FakeProvider], Any]
) -> None:
    fake = provider(behaviour)
    if error is None:
        assert door(fake).choices[0].message.content == "ok"
    else:
        with pytest.raises(error):
            door(fake)
    assert fake.invoice.total_nanos == cost_nanos
    assert fake.invoice.calls == 1
    assert fake.invoice.billed_calls == (cost_nanos > 0)


def test_a_refusal_carries_its_status_and_retry_time() -> None:
    with pytest.raises(ProviderHTTPError) as refused:
        provider(RefuseFree(429, retry_after_s=1.5)).complete()
    assert refused.value.status_code == 429
    assert refused.value.headers == {"retry-after": "1.5"}


def test_a_lie_is_on_the_answer_and_the_truth_on_the_invoice() -> None:
    fake = provider(LieAboutUsage(reported_input=1, reported_output=2, real_input=100, real_output=50))
    usage = fake.complete().usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (1, 2)
    assert fake.invoice.lines == (InvoiceLine(1, "fake-1", 100, 50, PRICE, "lied about usage"),)


def test_no_more_than_max_tokens_is_generated_reported_and_billed() -> None:
    fake = provider(Answer(output_tokens=50), Answer(output_tokens=50))
    answer = fake.complete(max_tokens=10)
    assert answer.usage.completion_tokens == 10
    assert answer.choices[0].finish_reason == "length"
    assert fake.invoice.total_nanos == fake.price_nanos(100, 10)
    assert fake.complete(max_tokens=50).choices[0].finish_reason == "stop"


def test_the_worst_case_is_the_price_of_all_the_tokens_a_request_may_take() -> None:
    fake = provider(Answer(input_tokens=100, output_tokens=9999))
    fake.complete(max_tokens=50)
    assert to_nanos(fake.worst_case_usd(100, 50)) == fake.invoice.total_nanos


def stop_after_a_second(fake: FakeProvider) -> None:
    async def main() -> None:
        async with asyncio.timeout(1):
            await fake.acomplete()

    with pytest.raises(TimeoutError):
        sim_run(main, seed=1)


def test_a_request_cancelled_while_it_stalls_is_billed_in_full() -> None:
    fake = provider(Stall(30))
    stop_after_a_second(fake)
    assert fake.invoice.lines == (InvoiceLine(1, "fake-1", 100, 50, PRICE, "cut off"),)


def test_a_request_cancelled_while_it_stalls_is_free_where_only_the_end_is_billed() -> None:
    fake = provider(Stall(30), Answer(), bill_on_start=False)
    stop_after_a_second(fake)
    assert fake.invoice.total_nanos == 0
    assert fake.invoice.calls == 1
    fake.complete()
    assert fake.invoice.total_nanos == PRICE


def test_a_refusal_after_the_caller_disconnected_is_still_free() -> None:
    fake = provider(Stall(30, then=RefuseFree()))
    stop_after_a_second(fake)
    assert (fake.invoice.total_nanos, fake.invoice.billed_calls) == (0, 0)


def test_blocking_work_that_is_interrupted_is_billed_in_full() -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    fake = FakeProvider(input_usd_per_mtok=1, output_usd_per_mtok=2, latency_s=5, sleep=interrupt)
    with pytest.raises(KeyboardInterrupt):
        fake.complete()
    assert fake.invoice.total_nanos == PRICE


def test_the_bill_is_there_while_the_answer_is_still_on_its_way() -> None:
    fake = provider(Stall(30))

    async def main() -> tuple[int, str]:
        asking = asyncio.create_task(fake.acomplete())
        await asyncio.sleep(1)
        seen = fake.invoice.total_nanos, fake.invoice.lines[0].outcome
        await asking
        return seen

    assert sim_run(main, seed=1) == (PRICE, "cut off")
    assert [line.outcome for line in fake.invoice.lines] == ["answered"]


def test_latency_adds_up_from_the_provider_the_answer_and_the_stall() -> None:
    waited: list[float] = []
    script: list[Behaviour] = [Answer(), Answer(latency_s=2), Stall(10), Stall(10, then=RefuseFree())]
    fake = FakeProvider(script, latency_s=0.5, sleep=waited.append)
    for _ in range(3):
        fake.complete()
    with pytest.raises(ProviderHTTPError):
        fake.complete()
    assert waited == [0.5, 2, 10.5, 10.5]


def test_an_async_answer_lets_others_run_even_without_latency() -> None:
    async def main() -> list[str]:
        order: list[str] = []

        async def one(name: str) -> None:
            order.append(f"{name} asks")
            await fake.acomplete()
            order.append(f"{name} has it")

        await asyncio.gather(one("a"), one("b"))
        return order

    fake = provider()
    assert any(sim_run(main, seed=seed)[:2] in (["a asks", "b asks"], ["b asks", "a asks"]) for seed in range(20))


def test_a_script_may_be_a_function_of_the_index() -> None:
    fake = FakeProvider(lambda index: RefuseFree() if index < 2 else Answer(text=str(index)))
    for _ in range(2):
        with pytest.raises(ProviderHTTPError):
            fake.complete()
    assert fake.complete().choices[0].message.content == "2"
    assert [line.number for line in fake.invoice.lines] == [1, 2, 3]


def test_a_script_may_be_endless() -> None:
    fake = FakeProvider(repeat(Answer(text="again")))
    assert {fake.complete().choices[0].message.content for _ in range(50)} == {"again"}


def test_one_request_too_many_says_so_and_is_not_billed() -> None:
    fake = provider(Answer(), Answer())
    fake.complete()
    fake.complete()
    with pytest.raises(ScriptEnded, match="2 behaviours"):
        fake.complete()
    assert fake.invoice.calls == 2


def test_an_unknown_shape_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="dict-anthropic"):
        FakeProvider(shape="gemini")  # type: ignore[arg-type]


def test_the_openai_chat_shape() -> None:
    answer = provider(Answer("hi", 7, 3), shape="openai").complete()
    assert answer.id
    assert answer.model == "fake-1"
    assert answer.choices[0].message.content == "hi"
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (7, 3, 10)
    assert usage.prompt_tokens_details.cached_tokens == 0


def test_the_openai_responses_shape() -> None:
    answer = provider(Answer("hi", 7, 3), shape="responses").complete()
    assert answer.output_text == "hi"
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (7, 3, 10)
    assert answer.usage.input_tokens_details.cached_tokens == 0


def test_the_anthropic_shape() -> None:
    answer = provider(Answer("hi", 7, 3), shape="anthropic").complete()
    assert answer.content[0].text == "hi"
    assert answer.stop_reason == "end_turn"
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens) == (7, 3)
    assert (usage.cache_creation_input_tokens, usage.cache_read_input_tokens) == (0, 0)


def test_the_dict_shapes_are_plain_data() -> None:
    openai = provider(Answer("hi", 7, 3), shape="dict-openai").complete()
    assert openai["choices"][0]["message"]["content"] == "hi"
    assert openai["usage"]["total_tokens"] == 10
    anthropic = provider(Answer("hi", 7, 3), shape="dict-anthropic").complete()
    assert anthropic["content"][0]["text"] == "hi"
    assert anthropic["usage"]["input_tokens"] == 7


@pytest.mark.parametrize("shape", ["openai", "responses", "anthropic"])
def test_an_answer_without_usage_has_none(shape: Any) -> None:
    assert provider(NoUsage(), shape=shape).complete().usage is None


@given(st.lists(st.sampled_from([case[0] for case in CASES]), min_size=1, max_size=20))
def test_the_total_is_the_sum_of_the_lines_whatever_the_script(script: list[Behaviour]) -> None:
    fake = provider(*script)
    for _ in script:
        try:
            fake.complete()
        except (ProviderHTTPError, OSError):
            continue
    invoice = fake.invoice
    assert invoice.total_nanos == sum(line.cost_nanos for line in invoice.lines)
    assert invoice.calls == len(script)


def test_the_invoice_counts_exactly_between_threads() -> None:
    def script() -> Iterator[Behaviour]:
        for number in range(4000):
            time.sleep(0)  # let another thread in while this one is inside the script
            yield Answer() if number % 2 else RefuseFree()

    fake = FakeProvider(script(), input_usd_per_mtok=1, output_usd_per_mtok=2)

    def work() -> None:
        for _ in range(500):
            try:
                fake.complete()
            except ProviderHTTPError:
                continue

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (fake.invoice.calls, fake.invoice.billed_calls) == (4000, 2000)
    assert fake.invoice.total_nanos == 2000 * PRICE
    assert [line.number for line in fake.invoice.lines] == list(range(1, 4001))


def test_the_invoice_prints_as_a_table() -> None:
    fake = provider(Answer(), RefuseFree(429))
    fake.complete()
    with pytest.raises(ProviderHTTPError):
        fake.complete()
    assert str(fake.invoice).splitlines() == [
        "#  model    input  output     cost  outcome",
        "-  -------  -----  ------  -------  --------",
        "1  fake-1     100      50  $0.0002  answered",
        "2  fake-1       0       0     free  HTTP 429",
        "-  -------  -----  ------  -------  --------",
        "   2 calls                 $0.0002  total",
    ]


def test_an_invoice_of_nothing_prints_too() -> None:
    assert "$0.00" in str(provider().invoice)
