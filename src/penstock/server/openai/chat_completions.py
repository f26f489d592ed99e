"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response

from penstock.server.auth import User
from penstock.server.openai.leaving import CLIENT_CLOSED_REQUEST, ClientLeft, RunStream, unless_left, with_heartbeats
from penstock.server.openai.refusals import Refused, broken_off, failure_of, of_run, written
from penstock.server.openai.running import Service, Started, on_leave, start, streaming
from penstock.server.openai.wire.answer import Answer, Ended
from penstock.server.openai.wire.bodies import ChatCompletionBody
from penstock.server.openai.wire.chunks import Completion
from penstock.server.openai.wire.conversation import check_supported, of_chat_completion
from penstock.server.sse import HEARTBEAT, framed

DONE = b"data: [DONE]\n\n"


async def complete(service: Service, user: User, body: ChatCompletionBody, request: Request) -> Response:
    """Run the graph on the conversation, and answer as the model of that name."""
    if body.stream:
        return await streaming(service.streams, user, lambda: _streamed(service, user, body))
    begun = await _begin(service, user, body)
    try:
        with of_run(begun.run.id):
            answer = await unless_left(request.receive, begun.followed())
    except ClientLeft:
        await on_leave(begun, user, body.penstock)()
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return _whole(answer, begun, _completion(begun, body))


async def _begin(service: Service, user: User, body: ChatCompletionBody) -> Started:
    check_supported(body)
    turns = of_chat_completion(body)
    graph = await service.graph_of(body.model, body.penstock.run_id)
    return await start(service, user, graph, turns, body)


def _completion(begun: Started, body: ChatCompletionBody) -> Completion:
    include_usage = body.stream_options is not None and body.stream_options.include_usage
    ignored = body.ignored(is_heard=begun.is_heard)
    return Completion(begun.run.id, body.model, begun.created, ignored, include_usage, body.metadata)


async def _streamed(service: Service, user: User, body: ChatCompletionBody) -> RunStream:
    begun = await _begin(service, user, body)
    frames = _frames(begun, _completion(begun, body))
    return RunStream(frames, service.streams, user.name, on_leave(begun, user, body.penstock))


def _whole(answer: Answer, begun: Started, completion: Completion) -> Response:
    assert answer.ended is not None, "what is followed to its end has one"
    if failure := _failure(answer.ended, answer, begun):
        raise failure
    return Response(written(completion.whole(answer)), media_type="application/json")


async def _frames(begun: Started, completion: Completion) -> AsyncGenerator[bytes, None]:
    answer = Answer(begun.speaking)
    yield framed(completion.opening())
    try:
        async with aclosing(with_heartbeats(begun.pieces(answer), begun.service.streams)) as pieces:
            async for piece in pieces:
                if piece is None:
                    yield HEARTBEAT
                elif failure := _failure(piece, answer, begun):
                    yield framed(failure.to_dict())
                else:
                    for chunk in completion.chunks(piece):
                        yield framed(chunk)
    except Exception as error:  # the status is sent already: whatever it is, the stream has to say it
        yield framed(broken_off(error, begun.run.id).to_dict())
    yield DONE


def _failure(piece: object, answer: Answer, begun: Started) -> Refused | None:
    if not isinstance(piece, Ended):
        return None
    return failure_of(piece, begun.run.id, has_text=bool(answer.said), asked=begun.asked)
