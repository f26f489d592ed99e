"""Crash points kill a process only on request, and exactly where requested."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from penstock.errors import InvalidValue
from penstock.runtime.durable import failpoints
from penstock.testing import crash_points

PROGRAM = """
from penstock.runtime.durable import failpoints
from penstock.testing import crash_points
assert failpoints.hook is None
crash_points.arm()
for number in range(5):
    if failpoints.hook is not None:
        failpoints.hook("node.started")
        failpoints.hook("node.replayed")
    print(number, flush=True)
"""


@pytest.fixture(autouse=True)
def no_process_is_killed() -> Iterator[None]:
    yield
    crash_points.disarm()


def run(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_process_dies_at_the_point_it_was_armed_for_and_not_before() -> None:
    died = run(PENSTOCK_CRASH_AT="node.started:3")
    assert (died.returncode, died.stdout) == (-signal.SIGKILL, "0\n1\n")


def test_without_the_variable_no_process_is_killed() -> None:
    lived = run()
    assert (lived.returncode, lived.stderr) == (0, "")


@pytest.mark.parametrize("wrong", ["nowhere", "node.started:0", "node.started:x", "node.started:-1", ":1"])
def test_an_unknown_failpoint_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidValue, match="crash point"):
        crash_points.arm(wrong)
    assert failpoints.hook is None


def test_an_armed_point_strikes_once() -> None:
    died: list[int] = []
    crash_points.arm("fork.before_append:2", die=lambda: died.append(1))
    assert failpoints.hook is not None
    for _ in range(4):
        failpoints.hook("fork.before_append")
    assert died == [1]


def test_points_can_be_watched() -> None:
    with crash_points.watching() as passed:
        assert failpoints.hook is not None
        failpoints.hook("node.started")
    assert passed == {"node.started": 1}
    assert failpoints.hook is None
