"""A value says its type, and becomes another only where that was declared."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import CancelledError, InvalidValue
from penstock.kernel.executor import STANDARD_CONVERSIONS, ConversionFailed, Conversions, DataValue

TYPES = ("text", "number", "boolean", "object", "list", "any")
PATH = "a.output → b.input"


@pytest.mark.parametrize(
    ("given", "value", "wanted", "expected"),
    [
        ("number", 5, "text", "5"),
        ("number", 0.5, "text", "0.5"),
        ("boolean", True, "text", "true"),
        ("object", {"a": "é"}, "text", '{"a": "é"}'),
        ("list", [1, None], "text", "[1, null]"),
        ("text", "5", "number", 5),
        ("text", " -1.5e2 ", "number", -150.0),
        ("text", "false", "boolean", False),
        ("text", "a", "list", ["a"]),
        ("object", {}, "list", [{}]),
        ("number", 0, "list", [0]),
        ("boolean", False, "list", [False]),
    ],
)
def test_a_standard_conversion(given: str, value: Any, wanted: str, expected: Any) -> None:
    assert STANDARD_CONVERSIONS.fits(given, wanted)
    converted = STANDARD_CONVERSIONS.convert(DataValue(given, value), wanted, PATH)
    assert converted == DataValue(wanted, expected)
    assert type(converted.value) is type(expected)


@pytest.mark.parametrize(
    ("given", "value", "wanted"),
    [
        ("text", "five", "number"),
        ("text", "true", "number"),
        ("text", "NaN", "number"),
        ("text", "1e999", "number"),
        pytest.param("text", "9" * 5_000, "number", id="5,000 digits"),
        pytest.param("text", "[" * 100_000, "number", id="deep brackets"),
        ("text", None, "number"),
        ("text", "yes", "boolean"),
        ("text", "True", "boolean"),
        ("text", ["true"], "boolean"),
        ("number", float("nan"), "text"),
        pytest.param("number", 10**5_000, "text", id="a number of 5,001 digits"),
        ("object", {"a": object()}, "text"),
    ],
)
def test_a_value_that_cannot_be_converted_says_where_and_why(given: str, value: Any, wanted: str) -> None:
    with pytest.raises(ConversionFailed) as caught:
        STANDARD_CONVERSIONS.convert(DataValue(given, value), wanted, PATH)
    error = caught.value
    assert (error.path, error.given, error.wanted) == (PATH, given, wanted)
    assert error.why
    assert str(error).startswith(f"{PATH}: {given} cannot become {wanted}: ")
    assert len(str(error)) < 400


def test_a_conversion_that_is_not_declared_is_refused() -> None:
    assert not STANDARD_CONVERSIONS.fits("number", "boolean")
    with pytest.raises(ConversionFailed, match="no such conversion is declared"):
        STANDARD_CONVERSIONS.convert(DataValue("number", 1), "boolean", PATH)


@pytest.mark.parametrize("wanted", ["number", "any"])
def test_a_value_of_the_right_type_and_a_value_for_any_are_not_converted(wanted: str) -> None:
    value = DataValue("number", None)
    assert STANDARD_CONVERSIONS.convert(value, wanted, PATH) is value


def test_a_value_of_any_type_arrives_everywhere_unchanged() -> None:
    value = DataValue("any", "not a number")
    assert STANDARD_CONVERSIONS.convert(value, "number", PATH) is value


@given(st.sampled_from(TYPES), st.sampled_from(TYPES), st.none() | st.booleans() | st.integers() | st.text())
def test_what_does_not_fit_is_never_converted_and_nothing_else_escapes(given: str, wanted: str, value: Any) -> None:
    fits = STANDARD_CONVERSIONS.fits(given, wanted)
    try:
        converted = STANDARD_CONVERSIONS.convert(DataValue(given, value), wanted, PATH)
    except ConversionFailed as error:
        undeclared = "no such conversion" in error.why
        assert fits != undeclared
    else:
        assert fits
        assert converted.type == wanted or "any" in (given, wanted)


def test_declared_conversions_extend_a_copy_and_take_precedence() -> None:
    extended = STANDARD_CONVERSIONS.extended({("text", "shout"): str.upper, ("text", "list"): list})
    assert extended.convert(DataValue("text", "ab"), "shout", PATH).value == "AB"
    assert extended.convert(DataValue("text", "ab"), "list", PATH).value == ["a", "b"]
    assert extended.fits("number", "text")
    assert not STANDARD_CONVERSIONS.fits("text", "shout")
    assert STANDARD_CONVERSIONS.convert(DataValue("text", "ab"), "list", PATH).value == ["ab"]


def test_a_conversion_has_to_be_a_function() -> None:
    with pytest.raises(InvalidValue, match="conversion from text to shout must be a function"):
        Conversions({("text", "shout"): "upper"})  # type: ignore[dict-item]


def test_a_conversion_cannot_swallow_a_cancel() -> None:
    def cancelled(value: Any) -> Any:
        raise CancelledError

    with pytest.raises(CancelledError):
        Conversions({("a", "b"): cancelled}).convert(DataValue("a", 1), "b", PATH)


def test_an_error_that_cannot_say_itself_is_still_a_failed_conversion() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def fail(value: Any) -> Any:
        raise Mute

    with pytest.raises(ConversionFailed, match="Mute"):
        Conversions({("a", "b"): fail}).convert(DataValue("a", 1), "b", PATH)


def test_a_failure_can_be_copied_with_its_facts() -> None:
    error = copy.copy(ConversionFailed(PATH, "text", "number", "it is a poem"))
    assert (error.path, error.given, error.wanted, error.why) == (PATH, "text", "number", "it is a poem")
