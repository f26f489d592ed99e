"""JSON from outside: what is refused, and the location in the error."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.errors import ApiError
from penstock.server.guards import MAX_INTEGER, read_json

BOUNDS = {"max_depth": 64, "max_values": 1_000}


def refused(raw: bytes, **bounds: int) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read_json(raw, **{**BOUNDS, **bounds})
    return caught.value


@pytest.mark.parametrize(
    ("raw", "status", "code", "path"),
    [
        (b"", 400, "bad_json", "$"),
        (b"{", 400, "bad_json", "$"),
        (b"{} {}", 400, "bad_json", "$"),
        (b'{"a": "\xff"}', 400, "bad_text", "$"),
        (b'"\xed\xa0\x80"', 400, "bad_text", "$"),
        (b"\xef\xbb\xbf{}", 400, "bad_json", "$"),
        (b'{"a": NaN}', 422, "bad_number", "$"),
        (b"[-Infinity]", 422, "bad_number", "$"),
        (b'{"a": [0, 1e999]}', 422, "bad_number", "$.a[1]"),
        (b'{"a": ' + b"9" * 5_000 + b"}", 422, "bad_number", "$"),
        (b'{"a": ' + b"9" * 400 + b"}", 422, "bad_number", "$.a"),
        (b'{"a": {"b c": -9223372036854775809}}', 422, "bad_number", '$.a["b c"]'),
        (b'{"a": {"b": 1, "b": 2}}', 422, "duplicate_key", "$"),
        (rb'{"a": ["\ud800"]}', 422, "bad_text", "$.a[0]"),
        (rb'{"\udc00": 1}', 422, "bad_text", "$"),
        (rb'{"a": "x\u0000y"}', 422, "bad_text", "$.a"),
        (b"[" * 100_000, 422, "too_deep", "$"),
        (b'{"a":' * 5_000, 422, "too_deep", "$"),
    ],
)
def test_json_that_breaks_programs_is_refused_with_its_path(raw: bytes, status: int, code: str, path: str) -> None:
    error = refused(raw)
    assert (error.status, error.code, error.path) == (status, code, path)
    assert len(str(error)) < 400


def test_depth_at_the_limit_is_fine_and_one_more_is_not() -> None:
    assert read_json(b"[" * 64 + b"]" * 64, **BOUNDS)
    error = refused(b"[" * 65 + b"]" * 65)
    assert (error.code, error.path) == ("too_deep", "$" + "[0]" * 64)


def test_values_at_the_limit_are_fine_and_one_more_is_not() -> None:
    assert len(read_json(json.dumps([0] * 999).encode(), **BOUNDS)) == 999
    assert refused(json.dumps([0] * 1_000).encode()).code == "too_large"


def test_whole_numbers_at_the_limit_are_fine() -> None:
    raw = json.dumps([MAX_INTEGER, -MAX_INTEGER]).encode()
    assert read_json(raw, **BOUNDS) == [MAX_INTEGER, -MAX_INTEGER]
    assert refused(json.dumps([MAX_INTEGER + 1]).encode()).path == "$[0]"


def test_a_whole_surrogate_pair_is_a_character() -> None:
    assert read_json(rb'"\ud83d\ude00"', **BOUNDS) == "😀"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    lambda inside: st.lists(inside, max_size=5) | st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), inside, max_size=5),
    max_leaves=20,
)  # fmt: skip


@given(VALUES, st.booleans())
def test_well_formed_json_is_parsed_unchanged(value: Any, is_ascii: bool) -> None:
    assert read_json(json.dumps(value, ensure_ascii=is_ascii).encode(), **BOUNDS) == value


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_parsed_or_refused(raw: bytes) -> None:
    with suppress(ApiError):
        read_json(raw, **BOUNDS)
