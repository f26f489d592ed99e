"""Authentication and authorization: users, their tokens, and one access table of every route.

A route missing from the table cannot be reached: the auth guard checks the table before routing, so an undeclared
route is never run. This module knows paths and methods, but nothing else of HTTP and nothing of storage.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import TYPE_CHECKING, Literal, get_args

from penstock.errors import InvalidValue, PenstockError
from penstock.hosting.tokens import TokenRecord

if TYPE_CHECKING:
    from starlette.requests import Request

Role = Literal["viewer", "user", "admin"]
Access = Literal["open", "viewer", "user", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)
"""In ascending order: a viewer reads their own things, a user also writes them, an admin may do everything."""

MIN_SECRET = 16
MAX_SECRET = 512
MAX_TOKENS = 10_000
NAMES_SHOWN = 20
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
SECRET = re.compile(r"[!-~]+")
"""Characters that a header can carry: printable ASCII, no spaces."""
UNTIL = "until="
DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
MOMENT = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(?P<zone>Z|[+-][0-9]{2}:[0-9]{2})?")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST_S = (datetime.min.replace(tzinfo=UTC) - _EPOCH) // timedelta(seconds=1)
_LAST_S = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // timedelta(seconds=1)
_NANOS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class User:
    """An authenticated user."""

    name: str
    role: Role

    def may(self, access: Access) -> bool:
        """Whether the role is sufficient for `access`."""
        return access == "open" or ROLES.index(self.role) >= ROLES.index(access)

    @property
    def is_admin(self) -> bool:
        """Whether the user may see and change the things of other users."""
        return self.role == "admin"

    def may_see(self, owner: str) -> bool:
        """Whether the user may see the things of that owner."""
        return self.is_admin or owner == self.name

    def check_new_id(self, field: str, id: str | None) -> None:
        """Raise InvalidValue for an id with another user's prefix: users cannot take or cancel each other's ids."""
        if id is not None and ":" in id and not id.startswith(f"{self.name}:") and not self.is_admin:
            raise InvalidValue(field, id, f"an id without a colon, or one that begins with your own name: {self.name}:")


LOCAL = User("local", "admin")
"""The user of every request when no tokens are configured; such a server listens on loopback only."""


class TokensInvalid(PenstockError):
    """A line of the tokens is invalid; the error names the line and never contains its text."""

    def __init__(self, line: int, expected: str) -> None:
        self.line = line
        self.expected = expected
        shape = "name:role:secret, or name:role:secret until=2026-12-31"
        super().__init__(f"line {line} of the tokens: {expected}; write a token as {shape}")


class TokensMissing(PenstockError):
    """A source of tokens is configured and contains none; the operator expects authentication."""

    def __init__(self, *named: str) -> None:
        self.named = named
        where = " and ".join(named)
        instead = "remove it to give every client on this machine access as an admin"
        super().__init__(f"there is no token in {where}: add lines of name:role:secret, or {instead}")


@dataclass(frozen=True, slots=True)
class Token:
    """A user and the SHA-256 of their secret; the secret itself is not kept.

    A token of the database has its record, and no digest here.
    """

    user: User
    digest: bytes
    until_ns: int | None = None
    """Last moment at which the token is valid, in nanoseconds since 1970; None if it does not expire."""
    record: TokenRecord | None = None
    """The token in the database; None for one of the environment."""

    @property
    def id(self) -> str:
        """The id of a token of the database; empty for one of the environment."""
        return "" if self.record is None else self.record.id

    @property
    def is_revoked(self) -> bool:
        """Whether the token was revoked when it was found."""
        return self.record is not None and self.record.revoked_ms is not None

    @property
    def is_gateway_key(self) -> bool:
        """Whether it is a gateway key: it can call models through the gateway, and use no route of the server."""
        return self.record is not None and self.record.kind == "gateway"

    @classmethod
    def of(cls, name: str, role: Role, secret: str, until: str | None = None) -> Token:
        """Create the token of a user with that secret, valid until `until`; raises TokensInvalid."""
        return _token(1, name, role, secret, None if until is None else _until_ns(1, until))

    def has_expired(self, now_ns: int) -> bool:
        """Whether the token is no longer valid at `now_ns`."""
        return self.until_ns is not None and now_ns > self.until_ns

    def __repr__(self) -> str:
        until = "" if self.until_ns is None else f", until {format_time(self.until_ns)}"
        return f"<Token of {self.user.name}, {self.user.role}{until}>"


def parse_tokens(lines: Iterable[str]) -> tuple[Token, ...]:
    """Parse lines of `name:role:secret`, optionally followed by a space and `until=` with a day or a moment.

    Empty lines and lines that begin with # are skipped. Raises TokensInvalid for the first invalid line.
    """
    tokens: dict[bytes, Token] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        token = _parse_line(number, text)
        if len(tokens) == MAX_TOKENS:
            raise TokensInvalid(number, f"at most {MAX_TOKENS} tokens are allowed")
        if token.digest in tokens:
            raise TokensInvalid(number, "another token has the same secret; each needs its own")
        tokens[token.digest] = token
    return tuple(tokens.values())


def _parse_line(number: int, text: str) -> Token:
    name, _, rest = text.partition(":")
    role, _, rest = rest.partition(":")
    secret, _, words = rest.partition(" ")
    # Text after the secret is never shown: it may be the rest of a secret that contains spaces.
    untils = [word.removeprefix(UNTIL) for word in words.split() if word.startswith(UNTIL)]
    if len(untils) < len(words.split()):
        raise TokensInvalid(number, f"only {UNTIL} may follow the secret, which has no spaces")
    if len(untils) > 1:
        raise TokensInvalid(number, f"{UNTIL} is there more than once")
    return _token(number, name, role, secret, _until_ns(number, untils[0]) if untils else None)


def _token(number: int, name: str, role: str, secret: str, until_ns: int | None) -> Token:
    if not NAME.fullmatch(name):
        raise TokensInvalid(number, "the name must be 1 to 64 of A-Z a-z 0-9 . _ -, a letter or digit first")
    if role not in ROLES:
        raise TokensInvalid(number, f"the role must be one of {', '.join(ROLES)}")
    if not MIN_SECRET <= len(secret) <= MAX_SECRET or not SECRET.fullmatch(secret):
        raise TokensInvalid(number, f"the secret must be {MIN_SECRET} to {MAX_SECRET} printable characters, no spaces")
    if secret.startswith(UNTIL):  # the secret is missing from the line: a date is not a secret
        raise TokensInvalid(number, f"the secret is missing before {UNTIL}, or begins with it")
    return Token(User(name, role), digest_of(secret.encode()), until_ns)


def _until_ns(number: int, text: str) -> int:
    """Parse `until`: the last nanosecond of a day, or the moment itself."""
    moment = MOMENT.fullmatch(text)
    if moment is None and not DAY.fullmatch(text):
        expected = "a day such as 2026-12-31, valid to its end in UTC, or a time such as 2026-12-31T18:00:00Z"
        raise TokensInvalid(number, f"{UNTIL} must be {expected}")
    if moment is not None and moment["zone"] is None:
        raise TokensInvalid(number, f"{UNTIL} needs the time zone of a time: Z for UTC, or an offset such as +02:00")
    try:
        if moment is not None:
            return _ns(datetime.fromisoformat(text).astimezone(UTC))
        return _ns(datetime.combine(date.fromisoformat(text), time(23, 59, 59), UTC)) + _NANOS_PER_S - 1
    except (ValueError, OverflowError):
        raise TokensInvalid(number, f"{UNTIL} must be a date and time that exist, in the years 1 to 9999") from None


def parse_until(text: str) -> int:
    """Parse the end of a token, a day or a time, in nanoseconds since 1970; raises TokensInvalid."""
    return _until_ns(1, text)


def _ns(moment: datetime) -> int:
    return (moment - _EPOCH) // timedelta(seconds=1) * _NANOS_PER_S


def format_time(until_ns: int) -> str:
    """Format the expiry of a token for people, in UTC and to the second; limited to the range of Python's calendar."""
    seconds = min(max(until_ns // _NANOS_PER_S, _FIRST_S), _LAST_S)
    return (_EPOCH + timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")


def names_of(tokens: Iterable[Token]) -> str:
    """List the owners of the tokens, each once; after NAMES_SHOWN names, only the number of the others."""
    names = list(dict.fromkeys(token.user.name for token in tokens))
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


def spenders(tokens: Iterable[Token], now_ns: int) -> set[str]:
    """Return the names of users who may start runs now, and so spend money."""
    return {token.user.name for token in tokens if token.user.may("user") and not token.has_expired(now_ns)}


def digest_of(secret: bytes) -> bytes:
    """Return the SHA-256 of a secret."""
    return hashlib.sha256(secret).digest()


def secret_in(authorization: bytes) -> bytes | None:
    """Return the secret of an Authorization header; None if it is empty or of another scheme than Bearer."""
    scheme, _, secret = authorization.partition(b" ")
    return secret.strip() or None if scheme.lower() == b"bearer" else None


def token_of(tokens: Iterable[Token], digest: bytes) -> Token | None:
    """Find the token of a secret by its digest, expired or not; compares all, so that timing does not reveal which."""
    found: Token | None = None
    for token in tokens:
        if hmac.compare_digest(token.digest, digest):
            found = token
    return found


def current_user(request: Request) -> User:
    """Return the user of the request, as set by the auth guard."""
    user: User = request.state.user
    return user


READ: Mapping[str, Access] = {"GET": "viewer"}
WRITE: Mapping[str, Access] = {"POST": "user"}

ACCESS: Mapping[str, Mapping[str, Access]] = {
    "/": {"GET": "open"},
    "/assets/{name}": {"GET": "open"},
    "/health": {"GET": "open", "HEAD": "open"},
    "/ready": {"GET": "open", "HEAD": "open"},
    "/metrics": {"GET": "admin"},
    "/docs": {"GET": "open"},
    "/api/openapi.json": READ,
    "/api/me": READ,
    "/api/node-types": READ,
    "/api/models": READ,
    "/api/tools": READ,
    "/api/mcp-servers": READ,
    "/api/graphs": {"GET": "viewer", "POST": "user"},
    "/api/graphs/validate": WRITE,
    "/api/graphs/{graph_id}": {"GET": "viewer", "PUT": "user", "DELETE": "user"},
    "/api/graphs/{graph_id}/versions": READ,
    "/api/graphs/{graph_id}/diff": READ,
    "/api/graphs/{graph_id}/source": READ,
    "/api/graphs/{graph_id}/layout": {"GET": "viewer", "PATCH": "user"},
    "/api/runs": {"GET": "viewer", "POST": "user"},
    "/api/runs/{run_id}": READ,
    "/api/runs/{run_id}/events": READ,
    "/api/runs/{run_id}/export": READ,
    "/api/runs/{run_id}/tree": READ,
    "/api/runs/{run_id}/explain": READ,
    "/api/runs/{run_id}/budgets": READ,
    "/api/runs/{run_id}/calls/{call_id}": READ,
    "/api/runs/{run_id}/diff/{other_id}": READ,
    "/api/runs/{run_id}/cancel": WRITE,
    "/api/runs/{run_id}/resume": WRITE,
    "/api/runs/{run_id}/grant": WRITE,
    "/api/runs/{run_id}/bills": READ,
    "/api/runs/{run_id}/bills/resolve": WRITE,
    "/api/runs/{run_id}/bills/release": WRITE,
    "/api/runs/{run_id}/fork": WRITE,
    "/api/runs/{run_id}/replay": WRITE,
    "/api/stream": READ,
    "/api/approvals": READ,
    "/api/approvals/{approval_id}": READ,
    "/api/approvals/{approval_id}/approve": WRITE,
    "/api/approvals/{approval_id}/edit": WRITE,
    "/api/approvals/{approval_id}/reject": WRITE,
    "/api/chats": {"GET": "viewer", "POST": "user"},
    "/api/chats/{chat_id}": {"GET": "viewer", "PATCH": "user", "DELETE": "user"},
    "/api/chats/{chat_id}/path": READ,
    "/api/chats/{chat_id}/messages": WRITE,
    "/api/chats/{chat_id}/messages/{message_id}/continue": WRITE,
    "/api/chats/{chat_id}/messages/{message_id}/retry": WRITE,
    "/api/chats/{chat_id}/messages/{message_id}/edit": WRITE,
    "/api/chats/{chat_id}/messages/{message_id}/choose": WRITE,
    "/api/agents": READ,
    "/api/agents/{graph_id}/chat": WRITE,
    "/api/attachments": WRITE,
    "/api/attachments/{attachment_id}": {"GET": "viewer", "DELETE": "user"},
    "/api/money": READ,
    "/api/budgets": READ,
    "/api/bills": READ,
    "/api/prices": READ,
    "/api/doctor": {"GET": "admin"},
    "/api/settings": {"GET": "admin"},
    "/api/host": {"GET": "admin"},
    "/api/tokens": {"GET": "admin", "POST": "admin"},
    "/api/tokens/{token_id}/spend": {"GET": "admin"},
    "/api/tokens/{token_id}/runs": {"GET": "admin"},
    "/api/tokens/{token_id}/bills": {"GET": "admin"},
    "/api/tokens/{token_id}/bills/resolve": {"POST": "admin"},
    "/api/tokens/{token_id}/bills/release": {"POST": "admin"},
    "/api/tokens/{token_id}/revoke": {"POST": "admin"},
    "/api/audit": {"GET": "admin"},
    "/api/people/{name}": {"GET": "admin"},
    "/api/people/{name}/export": {"GET": "admin"},
    "/api/people/{name}/erase": {"POST": "admin"},
    "/v1/models": READ,
    "/v1/models/{model_id}": READ,
    "/v1/chat/completions": WRITE,
    "/v1/embeddings": WRITE,
    "/v1/responses": WRITE,
    "/v1/responses/{response_id}": {"GET": "viewer", "DELETE": "user"},
    "/v1/responses/{response_id}/cancel": WRITE,
    "/mcp": {"GET": "user", "POST": "user", "DELETE": "user"},
}
"""Every route and the lowest role that may use it; the routes themselves check ownership."""


class Rules:
    """Finds the access rule of a path: literal paths before templates, at most one match."""

    def __init__(self, access: Mapping[str, Mapping[str, Access]] = ACCESS) -> None:
        self._literal = {path: methods for path, methods in access.items() if "{" not in path}
        self._patterns = [(_pattern(path), path, methods) for path, methods in access.items() if "{" in path]

    def find(self, path: str) -> tuple[str, Mapping[str, Access]] | None:
        """Return the route's template and the access each method requires; None if there is no such route."""
        if path in self._literal:
            return path, self._literal[path]
        for pattern, template, methods in self._patterns:
            if pattern.fullmatch(path):
                return template, methods
        return None


def reserved(template: str, access: Mapping[str, Mapping[str, Access]] = ACCESS) -> frozenset[str]:
    """Return the ids that cannot be used at the end of `template`, because such a path is another route's."""
    pattern = _pattern(template)
    return frozenset(path.rpartition("/")[2] for path in access if "{" not in path and pattern.fullmatch(path))


def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(template)))
