"""`tools/structure.py` counts imports and their cycles, frames, transactions and words."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tools import structure

ROOT = Path(__file__).parents[1]


def package(folder: Path, **files: str) -> Path:
    """A package `p` with these modules; `a__b` is module `b` of sub-package `a`."""
    top = folder / "p"
    top.mkdir()
    (top / "__init__.py").touch()
    for name, text in files.items():
        path = top.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text)
    return top


def test_each_import_is_counted_by_its_place_and_for_the_module_that_it_names(tmp_path: Path) -> None:
    text = """
import json
import p.b
from p.sub import c, name
from . import b
from .sub.c import something
if TYPE_CHECKING:
    from p.types import One
    def f():
        import p.later
try:
    import p.tried
except ImportError:
    pass
class A:
    import p.in_class
    def g(self):
        from p import in_function, a
"""
    names = ("b", "sub__c", "types", "later", "tried", "in_class", "in_function")
    modules = structure.modules_in(package(tmp_path, a=text, **dict.fromkeys(names, "")))
    found = {kind: edges.get("p.a", set()) for kind, edges in structure.imports_in(modules).items()}
    assert found == {
        "module": {"p.b", "p.sub", "p.sub.c", "p.tried", "p.in_class"},
        "type_checking": {"p.types", "p.later"},
        "function": {"p.in_function"},
    }


def test_relative_imports_are_resolved(tmp_path: Path) -> None:
    top = package(tmp_path, sub__c="from . import d\nfrom .. import b\nfrom ..b import x", sub__d="", b="")
    (top / "sub" / "__init__.py").write_text("from .c import y\nfrom ..b import x")
    found = structure.imports_in(structure.modules_in(top))["module"]
    assert found == {"p.sub.c": {"p.sub.d", "p.b"}, "p.sub": {"p.sub.c", "p.b"}}


def test_cycles_are_counted_by_kind_of_import(tmp_path: Path) -> None:
    files = {
        "a": "import p.b",
        "b": "def f():\n    import p.a",
        "c": "import p.d\nimport p.a",
        "d": "if TYPE_CHECKING:\n    import p.c",
        "e": "import p.f",
        "f": "import p.g",
        "g": "import p.e",
    }
    found = structure.measure_source(package(tmp_path, **files))
    always, by_function, by_type = ["p.e", "p.f", "p.g"], ["p.a", "p.b"], ["p.c", "p.d"]
    assert found["cycles"]["modules"] == {
        "module": [always],
        "with_function": [always, by_function],
        "with_type_checking": [always, by_type],
        "all": [always, by_function, by_type],
    }
    assert (found["modules"], found["lines"]) == (8, 10)


def test_folders_can_form_a_cycle_without_a_cycle_of_modules(tmp_path: Path) -> None:
    files = {"x__a": "import p.y.a", "y__a": "", "y__b": "import p.x.b", "x__b": ""}
    cycles = structure.measure_source(package(tmp_path, **files))["cycles"]
    assert cycles["modules"]["all"] == []
    assert cycles["folders"]["module"] == [["p.x", "p.y"]]


def test_a_long_chain_of_imports_does_not_overflow_the_stack() -> None:
    chain = {f"m{number}": {f"m{number + 1}"} for number in range(5_000)}
    assert structure.cycles(chain) == []
    assert structure.cycles({**chain, "m5000": {"m0"}}) == [sorted(f"m{number}" for number in range(5_001))]


def test_words_are_counted_alone_and_in_names_but_not_inside_other_words(tmp_path: Path) -> None:
    file = tmp_path / "a.md"
    file.write_text("Told is told; is_told, _bells. Untold stories: how-manieth; foretold, tolding.")
    assert structure.count_words([file], ("told", "untold", "bells", "how-manieth", "rouse")) == {
        "told": 3,
        "untold": 1,
        "bells": 1,
        "how-manieth": 1,
        "rouse": 0,
    }


def test_names_on_disk_and_on_the_wire_are_not_counted(tmp_path: Path) -> None:
    file = tmp_path / "a.md"
    kept = 'asked_ms, chats_nobody_made, {"asked": 1}, `untold`, stop.asked, Stop(asked=2), asked: float | None'
    file.write_text(f"{kept}. You asked: who? asked, is_asked, the untold.")
    assert structure.count_words([file], ("asked", "untold", "nobody")) == {"asked": 3, "untold": 1, "nobody": 0}


def test_frames_of_all_threads_are_counted_and_resumptions_separately(tmp_path: Path) -> None:
    (tmp_path / "storage").mkdir()
    texts = {"a.py": "def one(): return 1", "storage/b.py": "def many():\n    yield 1\n    yield 2"}
    names: dict[str, Any] = {}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        exec(compile(text, str(tmp_path / name), "exec"), names)  # as if it were imported from there
    walk = structure.Walk(tmp_path)
    with walk.watching():
        names["one"]()
        walk.is_on = True
        worker = threading.Thread(target=lambda: list(names["many"]()))
        worker.start()
        worker.join()
        names["one"]()
        with walk.paused():
            names["one"]()
        names["one"]()
        walk.is_on = False
    assert walk.figures() == {
        "files": 2,
        "folders": 2,
        "functions": 2,
        "frames": 3,
        "resumptions": 2,
        "package_changes": 2,
        "storage_percent": 33,
    }
    assert walk.figures()["frames"] == 0


def test_transactions_are_counted_by_their_first_statement(tmp_path: Path) -> None:
    transactions = structure.Transactions()
    writes = ("BEGIN IMMEDIATE", "SAVEPOINT s", "INSERT INTO t VALUES (1)", "ROLLBACK TO s", "SELECT 1", "COMMIT")
    reads = ("BEGIN", "SELECT * FROM t", "SELECT 1", "ROLLBACK")
    looks = ("BEGIN IMMEDIATE", "PRAGMA data_version", "COMMIT")
    for name in ("data.db", "data.db.ledger"):
        with transactions.watching():
            connection = sqlite3.connect(str(tmp_path / name), isolation_level=None)
        with closing(connection):
            connection.execute("CREATE TABLE t (a)")
            statements = (*writes, *reads, *looks, "SELECT 1") if name == "data.db" else writes
            for statement in statements:
                connection.execute(statement).fetchall()
    found = {"write": 2, "write_ledger": 1, "read": 2, "read_ledger": 0, "looks_for_changes": 1}
    assert transactions.figures() == found
    assert transactions.figures() == dict.fromkeys(found, 0)


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    """This tree, as the script measures it."""
    command = [sys.executable, "-m", "tools.structure", "--json"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(shown.stdout)
    return found


def test_a_chat_turn_on_sqlite_takes_at_most_five_transactions_that_write_and_five_that_read(
    measured: dict[str, Any],
) -> None:
    transactions = measured["transactions"]
    assert 0 < transactions["write"] <= 5
    assert 0 < transactions["read"] <= 5


def test_a_chat_request_passes_few_files(measured: dict[str, Any]) -> None:
    assert measured["walks"]["chat_request"]["files"] <= 104
    assert measured["root_names"] <= 100


def test_the_walks_of_the_architecture_have_the_measured_numbers_of_files(measured: dict[str, Any]) -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for title, walk in (("One call", "run_llm"), ("One node", "graph_node")):
        paragraph = text[text.index(f"**{title}**") :].partition("\n\n")[0]
        assert paragraph.endswith(f" {measured['walks'][walk]['files']} files."), title


def test_imports_form_no_cycle_at_any_depth(measured: dict[str, Any]) -> None:
    kinds = ("module", "with_function", "with_type_checking", "all")
    assert measured["cycles"] == {what: {kind: [] for kind in kinds} for what in ("modules", "folders")}


def test_source_tests_and_docs_use_ordinary_words(measured: dict[str, Any]) -> None:
    words = measured["words"]
    found = {where: {word for word, count in words[where].items() if count} for where in ("src", "tests")}
    assert found == {"src": set(), "tests": set()}
    assert sum(words["docs"].values()) <= 10  # in prose, some have their ordinary sense


def test_the_script_measures_this_tree(measured: dict[str, Any]) -> None:
    found = measured
    assert found["modules"] == len(list(structure.PACKAGE.rglob("*.py")))
    assert found["root_names"] > 0
    for walk in found["walks"].values():
        assert 0 < walk["folders"] <= walk["files"] <= walk["functions"] <= walk["frames"]
    sizes = [found["walks"][name]["files"] for name in ("run_llm", "graph_node", "chat_request")]
    assert sizes == sorted(sizes)
    transactions = found["transactions"]
    assert 0 < transactions["write_ledger"] < transactions["write"]
    assert 0 <= transactions["read_ledger"] < transactions["read"]
    lines = list(structure.render(found))
    assert any(line.strip().startswith(f"{sizes[-1]} files in ") for line in lines)
    assert [line.split()[0] for line in lines[-len(structure.WORDS) :]] == list(structure.WORDS)
    before = {**found, "modules": found["modules"] + 7, "walks": {"chat_request": found["walks"]["chat_request"]}}
    table = list(structure.compare(before, found))
    assert f"| modules | {found['modules'] + 7:,} | {found['modules']:,} | -7 |" in table
    assert f"| run.llm call: files | – | {sizes[0]} | |" in table
    assert f"| chat request: files | {sizes[-1]} | {sizes[-1]} | +0 |" in table
