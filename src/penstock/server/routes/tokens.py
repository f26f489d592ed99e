"""Access tokens: admins list, create and revoke them while servers run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request

from penstock.hosting.tokens import TokenKind, TokenRecord, TokenRole
from penstock.server.auth import Token, format_time
from penstock.server.errors import ApiError
from penstock.server.schemas import Body, Shown
from penstock.server.state import KNOWN_QUERY, CurrentUser, PageSize, PathId, QueryId, ServerState, Service
from penstock.server.tokens import MAX_NOTE, create_token

router = APIRouter(prefix="/api/tokens", tags=["tokens"], dependencies=[KNOWN_QUERY])

TokenState = Literal["active", "expired", "revoked"]
IN_ENVIRONMENT = "env-"
"""Beginning of the ids under which tokens of the environment are listed."""


class NewToken(Body):
    """A token to create."""

    name: Annotated[str, Field(min_length=1, max_length=64, description="Name of the user, who owns what it starts")]
    role: Annotated[TokenRole, Field(description="viewer reads, user also starts runs, admin may do everything")] = (
        "user"
    )
    expires: Annotated[
        str | None,
        Field(max_length=40, description="Last day, such as 2027-12-31, or a time, such as 2027-12-31T18:00:00Z"),
    ] = None
    note: Annotated[str, Field(max_length=MAX_NOTE, description="What the token is for")] = ""
    another: Annotated[bool, Field(description="Allow a further active token of the same name")] = False


class TokenShown(Shown):
    """A token, without its secret."""

    id: str
    source: Literal["database", "environment"]
    name: str
    role: TokenRole
    kind: TokenKind
    state: TokenState
    created_ms: int | None = None
    created_by: str | None = None
    expires: str | None = None
    revoked_ms: int | None = None
    revoked_by: str | None = None
    last_used_ms: int | None = None
    note: str = ""
    is_yours: bool = False
    """Whether it is the token of this request."""


class TokenList(Shown):
    """Tokens of the database, newest first; the first page begins with those of the server's environment."""

    tokens: list[TokenShown]
    next: str | None = None
    needs_tokens: bool
    """Whether clients need a token; without any, everybody on the server's machine may do everything."""


class CreatedToken(Shown):
    """A new token and its secret, which is shown this once."""

    token: TokenShown
    secret: str
    needs_tokens: bool


@router.get("")
async def list_tokens(request: Request, service: Service, before: QueryId = None, limit: PageSize = 100) -> TokenList:
    """List the tokens of the database and of the server's environment; never secrets."""
    found = await service.stores.tokens.list(before=before, limit=limit + 1)
    now_ms, own = service.now_ms(), request.state.token
    shown = [_shown(token, now_ms, own) for token in found[:limit]]
    named = _in_environment(service, own) if before is None else []
    following = found[limit - 1].id if len(found) > limit else None
    return TokenList(tokens=[*named, *shown], next=following, needs_tokens=await service.needs_tokens())


@router.post("", status_code=201)
async def create(body: NewToken, request: Request, service: Service, user: CurrentUser) -> CreatedToken:
    """Create a token, in force at once; the response has its secret, which is not stored and not shown again.

    409 if the user has an active token already, unless `another` is set. The first admin's token ends the free access
    that a server without tokens gives to its machine.
    """
    now_ms = service.now_ms()
    record, secret = create_token(
        body.name, body.role, by=user.name, now_ms=now_ms, expires=body.expires, note=body.note
    )
    if not body.another:
        _check_name(service, body.name)
    added = await service.stores.tokens.add(record, is_only=not body.another)
    service.tokens.forget(added.id)
    shown = _shown(added, now_ms, request.state.token)
    return CreatedToken(token=shown, secret=secret, needs_tokens=await service.needs_tokens())


@router.post("/{token_id}/revoke")
async def revoke(token_id: PathId, request: Request, service: Service, user: CurrentUser) -> TokenShown:
    """Revoke a token: this server refuses it at once, others within a second; a revoked one stays as it is.

    409 for the token of this request, for the last admin's, and for a token of the environment.
    """
    own: Token = request.state.token
    if token_id.startswith(IN_ENVIRONMENT):
        message = "this token is in the server's environment; remove its line there and restart the server"
        raise ApiError(409, message)
    if token_id == own.id:
        message = "this is your own token; revoke it with that of another admin, or with `penstock tokens revoke`"
        raise ApiError(409, message)
    now_ms = service.now_ms()
    revoked = await service.stores.tokens.revoke(
        token_id, by=user.name, now_ms=now_ms, keep_admin=not _has_admin(service)
    )
    service.tokens.forget(revoked.id)
    return _shown(revoked, now_ms, own)


def _shown(token: TokenRecord, now_ms: int, own: Token | None) -> TokenShown:
    state: TokenState = "active" if token.is_active(now_ms) else "expired" if token.revoked_ms is None else "revoked"
    return TokenShown(
        id=token.id,
        source="database",
        name=token.name,
        role=token.role,
        kind=token.kind,
        state=state,
        created_ms=token.created_ms,
        created_by=token.created_by,
        expires=None if token.expires_ms is None else format_time(token.expires_ms * 1_000_000),
        revoked_ms=token.revoked_ms,
        revoked_by=token.revoked_by,
        last_used_ms=token.last_used_ms,
        note=token.note,
        is_yours=own is not None and own.id == token.id,
    )


def _in_environment(service: ServerState, own: Token | None) -> Sequence[TokenShown]:
    now_ns = service.clock.time_ns()
    return [
        TokenShown(
            id=f"{IN_ENVIRONMENT}{number}",
            source="environment",
            name=token.user.name,
            role=token.user.role,
            kind="user",
            state="expired" if token.has_expired(now_ns) else "active",
            expires=None if token.until_ns is None else format_time(token.until_ns),
            is_yours=own is not None and own is token,
        )
        for number, token in enumerate(service.settings.tokens, 1)
    ]


def _check_name(service: ServerState, name: str) -> None:
    now_ns = service.clock.time_ns()
    if any(token.user.name == name and not token.has_expired(now_ns) for token in service.settings.tokens):
        message = f"{name} has a token in the server's environment; choose another name, or send `another`: true"
        raise ApiError(409, message, path="$.name")


def _has_admin(service: ServerState) -> bool:
    """Whether an admin's token of the environment is valid, so that the last one of the database may be revoked."""
    now_ns = service.clock.time_ns()
    return any(token.user.is_admin and not token.has_expired(now_ns) for token in service.settings.tokens)
