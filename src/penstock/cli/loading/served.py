"""Loads the targets of a server: graphs in JSON, and graphs and agents in Python.

Every target is loaded on its own. A target that cannot be served is reported, and the others are served. Code is
imported once for all targets that name it; loading again imports it anew, with all modules in the folders of the
programs.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from penstock.cli.exits import Exit, Refused
from penstock.cli.loading.code import is_user_code, load_module
from penstock.cli.loading.graphs import (
    GraphSource,
    is_agent,
    is_code,
    load_program,
    module_in,
    problems_of,
    read_source,
)
from penstock.flow.graph import Graph
from penstock.ids import AN_ID, ID
from penstock.kernel.document import graph_to_json
from penstock.kernel.graph import GraphInvalid, GraphSpec, Problem, shown

if TYPE_CHECKING:
    from penstock.agents.agent import Agent
    from penstock.nodes.program import Program

Check = Callable[[Mapping[str, Any]], Sequence[Problem]]
"""Returns the problems that prevent a document from running."""
MAX_SHOWN = 3
"""Maximum number of problems of a graph in a message of one line."""


@dataclass(frozen=True, slots=True)
class GraphFile:
    """A graph document to serve, from a file or made from a program."""

    id: str
    document: Mapping[str, Any]
    where: str
    name: str
    """Display name."""


@dataclass(frozen=True, slots=True)
class NotServed:
    """A target that cannot be served, and why."""

    where: str
    why: str
    problems: Sequence[Problem] = ()
    """All problems of a graph that is not valid."""
    code: Exit = Exit.FAILED

    def __str__(self) -> str:
        more = f" and {len(self.problems) - MAX_SHOWN} more" if len(self.problems) > MAX_SHOWN else ""
        listed = "; ".join(f"{problem.path}: {problem.detail}" for problem in self.problems[:MAX_SHOWN])
        text = f"{self.why}: {listed}{more}" if listed else self.why
        return text if text.startswith(self.where) else f"{self.where}: {text}"


@dataclass(slots=True)
class Served:
    """The graphs and programs that were loaded from the targets of a server."""

    files: dict[str, GraphFile] = field(default_factory=dict)
    """Documents by graph id, those of programs included."""
    programs: dict[str, Program] = field(default_factory=dict)
    """Programs by graph id."""
    refused: list[NotServed] = field(default_factory=list)

    def add(self, file: GraphFile, program: Program | None = None) -> None:
        """Add a graph; Refused if its id is not valid or taken."""
        if ID.fullmatch(file.id) is None:
            advice = 'rename the file, or give the graph another "id"' if program is None else "give it another name"
            raise Refused(f"{file.where}: {shown(file.id)} is not a valid graph id; {advice}: {AN_ID}")
        if (other := self.files.get(file.id)) is not None:
            if Path(file.where) == Path(other.where):
                raise Refused(f"{file.where} is named twice; name it once")
            raise Refused(f"{file.where} and {other.where} both have a graph called {file.id!r}; rename one")
        self.files[file.id] = file
        if program is not None:
            self.programs[file.id] = program

    @property
    def node_types(self) -> set[str]:
        """The node types that the graphs use."""
        return {type for file in self.files.values() for type in GraphSource(file.document).node_types}

    def add_embeddings(self, models: Mapping[str, Any]) -> None:
        """Serve each embedding model as a graph of its name, unless a graph has that name."""
        from penstock.agents.embedding import EmbeddingModel  # imports agents, as above
        from penstock.nodes.embedding import embedding_document

        for name, model in models.items():
            if isinstance(model, EmbeddingModel) and name not in self.files and ID.fullmatch(name):
                self.files[name] = GraphFile(name, embedding_document(name), f"model {name}", name)

    def remove_invalid(self, check: Check) -> None:
        """Move the graphs that cannot run to `refused`, except those that only lack an offer of a service."""
        from penstock.nodes.checking import NOT_OFFERED  # imports agents, which graphs in JSON need not have

        for file in list(self.files.values()):
            problems = check(file.document)
            if any(problem.code not in NOT_OFFERED for problem in problems):
                self.refused.append(_invalid(file.where, problems))
                del self.files[file.id]
                self.programs.pop(file.id, None)


def load_served(targets: Iterable[str]) -> Served:
    """Load the targets: JSON files, directories with JSON files, and Python code such as `app.py:graph`."""
    served, modules = Served(), _Modules()
    for where, load in _loads(targets, modules):
        try:
            served.add(*load())
        except GraphInvalid as invalid:
            served.refused.append(_invalid(where, invalid.problems))
        except Refused as refused:
            served.refused.append(NotServed(where, str(refused), code=refused.code))
    return served


def _invalid(where: str, problems: Sequence[Problem]) -> NotServed:
    return NotServed(where, f"{where} is not a valid graph", problems)


Load = Callable[[], tuple[GraphFile, "Program | None"]]


def _loads(targets: Iterable[str], modules: _Modules) -> Iterator[tuple[str, Load]]:
    """Yield each file or program of the targets, with a function that loads it."""
    for target in targets:
        path = Path(target)
        if is_code(target):
            yield target, lambda target=target: _load_code(target, modules)  # type: ignore[misc]
        elif path.is_dir():
            inside = sorted(path.glob("*.json"))
            for file in inside:
                yield str(file), lambda file=file: (_read_file(file), None)  # type: ignore[misc]
            if not inside:
                yield target, lambda target=target: _refuse(f"there is no .json file in {target!r}")  # type: ignore[misc]
        else:
            yield target, lambda path=path: (_read_file(path), None)  # type: ignore[misc]


def _refuse(message: str) -> tuple[GraphFile, None]:
    raise Refused(message)


def _read_file(path: Path) -> GraphFile:
    source = read_source(path, "GRAPHS")
    return GraphFile(source.id, source.document, str(path), source.id)


# Python code.


def _load_code(target: str, modules: _Modules) -> tuple[GraphFile, Program | None]:
    found = load_program(target, modules.load)
    if isinstance(found, GraphSpec):
        return GraphFile(found.id, graph_to_json(found), target, found.id), None
    program = _program(found, modules.load(module_in(target)))
    return GraphFile(program.name, program.document(), target, program.name), program


def _program(target: Graph | Agent, module: ModuleType) -> Program:
    from penstock.nodes.program import Program  # imports agents, which graphs in JSON need not have

    if not is_agent(target) and (problems := problems_of(target)):
        raise GraphInvalid(problems)
    return Program.of(target, (module.__doc__ or "").strip().partition("\n")[0])


class _Modules:
    """The modules of one pass over the targets: each is imported once, and fails once."""

    def __init__(self) -> None:
        self._loaded: dict[str, ModuleType | Refused] = {}

    def load(self, name: str) -> ModuleType:
        if name not in self._loaded:
            try:
                self._loaded[name] = load_module(name)
            except Refused as refused:
                self._loaded[name] = refused
        found = self._loaded[name]
        if isinstance(found, Refused):
            raise found
        return found


# Loading again.


def folders_of(targets: Iterable[str]) -> set[Path]:
    """Return the folders whose modules are imported again with the programs in them."""
    return {_folder(target) for target in targets if is_code(target)}


def _folder(target: str) -> Path:
    module = module_in(target)
    return Path(module).resolve().parent if module.endswith(".py") else Path.cwd()


def loaded_files(folders: Iterable[Path]) -> dict[str, Path]:
    """Return the source files of user modules that are loaded from these folders, by module name."""
    found: dict[str, Path] = {}
    parents = tuple(folders)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name == "__main__" or not isinstance(file, str) or not is_user_code(file):
            continue
        path = Path(file)
        if any(parent in path.parents for parent in parents):
            found[name] = path
    return found


def used_files(targets: Iterable[str], folders: Iterable[Path]) -> set[Path]:
    """Return the Python files that the targets name, and those of modules that were imported with them."""
    named = {Path(module_in(target)) for target in targets if is_code(target) and module_in(target).endswith(".py")}
    return {path.resolve() for path in (*named, *loaded_files(folders).values())}


def load_again(targets: Sequence[str], check: Check) -> Served:
    """Load the targets anew; modules that are not imported again stay as they are.

    New module objects replace the old ones, which running programs keep using.
    """
    before = {name: sys.modules[name] for name in loaded_files(folders_of(targets)) if name in sys.modules}
    for name in before:
        del sys.modules[name]
    importlib.invalidate_caches()
    try:
        served = load_served(targets)
    finally:
        for name, module in before.items():
            sys.modules.setdefault(name, module)
    served.remove_invalid(check)
    return served


def snapshot(targets: Iterable[str], folders: Iterable[Path]) -> dict[Path, tuple[int, int]]:
    """Return the modification time and size of every file that the targets were or would be loaded from."""
    parents = tuple(folders)
    files = set(loaded_files(parents).values())
    for folder in parents:
        files.update(folder.glob("*.py"))  # a module that failed to import is not among the loaded ones
    for target in targets:
        path = Path(module_in(target) if is_code(target) else target).resolve()
        files.update(path.glob("*.json") if path.is_dir() else [path])
    found: dict[Path, tuple[int, int]] = {}
    for file in files:
        try:
            state = file.stat()
        except OSError:  # removed, or not written yet
            continue
        found[file] = (state.st_mtime_ns, state.st_size)
    return found
