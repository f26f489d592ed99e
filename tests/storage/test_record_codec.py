"""What is kept in memory is what a database would have kept, however it is kept."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidValue
from penstock.storage import codec
from penstock.storage.memory.record_codec import decode_json, encode_json

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
        return repr(decode_json(encode_json("value", value)))
    except InvalidValue as error:
        return str(error)


def written_and_read(value: Any) -> str:
    try:
        return repr(codec.decode_document("table", "key", codec.encode_document("value", value)))
    except InvalidValue as error:
        return str(error)


@given(VALUE)
def test_values_in_memory_are_read_back_as_from_a_database(value: Any) -> None:
    assert kept_and_given(value) == written_and_read(value)


@pytest.mark.parametrize(
    "one",
    [
        *(True, 1, 1.0, -0.0, 2**63, -(2**63), 10**5_000, float("nan"), float("inf"), Number.ONE, Word.ONE, b"", ()),
        *("\0", "\u00fc", "\ud800", "\ud83d\ude00", (1,), [], {}, {1: 2}, MappingProxyType({"a": 1}), object),
    ],
    ids=lambda one: ascii(one)[:20] if type(one) is not int else f"{one:.3e}"[:20] if one < 2**64 else "huge",
)
def test_values_in_objects_are_read_back_as_from_a_database(one: Any) -> None:
    for value in (one, {"a": one}, {"b": {"a": one}}, MappingProxyType({"a": one})):
        assert kept_and_given(value) == written_and_read(value)


@pytest.mark.parametrize("key", [1, None, True, Word.ONE, "\u00fc", "\ud83d\ude00", ("a",)], ids=ascii)
def test_keys_are_read_back_as_from_a_database(key: Any) -> None:
    assert kept_and_given({key: 1}) == written_and_read({key: 1})


@pytest.mark.parametrize("value", [{}, {"a": 1}, {"a": [1]}, [{"a": 1}]], ids=str)
def test_callers_cannot_change_stored_values(value: Any) -> None:
    before = repr(value)
    kept = encode_json("value", value)
    for one in (value, decode_json(kept)):
        inside = one if isinstance(one, dict) else one[0]
        for more in inside.values():
            more.append(2) if isinstance(more, list) else None
        inside["b"] = 2
    assert repr(decode_json(kept)) == before
