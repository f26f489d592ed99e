"""`penstock runs bills`: list unresolved bills, resolve and release them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cli.conftest import Ended, Penstock
from tests.cli.remote.live import ANN, TOKENS, Live, serving
from tests.hosting.graphs import graph
from tests.hosting.test_bills import CEILING, Losing, prices

pytestmark = pytest.mark.requirement("X-10")

GRAPHS = {
    "one": graph(
        ("in", "input", {}), ("a", "llm-completion", {"model": "example"}), ("out", "output", {}), edges="in>a a>out"
    )
}


@pytest.fixture
def live() -> Iterator[Live]:
    with serving(graphs=GRAPHS, model=Losing(), prices=prices()) as server:
        yield server


@pytest.fixture
def runs(live: Live, penstock: Penstock) -> Any:
    """Run `penstock runs` with these arguments, at that server."""

    def call(*arguments: object) -> Ended:
        return penstock("runs", *arguments, "--url", live.url)

    return call


def halted(live: Live) -> tuple[str, str]:
    """Return the id of a halted run, and of its unresolved bill."""
    run_id = live.start("one", "hi", **CEILING)
    assert live.ended(run_id) == "halted"
    (bill,) = live.do(live.host.bills(run_id))
    return run_id, bill.call_id


def test_without_unresolved_bills_there_is_nothing_to_resolve(runs: Any, live: Live) -> None:
    assert runs("bills").out == "no run has unresolved bills: there is nothing to resolve\n"
    run_id, call_id = halted(live)
    runs("bills", run_id, "release", call_id)
    assert runs("bills", run_id).out == f"{run_id} has no unresolved bills: there is nothing to resolve\n"
    assert runs("bills").out == "no run has unresolved bills: there is nothing to resolve\n"


def test_a_halted_run_goes_on_after_its_bill_is_resolved(runs: Any, live: Live) -> None:
    run_id, call_id = halted(live)
    at = f"--url {live.url}"
    shown = runs("show", run_id).out.splitlines()
    assert "cost     $0.00 of $0.41, and $0.4096 held for unresolved calls" in shown
    assert shown[-1] == (
        f"→ unresolved bills hold $0.4096: resolve them with: penstock runs bills {run_id} {at}, then: "
        f"penstock runs resume {run_id} {at}; set max_output_tokens on its models so that a failed call holds less; "
        f"or raise the limit with: penstock runs grant {run_id} --max-cost USD {at} (at least $0.4092 more)"
    )

    overview = runs("bills").out.splitlines()
    assert overview[0].split() == ["RUN", "STATUS", "UNRESOLVED", "GRAPH"]
    assert overview[1].split() == [run_id, "halted", "$0.4096", "one@1"]

    listed = runs("bills", run_id).out.splitlines()
    assert listed[0].split() == ["CALL", "HELD", "WHEN", "MODEL", "WHY"]
    assert listed[1].split()[:2] == [call_id, "$0.4096"]
    assert listed[1].endswith("scripted  the peer has gone")
    command = f"penstock runs bills {run_id}"
    assert listed[2] == (
        f"→ resolve one with: {command} resolve CALL --cost USD {at}; or release one that cost nothing: "
        f"{command} release CALL {at}"
    )

    resolved = runs("bills", run_id, "resolve", call_id, "--cost", "0.02", "--by", "ann").out.splitlines()
    assert resolved[0] == f"{run_id}: bill of call {call_id} resolved at $0.02; $0.00 in unresolved bills left"
    assert resolved[1] == (
        f"→ its bills are resolved, so resume it with: penstock runs resume {run_id} {at}; or raise the limit with: "
        f"penstock runs grant {run_id} --max-cost USD {at} (at least $0.0196 more)"
    )
    assert runs("resume", run_id).code == 0
    assert live.ended(run_id) == "completed"
    assert live.until(run_id, "bill.resolved")["by"] == "ann"
    assert runs("tail", run_id).code == 0


def test_a_tail_that_ends_with_a_resolved_bill_has_the_exit_code_of_the_run(runs: Any, live: Live) -> None:
    run_id, call_id = halted(live)
    runs("bills", run_id, "release", call_id, "--by", "ann")
    tail = runs("tail", run_id)
    assert tail.code == 3
    assert "bill.released" in tail.out.splitlines()[-1]


def test_json_is_what_the_server_says(runs: Any, live: Live) -> None:
    run_id, call_id = halted(live)
    assert [run["id"] for run in json.loads(runs("bills", "--json").out)] == [run_id]
    listed = json.loads(runs("bills", run_id, "--json").out)
    assert (listed["bills"][0]["call_id"], listed["unresolved_usd"]) == (call_id, 0.4096)
    run = json.loads(runs("bills", run_id, "release", call_id, "--json").out)
    assert (run["id"], run["unresolved_usd"]) == (run_id, 0)


def test_what_the_server_refuses_is_an_error(runs: Any, live: Live) -> None:
    run_id, call_id = halted(live)
    missing = runs("bills", run_id, "release", "1-x/n000002")
    assert (missing.code, "has no unresolved bill of call '1-x/n000002'" in missing.err) == (2, True)
    runs("bills", run_id, "resolve", call_id, "--cost", "0.02", "--by", "ann")
    again = runs("bills", run_id, "release", call_id)
    assert (again.code, "was resolved at $0.02 by 'ann'" in again.err) == (2, True)
    assert runs("bills", "another").code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("r", "resolve"), "name the action and the call"),
        (("r", "resolve", "c"), "resolve needs --cost"),
        (("r", "release", "c", "--cost", "1"), "resolve needs --cost, and only resolve takes it"),
        (("r", "--by", "ann"), "--by is for resolve and release"),
        (("r", "resolve", "c", "--cost", "-1"), "--cost"),
        (("r", "pay", "c"), "pay"),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_is_sent(
    runs: Any, arguments: tuple[str, ...], message: str
) -> None:
    refused = runs("bills", *arguments)
    assert (refused.code, message in refused.err) == (64, True), refused.err


def test_with_a_token_the_recorded_person_is_its_owner(penstock: Penstock) -> None:
    with serving(graphs=GRAPHS, model=Losing(), prices=prices(), tokens=TOKENS) as live:
        run_id = live.start("one", "hi", owner="ann", **CEILING)
        assert live.ended(run_id) == "halted"
        (bill,) = live.do(live.host.bills(run_id))
        as_ann = ("--url", live.url, "--token", ANN)
        other = penstock("runs", "bills", run_id, "release", bill.call_id, "--by", "bob", *as_ann)
        assert (other.code, "by must be left out, or your own name: ann" in other.err) == (2, True)
        assert penstock("runs", "bills", run_id, "release", bill.call_id, *as_ann).code == 0
        assert live.until(run_id, "bill.released")["by"] == "ann"
