"""Access tokens: admins list, create and revoke them while servers run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import date
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import Field, model_validator
from starlette.requests import Request

from penstock.containment.ledger import Amounts
from penstock.errors import LedgerUnavailable
from penstock.gateway.key_accounts import KeySpend, days_until, spend_on
from penstock.gateway.key_bills import KeyBill, key_bills, resolve_key_bill
from penstock.gateway.key_runs import KeyRun, key_runs
from penstock.hosting.durability import day_of
from penstock.hosting.tokens import TokenKind, TokenNotFound, TokenRecord, TokenRole
from penstock.money import to_nanos, to_usd
from penstock.runtime.durable.async_ledger import AsyncLedger
from penstock.server.audit import note
from penstock.server.auth import Token, format_time
from penstock.server.errors import ApiError
from penstock.server.schemas import BillOfKey, Body, CostOfKey, Money, Shown
from penstock.server.state import KNOWN_QUERY, CurrentUser, PageSize, PathId, QueryId, ServerState, Service
from penstock.server.tokens import MAX_NOTE, check_team, create_token

router = APIRouter(prefix="/api/tokens", tags=["tokens"], dependencies=[KNOWN_QUERY])

TokenState = Literal["active", "expired", "revoked"]
Pattern = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[!-~]+$")]
"""A pattern of model names."""
MAX_PATTERNS = 100
MAX_DAYS = 366
IN_ENVIRONMENT = "env-"
"""Prefix of the ids of tokens of the environment in lists."""


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
    kind: Annotated[
        TokenKind, Field(description="user for a person or a program; gateway for a key that calls models only")
    ] = "user"
    daily_usd: Annotated[Money | None, Field(description="Gateway key: budget for each day (UTC)")] = None
    max_cost_usd: Annotated[Money | None, Field(description="Gateway key: budget for all of its time")] = None
    models: Annotated[
        tuple[Pattern, ...],
        Field(max_length=MAX_PATTERNS, description="Gateway key: models that it may call, such as gpt-*"),
    ] = ()
    team: Annotated[str, Field(max_length=64, description="Gateway key: team whose daily budget it spends from")] = ""

    @model_validator(mode="after")
    def _check_kind(self) -> NewToken:
        of_keys = {"daily_usd": self.daily_usd, "max_cost_usd": self.max_cost_usd, "models": self.models}
        given = [name for name, value in {**of_keys, "team": self.team}.items() if value not in (None, (), "")]
        if given and self.kind != "gateway":
            raise ValueError(f"{', '.join(given)} may be set for gateway keys only; set `kind` to gateway")
        return self

    @property
    def limits(self) -> dict[str, str] | None:
        """The limits to store; None for a user's token."""
        if self.kind != "gateway":
            return None
        given = {"daily_usd": self.daily_usd, "max_cost_usd": self.max_cost_usd}
        return {name: f"{amount:f}" for name, amount in given.items() if amount is not None}


class DaySpend(Shown):
    """The spending of a gateway key on one day of the server's budgets."""

    day: date
    limit_usd: float | None
    """Maximum spending of the key on the day: its daily budget, or the rest of its whole budget if that is less."""
    spent_usd: float
    held_usd: float
    """Held for calls under way."""
    unresolved_usd: float
    """Held for calls whose bill is unknown; it counts as spent until it is resolved."""
    left_usd: float | None
    api_calls: int
    tokens_in: int
    tokens_out: int

    @classmethod
    def of(cls, spend: KeySpend) -> DaySpend:
        """Convert the figures of the ledger."""
        usd = {
            name: None if nanos is None else to_usd(nanos)
            for name, nanos in (("limit_usd", spend.limit_nanos), ("left_usd", spend.left_nanos))
        }
        return cls(
            day=spend.day,
            **usd,
            spent_usd=to_usd(spend.spent_nanos),
            held_usd=to_usd(spend.held_nanos),
            unresolved_usd=to_usd(spend.unresolved_nanos),
            api_calls=spend.api_calls,
            tokens_in=spend.tokens_in,
            tokens_out=spend.tokens_out,
        )


class GatewayKeyShown(Shown):
    """The budgets of a gateway key, and its spending today."""

    team: str
    daily_usd: float | None
    max_cost_usd: float | None
    models: list[str]
    """Patterns of the models that it may call; empty for all."""
    today: DaySpend | None
    """None while the ledger is unavailable."""


class SpendShown(Shown):
    """The spending of a gateway key, day by day, oldest first; days without calls are included."""

    token_id: str
    days: list[DaySpend]


