"""Any value comes out as JSON, in bounded size, without an error."""

from __future__ import annotations

import enum
import json
import math
from collections import UserDict
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.tracing.jsonable import MAX_DEPTH, MAX_PARTS, MAX_TEXT, MAX_TEXT_TOTAL, jsonable

pytestmark = pytest.mark.requirement("G-8")

GENEROUS = 4 * MAX_TEXT_TOTAL
"""Characters of JSON that no input, however large, may exceed; escapes make one character into six at most."""


def dumped(value: object) -> str:
    """`value` as strict JSON text: no NaN, no unknown types."""
    return json.dumps(jsonable(value), allow_nan=False)


def is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return type(value) is dict and all(type(key) is str and is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return type(value) is list and all(is_plain(item) for item in value)
    return value is None or type(value) in (bool, int, float, str)


class Colour(enum.StrEnum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


class UnshowableText(str):
    def __str__(self) -> str:
        raise RuntimeError("no")


class UnshowableDate:
    def isoformat(self) -> str:
        return UnshowableText("no")


class NotText:
    def __repr__(self) -> str:
        return 5  # type: ignore[return-value]


class BrokenDict(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("no")


class BrokenList(list[Any]):
    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("no")


class EndlessMapping(UserDict[str, Any]):
    def __len__(self) -> int:
        raise OverflowError


def deep(value: object) -> object:
    for _ in range(MAX_DEPTH):
        value = [value]
    return value


class Named:
    def __repr__(self) -> str:
        return "<a thing>"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (0, 0),
        (-7, -7),
        (0.5, 0.5),
        ("text", "text"),
        ([1, "a", None], [1, "a", None]),
        ((1, 2), [1, 2]),
        ({1}, [1]),
        (frozenset({1}), [1]),
        ({"a": {"b": [1]}}, {"a": {"b": [1]}}),
        (UserDict({"a": 1}), {"a": 1}),
        ({1: "a", None: "b", (2, 3): "c"}, {"1": "a", "None": "b", "(2, 3)": "c"}),
        (Colour.RED, "red"),
        (Level.HIGH, 3),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (b"\x00\xff", "b'\\x00\\xff'"),
        (datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), "2026-01-02T03:04:05+00:00"),
        (date(2026, 1, 2), "2026-01-02"),
        (Decimal("0.10"), "Decimal('0.10')"),
        (Named(), "<a thing>"),
        (Unshowable(), "<Unshowable: RuntimeError while showing it>"),
        (NotText(), "<NotText: TypeError while showing it>"),
        (UnshowableText("x"), "<UnshowableText: RuntimeError while showing it>"),
        (UnshowableDate(), "<UnshowableDate: RuntimeError while showing it>"),
        ([BrokenDict(a=1), 2], ["<BrokenDict: RuntimeError while showing it>", 2]),
        ([BrokenList([1]), 2], ["<BrokenList: RuntimeError while showing it>", 2]),
        ({Unshowable: 1}, {repr(Unshowable): 1}),
        (deep(EndlessMapping({"a": 1})), deep("<EndlessMapping: OverflowError while showing it>")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_becomes_what_json_has_for_it(value: object, expected: object) -> None:
    assert jsonable(value) == expected
    assert is_plain(jsonable(value))
    dumped(value)


def test_a_key_that_cannot_be_shown_harms_only_itself() -> None:
    assert jsonable({Unshowable(): 1, "b": 2}) == {"<Unshowable: RuntimeError while showing it>": 1, "b": 2}


def test_odd_text_survives_a_round_trip() -> None:
    text = "lone \ud800 surrogate, null \x00, escape \x1b[31m, line\nbreak, right-to-left \u202e"
    assert json.loads(dumped({text: text})) == {text: text}


def test_the_result_shares_nothing_that_can_change_with_the_value() -> None:
    value: dict[str, Any] = {"a": [1, {"b": 2}]}
    result = jsonable(value)
    value["a"][1]["b"] = 3
    value["a"].append(4)
    assert result == {"a": [1, {"b": 2}]}


# Bounds.


@pytest.mark.parametrize(("digits", "kind"), [(300, int), (309, str), (5_000, str), (100_000, str)])
def test_a_number_too_long_for_json_readers_becomes_text(digits: int, kind: type) -> None:
    value = 10**digits
    assert type(jsonable(value)) is kind
    assert type(jsonable(-value)) is kind
    assert len(dumped({"n": value, value: "n"})) < 700


def test_a_list_that_contains_itself_ends() -> None:
    itself: list[Any] = [1]
    itself.append(itself)
    found = jsonable(itself)
    for _ in range(MAX_DEPTH - 1):
        assert found[0] == 1
        found = found[1]
    assert found == [1, "<list of 2>"]


def test_a_dictionary_that_contains_itself_ends() -> None:
    itself: dict[str, Any] = {}
    itself["me"] = itself
    assert dumped(itself).count("me") == MAX_DEPTH


def test_two_lists_that_contain_each_other_end() -> None:
    one: list[Any] = []
    other = [one, one]
    one.extend([other, other])
    assert len(dumped(one)) < GENEROUS


def doubled(value: Any, wrap: Callable[[Any], Any]) -> Any:
    for _ in range(60):
        value = wrap(value)
    return value


@pytest.mark.parametrize(
    "laughs",
    [
        doubled("ha", lambda value: [value, value]),
        doubled("ha", lambda value: (value,) * 10),
        doubled("ha", lambda value: {"a": value, "b": value, "c": value}),
        [["x" * MAX_TEXT] * 1_000] * 1_000,
        [{"k" * MAX_TEXT: 1}] * 9_000,
        {"x": "\x00" * MAX_TEXT * 3},
        b"\x00" * 10_000_000,
        [bytearray(MAX_TEXT)] * 9_000,
    ],
    ids=["lists", "tuples", "dictionaries", "text", "keys", "escapes", "bytes", "shared bytes"],
)
def test_a_small_value_that_unfolds_into_a_huge_one_stays_bounded(laughs: object) -> None:
    assert len(dumped(laughs)) < 10 * GENEROUS


def test_what_is_nested_too_deeply_is_named_not_followed() -> None:
    value: Any = "bottom"
    for _ in range(100_000):
        value = [value]
    assert dumped(value) == "[" * MAX_DEPTH + '"<list of 1>"' + "]" * MAX_DEPTH


def test_a_container_with_too_many_parts_is_cut() -> None:
    *shown, note = jsonable(range_list := list(range(MAX_PARTS * 3)))
    assert (len(shown), note) == (MAX_PARTS - 1, f"… ({MAX_PARTS * 3} items)")
    assert jsonable(range_list)[:3] == [0, 1, 2]
    pairs = jsonable({str(n): n for n in range_list})
    assert (pairs.pop("…"), len(pairs)) == (f"({MAX_PARTS * 3} keys)", MAX_PARTS - 1)


def test_text_that_is_cut_says_how_long_it_was() -> None:
    assert jsonable("x" * MAX_TEXT) == "x" * MAX_TEXT
    assert jsonable("x" * (MAX_TEXT + 1)) == "x" * MAX_TEXT + f"… ({MAX_TEXT + 1} characters)"


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.binary()
    | st.decimals()
    | st.datetimes()
    | st.builds(Unshowable)
    | st.builds(object),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(st.characters()) | st.integers() | st.none() | st.floats() | st.binary(), inner)
    ),
)


@given(anything)
def test_anything_at_all_is_json(value: object) -> None:
    result = jsonable(value)
    assert is_plain(result)
    json.dumps(result, allow_nan=False)


json_data = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(json_data)
def test_what_is_json_already_stays_as_it_is(value: object) -> None:
    assert jsonable(value) == value
