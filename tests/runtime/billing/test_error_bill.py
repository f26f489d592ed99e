"""The setting `error_bill`: what the error answers of one upstream cost."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import InvalidValue
from penstock.runtime.billing.error_bill import check_error_bill, is_free_status, mark_bill
from penstock.runtime.billing.usage import is_free_failure


class Answered(Exception):
    """An error answer of a provider."""

    def __init__(self, status_code: int) -> None:
        self.status_code = status_code
        super().__init__(f"HTTP {status_code}")


@pytest.mark.requirement("X-10")
@pytest.mark.parametrize("status", [400, 408, 429, 499, 500, 502, 503, 504, 520, 529])
def test_the_setting_decides_for_every_error_answer(status: int) -> None:
    for error_bill, is_free in (("free", True), ("unresolved", False)):
        error = Answered(status)
        mark_bill(error, check_error_bill(error_bill))
        assert is_free_failure(error) is is_free


@pytest.mark.requirement("X-10")
def test_a_mapping_decides_for_the_statuses_it_lists_and_the_default_for_the_others() -> None:
    error_bill = check_error_bill({504: "free", 500: "unresolved"})
    expected = {504: True, 500: False, 503: True, 502: False, 429: True}
    found = {}
    for status in expected:
        error = Answered(status)
        mark_bill(error, error_bill)
        found[status] = is_free_failure(error)
    assert found == expected


def test_an_error_without_an_answer_is_not_marked() -> None:
    lost, refused = ConnectionResetError(), ConnectionRefusedError()
    for error in (lost, refused):
        mark_bill(error, "free")
        mark_bill(error, "unresolved")
    assert (is_free_failure(lost), is_free_failure(refused)) == (False, True)


def test_a_redirect_is_not_an_error_answer() -> None:
    assert is_free_status("unresolved", 302) is None


def test_the_setting_is_a_copy() -> None:
    given: dict[int, Any] = {504: "free"}
    error_bill = check_error_bill(given)
    given[502] = "free"
    assert is_free_status(error_bill, 502) is None


@pytest.mark.parametrize(
    "given", ["paid", "", 1, True, [504], {504: "paid"}, {"504": "free"}, {200: "free"}, {True: "free"}, {600: "free"}]
)
def test_an_invalid_setting_is_refused(given: Any) -> None:
    with pytest.raises(InvalidValue, match=r"error_bill must be 'free', 'unresolved', or a mapping from HTTP status"):
        check_error_bill(given)
