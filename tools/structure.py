"""Measure the structure of the package: `python -m tools.structure [--json | --compare FILE]`, or `make structure`.

It measures the `penstock` that Python imports. `--compare` prints a table of these figures before and after, the former
from a file that `--json` has printed for another tree: `PYTHONPATH=other/src python -m tools.structure --json`.

Size: modules and lines of the package, names in `penstock.__all__`.

Cycles: groups of modules that import each other, at any depth. `module` counts the imports that run when a module is
loaded, `with_function` those and the ones inside functions, `with_type_checking` those and the ones under
`if TYPE_CHECKING`, `all` every import. The same for folders: in each package, its modules and its sub-packages are one
node each. An import of `penstock.a.b` counts for that module, not for the packages that contain it. Names that a
`__getattr__` loads are not seen.

Walks: what of the package runs during one `run.llm` call, during a graph of one step, and during one chat request: the
files, their folders and the functions that ran in any thread, the frames they made, how often a suspended frame was
resumed, and the changes of top-level package between two frames. The chat request is `POST /v1/chat/completions`,
answered by a streaming agent with a scripted model, as an ASGI call to a server in this process on SQLite files. It is
counted until the run has ended.

Transactions of the chat request are counted in further requests, without the profiler, by SQLite's trace of each
connection: a BEGIN IMMEDIATE is a write, another BEGIN or a SELECT outside a transaction is a read. Transactions in
which the database checks for changes by other processes depend on the clock, and are counted separately. So would those
that write what a run has emitted every few milliseconds: no timer fires while requests are measured, so that a slow
machine counts the same.

Each figure of walks and transactions is the median of several runs. Frames and functions depend on the version of
Python: compare figures of the same one.

Words: how often each of `WORDS` occurs in the source, the documentation and the tests, alone or as a part of a name.
Names that are on disk or on the wire (`STORED_NAMES`) keep their spelling and are not counted.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import importlib.util
import json
import re
import sqlite3
import statistics
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass, field
from opcode import opmap
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal
from unittest import mock


def _package() -> Path:
    spec = importlib.util.find_spec("penstock")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


PACKAGE = _package()
DOCS = PACKAGE.parents[1] / "docs"
TESTS = PACKAGE.parents[1] / "tests"

WORDS = (
    "told",
    "untold",
    "retold",
    "asked",
    "said",
    "whoever",
    "nobody",
    "somebody",
    "bells",
    "rouse",
    "hasten",
    "patiently",
    "wish",
    "forgetting",
    "how-manieth",
)
STORED_NAMES = re.compile(
    r"""asked_ms | chats_nobody_made  # a column, an index
    | (?<=["'`])(?:asked|untold)(?=["'`])  # members of JSON
    | (?<=\.)asked\b | \basked(?==|:[ ](?:float|number))  # the same as attributes, arguments and fields
    """,
    re.VERBOSE,
)
"""Names on disk and on the wire."""
OF_THE_WORDS = ("test_source.py", "test_structure_script.py")
"""Tests that are about the words."""
WARM_UPS = 3
ROUNDS = 5
"""An odd number, so that the median is one of the figures."""
SECRET = "secret-of-the-measurement"

Kind = Literal["module", "function", "type_checking"]
Edges = Mapping[str, Collection[str]]
Observation = Callable[[], AbstractContextManager[None]]

COUNTED: Mapping[str, tuple[Kind, ...]] = {
    "module": ("module",),
    "with_function": ("module", "function"),
    "with_type_checking": ("module", "type_checking"),
    "all": ("module", "function", "type_checking"),
}
"""The imports that each figure of cycles counts."""


# Modules and their imports.


def modules_in(package: Path) -> dict[str, Path]:
    """The files of a package by the names of their modules; a package is the module of its `__init__`."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = (package.name, *path.relative_to(package).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_in(modules: Mapping[str, Path]) -> dict[Kind, dict[str, set[str]]]:
    """Which modules each one imports, by what the import is for."""
    found: dict[Kind, dict[str, set[str]]] = {"module": {}, "function": {}, "type_checking": {}}
    for name, path in modules.items():
        for kind, target in _imports(ast.parse(path.read_text()), name, path.stem == "__init__", modules):
            if target != name:
                found[kind].setdefault(name, set()).add(target)
    return found


def _imports(tree: ast.Module, name: str, is_package: bool, modules: Collection[str]) -> Iterator[tuple[Kind, str]]:
    todo: list[tuple[ast.AST, Kind]] = [(tree, "module")]
    while todo:
        node, kind = todo.pop()
        if isinstance(node, ast.Import):
            yield from ((kind, alias.name) for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            source = _source(node, name, is_package)
            named = (f"{source}.{alias.name}" for alias in node.names)
            targets = (target if target in modules else source for target in named)
            yield from ((kind, target) for target in targets if target in modules)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += [(child, "type_checking") for child in node.body]
            todo += [(child, kind) for child in node.orelse]
        else:
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            inside: Kind = "function" if is_function and kind == "module" else kind
            todo += [(child, inside) for child in ast.iter_child_nodes(node)]


def _source(node: ast.ImportFrom, name: str, is_package: bool) -> str:
    """The absolute name of the module that names are imported from."""
    if not node.level:
        return node.module or ""
    parts = name.split(".")
    above = parts[: len(parts) - node.level + is_package]
    return ".".join([*above, *([node.module] if node.module else [])])


def joined(imports: Mapping[Kind, Edges], kinds: Iterable[Kind]) -> dict[str, set[str]]:
    """The imports of these kinds together."""
    edges: dict[str, set[str]] = defaultdict(set)
    for kind in kinds:
        for name, targets in imports[kind].items():
            edges[name].update(targets)
    return dict(edges)


def cycles(edges: Edges) -> list[list[str]]:
    """The groups of names that lead to each other, largest first."""
    order: list[str] = []
    _visit(edges, edges, order.append)
    backwards: dict[str, set[str]] = defaultdict(set)
    for name, targets in edges.items():
        for target in targets:
            backwards[target].add(name)
    groups: dict[str, list[str]] = {}
    seen: set[str] = set()
    for name in reversed(order):
        group: list[str] = []
        _visit([name], backwards, group.append, seen)
        groups[name] = sorted(group)
    return sorted((group for group in groups.values() if len(group) > 1), key=lambda group: (-len(group), group))


def _visit(names: Iterable[str], edges: Edges, leave: Callable[[str], object], seen: set[str] | None = None) -> None:
    """Walk depth-first from each of the names, and call `leave` with each name after all that it leads to."""
    seen = set() if seen is None else seen
    for first in names:
        if first in seen:
            continue
        seen.add(first)
        path = [(first, iter(sorted(edges.get(first, ()))))]
        while path:
            name, targets = path[-1]
            target = next((candidate for candidate in targets if candidate not in seen), None)
            if target is None:
                leave(name)
                path.pop()
            else:
                seen.add(target)
                path.append((target, iter(sorted(edges.get(target, ())))))


def folder_cycles(edges: Edges, packages: Iterable[str]) -> list[list[str]]:
    """The cycles between the direct members of each package: its modules, its sub-packages, and its `__init__`."""
    found: list[list[str]] = []
    for package in sorted(packages):
        inside: dict[str, set[str]] = defaultdict(set)
        for name, targets in edges.items():
            for target in targets:
                ends = _child(package, name), _child(package, target)
                if ends[0] is not None and ends[1] is not None and ends[0] != ends[1]:
                    inside[ends[0]].add(ends[1])
        found += cycles(inside)
    return sorted(found, key=lambda group: (-len(group), group))


def _child(package: str, name: str) -> str | None:
    """The direct member of the package that contains the module; None if the module is elsewhere."""
    if name == package:
        return name
    if not name.startswith(f"{package}."):
        return None
    return f"{package}.{name[len(package) + 1 :].partition('.')[0]}"


def measure_source(package: Path = PACKAGE) -> dict[str, Any]:
    """Size and cycles of a package."""
    modules = modules_in(package)
    imports = imports_in(modules)
    packages = [name for name, path in modules.items() if path.stem == "__init__"]
    found: dict[str, Any] = {"modules": {}, "folders": {}}
    for figure, kinds in COUNTED.items():
        edges = joined(imports, kinds)
        found["modules"][figure] = cycles(edges)
        found["folders"][figure] = folder_cycles(edges, packages)
    return {
        "modules": len(modules),
        "lines": sum(len(path.read_text().splitlines()) for path in modules.values()),
        "imports": {kind: sum(map(len, edges.values())) for kind, edges in imports.items()},
        "cycles": found,
    }


def count_words(files: Iterable[Path], words: Iterable[str] = WORDS) -> dict[str, int]:
    """How often each word occurs in the files, in any case, with no letter beside it, outside of `STORED_NAMES`."""
    patterns = {word: re.compile(rf"(?<![a-z]){re.escape(word)}(?![a-z])", re.IGNORECASE) for word in words}
    counts = dict.fromkeys(patterns, 0)
    for file in files:
        text = STORED_NAMES.sub("", file.read_text())
        for word, pattern in patterns.items():
            counts[word] += len(pattern.findall(text))
    return counts


# Walks.


@dataclass
class Walk:
    """What of the package ran while `is_on`, in this thread and in those started inside `watching`."""

    package: Path = PACKAGE
    is_on: bool = False
    calls: Counter[CodeType] = field(default_factory=Counter)
    resumptions: int = 0
    changes: int = 0
    _files: dict[CodeType, str | None] = field(default_factory=dict)
    _last: str = ""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Install the profiler in this thread and in those started in the block."""
        before = sys.getprofile()
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(before)
            threading.setprofile(None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing in the block."""
        before, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = before

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if not self.is_on or event != "call":
            return
        code = frame.f_code
        if code not in self._files:
            path = Path(code.co_filename)
            inside = path.is_relative_to(self.package)
            self._files[code] = str(path.relative_to(self.package)) if inside else None
        file = self._files[code]
        if file is None:
            return
        if _is_resumed(frame):
            self.resumptions += 1
        else:
            self.calls[code] += 1
        if (now := file.partition("/")[0]) != self._last:
            self.changes += 1
            self._last = now

    def figures(self) -> dict[str, int]:
        """What was counted since the last call."""
        by_file: Counter[str] = Counter()
        for code, calls in self.calls.items():
            by_file[str(self._files[code])] += calls
        frames = sum(by_file.values())
        storage = sum(calls for file, calls in by_file.items() if file.startswith("storage/"))
        found = {
            "files": len(by_file),
            "folders": len({str(Path(file).parent) for file in by_file}),
            "functions": len(self.calls),
            "frames": frames,
            "resumptions": self.resumptions,
            "package_changes": self.changes,
            "storage_percent": round(100 * storage / frames) if frames else 0,
        }
        self.calls, self.resumptions, self.changes, self._last = Counter(), 0, 0, ""
        return found


def _is_resumed(frame: FrameType) -> bool:
    """Whether a call event is that of a suspended generator or coroutine being resumed."""
    at, code = frame.f_lasti, frame.f_code.co_code
    return at >= 0 and code[at] == opmap["RESUME"] and code[at + 1] & 3 != 0


class Transactions:
    """The transactions of every SQLite connection opened in `watching`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Trace the connections that are opened in the block."""
        connect = sqlite3.connect

        def traced(database: str, **options: Any) -> sqlite3.Connection:
            connection: sqlite3.Connection = connect(database, **options)
            connection.set_trace_callback(Trace(self._count, is_ledger=".ledger" in database).ran)
            return connection

        with mock.patch.object(sqlite3, "connect", traced):
            yield

    def _count(self, kind: str, is_ledger: bool) -> None:
        with self._lock:
            self._counts[kind] += 1
            self._counts[f"{kind}_ledger"] += is_ledger

    def figures(self) -> dict[str, int]:
        """What was counted since the last call; the ledger's figures are included in the others."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return {kind: counts[kind] for kind in ("write", "write_ledger", "read", "read_ledger", "looks_for_changes")}


class Trace:
    """The statements of one connection, which belongs to one thread at a time."""

    def __init__(self, count: Callable[[str, bool], None], *, is_ledger: bool) -> None:
        self._count = count
        self._is_ledger = is_ledger
        self._kind: str | None = None
        """The kind of the open transaction."""
        self._is_look = True
        """Whether the open transaction has only read the number of changes."""

    def ran(self, statement: str) -> None:
        first, _, rest = statement.strip().upper().partition(" ")
        if first == "BEGIN":
            self._kind, self._is_look = "write" if rest.startswith("IMMEDIATE") else "read", True
        elif first in ("COMMIT", "ROLLBACK") and not rest.startswith("TO "):
            if self._kind is not None:
                self._count("looks_for_changes" if self._is_look else self._kind, self._is_ledger)
            self._kind = None
        elif self._kind is not None:
            self._is_look = self._is_look and "DATA_VERSION" in rest
        elif first == "SELECT":
            self._count("read", self._is_ledger)


def no_timer() -> AbstractContextManager[object]:
    """Let no timer write the events of runs; older trees, which may be compared, have none for all runs together."""
    try:
        from penstock.hosting import event_batches
    except ImportError:
        return nullcontext()
    return mock.patch.multiple(event_batches, GATHER_S=60.0, BUSY_GATHER_S=60.0)


@asynccontextmanager
async def serving(folder: str, unobserved: Observation = nullcontext) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """A server on SQLite files in that folder; yields a function that makes one chat request and waits for its end.

    It checks whether the run has ended inside `unobserved()`.
    """
    import httpx2

    from penstock.agents.scripted import ScriptedModel
    from penstock.chat.service import ChatService
    from penstock.hosting.host import HostSettings, RunHost
    from penstock.runtime.billing.prices import Price, PriceBook
    from penstock.server.app import create_app
    from penstock.server.auth import Token
    from penstock.server.settings import ServerSettings
    from penstock.storage import open_stores

    agent = {"model": "scripted", "stream": True}
    graph = {
        "nodes": [
            {"id": "start", "type": "chat-start", "position": {"x": 0, "y": 0}, "data": {}},
            {"id": "agent", "type": "agent", "position": {"x": 0, "y": 1}, "data": agent},
        ],
        "edges": [{"id": "e", "source": "start", "target": "agent", "data": {"channel": "flow"}}],
    }
    body = {"model": "chat", "messages": [{"role": "user", "content": "Which dams are there?"}]}
    # Long enough that no tick of the host happens during a request.
    settings = HostSettings(tick_s=60, lease_s=600)
    async with await open_stores(f"sqlite:///{folder}/structure.db") as stores:
        await stores.graphs.save("chat", "ann", "chat", graph, now_ms=0)
        services = {"models": {"scripted": ScriptedModel(lambda _: "Hoover and Itaipu.")}}
        prices = PriceBook(registered={"scripted": Price(1, 10)}, use_genai_prices=False)
        host = RunHost(stores, services=services, settings=settings, prices=prices)
        chats = ChatService(host, stores.chats)
        app = create_app(host, chats, stores, ServerSettings(tokens=(Token.of("ann", "user", SECRET),)))
        transport = httpx2.ASGITransport(app)
        headers = {"authorization": f"Bearer {SECRET}"}
        with no_timer():
            async with (
                host,
                httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers) as client,
            ):

                def is_running() -> bool:
                    with unobserved():
                        return bool(host.stats()["running"])

                async def request() -> None:
                    response = await client.post("/v1/chat/completions", json=body)
                    if response.status_code != 200:
                        raise RuntimeError(f"the chat request was answered {response.status_code}: {response.text}")
                    while is_running():  # noqa: ASYNC110  # a host has no event for it
                        await asyncio.sleep(0.001)

                yield request


async def measure_walks() -> dict[str, dict[str, int]]:
    """The figures of each walk."""
    with tempfile.TemporaryDirectory() as folder:
        return {
            "run_llm": await _measure_walk(_llm_call),
            "graph_node": await _measure_walk(_graph_node),
            "chat_request": await _measure_walk(lambda walk: serving(folder, walk.paused)),
        }


Step = Callable[[], Awaitable[None]]


async def _measure_walk(prepare: Callable[[Walk], AbstractAsyncContextManager[Step]]) -> dict[str, int]:
    """The figures of the step that `prepare` yields, which may be repeated."""
    walk = Walk()
    found = []
    with walk.watching():
        async with prepare(walk) as step:
            for _ in range(WARM_UPS):
                await step()
            for _ in range(ROUNDS):
                walk.is_on = True
                await step()
                walk.is_on = False
                found.append(walk.figures())
    return medians(found)


@asynccontextmanager
async def _llm_call(_: Walk) -> AsyncIterator[Step]:
    """One call inside a run with a limit."""
    import penstock

    with penstock.contain(max_cost_usd=1) as run:

        async def step() -> None:
            run.llm(lambda: "answer", cost_hint_usd=0.001)

        yield step


@asynccontextmanager
async def _graph_node(_: Walk) -> AsyncIterator[Step]:
    """A graph of one step, executed in a run with a limit."""
    import penstock

    async def work(context: penstock.ExecutionContext) -> str:
        return "result"

    graph = penstock.Graph("one")
    graph.add_step(penstock.FunctionNode("work", work), "work")
    with penstock.contain(max_cost_usd=1) as run:

        async def step() -> None:
            await graph.execute(run)

        yield step


async def measure_transactions() -> dict[str, int]:
    """The transactions of one chat request."""
    transactions = Transactions()
    with tempfile.TemporaryDirectory() as folder, transactions.watching():
        async with serving(folder) as request:
            for _ in range(WARM_UPS):
                await request()
            found = []
            for _ in range(ROUNDS):
                transactions.figures()
                await request()
                found.append(transactions.figures())
    return medians(found)


def medians(found: list[dict[str, int]]) -> dict[str, int]:
    """The median of each figure."""
    return {name: statistics.median_low(figures[name] for figures in found) for name in found[0]}


# The whole.


def measure() -> dict[str, Any]:
    """Everything, as JSON data."""
    import penstock

    return {
        **measure_source(),
        "root_names": len(penstock.__all__),
        "walks": asyncio.run(measure_walks()),
        "transactions": asyncio.run(measure_transactions()),
        "words": {
            "src": count_words(PACKAGE.rglob("*.py")),
            "docs": count_words(DOCS.rglob("*.md")),
            "tests": count_words(path for path in TESTS.rglob("*.py") if path.name not in OF_THE_WORDS),
        },
    }


WALKS = {"run_llm": "run.llm call", "graph_node": "graph node", "chat_request": "chat request"}


def render(found: Mapping[str, Any]) -> Iterator[str]:
    """The figures as lines of text."""
    yield f"{found['modules']:,} modules, {found['lines']:,} lines, {found['root_names']} names at the root"
    yield "imports: " + ", ".join(f"{count:,} {kind}" for kind, count in found["imports"].items())
    for what, figures in found["cycles"].items():
        yield f"cycles between {what}:"
        for figure, groups in figures.items():
            yield f"  {figure:<19} {len(groups)} groups of {sum(map(len, groups))}"
            yield from (f"    {', '.join(group)}" for group in groups)
    for name, walk in found["walks"].items():
        yield f"one {WALKS[name]}:"
        yield f"  {walk['files']} files in {walk['folders']} folders, {walk['functions']:,} functions"
        yield f"  {walk['frames']:,} frames, {walk['storage_percent']} % of them in storage"
        yield f"  {walk['resumptions']:,} resumptions, {walk['package_changes']:,} changes of package"
    transactions = found["transactions"]
    yield f"  {transactions['write']} write transactions, {transactions['write_ledger']} of them of the ledger"
    yield f"  {transactions['read']} read transactions, {transactions['read_ledger']} of them of the ledger"
    yield f"  and {transactions['looks_for_changes']} in which the database checks for changes by others"
    yield "words:" + " " * 10 + "".join(f"{where:>6}" for where in found["words"])
    for word in WORDS:
        yield f"  {word:<14}" + "".join(f"{counts[word]:>6}" for counts in found["words"].values())


def figures_in(found: Mapping[str, Any]) -> dict[str, int]:
    """Each figure as one number, by a label for a table."""
    figures = {"modules": found["modules"], "lines": found["lines"], "names at the root": found["root_names"]}
    figures |= {f"imports, {kind}": count for kind, count in found["imports"].items()}
    for what, by_kind in found["cycles"].items():
        for kind, groups in by_kind.items():
            figures[f"{what} in cycles, {kind}"] = sum(map(len, groups))
    for name, walk in found["walks"].items():
        figures |= {f"{WALKS[name]}: {figure.replace('_', ' ')}": count for figure, count in walk.items()}
    for kind, count in found["transactions"].items():
        figures[f"chat request: transactions, {kind.replace('_', ' ')}"] = count
    for where, counts in found["words"].items():
        figures[f"house words in {where}"] = sum(counts.values())
        figures |= {f"{word!r} in {where}": count for word, count in counts.items()}
    return figures


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """A Markdown table of the figures before and after, without those that are 0 in both."""
    old, new = figures_in(before), figures_in(after)
    yield "| | before | after | change |"
    yield "|---|---:|---:|---:|"
    for label in new:
        was, now = old.get(label), new[label]
        if was is None:
            yield f"| {label} | – | {now:,} | |"
        elif was or now:
            yield f"| {label} | {was:,} | {now:,} | {now - was:+,} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.structure", description="Measure the structure of the package."
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    output.add_argument("--compare", metavar="FILE", type=Path, help="print a table: FILE (saved --json) and now")
    options = parser.parse_args()
    found = measure()
    if options.json:
        print(json.dumps(found, indent=1))
    elif options.compare is not None:
        print("\n".join(compare(json.loads(options.compare.read_text()), found)))
    else:
        print("\n".join(render(found)))


if __name__ == "__main__":
    main()
