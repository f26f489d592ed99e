"""The body guard: limits on size, time and type of request bodies, and strict parsing of their JSON.

A body, chunked or not, is received completely before the route is called, within limits of size, time and total memory.
All bodies are JSON except those of RAW. Compressed bodies are rejected: a small one may expand without bound.

Many clients send the whole body before they read the response, and a client that is still sending when the connection
is closed never sees it. So a body that is too large is answered at once, and then read on briefly and discarded.

JSON is checked before any other code reads it. What a parser accepts and later code cannot handle is rejected, with its
path: text that is not UTF-8, unpaired surrogates, NUL, NaN and infinities, integers beyond 64 bits, duplicate keys,
nesting that leads to a RecursionError, and an excessive number of values.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.server.errors import ApiError, send_error
from penstock.server.guards import headers_named
from penstock.server.settings import ServerSettings

RAW: Mapping[str, str] = {"/api/attachments": "max_attachment_bytes"}
"""Routes that accept any bytes, with the setting that limits their size."""
THREAD_MIN_BYTES = 64 * 1024
"""Bodies of at least this size are checked on a thread."""
LINGER_BYTES = 32 * 1024 * 1024
LINGER_S = 2.0
"""How much, and for how long, a body rejected for its size is read on before the connection is closed."""
MAX_INTEGER = 2**63 - 1

Place = tuple[Any, Any] | None
"""The path of a value: the path of its container, and its key there; rendered only for an error."""


class TooLarge(ApiError):
    """A body exceeds its size limit."""

    def __init__(self, limit: int) -> None:
        message = f"the body is larger than {limit} bytes, the limit of this route"
        super().__init__(413, message, headers={"Connection": "close"})


class BodyGuard:
    """Receives and checks bodies before the app is called."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings
        self._free_bytes = settings.max_buffered_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in {"GET", "HEAD", "OPTIONS"}:
            await self._app(scope, receive, send)
            return
        body = _Body(self)
        try:
            await self._receive(body, scope, receive)
        except ClientDisconnect:
            body.release()
            return
        except TooLarge as error:
            body.release()
            await _refuse_and_drain(error, body, scope, receive, send)
            return
        except ApiError as error:
            body.release()
            await send_error(error, scope, receive, send)
            return
        try:
            await self._app(scope, body.replay_before(receive), send)
        finally:
            body.release()

    async def _receive(self, body: _Body, scope: Scope, receive: Receive) -> None:
        setting = RAW.get(scope["path"])
        limit: int = getattr(self._settings, setting or "max_body_bytes")
        _check_headers(scope, limit)
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                await body.read(receive, limit)
        except TimeoutError:
            message = f"the body did not arrive within {self._settings.body_timeout_s:g} s"
            raise ApiError(408, message, headers={"Connection": "close"}) from None
        if body.content and setting is None:
            _check_type(scope)
            await self._check_json(bytes(body.content))

    async def _check_json(self, raw: bytes) -> None:
        bounds = {"max_depth": self._settings.max_json_depth, "max_values": self._settings.max_json_values}
        if len(raw) < THREAD_MIN_BYTES:
            read_json(raw, **bounds)
        else:
            await asyncio.to_thread(read_json, raw, **bounds)

    def reserve(self, size: int) -> None:
        """Reserve buffer space; raises ApiError (503) if all bodies together exceed the limit."""
        if size > self._free_bytes:
            raise ApiError(
                503,
                "too many request bodies are being received at once; retry in a moment",
                code="overloaded",
                retry_after_s=1,
            )
        self._free_bytes -= size

    def release(self, size: int) -> None:
        """Release reserved buffer space."""
        self._free_bytes += size


class _Body:
    """One body, as far as it has been received."""

    def __init__(self, guard: BodyGuard) -> None:
        self.content = bytearray()
        self._guard = guard
        self._reserved = 0
        self._is_replayed = False
        self.is_complete = False
        """Whether the client has sent all of it, buffered or not."""

    async def read(self, receive: Receive, limit: int) -> None:
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            piece = message.get("body", b"")
            more = message.get("more_body", False)
            self.is_complete = not more
            if len(self.content) + len(piece) > limit:
                raise TooLarge(limit)
            self._guard.reserve(len(piece))
            self._reserved += len(piece)
            self.content += piece

    def release(self) -> None:
        self._guard.release(self._reserved)
        self._reserved = 0

    def replay_before(self, receive: Receive) -> Receive:
        """Return a `receive` that gives the body as one message, and then later messages, such as a disconnect."""

        async def replay() -> Message:
            if self._is_replayed:
                return await receive()
            self._is_replayed = True
            content = bytes(self.content)
            self.content = bytearray()
            self.release()
            return {"type": "http.request", "body": content, "more_body": False}

        return replay


def _check_headers(scope: Scope, limit: int) -> None:
    if any(value.lower() != b"identity" for value in headers_named(scope, b"content-encoding")):
        raise ApiError(415, "send the body uncompressed, without a Content-Encoding")
    for length in headers_named(scope, b"content-length"):
        if not length.isdigit() or len(length) > 20 or int(length) > limit:
            raise TooLarge(limit)


