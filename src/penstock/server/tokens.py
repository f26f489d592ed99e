"""Tokens in the database, as the auth guard looks them up.

Tokens are managed while servers run: in the web UI, over HTTP, and with `penstock tokens` on the database. A server
reads a token by its id and caches it for MAX_AGE_S: a change by another process takes effect within that time, a change
by the server itself at once. A secret that cannot be one of the database causes no read.

A server needs tokens if its environment has some, or if the database has had an admin's token: revoked and expired ones
count, so that a server never opens itself because a token has ended.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import InvalidValue
from penstock.hosting.ports import StoreUnavailable
from penstock.hosting.tokens import AnotherTeam, TokenKind, TokenRecord, TokenRole, TokenStore, id_in, new_secret
from penstock.server.auth import NAME, ROLES, Token, TokensInvalid, User, parse_until

MAX_AGE_S = 0.5
"""How long a token is cached."""
MAX_CACHED = 10_000
MAX_NOTE = 500
PAGE = 500
_NANOS_PER_MS = 1_000_000
_NANOS_PER_S = 1_000_000_000


class StoredTokens:
    """The tokens of a database, cached for MAX_AGE_S."""

    def __init__(self, store: TokenStore, clock: Clock = SYSTEM_CLOCK) -> None:
        self.store = store
        self._clock = clock
        self._known: OrderedDict[str, tuple[int, TokenRecord | None]] = OrderedDict()
        """Tokens by id, with the monotonic time at which they were read."""
        self._required: tuple[int, bool] | None = None

    async def find(self, secret: bytes) -> Token | None:
        """Return the token of a secret, valid or not; None if it is unknown. Raises StoreUnavailable."""
        id = id_in(secret)
        record = None if id is None else await self._read(id)
        if record is None or not record.matches(secret):
            return None
        await self._note_use(record)
        return as_token(record)

    async def is_revoked(self, token: Token) -> bool:
        """Whether a token has been revoked since it was found; False while the database cannot tell."""
        with suppress(StoreUnavailable):
            record = await self._read(token.id)
            return record is None or record.revoked_ms is not None
        return False

    async def are_required(self) -> bool:
        """Whether the database has had an admin's token, so that clients need one.

        While the database is unavailable, the last answer holds; StoreUnavailable if there was none.
        """
        now_ns = self._clock.monotonic_ns()
        if self._required is None or (not self._required[1] and self._is_old(self._required[0], now_ns)):
            try:
                self._required = (now_ns, await self.store.has_admin())
            except StoreUnavailable:
                if self._required is None:
                    raise
        return self._required[1]

    def forget(self, token_id: str) -> None:
        """Read a token again at its next use: it was changed here."""
        self._known.pop(token_id, None)
        if self._required is not None and not self._required[1]:
            self._required = None

    async def _read(self, id: str) -> TokenRecord | None:
        now_ns = self._clock.monotonic_ns()
        known = self._known.get(id)
        if known is not None and not self._is_old(known[0], now_ns):
            return known[1]
        record = await self.store.get(id)
        self._known[id] = (now_ns, record)  # the time before reading: it may have changed while it was read
        self._known.move_to_end(id)
        if len(self._known) > MAX_CACHED:
            self._known.popitem(last=False)
        return record

    async def _note_use(self, record: TokenRecord) -> None:
        """Record the use, which the store does once an hour; a token is accepted even if that fails."""
        now_ms = self._clock.time_ns() // _NANOS_PER_MS
        if record.is_active(now_ms) and record.is_use_due(now_ms):
            self._known.pop(record.id, None)
            with suppress(StoreUnavailable, asyncio.TimeoutError):
                await self.store.use(record.id, now_ms=now_ms)

    def _is_old(self, read_ns: int, now_ns: int) -> bool:
        return now_ns - read_ns > MAX_AGE_S * _NANOS_PER_S


def as_token(record: TokenRecord) -> Token:
    """Return a stored token as the guards know tokens."""
    until_ns = None if record.expires_ms is None else record.expires_ms * _NANOS_PER_MS
    return Token(User(record.name, record.role), b"", until_ns, record)


def create_token(
    name: str,
    role: str,
    *,
    by: str,
    now_ms: int,
    expires: str | None = None,
    note: str = "",
    kind: TokenKind = "user",
    limits: Mapping[str, Any] | None = None,
    models: Sequence[str] | None = None,
    team: str = "",
) -> tuple[TokenRecord, str]:
    """Create a token and its secret, which is not part of the record; InvalidValue says what is wrong.

    `expires` is a day or a time, as `until=` of a token in the environment; `limits`, `models` and `team` are those of
    a gateway key.
    """
    if not NAME.fullmatch(name):
        raise InvalidValue("name", name, "1 to 64 of A-Z a-z 0-9 . _ -, a letter or digit first")
    if role not in ROLES:
        raise InvalidValue("role", role, f"one of {', '.join(ROLES)}")
    if len(note) > MAX_NOTE or not note.isprintable():
        raise InvalidValue("note", note[:40], f"at most {MAX_NOTE} characters on one line")
    if team and not NAME.fullmatch(team):
        raise InvalidValue("team", team, "1 to 64 of A-Z a-z 0-9 . _ -, a letter or digit first")
    secret, id, salt, digest = new_secret()
    checked_role: TokenRole = role
    expires_ms = None if expires is None else _expires_ms(expires, now_ms)
    record = TokenRecord(id, name, checked_role, salt, digest, now_ms, by, kind, expires_ms, note=note)
    return replace(record, limits=limits, models=models, team=team), secret


async def check_team(store: TokenStore, key: TokenRecord, now_ms: int) -> None:
    """Raise AnotherTeam if an active gateway key of the same user belongs to another team.

    The daily budget of a user is part of that of their team, so a user has one team at a time.
    """
    async for other in all_tokens(store, "gateway"):
        if other.name == key.name and other.is_active(now_ms) and other.team != key.team:
            raise AnotherTeam(other)


async def all_tokens(store: TokenStore, *kinds: TokenKind) -> AsyncIterator[TokenRecord]:
    """Yield the tokens of these kinds, or all, newest first."""
    before: str | None = None
    while page := await store.list(kinds=kinds, before=before, limit=PAGE):
        for token in page:
            yield token
        before = page[-1].id


def _expires_ms(text: str, now_ms: int) -> int:
    try:
        expires_ms = parse_until(text) // _NANOS_PER_MS
    except TokensInvalid as invalid:
        raise InvalidValue(
            "expires", text[:40], invalid.expected.partition(" must be ")[2] or invalid.expected
        ) from None
    if expires_ms <= now_ms:
        raise InvalidValue("expires", text[:40], "a time that is not past")
    return expires_ms
