"""Responses: the official SDK against a whole server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import openai
import pytest
from openai.types.responses import Response

from penstock.hosting.host import RunLimits
from penstock.hosting.ports import HostedEvent, RunRecord
from tests.server.openai_service import ANNA, BERT, GRAPHS, Served, serving


async def until(served: Served, client: openai.AsyncOpenAI, response: Response) -> Response:
    """The response, once its run has ended."""
    await served.run(response.id.removeprefix("resp_"))
    return await client.responses.retrieve(response.id)


@pytest.mark.requirement("X-6")
async def test_a_graph_responds() -> None:
    async with serving() as served, served.client() as client:
        response = await client.responses.create(
            model="listener", input="Hi 🙂", instructions="Be kind.", metadata={"a": "b"}, temperature=1
        )
        assert response.status == "completed"
        assert response.output_text.endswith("user: Hi 🙂")
        assert "Be kind." in response.output_text
        assert (response.instructions, response.metadata, response.temperature) == ("Be kind.", {"a": "b"}, 1)
        assert response.usage is not None
        assert response.usage.total_tokens == 10
        assert (response.usage.model_extra or {})["cost"] == 0.25
        facts = (response.model_extra or {})["penstock"]
        assert (facts["cost_usd"], facts["ignored"]) == (0.25, [])
        later = await client.responses.retrieve(response.id)
        assert later == response


REQUESTS: list[dict[str, Any]] = [
    {"instructions": "Be kind.", "metadata": {"a": "b", "☀": "🙂"}, "temperature": 0, "top_p": 0.5, "user": "u"},
    {"max_output_tokens": 5, "background": False, "truncation": "auto", "metadata": {}},
    {"instructions": "x" * 5_000},
    {},
]


@pytest.mark.parametrize(
    ("model", "request_fields"),
    [
        *(("parrot", request_fields) for request_fields in REQUESTS),
        *((model, request_fields) for model in ("plain", "plain@1") for request_fields in REQUESTS[2:]),
    ],
)
async def test_a_retrieved_response_equals_the_created_one(model: str, request_fields: dict[str, Any]) -> None:
    """Every field, including those that repeat the request."""
    async with serving() as served, served.client() as client:
        given = await client.responses.create(model=model, input="Hi", **request_fields)
        assert (given.model, given.completed_at is None) == (model, False)
        assert await client.responses.retrieve(given.id) == given
        assert await client.responses.cancel(given.id) == given
        stream = await client.responses.retrieve(given.id, stream=True)
        *_, last = [event async for event in stream]
        assert last.type == "response.completed"
        assert last.response == given


async def test_a_retrieved_response_has_its_previous_response_id() -> None:
    async with serving() as served, served.client() as client:
        first = await client.responses.create(model="parrot", input="one")
        given = await client.responses.create(
            model="parrot", input="two", previous_response_id=first.id, instructions="new", metadata={"n": "2"}
        )
        later = await client.responses.retrieve(given.id)
        assert later == given
        assert (later.previous_response_id, later.metadata) == (first.id, {"n": "2"})
        assert (later.model_extra or {})["penstock"]["ignored"] == ["instructions"]


async def test_a_response_continues_with_the_named_version() -> None:
    async with serving() as served, served.client() as client:
        await served.stores.graphs.save("parrot", "anna", "New", GRAPHS["looker"], now_ms=1)
        first = await client.responses.create(model="parrot@1", input="one")
        second = await client.responses.create(model="parrot@1", input="two", previous_response_id=first.id)
        third = await client.responses.create(model="parrot", input="three", previous_response_id=second.id)
        assert [one.output_text for one in (first, second, third)] == ["one", "two", "Bright."]
        assert (await client.responses.retrieve(first.id)).output_text == "one"


async def test_of_an_oversized_request_the_short_fields_are_stored() -> None:
    async with serving() as served, served.client() as client:
        long = await client.responses.create(
            model="plain", input="x", instructions="i" * 100_000, metadata={"a": "b"}, user="u" * 100_000
        )
        later = await client.responses.retrieve(long.id)
        assert (later.instructions, later.user, later.metadata) == (None, None, {"a": "b"})
        (run,) = await served.runs()
        assert len(json.dumps(dict(run.origin))) < 1_000


async def test_the_stored_request_is_shown_with_its_run_and_not_in_lists() -> None:
    async with serving() as served, served.client() as client, httpx2.AsyncClient(base_url=served.url) as http:
        given = await client.responses.create(model="plain", input="x", metadata={"a": "b"})
        headers = {"Authorization": f"Bearer {ANNA}"}
        (listed,) = (await http.get("/api/runs", headers=headers)).json()["runs"]
        assert listed["origin"] == {"kind": "run"}
        run = (await http.get(f"/api/runs/{given.id.removeprefix('resp_')}", headers=headers)).json()
        assert run["origin"]["about"]["metadata"] == {"a": "b"}


async def test_any_run_can_be_retrieved_as_a_response() -> None:
    async with serving() as served, served.client() as client:
        run = await served.host.submit(owner="anna", graph_id="plain", input="x", origin={"kind": "run", "about": 3})
        await served.run(run.id)
        later = await client.responses.retrieve(f"resp_{run.id}")
        assert (later.model, later.metadata, later.output_text) == ("plain", {}, "x")


@pytest.mark.parametrize("ahead", [0, 1_000, 2**53])
async def test_a_stream_cannot_be_resumed_ahead_of_its_newest_event(ahead: int) -> None:
    async with serving() as served, served.client() as client:
        under_way = await client.responses.create(model="slow", input="x", background=True)
        await served.gate.reached.wait()
        with pytest.raises(openai.BadRequestError, match="the newest is 1") as refused:
            await client.responses.retrieve(under_way.id, stream=True, starting_after=2 + ahead)
        assert refused.value.param == "starting_after"
        served.gate.opened.set()
        ended = await until(served, client, under_way)
        stream = await client.responses.retrieve(ended.id, stream=True)
        newest = [event.sequence_number async for event in stream][-1]
        assert [_ async for _ in await client.responses.retrieve(ended.id, stream=True, starting_after=newest)] == []
        with pytest.raises(openai.BadRequestError, match=f"the newest is {newest}"):
            await client.responses.retrieve(ended.id, stream=True, starting_after=newest + 1 + ahead)


async def test_a_response_is_streamed() -> None:
    async with serving() as served, served.client() as client:
        async with client.responses.stream(model="looker", input="look") as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        assert events[0].type == "response.created"
        assert events[-1].type == "response.completed"
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert final.output_text == "Bright."
        call = final.output[0]
        assert call.type == "function_call"
        assert (call.name, call.arguments, call.status) == ("look", '{"at": "the ☀"}', "completed")
        assert (await client.responses.retrieve(final.id)).output_text == "Bright."


async def test_a_thousand_pieces_come_in_order() -> None:
    async with serving() as served, served.client() as client:
        async with client.responses.stream(model="counter", input="go") as stream:
            pieces = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        assert "".join(pieces) == final.output_text == " ".join(str(number) for number in range(1000))


async def test_a_long_truncated_answer_is_retrieved_completely() -> None:
    pieces = [f"{number} " for number in range(2_500)]
    text_events = [
        HostedEvent(at, 0, "text.delta", {"node_id": "agent", "text": piece}) for at, piece in enumerate(pieces, 1)
    ]
    async with serving() as served, served.client() as client:
        await served.host.close()
        await served.stores.runs.add(RunRecord("r", "anna", "parrot", 1))
        await served.stores.runs.claim("w", now_ms=0, lease_ms=1_000)
        await served.stores.events.append("r", 1, [*text_events, HostedEvent(2_501, 0, "run.cancelled")])
        await served.stores.runs.update("r", 1, status="cancelled")
        later = await client.responses.retrieve("resp_r")
        assert (later.status, later.output_text) == ("cancelled", "".join(pieces))


async def test_a_response_continues_an_earlier_one() -> None:
    async with serving() as served, served.client() as client:
        first = await client.responses.create(model="listener", input="One")
        second = await client.responses.create(model="listener", input="Two", previous_response_id=first.id)
        assert second.previous_response_id == first.id
        assert second.output_text.endswith("user: Two")
        assert "user: One | assistant: " in second.output_text
        # A conversation can go on from any of its responses, more than once.
        other = await client.responses.create(
            model="listener", input=[{"role": "user", "content": "Else"}], previous_response_id=first.id
        )
        assert "Two" not in other.output_text
        assert other.output_text.endswith("user: Else")


async def test_a_conversation_keeps_its_first_instructions() -> None:
    async with serving() as served, served.client() as client:
        first = await client.responses.create(model="listener", input="One", instructions="Be kind.")
        second = await client.responses.create(
            model="listener", input="Two", instructions="Be short.", previous_response_id=first.id
        )
        assert second.output_text.count("Be kind.") >= 1
        assert "Be short." not in second.output_text
        assert (second.model_extra or {})["penstock"]["ignored"] == ["instructions"]


async def test_a_response_that_cannot_be_continued_is_refused_with_the_reason() -> None:
    async with serving() as served, served.client() as client:
        plain = await client.responses.create(model="plain", input="x")
        with pytest.raises(openai.BadRequestError, match="chat-start"):
            await client.responses.create(model="plain", input="y", previous_response_id=plain.id)
        with pytest.raises(openai.BadRequestError, match="plain, the model of the previous response"):
            await client.responses.create(model="parrot", input="y", previous_response_id=plain.id)
        parrot = await client.responses.create(model="parrot", input="x")
        with pytest.raises(openai.BadRequestError, match="the server has the rest"):
            await client.responses.create(
                model="parrot",
                input=[{"role": "system", "content": "New rules."}, {"role": "user", "content": "y"}],
                previous_response_id=parrot.id,
            )
        again = await served.host.replay(parrot.id.removeprefix("resp_"), owner="anna")
        await served.run(again.id)
        with pytest.raises(openai.BadRequestError, match=f"this one is a replay of run .*not 'resp_{again.id}'"):
            await client.responses.create(model="parrot", input="y", previous_response_id=f"resp_{again.id}")
        (chat,) = await served.stores.chats.list(owner="anna")
        await served.stores.chats.remove(chat.id)
        with pytest.raises(openai.NotFoundError, match=f"conversation of response '{parrot.id}' was deleted") as gone:
            await client.responses.create(model="parrot", input="y", previous_response_id=parrot.id)
        assert gone.value.param == "previous_response_id"
        for id in ("resp_nothing", "nonsense", "resp_"):
            with pytest.raises(openai.NotFoundError) as refused:
                await client.responses.create(model="parrot", input="y", previous_response_id=id)
            assert refused.value.param == "previous_response_id"


async def test_responses_are_private_to_their_owner() -> None:
    async with serving() as served, served.client() as client, served.client(BERT) as other:
        response = await client.responses.create(model="parrot", input="secret")
        with pytest.raises(openai.NotFoundError):
            await other.responses.retrieve(response.id)
        with pytest.raises(openai.NotFoundError):
            await other.responses.cancel(response.id)
        with pytest.raises(openai.NotFoundError):
            await other.responses.create(model="parrot", input="x", previous_response_id=response.id)


async def test_a_background_response_is_retrieved_later() -> None:
    async with serving() as served, served.client() as client:
        response = await client.responses.create(model="slow", input="x", background=True)
        assert response.status in {"queued", "in_progress"}
        assert response.background is True
        await served.gate.reached.wait()
        assert (await client.responses.retrieve(response.id)).status == "in_progress"
        served.gate.opened.set()
        ended = await until(served, client, response)
        assert (ended.status, ended.output_text) == ("completed", "After all: x")


async def test_an_existing_background_response_is_returned_in_its_current_state() -> None:
    async with serving() as served, served.client() as client:
        request_fields: Any = {"input": "x", "background": True, "extra_body": {"penstock": {"run_id": "anna:bg"}}}
        begun = await client.responses.create(model="parrot", **request_fields)
        later = await until(served, client, begun)
        again = await client.responses.create(model="parrot", **request_fields)
        assert again == later
        assert (again.status, again.output_text) == ("completed", "x")
        assert again.usage is not None
        assert len(await served.runs()) == 1


async def test_a_cancelled_response_has_the_reason_that_its_run_has() -> None:
    async with serving() as served, served.client() as client:
        response = await client.responses.create(model="slow", input="x", background=True)
        await served.gate.reached.wait()
        cancelled = await client.responses.cancel(response.id)
        run = await served.run(response.id.removeprefix("resp_"))
        assert (cancelled.model_extra or {})["penstock"]["stop_reason"] == run.stop_reason == "aborted"


async def test_a_response_can_be_cancelled() -> None:
    async with serving() as served, served.client() as client:
        response = await client.responses.create(model="slow", input="x", background=True)
        await served.gate.reached.wait()
        cancelled = await client.responses.cancel(response.id)
        assert cancelled.status == "cancelled"
        assert cancelled.error is None
        assert (cancelled.model_extra or {})["penstock"]["message"] == "cancelled over /v1/responses"
        assert (await client.responses.cancel(response.id)).status == "cancelled"


async def test_a_response_that_is_complete_is_not_cancelled() -> None:
    async with serving() as served, served.client() as client:
        response = await client.responses.create(model="parrot", input="x")
        assert (await client.responses.cancel(response.id)).status == "completed"


@pytest.mark.requirement("X-6")
async def test_a_stream_is_resumed_where_it_was_left() -> None:
    async with serving() as served, served.client() as client:
        stream = await client.responses.create(model="counter", input="go", stream=True, background=True)
        seen: list[Any] = []
        async for event in stream:
            seen.append(event)
            if len(seen) == 20:
                break
        await stream.close()
        response_id = seen[0].response.id
        rest = await client.responses.retrieve(response_id, stream=True, starting_after=seen[-1].sequence_number)
        seen += [event async for event in rest]
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
        deltas = "".join(event.delta for event in seen if event.type == "response.output_text.delta")
        assert deltas == seen[-1].response.output_text == " ".join(str(number) for number in range(1000))


@pytest.mark.parametrize("background", [False, True])
async def test_a_disconnect_cancels_the_run_unless_it_is_in_the_background(background: bool) -> None:
    async with serving() as served, served.client() as client:
        stream = await client.responses.create(model="slow", input="x", stream=True, background=background)
        await served.gate.reached.wait()
        await stream.close()
        await served.no_open_streams()
        (run,) = await served.runs()
        if background:
            served.gate.opened.set()
        assert (await served.run(run.id)).status == ("completed" if background else "cancelled")


async def test_a_disconnect_from_a_retrieved_stream_cancels_nothing() -> None:
    async with serving() as served, served.client() as client:
        response = await client.responses.create(model="slow", input="x", background=True)
        await served.gate.reached.wait()
        again = await client.responses.retrieve(response.id, stream=True)
        assert (await anext(aiter(again))).type == "response.created"
        await again.close()
        await served.no_open_streams()
        served.gate.opened.set()
        ended = await until(served, client, response)
        assert (ended.status, ended.output_text) == ("completed", "After all: x")


async def test_a_disconnect_before_the_answer_cancels_the_run() -> None:
    async with serving() as served, served.client() as client:
        asking = asyncio.ensure_future(client.responses.create(model="slow", input="x"))
        await served.gate.reached.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        (run,) = await served.runs()
        assert (await served.run(run.id)).status == "cancelled"


async def test_a_limit_makes_a_response_incomplete() -> None:
    async with serving() as served, served.client() as client:
        limits = {"penstock": {"limits": {"max_api_calls": 1}}}
        response = await client.responses.create(model="endless", input="x", extra_body=limits)
        assert response.status == "incomplete"
        assert response.output_text == "Let me look."
        assert (response.model_extra or {})["penstock"]["stop_reason"] == "api_call_limit_exceeded"
        stream = await client.responses.create(model="endless", input="x", extra_body=limits, stream=True)
        assert [event.type async for event in stream][-1] == "response.incomplete"


async def test_a_halted_run_is_complete_after_a_grant() -> None:
    async with serving() as served, served.client() as client:
        limits = {"penstock": {"limits": {"max_api_calls": 1}}}
        response = await client.responses.create(model="looker", input="look", extra_body=limits)
        assert response.status == "incomplete"
        await served.host.grant(response.id.removeprefix("resp_"), RunLimits(max_api_calls=1), by="anna")
        ended = await until(served, client, response)
        assert (ended.status, ended.output_text) == ("completed", "Bright.")


async def test_a_failed_run_is_a_failed_response() -> None:
    async with serving() as served, served.client() as client:
        response = await client.responses.create(model="broken", input="x")
        assert response.status == "failed"
        assert response.error is not None
        assert "fell over" in response.error.message
        stream = await client.responses.create(model="broken", input="x", stream=True)
        assert [event.type async for event in stream][-1] == "response.failed"


async def test_a_repeated_request_with_a_run_id_returns_the_same_response() -> None:
    async with serving() as served, served.client() as client:
        extra = {"penstock": {"run_id": "mine"}}
        first = await client.responses.create(model="parrot", input="x", extra_body=extra)
        again = await client.responses.create(model="parrot", input="x", extra_body=extra)
        assert (first.id, again.id, first.output) == ("resp_mine", "resp_mine", again.output)
        assert len(await served.runs()) == 1


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
    ({"input": [{"type": "message", "content": "x"}]}, "input.0.role"),
    ({"input": [{"role": "assistant", "content": "x"}]}, "input"),
    ({"input": "x", "text": {"format": {"type": "grammar"}}}, "text.format"),
    ({"input": "x", "tool_choice": "required"}, "tool_choice"),
]


async def test_a_bad_request_names_what_is_wrong() -> None:
    async with serving() as served, served.client() as client:
        for request_fields, param in BAD:
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(model="parrot", **request_fields)
            assert (refused.value.param or "").startswith(param)
        assert await served.runs() == []
