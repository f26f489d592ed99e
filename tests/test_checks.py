"""Argument checks: the value comes back, or the error names the field and what is expected."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import checks
from penstock.errors import InvalidValue

ACCEPTED: list[tuple[Callable[[Any], Any], list[Any]]] = [
    (lambda value: checks.integer("n", value), [0, 1, 1 << 70]),
    (lambda value: checks.integer("n", value, minimum=None), [-5, 0]),
    (lambda value: checks.integer("n", value, minimum=2, maximum=3), [2, 3]),
    (lambda value: checks.seconds("n", value), [0, 0.5, 1e9]),
    (lambda value: checks.seconds("n", value, above_zero=True), [1e-9, 2]),
    (lambda value: checks.number("n", value, minimum=-1, maximum=1), [-1, 0.5, 1]),
    (lambda value: checks.boolean("n", value), [True, False]),
    (lambda value: checks.text("n", value), ["", "a\nb", "é"]),
    (lambda value: checks.text("n", value, minimum=1, maximum=2), ["a", "ab"]),
    (lambda value: checks.line("n", value, maximum=3), ["a", "abc"]),
    (lambda value: checks.identifier("n", value), ["run-1", "A.b_c:d"]),
    (lambda value: checks.choice("n", value, ("a", "b")), ["a", "b"]),
    (lambda value: checks.instance("n", value, int), [3]),
    (lambda value: checks.function("n", value), [len, print]),
    (lambda value: checks.mapping("n", value, "tools by name"), [{}, {"a": 1}]),
    (lambda value: checks.sequence("n", value, "tools"), [[], (1,), range(2)]),
]


def test_accepted_values_are_returned_unchanged() -> None:
    for number, (check, values) in enumerate(ACCEPTED):
        for value in values:
            assert check(value) is value, f"check {number} with {value!r}"


REFUSED: list[tuple[Callable[[Any], Any], list[Any], str]] = [
    (lambda value: checks.integer("n", value), [-1, True, 1.0, "1", None, math.nan], "a whole number, zero or more"),
    (
        lambda value: checks.integer("n", value, minimum=1, of="tokens", none="no limit"),
        [0, True],
        "a whole number of tokens, one or more, or None for no limit",
    ),
    (lambda value: checks.integer("n", value, minimum=2, maximum=3), [1, 4], "a whole number from 2 to 3"),
    (lambda value: checks.integer("n", value, minimum=None, maximum=3), [4], "a whole number, 3 or less"),
    (lambda value: checks.integer("n", value, minimum=None), ["a", None], "a whole number"),
    (
        lambda value: checks.seconds("n", value),
        [-1, math.nan, math.inf, 1e10, True, "1"],
        "a finite number of seconds, zero or more",
    ),
    (
        lambda value: checks.seconds("n", value, above_zero=True, none="no limit"),
        [0, -0.0],
        "a finite number of seconds, more than zero, or None for no limit",
    ),
    (lambda value: checks.number("n", value), [math.nan, -math.inf, False, "x"], "a finite number"),
    (lambda value: checks.number("n", value, minimum=0, maximum=1), [-0.1, 1.1], "a finite number from 0 to 1"),
    (lambda value: checks.number("n", value, minimum=0.5), [0.4], "a finite number, 0.5 or more"),
    (lambda value: checks.boolean("n", value), [0, 1, None, "yes"], "True or False"),
    (lambda value: checks.text("n", value), [None, b"", 3], "text"),
    (lambda value: checks.text("n", value, minimum=1), [""], "text that is not empty"),
    (lambda value: checks.text("n", value, minimum=1, maximum=2), ["", "abc"], "text of 1 to 2 characters"),
    (lambda value: checks.text("n", value, maximum=2), ["abc"], "text of at most 2 characters"),
    (lambda value: checks.line("n", value, maximum=3), ["", "abcd", "a\nb", None], "1 to 3 characters on one line"),
    (lambda value: checks.choice("n", value, ("a", "b", "c")), ["d", None, []], "'a', 'b' or 'c'"),
    (lambda value: checks.choice("n", value, ("a",)), ["b"], "'a'"),
    (lambda value: checks.instance("n", value, int), ["a"], "an int"),
    (lambda value: checks.instance("n", value, dict, "an object", none="none"), [3], "an object, or None for none"),
    (lambda value: checks.function("n", value), [3, None], "a function"),
    (lambda value: checks.mapping("n", value, "tools by name"), [[], {1: 2}, None], "a mapping of tools by name"),
    (lambda value: checks.sequence("n", value, "tools"), ["ab", b"ab", 3, None, {1}], "a list of tools"),
]


def test_refused_values_are_named_with_what_is_expected() -> None:
    for check, values, expected in REFUSED:
        for value in values:
            with pytest.raises(InvalidValue) as raised:
                check(value)
            assert (raised.value.field, raised.value.expected) == ("n", expected), repr(value)


@given(st.text(max_size=5) | st.none() | st.integers())
def test_only_ids_are_accepted_as_ids(value: Any) -> None:
    is_id = isinstance(value, str) and value[:1].isalnum() and all(c.isalnum() or c in "._:-" for c in value)
    if is_id and value.isascii():
        assert checks.identifier("n", value) == value
    else:
        with pytest.raises(InvalidValue, match="n must be an id: a letter or digit"):
            checks.identifier("n", value)
