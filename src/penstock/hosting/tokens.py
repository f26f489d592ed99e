"""Access tokens in the database: the record, its secret, and the port of the store.

A secret is shown once, when the token is created. The database stores a random salt and the SHA-256 of salt and secret:
a copy of the database grants no access, and two databases cannot be compared. A secret contains the id of its token, so
a lookup reads one row by its key. Knows nothing of HTTP, nor of the tokens in a server's environment.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from penstock.hosting.ports import Conflict

TokenRole = Literal["viewer", "user", "admin"]
TokenKind = Literal["user", "gateway"]
TOKEN_ROLES: tuple[TokenRole, ...] = get_args(TokenRole)
TOKEN_KINDS: tuple[TokenKind, ...] = get_args(TokenKind)
"""A `user` token is a person's or a program's; a `gateway` key may call models only, within limits of its own."""

PREFIX = "pen"
SECRET = re.compile(rb"pen_(?P<id>[0-9a-f]{12})_[A-Za-z0-9_-]{20,200}")
ID_BYTES = 6
SECRET_BYTES = 32
USE_INTERVAL_MS = 3_600_000
"""Shortest interval between two writes of a token's last use."""


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """One token, without its secret."""

    id: str
    name: str
    """Name of the user whom the token authenticates."""
    role: TokenRole
    salt: str
    digest: str
    """SHA-256 of the salt and the secret, in hexadecimal digits."""
    created_ms: int = 0
    created_by: str = ""
    kind: TokenKind = "user"
    expires_ms: int | None = None
    """The last millisecond at which the token is valid; None if it does not expire."""
    revoked_ms: int | None = None
    revoked_by: str | None = None
    last_used_ms: int | None = None
    """The last use, to the hour: it is written once an hour at most."""
    note: str = ""
    limits: Mapping[str, Any] | None = None
    """Limits of a gateway key; None for a user's token."""
    models: Sequence[str] | None = None
    """Models that a gateway key may call; None for all."""
    team: str = ""
    """Team of a gateway key, which also spends from the team's daily budget; empty for none."""

    def is_active(self, now_ms: int) -> bool:
        """Whether the token is neither revoked nor expired."""
        return self.revoked_ms is None and (self.expires_ms is None or now_ms <= self.expires_ms)

    def is_use_due(self, now_ms: int) -> bool:
        """Whether a use at this time would be recorded."""
        return self.last_used_ms is None or self.last_used_ms <= now_ms - USE_INTERVAL_MS

    @property
    def is_admin(self) -> bool:
        """Whether the token gives its user the rights of an admin."""
        return self.kind == "user" and self.role == "admin"

    def matches(self, secret: bytes) -> bool:
        """Whether the secret is that of this token."""
        return hmac.compare_digest(self.digest, digest_of(self.salt, secret))


class TokenNotFound(Conflict):
    """No token has this id."""

    def __init__(self, token_id: str) -> None:
        self.token_id = token_id
        super().__init__(f"there is no token {token_id!r}; list the tokens to see their ids")


class NameTaken(Conflict):
    """Another active token has the same name."""

    def __init__(self, name: str, token_id: str) -> None:
        self.name = name
        self.token_id = token_id
        super().__init__(
            f"{name} has the active token {token_id} already; revoke it, choose another name, "
            f"or request another token for {name}, such as to replace one without an interruption"
        )


class AnotherTeam(Conflict):
    """An active gateway key of the same user belongs to another team."""

    def __init__(self, other: TokenRecord) -> None:
        self.other = other
        team = f"of team {other.team!r}" if other.team else "without a team"
        super().__init__(
            f"{other.name} has the active gateway key {other.id} {team}, and a user has one team at a time; "
            "revoke that key, or create this one for the same team"
        )


class LastAdmin(Conflict):
    """Revoking this token would leave no admin."""

    def __init__(self, token_id: str) -> None:
        self.token_id = token_id
        super().__init__(
            f"token {token_id} is the last active one of an admin: without it, tokens can be managed with "
            "`penstock tokens` on the database only; create another admin's token first"
        )


class TokenStore(Protocol):
    """Tokens by id. Tokens are never removed, so that an id always identifies the token that was used."""

    async def add(self, token: TokenRecord, *, is_only: bool = False) -> TokenRecord:
        """Store a new token; idempotent for the same token, Conflict for a different one with the same id.

        With `is_only`, NameTaken if another user's token of that name is active at `created_ms`.
        """

    async def get(self, token_id: str) -> TokenRecord | None:
        """Return the token, or None if the id is unknown."""

    async def list(
        self, *, kinds: Collection[TokenKind] = (), before: str | None = None, limit: int = 100
    ) -> Sequence[TokenRecord]:
        """Return tokens, newest first (by created_ms, then id); `before` is the last id of the previous page."""

    async def revoke(self, token_id: str, *, by: str, now_ms: int, keep_admin: bool = False) -> TokenRecord:
        """Revoke a token; a revoked one is returned as it is. TokenNotFound if the id is unknown.

        With `keep_admin`, LastAdmin if no other admin's token would be active at `now_ms`.
        """

    async def use(self, token_id: str, *, now_ms: int) -> None:
        """Record a use, unless one was recorded in the hour before; nothing if the id is unknown."""

    async def has_admin(self) -> bool:
        """Whether there is a user token with the role admin, active or not."""


def new_secret(random_bytes: Callable[[int], bytes] = secrets.token_bytes) -> tuple[str, str, str, str]:
    """Create a secret; return it with the id that it contains, its salt and its digest."""
    id, salt = random_bytes(ID_BYTES).hex(), random_bytes(16).hex()
    text = base64.urlsafe_b64encode(random_bytes(SECRET_BYTES)).decode().rstrip("=")
    secret = f"{PREFIX}_{id}_{text}"
    return secret, id, salt, digest_of(salt, secret.encode())


def digest_of(salt: str, secret: bytes) -> str:
    """Return the salted SHA-256 of a secret; its 256 random bits need no slow hash."""
    return hashlib.sha256(bytes.fromhex(salt) + secret).hexdigest()


def id_in(secret: bytes) -> str | None:
    """Return the token id that a secret contains; None if it does not have the form of the database's secrets."""
    found = SECRET.fullmatch(secret)
    return None if found is None else found["id"].decode()
