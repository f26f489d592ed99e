"""Automatic retries by clients after a lost connection: a retry gets the existing run.

A client's SDK repeats a request that got no response. The run of a lost request continues for a short time (`grace_s`);
if the same user sends the same request in that time, that request follows the run, and nothing is paid twice. Otherwise
the run is cancelled.

Requests that several clients send at once stay separate, even if they are equal: a request follows only the run of a
lost one. If the SDK marks it as a retry (`x-stainless-retry-count`), it may also follow the run of a request that is in
progress or was answered a short time ago, because that answer may have been lost in transit. A retry after an error
starts a new run.

The state is in memory, for one process. Across several, `Idempotency-Key` names the run, which then continues without
its client.
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
"""The run of a request, with the data to answer from it."""

MAX_KEY = 255
MAX_ANSWERED = 1_000
"""Maximum number of requests that are kept, with their inputs, after their answer."""
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
        """Forget the request after the grace period: its answer is sent, and may still be lost."""
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
    """The requests of one server whose answers are not delivered yet, or were sent a short time ago."""

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
    """Return a key that is equal for equal requests of one user; another `Idempotency-Key` makes another request."""
    named = headers.get(IDEMPOTENCY_KEY)
    sent = json.dumps([user.name, path, named, body.model_dump(mode="json", by_alias=True)], sort_keys=True)
    return hashlib.sha256(sent.encode("utf-8", "surrogatepass")).hexdigest()


def is_retry(request: Request) -> bool:
    """Whether the SDK marks the request as a retry."""
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
