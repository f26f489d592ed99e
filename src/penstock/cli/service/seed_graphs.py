"""Saves the graphs that a server is started with in its graph store, and reports changes.

A graph from a file follows its file: if the stored graph differs, a new version is saved, and an archived graph is
restored. An example is only a starting point: once a user has changed or archived it, it stays as it is. The store
does not record the author of a version; an unchanged example is recognised by its digest.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from penstock.cli.graph import ADVICE
from penstock.cli.loading.served import GraphFile
from penstock.cli.render.screen import printable
from penstock.clock import SYSTEM_CLOCK
from penstock.hosting.host import RunHost
from penstock.hosting.ports import Conflict, GraphRecord, newest_to_replace
from penstock.kernel.graph import Problem
from penstock.server.examples import SHIPPED
from penstock.server.graph_check import GraphChecker, is_conversational

OWNER = "server"
"""Owner of the graphs that the server is started with; all users may use them."""


@dataclass(frozen=True, slots=True)
class SavedGraphs:
    """The result of saving: which graphs are offered, and notes to print about them."""

    ids: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unable: set[str] = field(default_factory=set)
    """Ids of graphs that cannot run as they are."""
    conversing: set[str] = field(default_factory=set)
    """Ids of graphs that are made for chat."""

    @property
    def to_try(self) -> str | None:
        """The graph to suggest for a first chat; None if none can run."""
        able = [id for id in self.ids if id not in self.unable]
        return next((id for id in able if id in self.conversing), able[0] if able else None)

    async def add(self, host: RunHost, record: GraphRecord) -> None:
        """Add a graph that is offered, with a note for each model, tool or program that it lacks."""
        self.ids.append(record.id)
        if is_conversational(record):
            self.conversing.add(record.id)
        if missing := await _not_offered(host, record):
            self.unable.add(record.id)
            self.notes.extend(missing)


async def save_graph_files(host: RunHost, files: Iterable[GraphFile]) -> SavedGraphs:
    """Save every graph as it is in its file."""
    saved = SavedGraphs()
    for file in files:
        known = await newest_to_replace(host.stores.graphs, file.id)
        record = await _save(host, file, known)
        if record.is_archived:
            await host.stores.graphs.archive(file.id, is_archived=False)
        saved.notes.extend(_changes(file, known, record))
        await saved.add(host, record)
    return saved


async def save_example_graphs(host: RunHost, files: Iterable[GraphFile]) -> SavedGraphs:
    """Save every example that is missing or unchanged since it was saved."""
    saved = SavedGraphs()
    for file in files:
        record = await newest_to_replace(host.stores.graphs, file.id)
        if record is None or _is_untouched(record):
            with suppress(Conflict):  # a concurrent save takes precedence
                record = await _save(host, file, record, expected=0 if record is None else record.version)
        if record is not None and not record.is_archived:
            await saved.add(host, record)
    return saved


def _is_untouched(record: GraphRecord) -> bool:
    return record.owner == OWNER and not record.is_archived and record.digest in SHIPPED.get(record.id, ())


async def _save(host: RunHost, file: GraphFile, known: GraphRecord | None, expected: int | None = None) -> GraphRecord:
    """Save the graph and return its record; an equal graph makes no new version, and an existing name is kept."""
    owner, name = (OWNER, file.name) if known is None else (known.owner, known.name)
    now_ms = SYSTEM_CLOCK.time_ns() // 1_000_000
    return await host.stores.graphs.save(file.id, owner, name, file.document, now_ms=now_ms, expected_version=expected)


def _changes(file: GraphFile, known: GraphRecord | None, now: GraphRecord) -> Iterable[str]:
    """Yield notes on stored state that the file has replaced."""
    if known is None:
        return
    if known.version != now.version:
        before = f"it differs from version {known.version}, which stays available"
        yield f"  updated       {printable(f'{file.where}: {file.id} is now version {now.version}; {before}')}"
    if known.is_archived:
        yield f"  restored      {printable(file.id)} was archived"


async def _not_offered(host: RunHost, record: GraphRecord) -> list[str]:
    found = await GraphChecker(host.executors, host.services).problems_in(record.document)
    return [f"  cannot run    {printable(f'{record.id}: {problem}{_advice(problem)}')}" for problem in found]


def _advice(problem: Problem) -> str:
    advice = ADVICE.get(problem.code)
    return "" if advice is None else f"; {advice}"