class KeyRunShown(Shown):
    """The usage of one run of a gateway key on a day."""

    run: str = Field(description="The run that the requests named; `day` if they named none")
    spent_usd: float
    held_usd: float
    """Held for calls under way."""
    unresolved_usd: float
    """Held for calls whose bill is unknown."""
    api_calls: int
    tokens_in: int
    tokens_out: int

    @classmethod
    def of(cls, run: KeyRun) -> KeyRunShown:
        """Convert the figures of the ledger."""
        used = run.used
        return cls(
            run=run.name,
            spent_usd=to_usd(used.spent_nanos),
            held_usd=to_usd(used.held_nanos),
            unresolved_usd=to_usd(used.unresolved_nanos),
            api_calls=used.api_calls,
            tokens_in=used.tokens_in,
            tokens_out=used.tokens_out,
        )


class KeyRunList(Shown):
    """The runs of a gateway key on one day, in the order of their first requests."""

    token_id: str
    day: date
    runs: list[KeyRunShown]
    next: str | None = None
    """Pass it as `after` for the next page."""


class KeyBillShown(Shown):
    """A call of a gateway key whose bill is unknown, and the amount held for it."""

    call_id: str = Field(description="Its id; the log of the gateway has the model and the time under the same id")
    run: str = Field(description="The run that the request named; `day` if it named none")
    day: date = Field(description="The day (UTC) to whose budgets it belongs")
    held_usd: float
    held_tokens: int


class KeyBillList(Shown):
    """The unresolved bills of a gateway key, earliest day first, and the total amount held for them."""

    token_id: str
    bills: list[KeyBillShown]
    unresolved_usd: float

    @classmethod
    def of(cls, key: TokenRecord, bills: Sequence[KeyBill]) -> KeyBillList:
        """Convert the bills of a key."""
        shown = [
            KeyBillShown(
                call_id=bill.call_id,
                run=bill.run,
                day=bill.day,
                held_usd=to_usd(bill.held.cost_nanos),
                held_tokens=bill.held.tokens_in + bill.held.tokens_out,
            )
            for bill in bills
        ]
        held_nanos = sum(bill.held.cost_nanos for bill in bills)
        return cls(token_id=key.id, bills=shown, unresolved_usd=to_usd(held_nanos))


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
    gateway: GatewayKeyShown | None = None
    """Budgets and spend of a gateway key; None for a user's token."""


class TokenList(Shown):
    """Tokens of the database, newest first; the first page begins with those of the server's environment."""

    tokens: list[TokenShown]
    next: str | None = None
    needs_tokens: bool
    """Whether clients need a token; without any, everybody on the server's machine may do everything."""


class CreatedToken(Shown):
    """A new token and its secret, which is shown only once."""

    token: TokenShown
    secret: str
    needs_tokens: bool


@router.get("")
async def list_tokens(
    request: Request,
    service: Service,
    before: QueryId = None,
    limit: PageSize = 100,
    kind: Annotated[TokenKind | None, Query(description="Only tokens of this kind")] = None,
) -> TokenList:
    """List the tokens of the database and of the server's environment; never secrets.

    Gateway keys have their budgets and their spending today.
    """
    found = await service.stores.tokens.list(kinds=() if kind is None else (kind,), before=before, limit=limit + 1)
    own = request.state.token
    shown = [await _shown(service, token, own) for token in found[:limit]]
    named = _in_environment(service, own) if before is None and kind != "gateway" else []
    following = found[limit - 1].id if len(found) > limit else None
    return TokenList(tokens=[*named, *shown], next=following, needs_tokens=await service.needs_tokens())


@router.get("/{token_id}/spend")
async def spend(token_id: PathId, service: Service, days: Annotated[int, Query(ge=1, le=MAX_DAYS)] = 30) -> SpendShown:
    """Return the spending of a gateway key on each of the last days of the server's budgets, today included."""
    key, zone = await _found_key(service, token_id), service.host.settings.zone
    ledger, wanted = AsyncLedger(service.stores.ledger), days_until(key, day_of(service.now_ms(), zone), zone)[-days:]
    return SpendShown(token_id=token_id, days=[DaySpend.of(await spend_on(ledger, key, day, zone)) for day in wanted])


@router.get("/{token_id}/runs")
async def runs(
    token_id: PathId,
    service: Service,
    day: Annotated[date | None, Query(description="A day of the server's budgets; today without it")] = None,
    after: QueryId = None,
    limit: PageSize = 100,
) -> KeyRunList:
    """List the runs of a gateway key on a day: those that `X-Penstock-Run` named, and `day` for all other requests."""
    key, zone = await _found_key(service, token_id), service.host.settings.zone
    of = day or day_of(service.now_ms(), zone)
    found = await key_runs(AsyncLedger(service.stores.ledger), key.id, of, after=after, limit=limit + 1)
    following = found[limit - 1].name if len(found) > limit else None
    return KeyRunList(token_id=key.id, day=of, runs=[KeyRunShown.of(run) for run in found[:limit]], next=following)


