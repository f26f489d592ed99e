"""Every API is contained: in the tree with its model, tokens and bill, under the ceiling, refused before it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import httpx2
import openai
import pytest

from penstock import (
    BudgetExceededError,
    CancelledError,
    ExecutionContext,
    Halted,
    Price,
    PriceBook,
    ShieldPipeline,
    Verdict,
    contain,
)
from penstock.providers import ExcessOutput, contained
from penstock.testing import ManualClock
from penstock.testing.provider import Cut, Endless, FakeProvider, FakeProviderServer, Garble, Hang, Say, Truncate
from tests.providers.shapes import CONVERSATION, MAX, MODEL, SHAPES, SIGNATURE, Shape

pytestmark = pytest.mark.requirement("X-11")

TEXTS = {name: shape for name, shape in SHAPES.items() if shape.has_output}
STREAMS = {name: shape for name, shape in SHAPES.items() if shape.streams}
REPORTING = {name: shape for name, shape in SHAPES.items() if shape.reports}
each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
each_text = pytest.mark.parametrize("shape", TEXTS.values(), ids=TEXTS)
each_stream = pytest.mark.parametrize("shape", STREAMS.values(), ids=STREAMS)
each_reporting = pytest.mark.parametrize("shape", REPORTING.values(), ids=REPORTING)


@contextmanager
def limited(server: FakeProviderServer, **limits: Any) -> Iterator[ExecutionContext]:
    with contain(prices=server.provider.prices, **limits) as run, contained(run):
        yield run


def post(server: FakeProviderServer, shape: Shape) -> httpx2.Response:
    return httpx2.post(server.url + shape.path, json=shape.body, headers=shape.headers, timeout=30)


def calls(run: ExecutionContext) -> list[Any]:
    nodes = run.graph.snapshot()["nodes"].values()
    return [SimpleNamespace(**node) for node in nodes if node["kind"] == "llm"]


@each_shape
def test_a_call_is_in_the_tree_with_its_model_tokens_and_bill(shape: Shape) -> None:
    with FakeProviderServer() as server, limited(server, max_cost_usd=1) as run:
        answer = post(server, shape)
    assert answer.status_code == 200
    (call,), (line,) = calls(run), server.invoice.lines
    assert (call.model, call.status) == (MODEL, "success")
    if shape.reports:
        assert (call.tokens_in or 0, call.tokens_out or 0) == (line.input_tokens, line.output_tokens)
        assert run.balance.spent_usd == pytest.approx(server.invoice.total_usd, abs=1e-9)
    assert run.balance.spent_usd >= server.invoice.total_usd > 0
    assert run.balance.held_usd == 0


@each_shape
def test_the_client_receives_what_the_provider_sent(shape: Shape) -> None:
    body = {**shape.body, "stream_options": {"include_usage": True}} if shape.body.get("stream") else shape.body
    shape = replace(shape, body=body)
    with FakeProviderServer(script=["one two three"], clock=ManualClock()) as server:
        sent = post(server, shape)
    with FakeProviderServer(script=["one two three"], clock=ManualClock()) as server, limited(server, max_cost_usd=1):
        received = post(server, shape)
    assert received.content == sent.content
    assert received.headers["content-type"] == sent.headers["content-type"]


@each_shape
def test_a_refused_call_never_leaves(shape: Shape) -> None:
    with (
        FakeProviderServer() as server,
        limited(server, max_cost_usd=0.000001) as run,
        pytest.raises(BudgetExceededError),
    ):
        post(server, shape)
    assert server.requests == ()
    assert calls(run)[0].status == "halt"


@each_shape
async def test_a_fan_out_stays_under_the_ceiling(shape: Shape) -> None:
    async with FakeProviderServer() as server, httpx2.AsyncClient(timeout=30) as client:
        ceiling = 0.005 if shape.has_output else len(str(shape.body)) * 2e-6
        with contain(max_cost_usd=ceiling, prices=server.provider.prices) as run, contained(run):
            sends = [client.post(server.url + shape.path, json=shape.body, headers=shape.headers) for _ in range(20)]
            answers = await asyncio.gather(*sends, return_exceptions=True)
        passed = [answer for answer in answers if isinstance(answer, httpx2.Response)]
        assert all(isinstance(answer, BudgetExceededError) for answer in answers if answer not in passed)
        assert 0 < len(passed) < 20
        assert 0 < server.invoice.total_usd <= ceiling
        assert run.balance.spent_usd >= server.invoice.total_usd - 1e-9


@each_reporting
@pytest.mark.parametrize("usage", ["absent", "zero", (1, 0)], ids=str)
def test_a_missing_or_false_usage_costs_what_was_held(shape: Shape, usage: Any) -> None:
    if usage == (1, 0) and not shape.has_output:
        pytest.skip("an input that is a little too small cannot be detected")
    with FakeProviderServer(script=[Say("word " * 80, usage=usage)]) as server, limited(server, max_cost_usd=1) as run:
        post(server, shape)
    assert run.balance.spent_usd + run.balance.unresolved_usd >= server.invoice.total_usd > 0
    assert calls(run)[0].status == "success"


@each_text
@pytest.mark.parametrize("what", ["text", "padding"])
def test_an_endless_answer_is_cut_off(shape: Shape, what: Any) -> None:
    with (
        FakeProviderServer(script=[Say("and so on ", then=Endless(what))]) as server,
        limited(server, max_cost_usd=1) as run,
    ):
        with pytest.raises(ExcessOutput):
            post(server, shape)
        server.wait_until(lambda: server.disconnects)
    assert run.balance.spent_usd >= server.invoice.total_usd
    assert server.disconnects[0].bytes_sent < 3_000_000


LINES = {name: shape for name, shape in TEXTS.items() if not (shape.streams and "/model/" in shape.path)}


@pytest.mark.parametrize("shape", LINES.values(), ids=LINES)
def test_an_endless_object_is_cut_off_while_it_arrives(shape: Shape) -> None:
    with (
        FakeProviderServer(script=[Say("and so on ", then=Endless("line"))]) as server,
        limited(server, max_cost_usd=1) as run,
    ):
        with pytest.raises(ExcessOutput):
            post(server, shape)
        server.wait_until(lambda: server.disconnects)
    assert run.balance.spent_usd >= server.invoice.total_usd
    assert server.disconnects[0].bytes_sent < 300_000


@pytest.mark.parametrize("usage", ["true", "absent"])
def test_an_invocation_of_any_vendor_is_billed_by_bedrocks_own_count(usage: Any) -> None:
    body = {"inputText": "hello"}
    shape = Shape("/model/amazon.titan-embed-text-v2:0/invoke", body, headers={"authorization": "Bearer key"})
    provider = FakeProvider(model="amazon.titan-embed-text-v2:0", output_usd_per_mtok=0)
    with FakeProviderServer(provider, [Say(usage=usage)]) as server, limited(server, max_cost_usd=1) as run:
        assert post(server, shape).status_code == 200
    (call,) = calls(run)
    assert call.tokens_in >= server.invoice.lines[0].input_tokens > 0
    assert run.balance.spent_usd >= server.invoice.total_usd > 0


@each_stream
@pytest.mark.parametrize("fault", [Truncate(after=2), Cut(after=2)], ids=["truncated", "cut"])
def test_a_broken_stream_stays_unresolved(shape: Shape, fault: Any) -> None:
    with (
        FakeProviderServer(script=[Say("one two three four", then=fault)]) as server,
        limited(server, max_cost_usd=1) as run,
        suppress(httpx2.HTTPError),
    ):
        post(server, shape)
    assert calls(run)[0].status == "fail"
    assert run.balance.unresolved_usd >= server.invoice.total_usd > 0


@each_stream
def test_a_garbled_event_does_not_end_the_reading(shape: Shape) -> None:
    with (
        FakeProviderServer(script=[Say("one two three four", then=Garble(after=1))]) as server,
        limited(server, max_cost_usd=1) as run,
    ):
        post(server, shape)
    committed = run.balance.spent_usd + run.balance.unresolved_usd
    assert committed >= server.invoice.total_usd - 1e-9


@each_text
def test_a_request_without_a_maximum_is_given_one_unless_it_is_signed(shape: Shape) -> None:
    body = {
        name: value
        for name, value in shape.body.items()
        if name not in ("max_tokens", "generationConfig", "inferenceConfig", "options")
    }
    unlimited = Shape(shape.path, body, headers=shape.headers)
    with FakeProviderServer(output_tokens=10_000) as server, limited(server, max_cost_usd=0.01) as run:
        if shape.headers:
            with pytest.raises(Halted, match=r"signed.*set inferenceConfig\.maxTokens"):
                post(server, unlimited)
            assert server.requests == ()
        else:
            assert post(server, unlimited).status_code in (200, 400)  # Anthropic's models need one
    assert server.invoice.total_usd <= 0.01
    assert run.balance.spent_usd <= 0.01


@pytest.mark.parametrize(
    ("shape", "read"),
    [
        (SHAPES["completions"], lambda body: body["max_tokens"]),
        (SHAPES["gemini"], lambda body: body["generationConfig"]["maxOutputTokens"]),
        (SHAPES["converse"], lambda body: body["inferenceConfig"]["maxTokens"]),
        (SHAPES["invoke"], lambda body: body["max_tokens"]),
        (SHAPES["ollama chat"], lambda body: body["options"]["num_predict"]),
    ],
    ids=["completions", "gemini", "converse", "invoke", "ollama"],
)
def test_a_maximum_is_clamped_to_what_is_left(shape: Shape, read: Callable[[Any], int]) -> None:
    with FakeProviderServer() as server, limited(server, max_cost_usd=0.001):
        post(server, shape)
    assert 16 <= read(server.requests[0].body) < MAX


# Bodies that are signed.


@pytest.mark.parametrize("path", ["converse", "converse-stream"])
def test_a_signed_body_is_sent_byte_for_byte(path: str) -> None:
    content = (
        b'{ "messages" : [{"role":"user","content":[{"text":"hi \\u00e9"}]}] , "inferenceConfig":{"maxTokens": 9}}'
    )
    model = quote("eu.anthropic.claude-3:0", safe="")
    headers = {**SIGNATURE, "content-type": "application/json", "accept-encoding": "gzip", "x-amz-date": "20260101T0Z"}
    with FakeProviderServer() as server, limited(server, max_cost_usd=1) as run:
        httpx2.post(f"{server.url}/model/{model}/{path}", content=content, headers=headers)
    (request,) = server.requests
    assert request.raw == content
    assert request.headers["accept-encoding"] == "gzip"
    assert calls(run)[0].model == "eu.anthropic.claude-3:0"


def test_a_signed_request_that_does_not_fit_says_what_to_set() -> None:
    with (
        FakeProviderServer() as server,
        limited(server, max_cost_usd=0.0005),
        pytest.raises(BudgetExceededError, match=r"cannot be clamped: set a smaller inferenceConfig\.maxTokens"),
    ):
        post(server, SHAPES["signed converse"])
    assert server.requests == ()


def test_a_signed_request_without_a_maximum_passes_where_nothing_is_limited() -> None:
    shape = Shape(f"/model/{MODEL}/converse", {"messages": CONVERSATION}, headers=SIGNATURE)
    with FakeProviderServer(output_tokens=5_000) as server, limited(server) as run:
        assert post(server, shape).status_code == 200
    assert run.balance.spent_usd == pytest.approx(server.invoice.total_usd, abs=1e-9)


# Answers that are no text, through the official client.


def priced(**prices: Price) -> FakeProviderServer:
    provider = FakeProvider()
    for model, price in prices.items():
        provider.prices.register(model.replace("_", "-"), price)
    return FakeProviderServer(provider)


def test_speech_holds_its_characters_and_is_not_cut_as_text() -> None:
    with (
        priced(tts_1=Price(15, None)) as server,
        limited(server, max_cost_usd=0.01) as run,
        openai.OpenAI(base_url=server.openai_url, api_key="k") as client,
    ):
        audio = client.audio.speech.create(model="tts-1", voice="alloy", input="a" * 500).read()
        with pytest.raises(BudgetExceededError):
            client.audio.speech.create(model="tts-1", voice="alloy", input="a" * 500)
    assert len(audio) > 500_000
    assert run.balance.spent_usd == pytest.approx(0.0075) == server.invoice.total_usd


def test_images_run_one_at_a_time_until_their_cost_is_known() -> None:
    async def main() -> None:
        async with (
            FakeProviderServer(output_tokens=400) as server,
            openai.AsyncOpenAI(base_url=server.openai_url, api_key="k") as client,
        ):
            with contain(max_cost_usd=0.05, prices=server.provider.prices) as run, contained(run):
                made = [client.images.generate(model=MODEL, prompt="a cat", n=2) for _ in range(20)]
                answers = await asyncio.gather(*made, return_exceptions=True)
            passed = [answer for answer in answers if not isinstance(answer, BaseException)]
            assert 0 < len(passed) < 20
            assert len(passed[0].data or ()) == 2
            assert run.balance.spent_usd == pytest.approx(server.invoice.total_usd)
            assert server.invoice.total_usd <= 0.05

    asyncio.run(main())


def test_images_without_a_usage_have_an_unknown_cost() -> None:
    shape = Shape("/v1/images/generations", {"model": MODEL, "prompt": "a cat"})
    with FakeProviderServer(script=[Say(usage="absent")]) as server, limited(server, max_cost_usd=1) as run:
        post(server, shape)
    assert run.get_snapshot().unknown_costs == 1
    assert "cost unknown" in run.explain()


def test_edited_images_and_transcripts_are_read_from_their_forms() -> None:
    with (
        FakeProviderServer(script=["picture", "spoken words"]) as server,
        limited(server, max_cost_usd=1) as run,
        openai.OpenAI(base_url=server.openai_url, api_key="k") as client,
    ):
        client.images.edit(model=MODEL, image=("a.png", b"\0" * 100_000), prompt="more", n=3)
        text = client.audio.transcriptions.create(model=MODEL, file=("a.mp3", b"\0" * 10_000))
    assert text.text == "spoken words"
    edited, heard = calls(run)
    assert [call.model for call in (edited, heard)] == [MODEL, MODEL]
    assert [(call.tokens_in, call.tokens_out) for call in (edited, heard)] == [
        (line.input_tokens, line.output_tokens) for line in server.invoice.lines
    ]
    assert len(server.requests[0].raw) > 100_000


def test_a_stream_of_a_transcript_is_billed() -> None:
    with (
        FakeProviderServer(script=["spoken words"]) as server,
        limited(server, max_cost_usd=1) as run,
        openai.OpenAI(base_url=server.openai_url, api_key="k") as client,
    ):
        file: Any = ("a.mp3", b"\0" * 10_000)
        events = list(client.audio.transcriptions.create(model=MODEL, file=file, stream=True))
    assert events[-1].type == "transcript.text.done"
    assert run.balance.spent_usd == pytest.approx(server.invoice.total_usd)


def test_the_official_clients_embeddings_and_completions_are_calls_of_the_run() -> None:
    with (
        FakeProviderServer() as server,
        limited(server, max_cost_usd=1) as run,
        openai.OpenAI(base_url=server.openai_url, api_key="k") as client,
    ):
        client.embeddings.create(model=MODEL, input=["a", "b"])
        whole = client.completions.create(model=MODEL, prompt=["a", "b"], n=2)
        chunks = list(client.completions.create(model=MODEL, prompt="a", stream=True, max_tokens=20))
        client.moderations.create(input="x")
    assert len(whole.choices) == 4
    assert all(chunk.choices for chunk in chunks)
    assert len(calls(run)) == 3
    assert run.balance.spent_usd == pytest.approx(server.invoice.total_usd)


@pytest.mark.parametrize(
    ("body", "answers"),
    [
        ({"prompt": "a"}, 1),
        ({"prompt": ["a", "b"]}, 2),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [[1, 2], [3]], "n": 2}, 4),
        ({"prompt": ["a", "b"], "n": 2, "best_of": 3}, 6),
    ],
)
def test_each_answer_to_each_prompt_is_held_for(body: dict[str, Any], answers: int) -> None:
    shape = Shape("/v1/completions", {"model": MODEL, "max_tokens": MAX, **body})
    output_usd = answers * MAX * 15 / 1e6
    with FakeProviderServer() as server, limited(server, max_cost_usd=output_usd):
        post(server, shape)  # clamped: the input has to be paid too
        assert server.requests[0].body["max_tokens"] < MAX
    with FakeProviderServer() as server, limited(server, max_cost_usd=output_usd + 0.001):
        post(server, shape)
    assert server.requests[0].body["max_tokens"] == MAX


# Requests of unknown cost.


UNKNOWN = {
    "openai batches": ("api.openai.com", "/v1/batches"),
    "azure batches": ("mine.openai.azure.com", "/openai/batches"),
    "anthropic batches": ("api.anthropic.com", "/v1/messages/batches"),
    "assistants": ("api.openai.com", "/v1/threads/t/runs"),
    "realtime": ("api.openai.com", "/v1/realtime/sessions"),
    "gemini batch": ("generativelanguage.googleapis.com", f"/v1beta/models/{MODEL}:batchGenerateContent"),
    "vertex": ("us-central1-aiplatform.googleapis.com", f"/v1/projects/p/models/{MODEL}:predict"),
    "bedrock agents": ("bedrock-agent-runtime.us-east-1.amazonaws.com", "/agents/a/agentAliases/b/sessions/c/text"),
    "cohere": ("api.cohere.com", "/v2/chat"),
}
each_unknown = pytest.mark.parametrize(("host", "path"), UNKNOWN.values(), ids=UNKNOWN)


@each_unknown
@pytest.mark.usefixtures("at_home")
def test_an_unknown_path_of_a_provider_is_a_call_of_unknown_cost(
    host: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeProviderServer() as server, limited(server, max_cost_usd=1) as run:
        port = server.url.rpartition(":")[2]
        httpx2.post(f"http://{host}:{port}{path}", json={"model": MODEL})
    (call,) = calls(run)
    assert call.name == path
    if server.invoice.total_usd:
        assert run.get_snapshot().unknown_costs == 1
        assert path in caplog.text
    with FakeProviderServer() as server, limited(server, strict=True) as run:
        port = server.url.rpartition(":")[2]
        with pytest.raises(Halted):
            httpx2.post(f"http://{host}:{port}{path}", json={"model": MODEL})
    assert server.requests == ()


@pytest.mark.usefixtures("at_home")
def test_unknown_costs_are_refused_if_the_prices_say_so() -> None:
    prices = PriceBook(unknown="refuse", use_genai_prices=False)
    with FakeProviderServer() as server, contain(prices=prices) as run, contained(run):
        port = server.url.rpartition(":")[2]
        with pytest.raises(Halted):
            httpx2.post(f"http://api.openai.com:{port}/v1/batches", json={})
    assert server.requests == ()


@pytest.mark.usefixtures("at_home")
def test_free_requests_of_a_provider_are_no_calls() -> None:
    with FakeProviderServer() as server, limited(server, strict=True) as run:
        port = server.url.rpartition(":")[2]
        home = f"http://api.openai.com:{port}"
        assert httpx2.post(f"{home}/v1/moderations", json={"input": "x"}).status_code == 200
        assert httpx2.get(f"{home}/v1/models").status_code == 200
        httpx2.post(f"{home}/v1/files", data={"purpose": "assistants"}, files={"file": b"x"})
        with pytest.raises(Halted):
            httpx2.post(f"{home}/v1/files", data={"purpose": "batch"}, files={"file": b"x"})
    assert [request.path for request in server.requests] == ["/v1/moderations", "/v1/models", "/v1/files"]
    assert len(calls(run)) == 1


# What a stop reaches.


@each_stream
def test_an_abort_ends_a_stream_in_the_middle(shape: Shape) -> None:
    with FakeProviderServer(script=[Say("one two three " * 9, then=Hang(after=2))]) as server:
        with (
            pytest.raises(CancelledError),
            contain(prices=server.provider.prices) as run,
            contained(run),
            httpx2.Client(timeout=60) as client,
            client.stream("POST", server.url + shape.path, json=shape.body, headers=shape.headers) as answer,
        ):
            for _ in answer.iter_raw():
                run.abort()
        server.wait_until(lambda: server.disconnects)
    assert calls(run)[0].status == "halt"


class Cheaper:
    """A hook that wants another model."""

    def before_llm_call(self, call: Any) -> Verdict:
        return Verdict.degrade(model="smaller", reason="budget is low")


@each_shape
def test_a_degraded_call_is_refused_where_its_model_cannot_be_changed(shape: Shape) -> None:
    is_fixed = "model" not in shape.body
    pipeline = ShieldPipeline(pre_dispatch=Cheaper())
    with FakeProviderServer() as server, limited(server, pipeline=pipeline) as run:
        if is_fixed:
            with pytest.raises(Halted, match="wants model 'smaller', and this request cannot be changed"):
                post(server, shape)
        else:
            post(server, shape)
    assert [request.model for request in server.requests] == ([] if is_fixed else ["smaller"])
    assert run.balance.held_usd == 0


def test_a_schema_with_a_list_of_types_is_sent_as_it_is() -> None:
    schema = {"type": "object", "properties": {"city": {"type": ["string", "null"]}}}
    tools = [{"type": "function", "function": {"name": "find", "parameters": schema}}]
    with FakeProviderServer() as server, limited(server, max_cost_usd=1) as run:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": tools}
        answer = httpx2.post(server.url + "/v1/chat/completions", json=body, timeout=30)
    assert answer.status_code == 200
    assert run.balance.spent_usd == pytest.approx(server.invoice.total_usd, abs=1e-9)


def test_half_a_surrogate_pair_in_a_prompt_is_sent() -> None:
    content = b'{"model": "fake-1", "max_tokens": 100, "messages": [{"role": "user", "content": "\\ud83d"}]}'
    with FakeProviderServer() as server, limited(server, max_cost_usd=1) as run:
        answer = httpx2.post(server.url + "/v1/chat/completions", content=content, timeout=30)
    assert answer.status_code == 200
    assert run.balance.spent_usd == pytest.approx(server.invoice.total_usd, abs=1e-9)


@pytest.mark.parametrize(
    "content",
    [b"\x1f\x8b\x08\x00", b'{"model": "\xff"}', b'{"messages": ' + b"[" * 3_000 + b"]" * 3_000 + b"}"],
    ids=["gzip", "no UTF-8", "deep"],
)
def test_a_body_that_cannot_be_read_is_a_call_of_unknown_cost(content: bytes) -> None:
    with FakeProviderServer() as server:
        with limited(server) as run:
            httpx2.post(server.url + "/v1/chat/completions", content=content, timeout=30)
        assert len(calls(run)) == 1
        with pytest.raises(Halted), limited(server, strict=True):
            httpx2.post(server.url + "/v1/chat/completions", content=content, timeout=30)
        assert len(server.requests) == 1
