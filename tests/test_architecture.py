"""ARCHITECTURE.md names files and folders that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.blocks import blocks

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "penstock"
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
PACKAGE = re.compile(r"^\| `([a-z/_]+/)` \| [^|]+ \| (.+) \|$", re.MULTILINE)
FACADES = {"events", "executors", "export", "stores"}
VERBS = {"decides"}
"""What the picture writes below a package."""
NAME = re.compile(r"`([a-z_]+/?)`")
PATH = re.compile(r"`((?:[a-z_]+/)+(?:[a-z_]+\.py)?|[a-z_]+\.py)`")


def is_there(path: str) -> bool:
    return (SOURCE / path).exists() or (ROOT / path).exists()


@pytest.mark.parametrize(("package", "files"), PACKAGE.findall(TEXT))
def test_the_files_of_a_package_are_there(package: str, files: str) -> None:
    folder = SOURCE / package
    missing = [
        name
        for name in NAME.findall(re.sub(r"`with lock`|`/v1`", "", files))
        if not (folder / name).is_dir() and not (folder / f"{name}.py").is_file()
    ]
    assert missing == []


def test_the_picture_has_every_package_and_core_module_and_nothing_else() -> None:
    (picture,) = [block.text for block in blocks(TEXT) if block.kind == "text"]
    lines = [line for line in picture.splitlines() if line[:20].strip()]
    drawn = {name for line in lines for name in re.split(r"\s{3,}", line.strip())[0].split()}
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    modules = {path.stem for path in SOURCE.glob("*.py")} - {"__init__", *FACADES}
    assert {name for name in drawn if name.isidentifier()} - VERBS == packages | modules


def test_every_package_has_a_row() -> None:
    packages = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()}
    assert packages - {package.split("/")[0] for package, _ in PACKAGE.findall(TEXT)} == set()


def test_every_path_is_there() -> None:
    behind_the_table = TEXT[TEXT.index("## The door") :]
    assert [path for path in PATH.findall(behind_the_table) if not is_there(path)] == []
