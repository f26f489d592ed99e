"""Who asks, and what they may do: users, their tokens, and one table of every route.

What is not in the table does not exist: the gate answers before any route is looked for, so a route that somebody
forgot to declare cannot be reached. Nothing here knows HTTP beyond paths and methods, or where things are kept.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import TYPE_CHECKING, Literal, get_args

from penstock.errors import PenstockError

if TYPE_CHECKING:
    from starlette.requests import Request

Role = Literal["viewer", "user", "admin"]
Access = Literal["open", "viewer", "user", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)
"""From the least to the most: a viewer reads what is theirs, a user also writes it, an admin does everything."""

MIN_SECRET = 16
MAX_SECRET = 512
MAX_TOKENS = 10_000
NAMES_SHOWN = 20
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
SECRET = re.compile(r"[!-~]+")
"""What a header can carry: printable ASCII, no spaces."""
UNTIL = "until="
DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
MOMENT = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(?P<zone>Z|[+-][0-9]{2}:[0-9]{2})?")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NANOS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class User:
    """Somebody who was let in."""

    name: str
    role: Role

    def may(self, access: Access) -> bool:
        """Whether the role is enough."""
        return access == "open" or ROLES.index(self.role) >= ROLES.index(access)

    @property
    def is_admin(self) -> bool:
        """Whether they may see and change what is others'."""
        return self.role == "admin"


LOCAL = User("local", "admin")
"""Everybody, where there are no tokens; such a server listens on loopback alone."""


class TokensInvalid(PenstockError):
    """A line of a token file cannot be used; says which, and never what stands there."""

    def __init__(self, line: int, expected: str) -> None:
        self.line = line
        self.expected = expected
        shape = "name:role:secret, or name:role:secret until=2026-12-31"
        super().__init__(f"line {line} of the tokens: {expected}; a token is written {shape}")


class TokensMissing(PenstockError):
    """Tokens were named, and there are none: whoever names them wants them asked for."""

    def __init__(self, *named: str) -> None:
        self.named = named
        where = " and ".join(named)
        instead = "leave it out to let in everybody on this machine, as an admin"
        super().__init__(f"there is no token in {where}: write name:role:secret, one a line, or {instead}")


@dataclass(frozen=True, slots=True)
class Token:
    """A user, and the SHA-256 of the secret that proves it; the secret itself is not kept."""

    user: User
    digest: bytes
    until_ns: int | None = None
    """The last moment at which it is good, in nanoseconds since 1970; None if it always is."""

    @classmethod
    def of(cls, name: str, role: Role, secret: str, until: str | None = None) -> Token:
        """The token of a user with that secret, good until then."""
        return _token(1, name, role, secret, None if until is None else _until_ns(1, until))

    def has_expired(self, now_ns: int) -> bool:
        """Whether it was good once, and is not any more."""
        return self.until_ns is not None and now_ns > self.until_ns

    def __repr__(self) -> str:
        until = "" if self.until_ns is None else f", until {written(self.until_ns)}"
        return f"<Token of {self.user.name}, {self.user.role}{until}>"


def parse_tokens(lines: Iterable[str]) -> tuple[Token, ...]:
    """The tokens in lines of `name:role:secret` and, behind a space, maybe `until=` and a day or a moment.

    Empty lines and those that begin with # say nothing.
    """
    tokens: dict[bytes, Token] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        token = _parsed(number, text)
        if len(tokens) == MAX_TOKENS:
            raise TokensInvalid(number, f"there may be {MAX_TOKENS}")
        if token.digest in tokens:
            raise TokensInvalid(number, "its secret is that of another token; every token has one of its own")
        tokens[token.digest] = token
    return tuple(tokens.values())


def _parsed(number: int, text: str) -> Token:
    name, _, rest = text.partition(":")
    role, _, rest = rest.partition(":")
    secret, _, words = rest.partition(" ")
    # What stands behind the secret is never shown: it may be the rest of a secret that has spaces.
    untils = [word.removeprefix(UNTIL) for word in words.split() if word.startswith(UNTIL)]
    if len(untils) < len(words.split()):
        raise TokensInvalid(number, f"behind the secret, which has no spaces, there may be {UNTIL} and nothing else")
    if len(untils) > 1:
        raise TokensInvalid(number, f"it says {UNTIL} more than once, and may say it once")
    return _token(number, name, role, secret, _until_ns(number, untils[0]) if untils else None)


def _token(number: int, name: str, role: str, secret: str, until_ns: int | None) -> Token:
    if not NAME.fullmatch(name):
        raise TokensInvalid(number, "the name must be 1 to 64 of A-Z a-z 0-9 . _ -, a letter or digit first")
    if role not in ROLES:
        raise TokensInvalid(number, f"the role must be one of {', '.join(ROLES)}")
    if not MIN_SECRET <= len(secret) <= MAX_SECRET or not SECRET.fullmatch(secret):
        raise TokensInvalid(number, f"the secret must be {MIN_SECRET} to {MAX_SECRET} printable characters, no spaces")
    if secret.startswith(UNTIL):  # a line whose secret was forgotten: a day is no secret
        raise TokensInvalid(number, f"the secret must stand before {UNTIL}, and not begin with it")
    return Token(User(name, role), _digest(secret.encode()), until_ns)


