"""The endpoints that clients of OpenAI's API know: models, chat completions, responses.

Whoever asks has been let in already, by the server's gate; `current_user` says who it is. Every error of these routes
is told in OpenAI's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Query, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from penstock.server.auth import User, current_user
from penstock.server.openai import chat_completions, models, responses
from penstock.server.openai.refusals import refusal_of, written
from penstock.server.openai.running import Service
from penstock.server.openai.wire.bodies import ChatCompletionBody, ErrorAnswer, ResponseBody
from penstock.server.openai.wire.described import (
    CompletionAnswer,
    Described,
    ModelFacts,
    ModelList,
    ResponseAnswer,
    ResponseDeleted,
)
from penstock.server.runnable import Runnable
from penstock.server.sse import Streams

if TYPE_CHECKING:
    from penstock.chat.service import ChatService
    from penstock.hosting.host import RunHost
    from penstock.storage import Stores

ERROR = {"model": ErrorAnswer, "description": "What went wrong"}
ERRORS: dict[int | str, dict[str, Any]] = {"4XX": ERROR, "5XX": ERROR}

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class OpenAIRoute(APIRoute):
    """A route whose errors have OpenAI's shape; one that nobody expected goes on to the server."""

    def get_route_handler(self) -> Handler:
        """The handler, with its errors told."""
        handle: Handler = super().get_route_handler()

        async def told(request: Request) -> Response:
            try:
                return await handle(request)
            except Exception as error:
                if refused := refusal_of(error):
                    return refused.response()
                raise

        return told


def answers(model: type[Described], *, streamed: bool = False) -> dict[int | str, dict[str, Any]]:
    """How a success is described: in one, and maybe as a stream if the request says so."""
    return {200: {"model": model, **({"content": {"text/event-stream": {}}} if streamed else {})}}


def create_openai_router(
    host: RunHost,
    chats: ChatService,
    stores: Stores,
    graphs: Runnable,
    *,
    streams: Streams,
    user_of: Callable[[Request], User] = current_user,
) -> APIRouter:
    """The routes under /v1."""
    service = Service(host, chats, stores, graphs, streams)
    router = APIRouter(prefix="/v1", tags=["openai"], route_class=OpenAIRoute, responses=ERRORS)
    _add_models(router, service)
    _add_chat_completions(router, service, user_of)
    _add_responses(router, service, user_of)
    return router


def _add_models(router: APIRouter, service: Service) -> None:
    @router.get("/models", responses=answers(ModelList))
    async def list_models() -> Response:
        """The graphs that can be run, as models."""
        found = await models.runnable(service.stores.graphs, service.graphs)
        return _json({"object": "list", "data": [models.described(one) for one in found]})

    @router.get("/models/{model_id}", responses=answers(ModelFacts))
    async def get_model(model_id: str) -> Response:
        """One graph as a model; `graph@3` is its third version."""
        found = await service.graph_of(model_id)
        return _json({**models.described(found), "id": model_id})


def _add_chat_completions(router: APIRouter, service: Service, user_of: Callable[[Request], User]) -> None:
    @router.post("/chat/completions", responses=answers(CompletionAnswer, streamed=True))
    async def create_chat_completion(body: ChatCompletionBody, request: Request) -> Response:
        """Run a graph on a conversation; with `stream`, told as it comes."""
        return await chat_completions.complete(service, user_of(request), body, request)


def _add_responses(router: APIRouter, service: Service, user_of: Callable[[Request], User]) -> None:
    @router.post("/responses", responses=answers(ResponseAnswer, streamed=True))
    async def create_response(body: ResponseBody, request: Request) -> Response:
        """Run a graph on some input; with `stream`, told as it comes; with `background`, without waiting for it."""
        return await responses.respond(service, user_of(request), body, request)

    @router.get("/responses/{response_id}", responses=answers(ResponseAnswer, streamed=True))
    async def get_response(
        response_id: str, request: Request, starting_after: int | None = Query(None, ge=0), stream: bool = False
    ) -> Response:
        """A response as it stands, or its stream, from the beginning or after some event."""
        return await responses.retrieve(service, user_of(request), response_id, starting_after, stream=stream)

    @router.delete("/responses/{response_id}", responses=answers(ResponseDeleted))
    async def delete_response(response_id: str, request: Request) -> Response:
        """Remove a response that is over, and its run; what was said stays as long as other responses go on from it."""
        await responses.delete(service, user_of(request), response_id)
        return _json({"id": response_id, "object": "response", "deleted": True})

    @router.post("/responses/{response_id}/cancel", responses=answers(ResponseAnswer))
    async def cancel_response(response_id: str, request: Request) -> Response:
        """Stop the run behind a response."""
        return await responses.cancel(service, user_of(request), response_id)


def _json(data: object) -> Response:
    return Response(written(data), media_type="application/json")
