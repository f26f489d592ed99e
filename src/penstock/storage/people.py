"""Find, export and erase the data of one person.

A person is a name: the owner of runs, chats and memories, and a name in tokens and the audit log. Erasing removes the
person's own data, and replaces the name wherever it only identifies the person. Money totals stay, under the pseudonym.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from penstock.hosting.audit import AuditFilter
from penstock.hosting.durability import RUNS, UNKNOWN
from penstock.hosting.ports import ENDED, Conflict, RunRecord, RunStatus
from penstock.ids import new_run_id
from penstock.nodes.memory import MAX_MEMORIES, space_of_owner
from penstock.runtime.durable.async_ledger import AsyncLedger
from penstock.storage.stores import Stores

PAGE = 200
UNFINISHED: tuple[RunStatus, ...] = ("queued", "running", "waiting", "parked")
SHOWN = 5
"""Maximum number of unfinished runs that an error names."""


@dataclass(frozen=True, slots=True)
class Erased:
    """The result of erasing a person."""

    pseudonym: str
    """The replacement of the name."""
    runs: int
    chats: int
    places: Mapping[str, int]
    """Rows that were removed or renamed, by table and column."""
    tokens: tuple[str, ...]
    """Ids of the person's tokens, which are revoked."""


async def export_person(stores: Stores, name: str) -> AsyncIterator[dict[str, Any]]:
    """Yield all stored data of a person, as JSON data; each value is an object whose first key is its kind."""
    async for run in _runs(stores, name):
        yield {"run": run._asdict()}
        async for event in _events(stores, run):
            yield event
        for approval in await stores.approvals.list(run_id=run.id, limit=1_000):
            yield {"approval": asdict(approval)}
    async for chat in _chats(stores, name):
        messages, _ = await stores.chats.messages(chat.id)
        yield {"chat": asdict(chat), "messages": [asdict(message) for message in messages]}
    for id in await stores.people.attachments(name):
        found = await stores.chats.attachment(id)
        if found is not None:
            yield {"attachment": {**asdict(found[0]), "base64": base64.b64encode(found[1]).decode()}}
    for memory in await stores.memories.search(space_of_owner(name), "", MAX_MEMORIES):
        yield {"memory": {"key": memory.key, "value": memory.value}}
    async for token in _tokens(stores, name):
        yield {"token": {key: value for key, value in asdict(token).items() if key not in ("salt", "digest")}}
    async for entry in _audit(stores, name):
        yield {"audit": asdict(entry)}


async def erase_person(stores: Stores, name: str, *, by: str, now_ms: int) -> Erased:
    """Erase a person: revoke their tokens, remove what they own, and replace their name by a pseudonym.

    Conflict, before anything is removed, while the person has unfinished runs: cancel these first. Repeat a call that
    was interrupted: it finishes the rest.
    """
    unfinished = await stores.runs.list(owner=name, statuses=UNFINISHED, limit=SHOWN + 1)
    if unfinished:
        named = ", ".join(run.id for run in unfinished[:SHOWN]) + (", …" if len(unfinished) > SHOWN else "")
        raise Conflict(f"{name!r} has runs that have not ended: cancel {named} first")
    tokens = [token.id async for token in _tokens(stores, name)]
    for token_id in tokens:
        await stores.tokens.revoke(token_id, by=by, now_ms=now_ms, keep_admin=True)
    runs = 0
    while page := await stores.runs.list(owner=name, statuses=tuple(ENDED), limit=PAGE):
        for run in page:
            await stores.runs.remove(run.id)
        await AsyncLedger(stores.ledger).forget([prefix + run.id for run in page for prefix in (RUNS, UNKNOWN)])
        runs += len(page)
    chats = 0
    while found := await stores.chats.list(owner=name, limit=PAGE):
        for chat in found:
            await stores.chats.remove(chat.id)
        chats += len(found)
    pseudonym = f"erased-{new_run_id()[-12:]}"
    return Erased(pseudonym, runs, chats, await stores.people.forget(name, pseudonym), tuple(tokens))


async def _runs(stores: Stores, name: str) -> AsyncIterator[RunRecord]:
    before: str | None = None
    while page := await stores.runs.list(owner=name, before=before, limit=PAGE):
        for run in page:
            yield run
        before = page[-1].id


async def _events(stores: Stores, run: RunRecord) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a run, and the recorded requests and responses of its calls."""
    place = 0
    while page := await stores.events.read(run.id, place, PAGE):
        for event in page:
            yield {"event": {"run_id": run.id, **event._asdict()}}
            call_id = event.data.get("call_id") if event.type == "call.ended" else None
            payload = None if call_id is None else await stores.payloads.get(run.id, call_id)
            if payload is not None:
                yield {"payload": payload._asdict()}
        place = page[-1].seq


async def _chats(stores: Stores, name: str) -> AsyncIterator[Any]:
    before: str | None = None
    while page := await stores.chats.list(owner=name, before=before, limit=PAGE):
        for chat in page:
            yield chat
        before = page[-1].id


async def _tokens(stores: Stores, name: str) -> AsyncIterator[Any]:
    before: str | None = None
    while page := await stores.tokens.list(before=before, limit=PAGE):
        for token in page:
            if token.name == name:
                yield token
        before = page[-1].id


async def _audit(stores: Stores, name: str) -> AsyncIterator[Any]:
    before: str | None = None
    while page := await stores.audit.list(AuditFilter(actor=name), before=before, limit=PAGE):
        for entry in page:
            yield entry
        before = page[-1].id
