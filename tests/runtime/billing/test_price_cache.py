"""The exported table of prices is kept for the next process, which then starts none and makes none."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.runtime.billing import price_cache, price_export, price_table
from penstock.runtime.billing.price_cache import Cache
from penstock.runtime.billing.price_table import PriceTable, kept_table, load_table

PRICED = """
import asyncio, sys

happened = []
sys.addaudithook(lambda event, args: happened.append("export") if event == "subprocess.Popen" else None)
from penstock import *
from penstock.runtime.billing.usage import Usage
from penstock.agents.model import ModelResponse

def ask():
    return ModelResponse("yes", usage=Usage(1_000, 10, model="gpt-4o"))

async def aask():
    return ask()

async def main():
    with contain() as run:
        {call}
    assert not [name for name in sys.modules if name.startswith("genai_prices")]
    print(*happened, run.stats.total_cost)

asyncio.run(main())
"""
CALLS = {
    "a sync call that names its model": "run.wrap_llm_call(ask, WrapOptions(model='gpt-4o'))",
    "a sync call whose answer names the model": "run.llm(ask)",
    "a sync step": "await Graph('g').add_step(FunctionNode('ask', lambda ctx: ctx.llm(ask)), 'ask').execute(run)",
    "an async call": "await run.allm(aask, model='gpt-4o')",
}


def priced(call: str, directory: Path) -> str:
    """What a new process says that makes this call."""
    environ = {**os.environ, "XDG_CACHE_HOME": str(directory)}
    code = PRICED.format(call=call)
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environ)
    assert shown.returncode == 0, shown.stderr
    return shown.stdout.strip()


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory in which an earlier process has kept the table."""
    directory = tmp_path_factory.mktemp("warm")
    assert priced("run.llm(ask)", directory) == "export 0.0026"
    return directory


@pytest.mark.parametrize("call", CALLS)
def test_the_next_process_reads_the_table_that_the_first_has_kept(call: str, warm: Path) -> None:
    assert priced(CALLS[call], warm) == "0.0026"


def test_the_kept_table_is_the_exported_one_and_private(warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(warm))
    cache = Cache.find()
    assert cache is not None
    lines = cache.read()
    assert lines is not None
    assert [line.decode() for line in lines] == list(price_export.lines())
    assert list((warm / "penstock").iterdir()) == [cache.path]
    assert stat.S_IMODE(cache.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(cache.path.parent.stat().st_mode) == 0o700


LINES = ['["provider", "mine", ["equals", "own"], null, []]', '["model", ["equals", "own"], [[null, null]]]', '["end"]']


def kept() -> Cache:
    """A small table, kept in the cache directory of the test."""
    cache = Cache.find()
    assert cache is not None
    cache.write(LINES)
    assert kept_table() is not None
    return cache


def _of_other_sources(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    Cache(cache.path, b'["made from", []]').write(LINES)


def _of_another_size(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(price_cache, "EXPORTING", (*price_cache.EXPORTING, "prices.py"))


DAMAGES: dict[str, Callable[[Cache, pytest.MonkeyPatch], Any]] = {
    "is gone": lambda cache, _: cache.path.unlink(),
    "is empty": lambda cache, _: cache.path.write_bytes(b""),
    "is truncated": lambda cache, _: cache.path.write_bytes(cache.path.read_bytes()[:-9]),
    "is cut inside a line": lambda cache, _: cache.path.write_bytes(cache.path.read_bytes()[:-20] + b"\n[end]"),
    "is no JSON": lambda cache, _: cache.path.write_bytes(cache.made_from + b"\n\xff\xfe\x00"),
    "has no end": lambda cache, _: cache.write(LINES[:-1]),
    "has an object for a line": lambda cache, _: cache.write(["{}", *LINES]),
    "has a model without a provider": lambda cache, _: cache.write(LINES[1:]),
    "was made from other sources": _of_other_sources,
    "is older than the sources": _of_another_size,
    "may be written by others": lambda cache, _: cache.path.chmod(0o622),
    "is a directory": lambda cache, _: (cache.path.unlink(), cache.path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_table_is_made_anew_if_the_kept_one(damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    DAMAGES[damage](kept(), monkeypatch)
    assert kept_table() is None
    monkeypatch.setattr(price_table, "start_export", lambda: None)
    monkeypatch.setattr(price_export, "lines", lambda: iter(LINES))
    assert load_table().find("own") is not None


@pytest.mark.parametrize(
    ("owner", "mode", "trusted"),
    [(1000, 0o600, True), (0, 0o644, True), (1001, 0o600, False), (1000, 0o620, False), (0, 0o602, False)],
)
def test_a_table_counts_only_if_this_user_or_root_has_written_it(
    owner: int, mode: int, trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert price_cache._is_trusted(SimpleNamespace(st_uid=owner, st_mode=mode)) is trusted  # type: ignore[arg-type]


def test_a_table_that_cannot_be_written_leaves_the_old_one_and_no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = kept()

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    cache.write(["other"])
    assert list(cache.path.parent.iterdir()) == [cache.path]
    assert kept_table() is not None


def test_nothing_is_kept_where_no_directory_can_be_made(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (empty_cache / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(empty_cache / "file"))
    cache = Cache.find()
    assert cache is not None
    cache.write(LINES)
    assert cache.read() is None


def _homeless() -> Path:
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize("given", ["", "relative"])
def test_without_a_home_nothing_is_kept(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.setattr(Path, "home", _homeless)
    assert Cache.find() is None
    assert kept_table() is None


def test_without_genai_prices_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(price_cache, "find_spec", lambda name: None)
    assert Cache.find() is None


def test_prices_that_a_program_has_set_in_genai_prices_take_precedence_over_kept_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept()
    monkeypatch.setattr(price_table, "_is_customized", lambda: True)
    assert kept_table() is None


def test_an_export_that_was_started_is_used_and_not_the_kept_table() -> None:
    kept()
    export = price_table.start_export()
    assert export is not None
    loaded = load_table(export)
    assert isinstance(loaded, PriceTable)
    assert loaded.find("gpt-4o") is not None
    assert loaded.find("own") is None