async def _refuse_and_drain(error: ApiError, body: _Body, scope: Scope, receive: Receive, send: Send) -> None:
    """Respond, but complete the response, which closes the connection, only after reading on from the client."""

    async def send_open(message: Message) -> None:
        await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)

    await send_error(error, scope, receive, send_open)
    if not body.is_complete and _may_drain(scope):
        await _drain(receive)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _may_drain(scope: Scope) -> bool:
    """Whether to read on: not if the client awaits `100 Continue`, or has announced more than LINGER_BYTES."""
    lengths = headers_named(scope, b"content-length")
    is_bounded = all(length.isdigit() and len(length) <= 20 and int(length) <= LINGER_BYTES for length in lengths)
    return is_bounded and not headers_named(scope, b"expect")


async def _drain(receive: Receive) -> None:
    left = LINGER_BYTES
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while left > 0:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
                left -= len(message["body"])


def _check_type(scope: Scope) -> None:
    types = headers_named(scope, b"content-type")
    kind, _, parameters = types[0].partition(b";") if len(types) == 1 else (b"", b"", b"")
    charset = parameters.strip().lower().replace(b'"', b"")
    is_json = kind.strip().lower() == b"application/json" and charset in {b"", b"charset=utf-8"}
    if not is_json:
        raise ApiError(415, "send JSON with Content-Type: application/json")


def read_json(raw: bytes, *, max_depth: int, max_values: int) -> Any:
    """Parse `raw`; raises ApiError with the problem and its path."""
    value = _parse(raw, max_depth)
    _check_value(value, max_depth, max_values, has_escapes=b"\\u" in raw)
    return value


def _parse(raw: bytes, max_depth: int) -> Any:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _invalid(400, "bad_text", f"byte {error.start} is not UTF-8") from None
    try:
        return json.loads(text, parse_constant=_reject_constant, object_pairs_hook=_object)
    except RecursionError:
        raise _too_deep(max_depth, None) from None
    except json.JSONDecodeError as error:
        raise _invalid(400, "bad_json", f"invalid JSON: {error.msg} at character {error.pos}") from None
    except ValueError:  # from int(): more digits than Python converts
        raise _invalid(422, "bad_number", "an integer has too many digits") from None


def _reject_constant(name: str) -> Any:
    raise _invalid(422, "bad_number", f"{name} is not a JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((duplicate, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise _invalid(422, "duplicate_key", f"the key {ascii(duplicate)[:80]} occurs twice in one object")
    return found


def _check_value(value: Any, max_depth: int, max_values: int, *, has_escapes: bool) -> None:
    """Check every value; strings only if the text has escapes, without which none can be invalid."""
    todo: list[tuple[Any, Place, int]] = [(value, None, 0)]
    left = max_values
    while todo:
        item, place, depth = todo.pop()
        left -= 1
        if left < 0:
            raise _invalid(422, "too_large", f"the body has more than {max_values} values")
        if isinstance(item, str):
            if has_escapes:
                _check_text(item, place)
        elif isinstance(item, (dict, list)):
            if depth >= max_depth:
                raise _too_deep(max_depth, place)
            todo.extend((child, (place, key), depth + 1) for key, child in _children(item, place, has_escapes))
        elif isinstance(item, (int, float)):
            _check_number(item, place)


def _children(container: dict[str, Any] | list[Any], place: Place, has_escapes: bool) -> Iterator[tuple[Any, Any]]:
    if isinstance(container, list):
        return enumerate(container)
    if has_escapes:
        for key in container:
            _check_text(key, place)
    return iter(container.items())


def _check_text(text: str, place: Place) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _invalid(422, "bad_text", "a string contains an unpaired surrogate", place) from None
    if "\0" in text:
        raise _invalid(422, "bad_text", "a string contains a NUL character", place)


def _check_number(number: float, place: Place) -> None:
    if isinstance(number, int) and abs(number) > MAX_INTEGER:
        raise _invalid(422, "bad_number", f"an integer has more than {MAX_INTEGER.bit_length() + 1} bits", place)
    if not math.isfinite(number):
        raise _invalid(422, "bad_number", "a number is too large", place)


def _too_deep(max_depth: int, place: Place) -> ApiError:
    return _invalid(422, "too_deep", f"values are nested deeper than {max_depth} levels", place)


def _invalid(status: int, code: str, message: str, place: Place = None) -> ApiError:
    path = _path(place)
    return ApiError(status, f"{path}: {message}", code=code, path=path)


def _path(place: Place) -> str:
    steps: list[str] = []
    while place is not None:
        place, key = place
        steps.append(
            f"[{key}]" if isinstance(key, int) else f".{key[:80]}" if key.isidentifier() else f"[{_quoted(key)}]"
        )
    return "$" + "".join(reversed(steps))[:500]


def _quoted(key: str) -> str:
    return json.dumps(key[:80])  # escapes characters that cannot be encoded
