"""How the command line is called in tests: in this process, from an empty directory, with nothing left behind."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from penstock.cli import main
from penstock.kernel.executor import _installed


class Ended(NamedTuple):
    """What a command came to."""

    code: int
    out: str
    err: str


Penstock = Callable[..., Ended]


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty directory to work in; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def only_what_tests_install(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The node types that come with the package are not offered here: what a test is about stands in the test."""
    every = importlib.metadata.entry_points

    def others(**wanted: str) -> list[importlib.metadata.EntryPoint]:
        return [one for one in every(**wanted) if not one.value.startswith("penstock.nodes.")]

    monkeypatch.setattr(importlib.metadata, "entry_points", others)
    _installed.cache_clear()
    yield
    _installed.cache_clear()


@pytest.fixture
def penstock(capsys: pytest.CaptureFixture[str]) -> Penstock:
    """Runs `penstock` with these arguments: exit code, standard output, standard error."""

    def call(*arguments: object) -> Ended:
        code = main([str(one) for one in arguments])
        printed = capsys.readouterr()
        return Ended(code, printed.out, printed.err)

    return call
