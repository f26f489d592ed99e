"""The data of one person, for admins: find, export and erase it."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from fastapi import APIRouter
from starlette.responses import Response

from penstock.server import audit
from penstock.server.errors import ApiError, not_found
from penstock.server.routes.runs import json_line
from penstock.server.schemas import Shown
from penstock.server.sse import EventStream
from penstock.server.state import KNOWN_QUERY, CurrentUser, PathId, ServerState, Service
from penstock.storage.people import erase_person, export_person

router = APIRouter(prefix="/api/people", tags=["people"], dependencies=[KNOWN_QUERY])


class PersonShown(Shown):
    """Where the name of a person is stored."""

    name: str
    places: dict[str, int]
    """Number of rows by table and column."""
    has_token_in_environment: bool


class ErasedShown(Shown):
    """The result of erasing a person."""

    pseudonym: str
    """The replacement for the name."""
    runs: int
    chats: int
    places: dict[str, int]
    """Number of other rows that were removed or renamed, by table and column."""
    tokens: list[str]
    """Ids of the person's tokens, which are revoked."""


@router.get("/{name}")
async def find_person(name: PathId, service: Service) -> PersonShown:
    """Return where the name of a person is stored, as numbers of rows; 404 if it is stored nowhere."""
    return PersonShown(
        name=name, places=await _places(service, name), has_token_in_environment=_is_in_environment(service, name)
    )


@router.get("/{name}/export", response_class=Response, responses={200: {"content": {"application/x-ndjson": {}}}})
async def export(name: PathId, service: Service, user: CurrentUser) -> Response:
    """Export everything that is stored about a person, one JSON value per line."""
    disposition = {"Content-Disposition": f'attachment; filename="person-{name.replace(":", "-")}.ndjson"'}
    await _places(service, name)
    audit.note(target="", owner=name)
    with service.streams.place(user.name):
        lines = _lines(service, name)
        return EventStream(lines, service.streams, user, headers=disposition, media_type="application/x-ndjson")


@router.post("/{name}/erase")
async def erase(name: PathId, service: Service, user: CurrentUser) -> ErasedShown:
    """Erase a person: tokens are revoked, runs, chats, files and memories removed, and the name is replaced elsewhere.

    409 while runs of the person have not ended, for yourself, and for a person with a token in the environment.
    """
    if name == user.name:
        raise ApiError(409, "you cannot erase yourself; let another admin do it")
    if _is_in_environment(service, name):
        message = f"{name} has a token in the server's environment; remove its line there and restart the server first"
        raise ApiError(409, message)
    await _places(service, name)
    erased = await erase_person(service.stores, name, by=user.name, now_ms=service.now_ms())
    for token_id in erased.tokens:
        service.tokens.forget(token_id)
    audit.note(target=erased.pseudonym, runs=erased.runs, chats=erased.chats)
    return ErasedShown.model_validate(erased, from_attributes=True)


async def _places(service: ServerState, name: str) -> dict[str, int]:
    """Return where the name is stored; raise 404 if nowhere."""
    found = dict(await service.stores.people.places(name))
    if not found:
        raise not_found("person: nothing is stored under this name")
    return found


async def _lines(service: ServerState, name: str) -> AsyncGenerator[bytes, None]:
    async for value in export_person(service.stores, name):
        yield json_line(value)


def _is_in_environment(service: ServerState, name: str) -> bool:
    return any(token.user.name == name for token in service.settings.tokens)
