"""The states of a run: the table, and the page that shows it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from penstock.hosting.event_data import ENDINGS
from penstock.hosting.ports import CLAIMED, ENDED, PARKED, QUEUED, TRANSITIONS, RunStatus

PAGE = Path(__file__).parents[2] / "docs" / "hosting.md"


def test_the_page_shows_the_table_of_states() -> None:
    table = PAGE.read_text().partition("## What becomes of a run")[2].partition("\n\n`")[0]
    rows = re.findall(r"^\| (\w+) \|(.*)\|$", table, re.MULTILINE)
    assert {status: set(after.replace(",", " ").split()) for status, after in rows} == {
        status: set(after) for status, after in TRANSITIONS.items()
    }


def test_every_status_is_of_one_sort() -> None:
    statuses = set(get_args(RunStatus))
    assert statuses == QUEUED | CLAIMED | PARKED | ENDED == set(TRANSITIONS)
    assert sum(map(len, (QUEUED, CLAIMED, PARKED, ENDED))) == len(statuses)


def test_a_run_that_a_worker_leaves_has_a_last_event_that_says_how() -> None:
    assert set(ENDINGS) == ENDED | PARKED
    assert not TRANSITIONS["completed"]
