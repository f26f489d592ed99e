"""What `make check` leaves out is there to be left out."""

from __future__ import annotations

from tests import unit


def test_files_and_folders_that_are_left_out_exist() -> None:
    assert [name for name in unit.NOT_UNIT if not (unit.TESTS / name).exists()] == []


def test_tests_that_are_left_out_exist() -> None:
    source = "\n".join(path.read_text() for path in unit.TESTS.rglob("test_*.py") if unit.is_unit(path))
    assert {name for name in unit.SLOW if f"def {name}(" not in source} == set()
