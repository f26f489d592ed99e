"""Ids of runs and calls."""

from __future__ import annotations

from itertools import pairwise
from uuid import RFC_4122, UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.ids import call_id, call_number, new_run_id


@pytest.mark.parametrize(
    ("number", "node_id"),
    [(0, "n000000"), (1, "n000001"), (999_999, "n999999"), (1_000_000, "n1000000"), (10**12, "n1000000000000")],
)
def test_a_call_id_is_n_and_six_digits_or_as_many_as_it_takes(number: int, node_id: str) -> None:
    assert call_id(number) == node_id
    assert call_number(node_id) == number


@given(st.lists(st.integers(0, 10**8)))
def test_the_order_of_calls_is_kept_past_the_sixth_digit(numbers: list[int]) -> None:
    ids = [call_id(number) for number in numbers]
    assert sorted(ids, key=call_number) == [call_id(number) for number in sorted(numbers)]


@pytest.mark.parametrize(
    "text",
    [
        *("", "n", "n1", "n00001", "000001", "N000001", "m000001", "n-00001", "n+00001", "n 00001", "n000001 "),
        *("n00000a", "n1_00000", "n00000²", "n०००००१", "n000001\n", "run-1"),
        "n0000001",
        "n" + "0" * 5_000 + "1",
        "n" + "9" * 5_000,
    ],
    ids=lambda text: repr(text[:12]),
)
def test_an_unknown_call_id_is_a_key_error(text: str) -> None:
    with pytest.raises(KeyError, match=r"is not a call id \(they look like n000001\)"):
        call_number(text)


@given(st.text())
def test_any_text_is_the_one_id_of_its_call_or_a_key_error(text: str) -> None:
    try:
        number = call_number(text)
    except KeyError:
        return
    assert call_id(number) == text


def test_run_ids_are_fresh_and_sort_by_the_time_they_were_made_at(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for nanosecond in (1_767_225_600_000_000_000, 1_767_225_600_000_000_001, 1_767_225_600_000_999_999, 2**67):
        monkeypatch.setattr("time.time_ns", lambda now=nanosecond: now)
        made.append([new_run_id() for _ in range(1_000)])
    assert len({run_id for ids in made for run_id in ids}) == 4_000
    for earlier, later in pairwise(made):
        assert max(earlier) < min(later)
    assert {(UUID(run_id).version, UUID(run_id).variant) for ids in made for run_id in ids} == {(7, RFC_4122)}
