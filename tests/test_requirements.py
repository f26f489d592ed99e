"""Requirements and tests hold each other."""

from __future__ import annotations

import re

import pytest

from tests import requirements
from tests.requirements import REQUIREMENTS, Requirement


def test_every_built_requirement_has_a_test(marked: set[str]) -> None:
    assert requirements.untested(marked) == []


def test_no_deferred_requirement_is_marked(marked: set[str]) -> None:
    assert requirements.built_but_deferred(marked) == []


@pytest.mark.parametrize("id_", REQUIREMENTS)
def test_a_requirement_is_one_sentence_in_a_known_group(id_: str) -> None:
    requirement = REQUIREMENTS[id_]
    assert re.fullmatch(r"(G|C|P|T|K|X)-[A-Z]?\d+", id_)
    assert requirement.behaviour.endswith(".")
    assert requirement.deferred is None or requirement.deferred.startswith("needs ")


def test_an_id_without_a_requirement_is_unknown() -> None:
    assert requirements.unknown(["G-1", "G-99"]) == ["G-99"]


def test_a_mark_on_a_deferred_id_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REQUIREMENTS, "G-2", Requirement("One.", "needs another"))
    assert requirements.built_but_deferred(["G-1", "G-2"]) == ["G-2"]


def test_a_built_id_without_a_mark_shows() -> None:
    assert requirements.untested(REQUIREMENTS.keys() - {"C-2"}) == ["C-2"]


def test_an_id_is_unproven_when_none_of_its_tests_passed() -> None:
    assert requirements.unproven({"G-1": True, "G-2": False}) == ["G-2"]


def test_marks_are_read_from_decorators_and_module_marks() -> None:
    source = "pytestmark = pytest.mark.requirement('C-1')\n@pytest.mark.requirement('G-1', 'G-2')\ndef test(): ...\n"
    assert sorted(requirements.marks_in(source)) == ["C-1", "G-1", "G-2"]
