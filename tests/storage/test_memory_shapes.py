"""What is kept in memory is what a database would have kept, however it is kept."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidValue
from penstock.storage.memory.shapes import to_give, to_keep
from penstock.storage.sql import codec

LEAF = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None))
KEY = st.text(st.characters(codec=None), max_size=3) | st.integers()
VALUE = st.recursive(LEAF, lambda inside: st.lists(inside, max_size=3) | st.dictionaries(KEY, inside, max_size=3))


class Number(IntEnum):
    ONE = 1


class Word(StrEnum):
    ONE = "one"


def kept_and_given(value: Any) -> str:
    """As Python writes what came back, or why nothing did: 1, 1.0 and True are three, and so are "a" and Word.A."""
    try:
        return repr(to_give(to_keep("value", value)))
    except InvalidValue as error:
        return str(error)


def written_and_read(value: Any) -> str:
    try:
        return repr(codec.read_document("table", "key", codec.document("value", value)))
    except InvalidValue as error:
        return str(error)


@given(VALUE)
def test_whatever_is_kept_comes_back_as_from_a_database(value: Any) -> None:
    assert kept_and_given(value) == written_and_read(value)


@pytest.mark.parametrize(
    "one",
    [
        *(True, 1, 1.0, -0.0, 2**63, -(2**63), 10**5_000, float("nan"), float("inf"), Number.ONE, Word.ONE, b"", ()),
        *("\0", "\u00fc", "\ud800", "\ud83d\ude00", (1,), [], {}, {1: 2}, MappingProxyType({"a": 1}), object),
    ],
    ids=lambda one: ascii(one)[:20] if type(one) is not int else f"{one:.3e}"[:20] if one < 2**64 else "huge",
)
def test_what_is_in_an_object_comes_back_as_from_a_database(one: Any) -> None:
    for value in (one, {"a": one}, {"b": {"a": one}}, MappingProxyType({"a": one})):
        assert kept_and_given(value) == written_and_read(value)


@pytest.mark.parametrize("key", [1, None, True, Word.ONE, "\u00fc", "\ud83d\ude00", ("a",)], ids=ascii)
def test_a_key_comes_back_as_from_a_database(key: Any) -> None:
    assert kept_and_given({key: 1}) == written_and_read({key: 1})


@pytest.mark.parametrize("value", [{}, {"a": 1}, {"a": [1]}, [{"a": 1}]], ids=str)
def test_neither_who_gave_it_nor_who_was_given_it_can_change_what_is_kept(value: Any) -> None:
    before = repr(value)
    kept = to_keep("value", value)
    for one in (value, to_give(kept)):
        inside = one if isinstance(one, dict) else one[0]
        for more in inside.values():
            more.append(2) if isinstance(more, list) else None
        inside["b"] = 2
    assert repr(to_give(kept)) == before