@router.get("/{token_id}/bills")
async def bills(token_id: PathId, service: Service) -> KeyBillList:
    """List the calls of a gateway key whose bill is unknown: their holds stay taken until each is resolved."""
    key = await _found_key(service, token_id)
    return KeyBillList.of(key, await key_bills(AsyncLedger(service.stores.ledger), key.id))


@router.post("/{token_id}/bills/resolve")
async def resolve_bill(token_id: PathId, body: CostOfKey, service: Service) -> KeyBillList:
    """Settle an unresolved bill of a gateway key at the cost of its call; return the remaining bills.

    The amount may be more than the hold. The audit log records who did it. 409 if the key has no such bill.
    """
    cost = Amounts(to_nanos(body.cost_usd, "cost_usd"), body.tokens_in, body.tokens_out)
    return await _resolved(service, token_id, body.call_id, cost)


@router.post("/{token_id}/bills/release")
async def release_bill(token_id: PathId, body: BillOfKey, service: Service) -> KeyBillList:
    """Release an unresolved bill of a gateway key, whose call cost nothing; return the remaining bills."""
    return await _resolved(service, token_id, body.call_id, None)


@router.post("", status_code=201)
async def create(body: NewToken, request: Request, service: Service, user: CurrentUser) -> CreatedToken:
    """Create a token, in force at once; the response has its secret, which is not stored and not shown again.

    409 if the user has an active token already, unless `another` is set or it is a gateway key; and if the user has an
    active gateway key of another team. The first admin's token ends the free access that a server without tokens gives
    to its machine.
    """
    now_ms = service.now_ms()
    record, secret = create_token(
        body.name,
        body.role,
        by=user.name,
        now_ms=now_ms,
        expires=body.expires,
        note=body.note,
        kind=body.kind,
        limits=body.limits,
        models=body.models or None,
        team=body.team,
    )
    if body.kind == "gateway":
        await check_team(service.stores.tokens, record, now_ms)
    elif not body.another:
        _check_name(service, body.name)
    added = await service.stores.tokens.add(record, is_only=not body.another)
    service.tokens.forget(added.id)
    note(target=added.id, owner=added.name, kind=added.kind, role=added.role, expires=body.expires)
    shown = await _shown(service, added, request.state.token)
    return CreatedToken(token=shown, secret=secret, needs_tokens=await service.needs_tokens())


@router.post("/{token_id}/revoke")
async def revoke(token_id: PathId, request: Request, service: Service, user: CurrentUser) -> TokenShown:
    """Revoke a token: this server refuses it at once, others within a second; a revoked token stays as it is.

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
    note(owner=revoked.name)
    return await _shown(service, revoked, own)


async def _found_key(service: ServerState, token_id: str) -> TokenRecord:
    """Return a gateway key; raise TokenNotFound, or ApiError for the token of a user."""
    key: TokenRecord | None = await service.stores.tokens.get(token_id)
    if key is None:
        raise TokenNotFound(token_id)
    if key.kind != "gateway":
        raise ApiError(409, "this is not a gateway key; the costs of its user are in the list of runs")
    return key


async def _resolved(service: ServerState, token_id: str, call_id: str, actual: Amounts | None) -> KeyBillList:
    key = await _found_key(service, token_id)
    cost_usd = None if actual is None else to_usd(actual.cost_nanos)
    note(owner=key.name, call_id=call_id, cost_usd=cost_usd)
    left = await resolve_key_bill(AsyncLedger(service.stores.ledger), key.id, call_id, actual)
    return KeyBillList.of(key, left)


async def _shown(service: ServerState, token: TokenRecord, own: Token | None) -> TokenShown:
    now_ms = service.now_ms()
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
        gateway=await _gateway_key(service, token) if token.kind == "gateway" else None,
    )


async def _gateway_key(service: ServerState, key: TokenRecord) -> GatewayKeyShown:
    limits, today = key.limits or {}, None
    zone = service.host.settings.zone
    with suppress(LedgerUnavailable):  # the figures are only for display
        day = day_of(service.now_ms(), zone)
        today = DaySpend.of(await spend_on(AsyncLedger(service.stores.ledger), key, day, zone))
    return GatewayKeyShown(
        team=key.team,
        daily_usd=limits.get("daily_usd"),
        max_cost_usd=limits.get("max_cost_usd"),
        models=list(key.models or ()),
        today=today,
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
