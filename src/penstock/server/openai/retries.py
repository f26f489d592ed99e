"""Requests that clients repeat by themselves after a lost connection: they get the run that is there.

A client's SDK repeats a request that got no answer. The run of a lost request continues for a moment (`grace_s`); if
the same user sends the same request in that time, that request follows the run, and nothing is paid twice. Otherwise
the run is cancelled. Requests that several clients send at once are separate, however equal they are: only a request
that was lost is taken up, or, if the SDK says that it repeats one (`x-stainless-retry-count`), one that is still under
way or was answered a moment ago: its answer may have been lost on its way. Errors are not: a retry of them starts anew.

In memory, for one process: across several, `Idempotency-Key` names the run, which then goes on without its client.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from penstock.errors import InvalidValue
from penstock.server.auth import User

T = TypeVar("T")
"""The run of a request, with what is needed to answer from it."""

MAX_KEY = 255
MAX_ANSWERED = 1_000
"""Maximum number of requests that are kept after their answer, with their inputs."""
RETRY_COUNT = "x-stainless-retry-count"
IDEMPOTENCY_KEY = "Idempotency-Key"


@dataclass(slots=True, eq=False)
class Entry(Generic[T]):
    """One request whose answer is not delivered yet."""

    retries: Retries[T]
    key: str
    handle: T
    adopted: asyncio.Event = field(default_factory=asyncio.Event)
    is_lost: bool = False

    def delivered(self) -> None:
        """Forget the request: its client has the answer."""
        self.retries.remove(self)

    def answered(self) -> None:
        """Forget the request in a moment: its answer is sent, and may be lost."""
        self.retries.keep(self)

    async def is_adopted(self) -> bool:
        """Wait for a repeated request after the client disconnected; return whether one came in time."""
        self.is_lost = True
        try:
            async with asyncio.timeout(self.retries.grace_s):
                await self.adopted.wait()
        except TimeoutError:
            pass
        finally:
            self.retries.remove(self)
        return self.adopted.is_set()


class Retries(Generic[T]):
    """The requests of one server whose answers are not delivered yet, or only just."""

    def __init__(self, grace_s: float) -> None:
        self.grace_s = grace_s
        self._entries: dict[str, list[Entry[T]]] = {}
        self._answered = 0

    def add(self, key: str, handle: T) -> Entry[T]:
        """Add a request that was started."""
        entry = Entry(self, key, handle)
        self._entries.setdefault(key, []).append(entry)
        return entry

    def keep(self, entry: Entry[T]) -> None:
        """Keep an answered request for `grace_s`, unless `MAX_ANSWERED` are kept."""
        if self.grace_s > 0 and self._answered < MAX_ANSWERED:
            self._answered += 1
            self._entries.setdefault(entry.key, []).append(entry)
            asyncio.get_running_loop().call_later(self.grace_s, self._drop, entry)

    def _drop(self, entry: Entry[T]) -> None:
        self._answered -= 1
        self.remove(entry)

    def remove(self, entry: Entry[T]) -> None:
        """Remove a request; no effect if it was removed before."""
        entries = self._entries.get(entry.key, [])
        if entry in entries:
            entries.remove(entry)
            if not entries:
                del self._entries[entry.key]

    def __iter__(self) -> Iterator[Entry[T]]:
        """Iterate over the requests."""
        for entries in [*self._entries.values()]:
            yield from [*entries]

    def take_up(self, key: str, *, is_retry: bool) -> T | None:
        """Return the run of a request that this one repeats; None if it repeats none."""
        entries = self._entries.get(key, [])
        for entry in entries:
            if entry.is_lost and not entry.adopted.is_set():
                entry.adopted.set()
                return entry.handle
        return entries[-1].handle if entries and is_retry else None


def request_key(user: User, path: str, body: BaseModel, headers: Mapping[str, str]) -> str:
    """Return a key that is equal for equal requests of one user; other `Idempotency-Key`s make other requests."""
    named = headers.get(IDEMPOTENCY_KEY)
    sent = json.dumps([user.name, path, named, body.model_dump(mode="json", by_alias=True)], sort_keys=True)
    return hashlib.sha256(sent.encode("utf-8", "surrogatepass")).hexdigest()


def is_retry(request: Request) -> bool:
    """Whether the SDK says that it repeats a request."""
    count = request.headers.get(RETRY_COUNT, "0")
    return count.isascii() and count.isdigit() and int(count[:9]) > 0


def run_id_from(user: User, headers: Mapping[str, str]) -> str | None:
    """Return the id of the run that the `Idempotency-Key` of a request names; None without one."""
    key = headers.get(IDEMPOTENCY_KEY)
    if key is None:
        return None
    if not 1 <= len(key) <= MAX_KEY:
        raise InvalidValue(IDEMPOTENCY_KEY, key[:40], f"1 to {MAX_KEY} characters")
    return "idem-" + hashlib.sha256(json.dumps([user.name, key]).encode()).hexdigest()[:40]