def _until_ns(number: int, text: str) -> int:
    """The last nanosecond of a day, or the moment itself."""
    moment = MOMENT.fullmatch(text)
    if moment is None and not DAY.fullmatch(text):
        expected = "a day such as 2026-12-31, which is good to its end in UTC, or a moment such as 2026-12-31T18:00:00Z"
        raise TokensInvalid(number, f"{UNTIL} must have {expected}")
    if moment is not None and moment["zone"] is None:
        raise TokensInvalid(number, f"{UNTIL} must say the zone of a time: Z behind it for UTC, or such as +02:00")
    try:
        if moment is not None:
            return _ns(datetime.fromisoformat(text).astimezone(UTC))
        return _ns(datetime.combine(date.fromisoformat(text), time(23, 59, 59), UTC)) + _NANOS_PER_S - 1
    except (ValueError, OverflowError):
        raise TokensInvalid(number, f"{UNTIL} must have a day and a time that exist, in the years 1 to 9999") from None


def _ns(moment: datetime) -> int:
    return (moment - _EPOCH) // timedelta(seconds=1) * _NANOS_PER_S


def written(until_ns: int) -> str:
    """A token's last moment as people read it, to the second and in UTC."""
    return (_EPOCH + timedelta(seconds=until_ns // _NANOS_PER_S)).isoformat().replace("+00:00", "Z")


def names_of(tokens: Iterable[Token]) -> str:
    """Whose tokens they are, each named once; of many, the first."""
    names = list(dict.fromkeys(token.user.name for token in tokens))
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


def spenders(tokens: Iterable[Token], now_ns: int) -> set[str]:
    """Who may start runs now, and so spend money, by name."""
    return {token.user.name for token in tokens if token.user.may("user") and not token.has_expired(now_ns)}


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def secret_in(authorization: bytes) -> bytes | None:
    """What an Authorization header presents; None if it is nothing, or for another scheme."""
    scheme, _, secret = authorization.partition(b" ")
    return secret.strip() or None if scheme.lower() == b"bearer" else None


def token_of(tokens: Iterable[Token], secret: bytes) -> Token | None:
    """The token of that secret, be it good or over; every one is compared, so the time says not which."""
    presented = _digest(secret)
    found: Token | None = None
    for token in tokens:
        if hmac.compare_digest(token.digest, presented):
            found = token
    return found


def current_user(request: Request) -> User:
    """Who asks; the gate has let them in."""
    user: User = request.state.user
    return user


READ: Mapping[str, Access] = {"GET": "viewer"}
WRITE: Mapping[str, Access] = {"POST": "user"}

ACCESS: Mapping[str, Mapping[str, Access]] = {
    "/": {"GET": "open"},
    "/health": {"GET": "open", "HEAD": "open"},
    "/ready": {"GET": "open", "HEAD": "open"},
    "/metrics": {"GET": "admin"},
    "/api/openapi.json": READ,
    "/api/me": READ,
    "/api/node-types": READ,
    "/api/graphs": {"GET": "viewer", "POST": "user"},
    "/api/graphs/validate": WRITE,
    "/api/graphs/{graph_id}": {"GET": "viewer", "PUT": "user", "DELETE": "user"},
    "/api/graphs/{graph_id}/versions": READ,
    "/api/runs": {"GET": "viewer", "POST": "user"},
    "/api/runs/{run_id}": READ,
    "/api/runs/{run_id}/events": READ,
    "/api/runs/{run_id}/export": READ,
    "/api/runs/{run_id}/cancel": WRITE,
    "/api/runs/{run_id}/resume": WRITE,
    "/api/runs/{run_id}/grant": WRITE,
    "/api/runs/{run_id}/fork": WRITE,
    "/api/runs/{run_id}/replay": WRITE,
    "/api/approvals": READ,
    "/api/approvals/{approval_id}": READ,
    "/api/approvals/{approval_id}/approve": WRITE,
    "/api/approvals/{approval_id}/edit": WRITE,
    "/api/approvals/{approval_id}/reject": WRITE,
    "/api/chats": {"GET": "viewer", "POST": "user"},
    "/api/chats/{chat_id}": {"GET": "viewer", "PATCH": "user", "DELETE": "user"},
    "/api/chats/{chat_id}/messages": WRITE,
    "/api/chats/{chat_id}/messages/{message_id}/continue": WRITE,
    "/api/chats/{chat_id}/messages/{message_id}/retry": WRITE,
    "/api/chats/{chat_id}/messages/{message_id}/edit": WRITE,
    "/api/chats/{chat_id}/messages/{message_id}/choose": WRITE,
    "/api/agents/{graph_id}/chat": WRITE,
    "/api/attachments": WRITE,
    "/api/attachments/{attachment_id}": READ,
    "/v1/models": READ,
    "/v1/models/{model_id}": READ,
    "/v1/chat/completions": WRITE,
    "/v1/responses": WRITE,
    "/v1/responses/{response_id}": {"GET": "viewer", "DELETE": "user"},
    "/v1/responses/{response_id}/cancel": WRITE,
    "/mcp": {"GET": "user", "POST": "user", "DELETE": "user"},
}
"""Every route there is, and the least role that may use it; whose things they may touch, the routes look at."""


class Rules:
    """Finds the rule for a path; one way or none, and the most literal first."""

    def __init__(self, access: Mapping[str, Mapping[str, Access]] = ACCESS) -> None:
        self._literal = {path: methods for path, methods in access.items() if "{" not in path}
        self._patterns = [(_pattern(path), path, methods) for path, methods in access.items() if "{" in path]

    def find(self, path: str) -> tuple[str, Mapping[str, Access]] | None:
        """The route's template and what each of its methods asks for; None if there is no such route."""
        if path in self._literal:
            return path, self._literal[path]
        for pattern, template, methods in self._patterns:
            if pattern.fullmatch(path):
                return template, methods
        return None


def reserved(template: str, access: Mapping[str, Mapping[str, Access]] = ACCESS) -> frozenset[str]:
    """What nothing may be called whose id ends a path of that template: such a path is another route's."""
    pattern = _pattern(template)
    return frozenset(path.rpartition("/")[2] for path in access if "{" not in path and pattern.fullmatch(path))


def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(template)))
