"""Errors carry facts, read well, and are caught by whom they are meant for."""

from __future__ import annotations

import asyncio
import copy
import inspect
import pickle
from typing import Any

import pytest

from penstock import errors
from penstock.containment.limits import Budget, BudgetExceededError, ResourceUsage
from penstock.errors import (
    CancelledError,
    DeadlockError,
    Halted,
    InvalidValue,
    KeyTaken,
    LedgerError,
    LedgerUnavailable,
    PenstockError,
    RunEnded,
    StepTimeout,
    UnderAnother,
)
from penstock.stops import LIMIT_REASONS, Stop, StopReason

USAGE = ResourceUsage(tokens_used=100)
BUDGET = Budget(max_tokens=100)
STOP = Stop(StopReason.TOKEN_LIMIT_EXCEEDED, "100 of the 100 tokens of 'step' used", budget="step", unit="tokens")

ONE_OF_EACH: list[PenstockError] = [
    PenstockError("something"),
    InvalidValue("max_steps", -1, "zero or more"),
    RunEnded("run-1", "a call was started"),
    LedgerError("a hold that is settled cannot become settled"),
    KeyTaken("run/1/n000002", "hold 'run/1/n000002' is settled"),
    UnderAnother("run:a", "all:2026-01-02", "user:ann:2026-01-02"),
    LedgerUnavailable("the disk is full"),
    DeadlockError("terminal", 30.0, "'edit' still has it"),
    StepTimeout("fetch", 50),
    Halted(STOP, partial={"draft": 1}),
    BudgetExceededError(USAGE, BUDGET, STOP.message, stop=STOP, partial={"draft": 1}),
]


def kinds() -> list[type[BaseException]]:
    own = [value for value in vars(errors).values() if inspect.isclass(value) and value.__module__ == errors.__name__]
    return [BudgetExceededError, *[value for value in own if issubclass(value, BaseException)]]


def test_the_tree_at_the_top_of_the_module_is_the_real_one() -> None:
    drawn: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        name = line.lstrip(" │├└─").split(" ")[0]
        if line.startswith("    ") and name:
            drawn.append((len(line) - len(line.lstrip(" │├└─")), name))
    for index, (indent, name) in enumerate(drawn):
        above = next((parent for depth, parent in reversed(drawn[:index]) if depth < indent), None)
        if above is not None:
            (kind,) = [kind for kind in kinds() if kind.__name__ == name]
            bases = {base.__name__ for base in kind.__mro__[1:]}
            assert above in bases, f"{name} is drawn under {above}"
    assert {name for _, name in drawn} == {kind.__name__ for kind in kinds()} | {"Exception", "BaseException"}


def test_a_cancellation_is_not_an_exception_so_nothing_that_catches_those_swallows_it() -> None:
    def careless() -> str:
        try:
            raise CancelledError("the user went away")
        except Exception:
            return "swallowed"

    with pytest.raises(CancelledError, match=r"^the user went away$"):
        careless()
    assert not issubclass(CancelledError, (Exception, asyncio.CancelledError))


def test_a_cancellation_has_a_reason_and_is_an_abort_unless_it_has_a_stop() -> None:
    plain = CancelledError()
    assert (str(plain), plain.reason, plain.stop.reason) == ("cancelled", "cancelled", StopReason.ABORTED)
    late = Stop(StopReason.TIMEOUT, "5.000 s elapsed of the 5 s of 'main'")
    timed_out = CancelledError("timed out", stop=late)
    assert (timed_out.reason, timed_out.stop) == (late.message, late)


def test_an_invalid_value_is_a_value_error_and_carries_field_value_and_expectation() -> None:
    error = InvalidValue("max_steps", -1, "zero or more")
    assert isinstance(error, ValueError)
    assert (error.field, error.value, error.expected) == ("max_steps", -1, "zero or more")
    assert str(error) == "max_steps must be zero or more, not -1"


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("x" * 78, repr("x" * 78)),
        ("x" * 79, "'" + "x" * 76 + "..."),
        ("a\nb", r"'a\nb'"),
        (10**5_000, "<int that cannot be shown>"),
        (Unshowable(), "<Unshowable that cannot be shown>"),
    ],
    ids=["80 characters", "81 characters", "two lines", "huge", "unshowable"],
)
def test_a_refused_value_is_shown_on_one_short_line(value: Any, shown: str) -> None:
    assert str(InvalidValue("field", value, "short")) == f"field must be short, not {shown}"


def test_the_error_of_an_ended_run_names_the_operation_and_what_to_do() -> None:
    error = RunEnded("run-1", "a call was started")
    assert isinstance(error, RuntimeError)
    assert error.run_id == "run-1"
    assert str(error) == "run run-1 has ended: a call was started; start a new run for further work"


def test_a_halt_carries_its_stop_and_what_was_complete() -> None:
    error = Halted(STOP, partial={"draft": "text"})
    assert error.stop is STOP
    assert error.stop_reason is StopReason.TOKEN_LIMIT_EXCEEDED
    assert error.reason == "100 of the 100 tokens of 'step' used"
    assert error.partial == {"draft": "text"}
    assert str(error) == "token_limit_exceeded: 100 of the 100 tokens of 'step' used"
    assert Halted(STOP).partial == {}


def test_an_exceeded_budget_carries_usage_budget_and_reason() -> None:
    error = BudgetExceededError(USAGE, BUDGET, "Token limit exceeded: 100/100")
    assert error.usage is USAGE
    assert error.budget is BUDGET
    assert error.reason == "Token limit exceeded: 100/100"
    assert error.stop_reason is StopReason.BUDGET_EXCEEDED
    assert error.owner is None
    assert error.partial == {}
    assert str(error) == "Token limit exceeded: 100/100"


def test_an_exceeded_budget_error_names_the_budget_and_the_completed_results() -> None:
    error = BudgetExceededError(USAGE, BUDGET, STOP.message, stop=STOP, partial={"draft": "text"})
    assert isinstance(error, Halted)
    assert error.owner == "step"
    assert error.stop_reason is StopReason.TOKEN_LIMIT_EXCEEDED
    assert error.reason == STOP.message
    assert error.partial == {"draft": "text"}


@pytest.mark.parametrize("error", ONE_OF_EACH, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("again", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))], ids=["copy", "pickle"])
def test_an_error_from_another_process_is_the_same_error(error: PenstockError, again: Any) -> None:
    other = again(error)
    assert type(other) is type(error)
    assert (str(other), other.args, vars(other)) == (str(error), error.args, vars(error))


def test_each_kind_of_error_of_ours_is_in_the_table_above() -> None:
    assert {type(error) for error in ONE_OF_EACH} == {kind for kind in kinds() if issubclass(kind, Exception)}


def test_the_reasons_for_stopping_have_the_names_that_logs_and_traces_rely_on() -> None:
    chain_level = {"budget_exceeded", "retry_budget_exceeded", "circuit_open", "step_limit_exceeded", "timeout"}
    chain_level |= {"aborted", "provider_rate_limit", "provider_error"}
    assert chain_level <= {reason.value for reason in StopReason}
    assert len({reason.value for reason in StopReason}) == len(StopReason)
    assert str(StopReason.TIMEOUT) == "timeout"
    assert StopReason.ABORTED not in LIMIT_REASONS


def test_a_stop_reads_as_its_reason_and_its_message() -> None:
    assert str(Stop(StopReason.ABORTED, "by the user")) == "aborted: by the user"
