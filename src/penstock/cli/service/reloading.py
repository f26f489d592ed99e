"""Loads the graphs and programs of a running server again when their files change.

Files are polled, because that works on every file system and needs no library. A change is loaded once the files have
stayed as they are for one interval: editors write several files, and some write one in two steps. New runs use the new
version; running ones finish with the version that they started with. A target that cannot be loaded stays as it was.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

from penstock.cli.loading.code import describe_error
from penstock.cli.loading.served import Check, Served, folders_of, load_again, snapshot, used_files
from penstock.cli.render.screen import printable
from penstock.cli.service.seed_graphs import save_graph_files
from penstock.hosting.host import RunHost
from penstock.runtime.worker import LoopJob

POLL_INTERVAL_S = 0.3
SLOW_S = 10.0
"""After this time, an import that has not ended is reported."""

Snapshot = dict[Path, tuple[int, int]]


class Reloader:
    """Watches the files of a server's targets; a context manager that stops watching at its end."""

    def __init__(
        self,
        targets: Sequence[str],
        served: Served,
        check: Check,
        report: Callable[[str], None],
        *,
        interval_s: float = POLL_INTERVAL_S,
    ) -> None:
        # Python matches compiled code by the size of its source and its time in seconds: two edits within a second may
        # look the same.
        sys.dont_write_bytecode = True
        self._targets = targets
        self._programs = served.programs
        """The programs that nodes run, changed in place."""
        self._files = dict(served.files)
        """Served graphs by id."""
        self._has_refused = bool(served.refused)
        """Whether a target could not be loaded the last time: the fix may be in any file that it imports."""
        self._check = check
        self._report = report
        self._interval_s = interval_s
        self._folders = folders_of(targets)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Reloader:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def start(self, host: RunHost) -> None:
        """Start watching, from the files as they are now."""
        seen = await self._look()
        self._task = asyncio.create_task(self._watch(host, seen), name="reload")

    async def _look(self) -> Snapshot:
        return await asyncio.to_thread(snapshot, self._targets, self._folders)

    async def _watch(self, host: RunHost, loaded: Snapshot) -> None:
        before = loaded
        while True:
            await asyncio.sleep(self._interval_s)
            now = await self._look()
            if now != loaded and now == before:
                changed = [path for path in now.keys() | loaded.keys() if now.get(path) != loaded.get(path)]
                if used := self._used(changed):
                    await self._reload(host, used)
                    now = await self._loaded_from(now)
                loaded = now
            before = now

    def _used(self, changed: Sequence[Path]) -> list[Path]:
        """Return the changed files that may belong to the targets; other scripts beside them are excluded."""
        if self._has_refused:
            return sorted(changed)
        used = used_files(self._targets, self._folders)
        return sorted(path for path in changed if path.suffix != ".py" or path.resolve() in used)

    async def _loaded_from(self, seen: Snapshot) -> Snapshot:
        """Return the files to watch from now on; files seen before the reload keep their state of that time.

        New are the modules that programs have imported. A graph that was added meanwhile is not loaded yet.
        """
        modules = {path: state for path, state in (await self._look()).items() if path.suffix == ".py"}
        return {**modules, **seen}

    async def _reload(self, host: RunHost, changed: Sequence[Path]) -> None:
        names = printable(", ".join(path.name for path in changed))
        try:
            served = await self._load(names)
            self._programs.update(served.programs)  # before graphs are checked against the programs
            saved = await save_graph_files(host, served.files.values())
        except Exception as error:  # a store that is unavailable must not end the watch: the next change is loaded
            self._report(f"  not reloaded  {names}: {printable(describe_error(error))}")
            return
        notes = [f"  not reloaded  {printable(str(refused))}" for refused in served.refused]
        self._report("\n".join([f"  reloaded      {names}", *saved.notes, *self._replace(served), *notes]))

    async def _load(self, names: str) -> Served:
        """Load the targets on a thread that the process need not wait for at its end: an import may never return."""
        job = LoopJob(lambda: load_again(self._targets, self._check), lambda _value, _error: None)
        loading = asyncio.ensure_future(job.result())
        try:
            if not (await asyncio.wait((loading,), timeout=SLOW_S))[0]:
                fact = f"not imported after {SLOW_S:g} s, and running still; what is served stays until then"
                self._report(f"  not reloaded  {names}: {fact}")
            served: Served = await loading
        finally:
            loading.cancel()
        return served

    def _replace(self, served: Served) -> Iterator[str]:
        """Let new runs use the loaded version; yield additions and, unless a target failed, removals."""
        for file in served.files.values():
            if file.id not in self._files:
                yield f"  added         {printable(f'{file.where}: {file.id}')}"
        self._has_refused = bool(served.refused)
        gone = [] if served.refused else [file for id, file in self._files.items() if id not in served.files]
        for file in gone:
            if self._programs.pop(file.id, None) is not None:
                yield f"  removed       {printable(f'{file.where}: {file.id} is no longer served')}"
            elif Path(file.where).suffix == ".json":
                advice = f"it is served as it was stored; archive it with DELETE /api/graphs/{file.id}"
                yield f"  removed       {printable(f'{file.where}, which had {file.id}: {advice}')}"
        self._programs.update(served.programs)
        self._files = {**(self._files if served.refused else {}), **served.files}
