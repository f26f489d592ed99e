"""Models and chat completions: the official SDK against a whole server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionChunk

from penstock import Agent, ExecutionContext
from penstock.hosting.host import HostSettings, RunLimits
from penstock.providers.models import model
from penstock.providers.models.connections import close_connections
from penstock.server.openai.wire.described import (
    CompletionAnswer,
    Described,
    ModelFacts,
    ModelList,
    ResponseAnswer,
    ResponseDeleted,
)
from penstock.server.schemas import MAX_TIMEOUT_S
from tests.server.openai_service import ANNA, BERT, GRAPHS, VERA, Served, serving

STRANGE = 'line\nend\r\n\u2028\u2029\x85 ünï 日本 🙂 data: [DONE]\n\nevent: error \\ " \x00'


def user_message(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


async def collected(stream: openai.AsyncStream[ChatCompletionChunk]) -> list[ChatCompletionChunk]:
    return [chunk async for chunk in stream]


def text_of(chunks: list[ChatCompletionChunk]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


async def posted(served: Served, body: Any, path: str = "/v1/chat/completions", key: str = ANNA) -> httpx2.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    async with httpx2.AsyncClient(base_url=served.url, headers=headers) as client:
        return await client.post(path, content=content)


# Models


@pytest.mark.requirement("X-6")
async def test_graphs_are_models() -> None:
    async with serving() as served, served.client(VERA) as client:
        models = [model async for model in client.models.list()]
        assert [model.id for model in models] == sorted(GRAPHS)
        one = await client.models.retrieve("parrot")
        assert (one.id, one.object, one.owned_by, one.created) == ("parrot", "model", "anna", 1_700_000_000)
        assert one.model_extra == {"penstock": {"name": "The parrot", "version": 1, "chat": True}}


async def test_every_response_matches_the_openapi_description() -> None:
    answer_to: list[tuple[str, str, dict[str, Any] | None, type[Described]]] = [
        ("GET", "/v1/models", None, ModelList),
        ("GET", "/v1/models/parrot", None, ModelFacts),
        ("POST", "/v1/chat/completions", {"model": "parrot", "messages": user_message("x")}, CompletionAnswer),
        ("POST", "/v1/responses", {"model": "parrot", "input": "x"}, ResponseAnswer),
        ("POST", "/v1/responses", {"model": "broken", "input": "x"}, ResponseAnswer),
        ("POST", "/v1/responses", {"model": "slow", "input": "x", "background": True}, ResponseAnswer),
        ("GET", "/v1/responses/{response_id}", None, ResponseAnswer),
        ("POST", "/v1/responses/{response_id}/cancel", None, ResponseAnswer),
        ("DELETE", "/v1/responses/{response_id}", None, ResponseDeleted),
    ]
    headers = {"Authorization": f"Bearer {ANNA}"}
    async with serving() as served, httpx2.AsyncClient(base_url=served.url, headers=headers, timeout=30) as client:
        id, paths = "", served.app.openapi()["paths"]
        for method, path, body, model in answer_to:
            answer = await client.request(method, path.replace("{response_id}", id), json=body)
            assert answer.status_code == 200, answer.text
            model.model_validate(answer.json(), strict=True)
            id = answer.json().get("id", "")
            described = paths[path.replace("/parrot", "/{model_id}")][method.lower()]["responses"]["200"]["content"]
            assert described["application/json"]["schema"] == {"$ref": f"#/components/schemas/{model.__name__}"}


async def test_a_version_of_a_graph_is_a_model() -> None:
    async with serving() as served, served.client() as client:
        changed = {**GRAPHS["plain"], "nodes": [{"id": "c", "type": "constant", "data": {"value": "new"}}], "edges": []}
        await served.stores.graphs.save("plain", "anna", "Plain", changed, now_ms=1)
        answers = {
            model: (await client.chat.completions.create(model=model, messages=user_message("old")))
            .choices[0]
            .message.content
            for model in ("plain", "plain@1", "plain@2")
        }
        assert answers == {"plain": "new", "plain@1": "old", "plain@2": "new"}
        assert (await client.models.retrieve("plain@1")).id == "plain@1"


async def test_a_missing_model_is_not_found() -> None:
    async with serving() as served, served.client() as client:
        for model in ("unknown", "parrot@2", "parrot@", "parrot@x", "parrot@²", "parrot@1@1", "../etc"):
            with pytest.raises(openai.NotFoundError) as refused:
                await client.chat.completions.create(model=model, messages=user_message("x"))
            assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
        assert await served.runs() == []


async def test_an_archived_graph_is_not_a_model_in_any_version() -> None:
    async with serving() as served, served.client() as client:
        first = await client.responses.create(model="parrot", input="x")
        for name in ("plain", "parrot"):
            await served.stores.graphs.archive(name)
        answer_to: list[Callable[[], Awaitable[Any]]] = [
            lambda: client.models.retrieve("plain"),
            lambda: client.models.retrieve("plain@1"),
            lambda: client.chat.completions.create(model="plain", messages=user_message("x")),
            lambda: client.chat.completions.create(model="plain@1", messages=user_message("x"), stream=True),
            lambda: client.responses.create(model="parrot@1", input="x", background=True),
            lambda: client.responses.create(model="parrot", input="x", previous_response_id=first.id),
        ]
        for ask in answer_to:
            with pytest.raises(openai.NotFoundError, match="is archived") as refused:
                await ask()
            assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
        assert not {"plain", "parrot"} & {model.id async for model in client.models.list()}
        assert len(await served.runs()) == 1


async def test_a_conversation_runs_the_named_version() -> None:
    async with serving() as served, served.client() as client:
        await served.stores.graphs.save("parrot", "anna", "New", GRAPHS["looker"], now_ms=1)
        answers = {
            model: (await client.chat.completions.create(model=model, messages=user_message("Hi")))
            .choices[0]
            .message.content
            for model in ("parrot", "parrot@1", "parrot@2")
        }
        assert answers == {"parrot": "Bright.", "parrot@1": "Hi", "parrot@2": "Bright."}
        assert sorted(run.graph_version for run in await served.runs()) == [1, 2, 2]


async def test_another_version_under_the_id_of_a_run_is_a_conflict() -> None:
    async with serving() as served, served.client() as client:
        await served.stores.graphs.save("parrot", "anna", "New", GRAPHS["looker"], now_ms=1)
        extra = {"penstock": {"run_id": "mine"}}
        for _ in range(2):
            await client.chat.completions.create(model="parrot@1", messages=user_message("Hi"), extra_body=extra)
        with pytest.raises(openai.ConflictError, match="an id of its own"):
            await client.chat.completions.create(model="parrot@2", messages=user_message("Hi"), extra_body=extra)
        assert len(await served.runs()) == 1


DRAFT = {"nodes": [{"id": "a", "type": "no-such-type", "data": {}}], "edges": []}


async def test_an_invalid_graph_is_not_listed_and_refused_with_its_problems() -> None:
    async with serving() as served, served.client() as client:
        await served.stores.graphs.save("draft", "anna", "Draft", DRAFT, now_ms=1)
        await served.stores.graphs.save("plain", "anna", "Plain", DRAFT, now_ms=1)
        assert sorted([model.id async for model in client.models.list()]) == sorted(set(GRAPHS) - {"plain"})
        answer_to: list[Callable[[], Awaitable[Any]]] = [
            lambda: client.models.retrieve("draft"),
            lambda: client.chat.completions.create(model="draft", messages=user_message("x")),
            lambda: client.chat.completions.create(model="draft", messages=user_message("x"), stream=True),
            lambda: client.responses.create(model="plain", input="x"),
            lambda: client.responses.create(model="plain@2", input="x", background=True),
        ]
        for ask in answer_to:
            with pytest.raises(openai.BadRequestError, match="no-such-type") as refused:
                await ask()
            assert refused.value.code == "graph_invalid"
        assert await served.runs() == []
        assert (await client.responses.create(model="plain@1", input="x")).output_text == "x"


# Answers


@pytest.mark.requirement("X-6")
async def test_a_graph_answers_and_reports_its_cost() -> None:
    async with serving() as served, served.client() as client:
        answer = await client.chat.completions.create(
            model="parrot", messages=user_message(STRANGE.replace("\x00", ""))
        )
        assert answer.choices[0].message.content == STRANGE.replace("\x00", "")
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 3)
        facts = (answer.model_extra or {})["penstock"]
        assert (facts["cost_usd"], facts["stop_reason"], facts["ignored"]) == (0.25, None, [])
        assert (answer.usage.model_extra or {})["cost"] == 0.25
        run = await served.run(facts["run_id"])
        assert (run.owner, run.status, run.cost_nanos) == ("anna", "completed", 250_000_000)


def ask_from_a_thread(served: Served) -> tuple[str | None, str]:
    with served.sync_client() as client:
        whole = client.chat.completions.create(model="parrot", messages=user_message("sync"))
        chunks = client.chat.completions.create(model="parrot", messages=user_message("sync stream"), stream=True)
        return whole.choices[0].message.content, "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


async def test_the_sync_client_is_answered() -> None:
    async with serving() as served:
        assert await asyncio.to_thread(ask_from_a_thread, served) == ("sync", "sync stream")


async def test_the_whole_conversation_reaches_the_agent() -> None:
    async with serving() as served, served.client() as client:
        answer = await client.chat.completions.create(
            model="listener",
            messages=[
                {"role": "developer", "content": "Be kind."},
                {"role": "user", "content": "One"},
                {"role": "assistant", "content": "Two"},
                {"role": "user", "content": [{"type": "text", "text": "Three"}]},
            ],
        )
        content = answer.choices[0].message.content or ""
        assert content.endswith("user: One | assistant: Two | user: Three")
        assert "Be kind." in content


async def test_a_graph_without_a_chat_start_runs_on_the_last_message() -> None:
    async with serving() as served, served.client() as client:
        talk: list[Any] = [*user_message("first"), {"role": "assistant", "content": "ok"}, *user_message("second")]
        answer = await client.chat.completions.create(model="plain", messages=talk)
        assert answer.choices[0].message.content == "second"
        chunks = await collected(await client.chat.completions.create(model="plain", messages=talk, stream=True))
        assert text_of(chunks) == "second"


# Streams


@pytest.mark.requirement("X-6")
async def test_an_answer_is_streamed() -> None:
    async with serving() as served, served.client() as client:
        text = STRANGE.replace("\x00", "")
        stream = await client.chat.completions.create(
            model="parrot", messages=user_message(text), stream=True, stream_options={"include_usage": True}
        )
        chunks = await collected(stream)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert text_of(chunks) == text
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.total_tokens == 10
        assert (chunks[-1].usage.model_extra or {})["cost"] == 0.25
        (end,) = [chunk for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
        assert (end.model_extra or {})["penstock"]["cost_usd"] == 0.25


async def test_a_thousand_pieces_come_in_order() -> None:
    async with serving() as served, served.client() as client:
        stream = await client.chat.completions.create(model="counter", messages=user_message("go"), stream=True)
        assert text_of(await collected(stream)) == " ".join(str(number) for number in range(1000))


async def test_the_stream_helper_of_the_sdk_understands_it() -> None:
    async with serving() as served, served.client() as client:
        async with client.chat.completions.stream(model="looker", messages=user_message("look")) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        assert final.choices[0].message.content == "Bright."
        assert not final.choices[0].message.tool_calls


async def test_many_streams_at_once_do_not_mix() -> None:
    async with serving() as served, served.client() as client:

        async def answer_to(number: int) -> str:
            text = f"number {number} " * 20
            return text_of(await collected(await client.chat.completions.create(
                model="parrot", messages=user_message(text), stream=True
            )))  # fmt: skip

        answers = await asyncio.gather(*(answer_to(number) for number in range(40)))
        assert answers == [f"number {number} " * 20 for number in range(40)]


async def test_tool_calls_of_the_graph_are_in_the_penstock_field() -> None:
    async with serving() as served, served.client() as client:
        chunks = await collected(
            await client.chat.completions.create(model="looker", messages=user_message("look"), stream=True)
        )
        received = [(chunk.model_extra or {}).get("penstock", {}).get("tool_call") for chunk in chunks]
        (call,) = [one for one in received if one]
        assert (call["name"], json.loads(call["arguments"])) == ("look", {"at": "the ☀"})
        assert all(not chunk.choices[0].delta.tool_calls for chunk in chunks)


async def test_a_graph_that_does_not_stream_answers_in_one_piece() -> None:
    async with serving() as served, served.client() as client:
        chunks = await collected(
            await client.chat.completions.create(model="quiet", messages=user_message("a b"), stream=True)
        )
        assert [chunk.choices[0].delta.content for chunk in chunks] == ["", "a b", None]


async def test_an_idle_stream_sends_heartbeats() -> None:
    async with serving(heartbeat_s=0.01) as served, httpx2.AsyncClient() as client:
        headers = {"Authorization": f"Bearer {ANNA}"}
        body = {"model": "slow", "messages": user_message("x"), "stream": True}
        beats = 0
        async with client.stream("POST", f"{served.url}/v1/chat/completions", json=body, headers=headers) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            async for line in answer.aiter_lines():
                beats += line.startswith(":")
                if beats == 2:
                    served.gate.opened.set()
        assert beats >= 2


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
async def test_a_stream_waiting_for_an_approval_reports_it_and_sends_heartbeats(path: str) -> None:
    async with serving(heartbeat_s=0.01) as served, httpx2.AsyncClient() as client:
        headers = {"Authorization": f"Bearer {ANNA}"}
        body = {"model": "question", "messages": user_message("do it"), "input": "do it", "stream": True}
        beats, received = 0, ""
        async with client.stream("POST", f"{served.url}/v1/{path}", json=body, headers=headers) as answer:
            async for line in answer.aiter_lines():
                received += line
                waiting = await served.stores.approvals.list(states=("waiting",))
                beats += line.startswith(":") and bool(waiting)
                if beats == 2 and waiting:
                    run_id, approval_id = waiting[0].run_id, waiting[0].id
                    later = await client.get(f"{served.url}/v1/responses/resp_{run_id}", headers=headers)
                    (question,) = later.json()["penstock"]["approvals"]
                    assert (question["id"], question["question"], question["value"]) == (
                        approval_id,
                        "Really?",
                        "do it",
                    )
                    await client.post(f"{served.url}{question['answer'][0].removeprefix('POST ')}", headers=headers)
        assert beats >= 2
        assert f"POST /api/approvals/{approval_id}/approve" in received
        assert f'"run_id":"{run_id}"' in received
        assert "do it" in received


# Limits and failures


async def test_requested_limits_hold() -> None:
    async with serving() as served, served.client() as client:
        answer = await client.chat.completions.create(
            model="parrot", messages=user_message("x"), extra_body={"penstock": {"limits": {"max_cost_usd": "0.5"}}}
        )
        run = await served.run((answer.model_extra or {})["penstock"]["run_id"])
        assert run.limits["max_cost_usd"] == "0.5"


async def test_a_run_that_only_holds_of_others_have_halted_is_retried_by_the_client() -> None:
    async with serving() as served, served.client() as client:
        answer = await client.chat.completions.create(model="crowded", messages=user_message("x"))
        assert answer.choices[0].message.content == "Now: x"
        assert sorted(run.status for run in await served.runs()) == ["completed", "halted"]
    async with serving() as served, served.client(max_retries=0) as client:
        with pytest.raises(openai.RateLimitError, match="retry in a moment") as refused:
            await client.chat.completions.create(model="crowded", messages=user_message("x"))
        headers = refused.value.response.headers
        assert (headers["retry-after"], headers.get("x-should-retry")) == ("2", None)
    async with serving() as served, served.client() as client:
        with pytest.raises(openai.RateLimitError, match="POST /api/runs/mine/resume in a moment"):
            await client.chat.completions.create(
                model="crowded", messages=user_message("x"), extra_body={"penstock": {"run_id": "mine"}}
            )
        assert [run.status for run in await served.runs()] == ["halted"]
        await served.host.resume("mine")
        assert (await served.run("mine")).status == "completed"


async def test_a_limit_without_any_answer_is_an_error_that_is_not_retried() -> None:
    async with serving() as served, served.client() as client:
        limits = {"penstock": {"limits": {"max_api_calls": 1}}}
        with pytest.raises(openai.APIStatusError) as refused:
            await client.chat.completions.create(model="greedy", messages=user_message("x"), extra_body=limits)
        assert refused.value.status_code == 402
        assert refused.value.code == "api_call_limit_exceeded"
        headers = refused.value.response.headers
        assert (headers["x-should-retry"], headers.get("retry-after")) == ("false", None)
        assert len(await served.runs()) == 1
        stream = await client.chat.completions.create(
            model="greedy", messages=user_message("x"), stream=True, extra_body=limits
        )
        with pytest.raises(openai.APIError, match="halted"):
            await collected(stream)


async def test_an_answer_truncated_by_a_limit_is_returned_with_the_reason() -> None:
    async with serving() as served, served.client() as client:
        # The agent speaks, uses a tool, and may not ask its model again.
        limits = {"penstock": {"limits": {"max_api_calls": 1}}}
        answer = await client.chat.completions.create(model="endless", messages=user_message("x"), extra_body=limits)
        assert answer.choices[0].finish_reason == "length"
        assert answer.choices[0].message.content == "Let me look."
        assert (answer.model_extra or {})["penstock"]["stop_reason"] == "api_call_limit_exceeded"
        chunks = await collected(
            await client.chat.completions.create(
                model="endless", messages=user_message("x"), stream=True, extra_body=limits
            )
        )
        assert text_of(chunks) == "Let me look."
        assert chunks[-1].choices[0].finish_reason == "length"


TOO_LONG = {"timeout_s": MAX_TIMEOUT_S + 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_truncated_by_the_graph_says_so(stream: bool) -> None:
    async with serving() as served, served.client() as client:
        text, finish, facts = await _counted(client, "short", stream)
        assert (text, finish) == ("1, 2, 3, 4, 5, ", "length")
        assert (facts["status"], facts["stop_reason"]) == ("completed", None)
        response = await client.responses.create(model="short", input="count to 9")
        assert (response.status, response.output_text) == ("incomplete", "1, 2, 3, 4, 5, ")
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("limits", "reason"),
    [({"max_tokens": 40}, "token_limit_exceeded"), ({"max_cost_usd": "0.00002"}, "budget_exceeded")],
)
async def test_an_answer_truncated_by_cost_or_tokens_is_stored_and_continues_with_a_grant(
    stream: bool, limits: dict[str, Any], reason: str
) -> None:
    async with serving() as served, served.client() as client:
        text, finish, facts = await _counted(client, "example", stream, limits)
        assert text.startswith("1, 2, 3, ")
        assert "9." not in text
        assert (finish, facts["status"], facts["stop_reason"]) == ("length", "halted", reason)
        more = {"max_tokens": 1_000} if "max_tokens" in limits else {"max_cost_usd": "1"}
        await served.host.grant(facts["run_id"], more, by="anna")
        await served.run(facts["run_id"])
        later = await client.responses.retrieve(f"resp_{facts['run_id']}")
        assert (later.status, later.output_text) == ("completed", COUNTED)


COUNTED = ", ".join(map(str, range(1, 40))) + "."


async def _counted(
    client: AsyncOpenAI, model: str, stream: bool, limits: dict[str, Any] | None = None
) -> tuple[str, str | None, dict[str, Any]]:
    """The text, why it ended, and what is known of the run."""
    extra = {"penstock": {"limits": limits or {}}}
    if not stream:
        whole = await client.chat.completions.create(
            model=model, messages=user_message("count to 39"), extra_body=extra
        )
        (choice,) = whole.choices
        return choice.message.content or "", choice.finish_reason, (whole.model_extra or {})["penstock"]
    chunks = await client.chat.completions.create(
        model=model, messages=user_message("count to 39"), stream=True, extra_body=extra
    )
    read = [chunk async for chunk in chunks]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in read)
    return text, read[-1].choices[0].finish_reason, (read[-1].model_extra or {})["penstock"]


async def test_limits_above_the_ceilings_are_refused() -> None:
    settings = HostSettings(ceilings=RunLimits(max_cost_usd="0.5"), drain_s=0)
    async with serving(settings) as served, served.client() as client:
        for limits, param in (
            ({"max_cost_usd": 2}, "penstock.limits.max_cost_usd"),
            ({"max_money": 1}, "penstock.limits"),
            (TOO_LONG, "penstock.limits.timeout_s"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(
                    model="parrot", messages=user_message("x"), extra_body={"penstock": {"limits": limits}}
                )
            assert refused.value.param == param
        assert await served.runs() == []


async def test_a_failed_run_is_an_error_that_is_not_retried() -> None:
    async with serving() as served, served.client() as client:
        with pytest.raises(openai.InternalServerError, match="fell over") as failed:
            await client.chat.completions.create(model="broken", messages=user_message("x"))
        assert failed.value.code == "ValueError"
        assert len(await served.runs()) == 1
        stream = await client.chat.completions.create(model="broken", messages=user_message("x"), stream=True)
        with pytest.raises(openai.APIError, match="fell over"):
            await collected(stream)


async def test_a_full_queue_has_retry_after() -> None:
    settings = HostSettings(max_running=1, max_queued=1, drain_s=0)
    async with serving(settings) as served, served.client(max_retries=0) as client:
        first = await client.chat.completions.create(model="slow", messages=user_message("x"), stream=True)
        await served.gate.reached.wait()
        second = await client.chat.completions.create(model="slow", messages=user_message("x"), stream=True)
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as refused:
                await client.chat.completions.create(model="slow", messages=user_message("x"), stream=stream)
            assert int(refused.value.response.headers["Retry-After"]) >= 1
        await first.close()
        await second.close()


async def test_no_run_is_started_for_a_stream_over_the_limit() -> None:
    async with serving(max_streams_per_user=1) as served, served.client(max_retries=0) as client:
        first = await client.chat.completions.create(model="slow", messages=user_message("x"), stream=True)
        with pytest.raises(openai.RateLimitError, match="open streams"):
            await client.chat.completions.create(model="parrot", messages=user_message("x"), stream=True)
        assert len(await served.runs()) == 1
        await first.close()
        await served.run((await served.runs())[0].id)
        for _ in range(3):  # each gives its place back, also when it is refused
            with pytest.raises(openai.NotFoundError):
                await client.chat.completions.create(model="unknown", messages=user_message("x"), stream=True)
        await collected(await client.chat.completions.create(model="parrot", messages=user_message("x"), stream=True))


BAD: list[tuple[Any, str | None]] = [
    ({"model": "parrot"}, "messages"),
    ({"model": "parrot", "messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
    ({"model": "parrot", "messages": [{"role": "user", "content": "x"}], "n": 2}, "n"),
    ({"model": "parrot", "messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}, "tool_choice"),
    ({"model": "parrot", "messages": [{"role": "user", "content": "x"}], "penstock": {"x": 1}}, "penstock.x"),
    ({"model": "parrot", "messages": [{"role": "user", "content": ""}]}, "messages.0.content"),
    ([], None),
    (b"{nonsense", None),
]


async def test_a_bad_request_names_the_field_in_openais_format() -> None:
    async with serving() as served:
        for body, param in BAD:
            answer = await posted(served, body)
            assert answer.status_code == 400, body
            error = answer.json()["error"]
            assert error.keys() == {"message", "type", "param", "code"}
            assert error["type"] == "invalid_request_error"
            assert param is None or (error["param"] or "").startswith(param)
        assert await served.runs() == []


async def test_an_unpaired_surrogate_is_refused() -> None:
    async with serving() as served:
        answer = await posted(served, {"model": "plain", "messages": user_message("\ud800")})
        assert answer.status_code in {400, 422}  # the server's own guard may be the first to see it
        assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_authentication_errors_have_openais_format() -> None:
    async with serving() as served:
        async with served.client("wrong-secret-1234567") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(model="parrot", messages=user_message("x"))
        async with served.client(VERA) as client:
            with pytest.raises(openai.PermissionDeniedError):
                await client.chat.completions.create(model="parrot", messages=user_message("x"))


async def test_pictures_are_attached_and_addresses_are_not_fetched() -> None:
    async with serving() as served, served.client() as client:
        picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
        talk: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "See?"}, picture]}]
        answer = await client.chat.completions.create(model="parrot", messages=talk)
        run = await served.run((answer.model_extra or {})["penstock"]["run_id"])
        messages, _ = await served.stores.chats.messages(run.origin["chat_id"])
        (attached,) = messages[0].data["attachments"]
        assert (attached["media_type"], attached["size"]) == ("image/png", 8)
        far = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/a.png"}}
        with pytest.raises(openai.BadRequestError, match="not fetched"):
            await client.chat.completions.create(model="parrot", messages=[{"role": "user", "content": [far]}])  # type: ignore[list-item]
        with pytest.raises(openai.BadRequestError, match="chat-start"):
            await client.chat.completions.create(model="plain", messages=talk)


async def test_ignored_fields_are_listed() -> None:
    async with serving() as served, served.client() as client:
        answer = await client.chat.completions.create(
            model="parrot", messages=user_message("x"), metadata={"a": "b"}, prompt_cache_key="k", store=True
        )
        assert answer.metadata == {"a": "b"}
        assert (answer.model_extra or {})["penstock"]["ignored"] == ["prompt_cache_key", "store"]


# Runs that are submitted again, and clients that disconnect


async def test_a_repeated_request_with_a_run_id_returns_the_same_run() -> None:
    async with serving() as served, served.client() as client:
        for model in ("parrot", "plain"):
            extra = {"penstock": {"run_id": f"mine-{model}"}}
            for _ in range(2):
                answer = await client.chat.completions.create(model=model, messages=user_message("x"), extra_body=extra)
                assert answer.id == f"chatcmpl-mine-{model}"
                assert answer.choices[0].message.content == "x"
        assert len(await served.runs()) == 2
        async with served.client(BERT, max_retries=0) as other:
            with pytest.raises(openai.ConflictError):
                await other.chat.completions.create(
                    model="plain", messages=user_message("x"), extra_body={"penstock": {"run_id": "mine-plain"}}
                )


async def test_an_id_with_another_users_prefix_is_refused() -> None:
    async with serving() as served, served.client() as client:
        for extra in ({"penstock": {"run_id": "bert:1"}}, {"penstock": {"run_id": "a/b"}}):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(model="parrot", messages=user_message("x"), extra_body=extra)
            assert "run_id" in str(refused.value.param)
            with pytest.raises(openai.BadRequestError):
                await client.responses.create(model="parrot", input="x", extra_body=extra)
        extra = {"penstock": {"run_id": "anna:1"}}
        answer = await client.chat.completions.create(model="parrot", messages=user_message("x"), extra_body=extra)
        assert answer.id == "chatcmpl-anna:1"


async def test_it_works_on_a_database(tmp_path: Path) -> None:
    async with serving(url=f"sqlite:///{tmp_path}/it.db") as served, served.client() as client:
        chunks = await collected(
            await client.chat.completions.create(model="counter", messages=user_message("x"), stream=True)
        )
        assert text_of(chunks) == " ".join(str(number) for number in range(1000))
        first = await client.responses.create(model="listener", input="One")
        second = await client.responses.create(model="listener", input="Two", previous_response_id=first.id)
        assert second.output_text.endswith("user: Two")
        assert (await client.responses.retrieve(second.id)).output == second.output
        stream = await client.chat.completions.create(model="slow", messages=user_message("x"), stream=True)
        await served.gate.reached.wait()
        await stream.close()
        run = (await served.runs())[0]
        assert (await served.run(run.id)).status == "cancelled"


@pytest.mark.requirement("K-14")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnect_cancels_the_run(stream: bool) -> None:
    async with serving() as served, served.client() as client:
        asking = asyncio.ensure_future(_complete(client, stream))
        await served.gate.reached.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        (run,) = await served.runs()
        ended = await served.run(run.id)
        assert ended.status == "cancelled"
        assert "the client disconnected" in str(ended.error)


async def _complete(client: openai.AsyncOpenAI, stream: bool, **penstock: Any) -> None:
    answer = await client.chat.completions.create(
        model="slow", messages=user_message("x"), stream=stream, extra_body={"penstock": penstock}
    )
    if stream:
        await collected(answer)  # type: ignore[arg-type]


@pytest.mark.requirement("K-14")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_run_continues_after_a_disconnect_if_requested(stream: bool) -> None:
    async with serving() as served, served.client() as client:
        asking = asyncio.ensure_future(_complete(client, stream, on_disconnect="continue"))
        await served.gate.reached.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await served.no_open_streams()
        served.gate.opened.set()
        (run,) = await served.runs()
        ended = await served.run(run.id)
        assert (ended.status, ended.output) == ("completed", "After all: x")


async def test_a_cancelled_run_is_an_error_for_its_client() -> None:
    async with serving() as served, served.client() as client:
        asking = asyncio.ensure_future(_complete(client, False))
        await served.gate.reached.wait()
        (run,) = await served.runs()
        await served.host.cancel(run.id, reason="enough", by="ann")
        with pytest.raises(openai.ConflictError, match="enough"):
            await asking
        assert len(await served.runs()) == 1


async def test_a_parked_run_is_reported_as_such() -> None:
    async with serving() as served, served.client(max_retries=0) as client:
        whole = asyncio.ensure_future(_complete(client, False))
        await served.gate.reached.wait()
        stream = asyncio.ensure_future(_complete(client, True))
        while len(await served.runs()) < 2:  # noqa: ASYNC110  the second one is on its way
            await asyncio.sleep(0.01)
        await served.host.close(drain_s=0)
        with pytest.raises(openai.InternalServerError) as parked:
            await whole
        assert (parked.value.status_code, parked.value.code) == (503, "parked")
        with pytest.raises(openai.APIError):
            await stream


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
async def test_at_shutdown_streams_end_and_no_run_is_started(path: str) -> None:
    async with serving() as served, httpx2.AsyncClient(timeout=30) as client:
        url, headers = f"{served.url}/v1/{path}", {"Authorization": f"Bearer {ANNA}"}
        body = {"model": "slow", "messages": user_message("x"), "input": "x"}
        async with client.stream("POST", url, json={**body, "stream": True}, headers=headers) as answer:
            await served.gate.reached.wait()
            served.app.state.server.streams.close()
            received = (await answer.aread()).decode()
        (run,) = await served.runs()
        assert '"code":"parked"' in received
        assert f"GET /v1/responses/resp_{run.id}" in received
        assert run.status == "running"  # it goes on without its reader
        for stream in (False, True):
            refused = await client.post(url, json={**body, "stream": stream}, headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
            assert "x-should-retry" not in refused.headers
        assert len(await served.runs()) == 1


@pytest.mark.requirement("X-14")
async def test_a_request_whose_run_waits_for_an_approval_is_answered_with_the_question() -> None:
    async with serving() as served, served.client() as client:
        request: Any = {
            "model": "question",
            "messages": user_message("do it"),
            "extra_headers": {"Idempotency-Key": "k"},
        }
        waiting = await client.chat.completions.create(**request)
        assert (waiting.choices[0].message.content, waiting.choices[0].finish_reason) == ("", "stop")
        facts = (waiting.model_extra or {})["penstock"]
        (question,) = facts["approvals"]
        assert (facts["status"], question["question"]) == ("waiting", "Really?")
        assert (await client.chat.completions.create(**request)).id == waiting.id
        await served.host.answer(question["id"], "approved", by="anna")
        await served.run(facts["run_id"])
        answer = await client.chat.completions.create(**request)
        assert answer.id == waiting.id
        assert answer.choices[0].message.content == "do it"
        response = await client.responses.create(model="question", input="do it")
        facts = (response.model_extra or {})["penstock"]
        assert (response.status, facts["status"], response.output) == ("in_progress", "waiting", [])
        await served.host.answer(facts["approvals"][0]["id"], "approved", by="anna")
        await served.run(facts["run_id"])
        assert (await client.responses.retrieve(response.id)).output_text == "do it"


# Others of ours


async def test_a_graph_is_used_as_the_model_of_another_agent() -> None:
    async with serving() as served:
        for name in (f"openai-compatible:{served.url}/v1:parrot", "openai-responses:parrot"):
            options = {} if "compatible" in name else {"base_url": f"{served.url}/v1"}
            elsewhere = await asyncio.to_thread(model, name, api_key=ANNA, **options)
            heard: list[str] = []
            agent = Agent(elsewhere, on_delta=lambda delta, to=heard: to.append(delta.text))  # type: ignore[union-attr,misc]
            with ExecutionContext() as run:
                result = await agent.run("Anybody there?", run)
                assert result.output == "".join(heard) == "Anybody there?"
                assert run.stats.total_input_tokens == 7
        await close_connections()
