"""Keeps the graphs that a server is given where its host finds them, and says what it found there.

A graph of a file follows its file: where another one is kept it gets a new version, and is offered again if it was
archived. An example is there to begin with, and is whose who saves it: one that somebody has changed or archived stays
as it is. Who has made a version is not kept anywhere; an example that nobody has changed is known by its digest.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from penstock.cli.loading.offers import Given
from penstock.cli.showing.screen import printable
from penstock.clock import SYSTEM_CLOCK
from penstock.hosting.host import RunHost
from penstock.hosting.ports import Conflict
from penstock.hosting.records import GraphRecord
from penstock.server.examples import SHIPPED
from penstock.server.openai.models import converses
from penstock.server.runnable import UNKNOWN_MODEL, Runnable

OWNER = "server"
"""Whose the graphs are that the server is given when it starts; everybody may use them."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What became of the graphs: which of them there are, and what is to be said of them."""

    ids: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unable: set[str] = field(default_factory=set)
    """Those that cannot run as they are, by id."""
    conversing: set[str] = field(default_factory=set)
    """Those that are made to be talked to, by id."""

    @property
    def to_try(self) -> str | None:
        """The one to talk to first; None if none can run."""
        able = [id for id in self.ids if id not in self.unable]
        return next((id for id in able if id in self.conversing), able[0] if able else None)

    async def add(self, host: RunHost, record: GraphRecord) -> None:
        """One more that is offered; of a model that it lacks, it is said."""
        self.ids.append(record.id)
        if converses(record):
            self.conversing.add(record.id)
        if missing := await _missing_models(host, record):
            self.unable.add(record.id)
            self.notes.extend(missing)


async def keep_files(host: RunHost, given: Iterable[Given]) -> Kept:
    """Keep every graph as its file has it."""
    kept = Kept()
    for one in given:
        known = await host.stores.graphs.get(one.id)
        record = await _saved(host, one, known)
        if record.is_archived:
            await host.stores.graphs.archive(one.id, is_archived=False)
        kept.notes.extend(_changes(one, known, record))
        await kept.add(host, record)
    return kept


async def keep_examples(host: RunHost, given: Iterable[Given]) -> Kept:
    """Keep every example that is not there, or is as it was put there once."""
    kept = Kept()
    for one in given:
        record = await host.stores.graphs.get(one.id)
        if record is None or _is_untouched(record):
            with suppress(Conflict):  # somebody was quicker, and has it as they want it
                record = await _saved(host, one, record, expected=0 if record is None else record.version)
        if record is not None and not record.is_archived:
            await kept.add(host, record)
    return kept


def _is_untouched(record: GraphRecord) -> bool:
    return record.owner == OWNER and not record.is_archived and record.digest in SHIPPED[record.id]


async def _saved(host: RunHost, one: Given, known: GraphRecord | None, expected: int | None = None) -> GraphRecord:
    """The graph as it is kept now; the same again makes no new version, and a name that it has stays."""
    owner, name = (OWNER, one.name) if known is None else (known.owner, known.name)
    now_ms = SYSTEM_CLOCK.time_ns() // 1_000_000
    return await host.stores.graphs.save(one.id, owner, name, one.document, now_ms=now_ms, expected_version=expected)


def _changes(one: Given, known: GraphRecord | None, now: GraphRecord) -> Iterable[str]:
    """What the database had that is not in force any more."""
    if known is None:
        return
    if known.version != now.version:
        before = f"version {known.version} in the database was another; it can still be read"
        yield f"  follows       {printable(f'{one.where}: {one.id} is version {now.version} now; {before}')}"
    if known.is_archived:
        yield f"  back          {printable(one.id)} was archived; what is given is offered again"


async def _missing_models(host: RunHost, record: GraphRecord) -> list[str]:
    found = await Runnable(host.executors, host.services).problems_in(record.document)
    missing = [f"{one.path}: {one.detail}" for one in found if one.code == UNKNOWN_MODEL]
    return [f"  cannot run    {printable(f'{record.id}: {one}; --models offers more')}" for one in missing]
