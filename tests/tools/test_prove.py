"""`make prove`: a cell is really run, errors are never verdicts, and the page is made of the results alone."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tools.prove import page, sources
from tools.prove.__main__ import chosen
from tools.prove.cell import measure
from tools.prove.contestants import CONTESTANTS
from tools.prove.page import HTML, RESULTS, TABLE, read_cells, table
from tools.prove.probes import PROBES, Facts, Kind, verdict
from tools.prove.results import Cell, read_results, write_results

FIVE = tuple({"at": 1.0 + at, "messages": [("user", "hello")]} for at in range(5))
LATE = ({"at": 3.0, "messages": [("user", "hello")]},)


def report(kind: str, at: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "at": at, **more}


def ends(*cases: str) -> tuple[dict[str, Any], ...]:
    starts = [report("event", case=case, kind_of="start") for case in ("complete", "fail", "cancel")]
    return (*starts, *(report("event", case=case, kind_of="end") for case in cases))


CANCELLED = (report("cancel", 2.0), report("returned", 2.5))
TOOL = (report("began", 0.5), report("tool", 1.0))


@pytest.mark.requirement("X-17")
@pytest.mark.parametrize(
    ("probe", "facts", "kind"),
    [
        ("budget", Facts(0.10, FIVE), Kind.HOLDS),
        ("budget", Facts(0.12, FIVE), Kind.FAILS),
        ("budget", Facts(0.0), Kind.ERROR),
        ("budget", Facts(0.02, FIVE[:1]), Kind.ERROR),
        ("budget", Facts(0.10, FIVE, problem="the program raised ImportError"), Kind.ERROR),
        ("budget", Facts(0.10, FIVE, ended=False), Kind.ERROR),
        ("failures", Facts(0.10, FIVE, ended=False), Kind.ERROR),
        ("failures", Facts(0.12, FIVE, ended=False), Kind.FAILS),
        ("retries", Facts(0, FIVE[:4]), Kind.HOLDS),
        ("retries", Facts(0, FIVE), Kind.FAILS),
        ("retries", Facts(0, FIVE[:1]), Kind.ERROR),
        ("retries", Facts(0, FIVE[:4], ended=False), Kind.ERROR),
        ("retries", Facts(0, FIVE, ended=False), Kind.FAILS),
        ("cancel_before", Facts(0, (), (), CANCELLED), Kind.HOLDS),
        ("cancel_before", Facts(0.02, LATE, (), CANCELLED), Kind.FAILS),
        ("cancel_before", Facts(0, (), (), ()), Kind.ERROR),
        ("cancel_during", Facts(0.02, FIVE[:1], (2.4,), CANCELLED), Kind.HOLDS),
        ("cancel_during", Facts(0.02, FIVE[:1], (), CANCELLED), Kind.FAILS),
        ("cancel_during", Facts(0.04, (*FIVE[:1], *LATE), (2.4,), CANCELLED), Kind.FAILS),
        ("cancel_during", Facts(0.02, FIVE[:1], (), CANCELLED[:1], ended=False), Kind.FAILS),
        ("timeouts", Facts(0, (), (), (*TOOL, report("returned", 2.6))), Kind.HOLDS),
        ("timeouts", Facts(0, (), (), (*TOOL, report("returned", 8.6))), Kind.FAILS),
        ("timeouts", Facts(0, (), (), (report("began"), report("returned", 1.1))), Kind.ERROR),
        ("events", Facts(0, FIVE, (), ends("complete", "fail", "cancel")), Kind.HOLDS),
        ("events", Facts(0, FIVE, (), ends("complete", "cancel")), Kind.FAILS),
        ("events", Facts(0, FIVE, (), ends("complete", "fail", "cancel", "cancel")), Kind.FAILS),
        ("events", Facts(0, FIVE), Kind.ERROR),
    ],
)
def test_a_cell_is_judged_by_what_was_measured(probe: str, facts: Facts, kind: Kind) -> None:
    assert verdict(PROBES[probe], facts).kind is kind


def conversation(*texts: str) -> dict[str, Any]:
    return {"at": 1.0, "messages": [("user", text) for text in texts]}


@pytest.mark.parametrize(
    ("texts", "seen"),
    [
        (("question one", "answer one", "question two"), "nothing lost, nothing twice"),
        (("question one", "answer one"), "'question two' lost"),
        (("question one", "answer one", "question two", "question two"), "'question two' 2×"),
    ],
)
def test_a_chat_is_judged_by_what_the_model_is_sent(texts: tuple[str, ...], seen: str) -> None:
    found = verdict(PROBES["chat"], Facts(0, (conversation(*texts, "question three"),)))
    assert found.text == seen
    assert (found.kind is Kind.HOLDS) is (seen == "nothing lost, nothing twice")


@pytest.mark.parametrize(("first", "kind"), [(1, Kind.HOLDS), (2, Kind.FAILS)])
def test_a_resumed_run_is_judged_by_what_was_paid_twice(first: int, kind: Kind) -> None:
    requests = (*[conversation("first step")] * first, *[conversation("second step")] * 2)
    done = Facts(0, requests, (), (report("answer", text="two"),))
    assert verdict(PROBES["resume"], done).kind is kind
    assert verdict(PROBES["resume"], replace(done, reports=())).kind is Kind.FAILS
    assert verdict(PROBES["resume"], replace(done, reports=(report("answer", text="one"),))).kind is Kind.ERROR


@pytest.mark.requirement("X-17")
@pytest.mark.parametrize("probe", ["budget", "cancel_before"])
def test_the_harness_runs_our_own_programs(probe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(page.ROOT))
    facts = measure("penstock", PROBES[probe], sys.executable, tmp_path)
    assert verdict(PROBES[probe], facts).kind is Kind.HOLDS, facts
    assert facts.invoice_usd == (0.10 if probe == "budget" else 0)


@pytest.mark.requirement("X-17")
def test_a_program_that_fails_is_an_error_and_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(page.ROOT))
    facts = measure("no_such_contestant", PROBES["cancel_before"], sys.executable, tmp_path)
    found = verdict(PROBES["cancel_before"], facts)
    assert found.kind is Kind.ERROR
    assert "ModuleNotFoundError" in found.text


@pytest.mark.requirement("X-17")
def test_the_committed_pages_are_made_from_the_results_and_the_programs() -> None:
    cells = read_cells(read_results(RESULTS))
    errors = [f"{cell.contestant}:{cell.probe}: {cell.verdict.text}" for cell in cells.values() if _is_error(cell)]
    assert errors == []
    assert HTML.read_text("utf-8") == page.page(cells)
    assert table(cells) in TABLE.read_text("utf-8")


def _is_error(cell: page.Shown) -> bool:
    return cell.verdict.kind is Kind.ERROR


def test_the_page_has_every_cell_with_its_program_and_how_to_run_it_again() -> None:
    text = HTML.read_text("utf-8")
    anchors = set(re.findall(r'id="([^"]+)"', text))
    links = set(re.findall(r'href="#([^"]+)"', text))
    assert links <= anchors
    for contestant in CONTESTANTS:
        found = sources.sources(contestant)
        for probe in PROBES:
            assert f"{contestant}-{probe}" in links
            assert (probe in found.not_applicable) != (probe in found.programs)
            assert (f"make prove CELLS={contestant}:{probe}<" in text) == (probe in found.programs)
    assert "<script" not in text
    assert not re.findall(r'(?:src|href)="https?:', text)


def test_a_program_that_was_changed_since_is_no_verdict(tmp_path: Path) -> None:
    results = read_results(RESULTS)
    results["penstock", "budget"] = Cell("another program", "2026-01-01", results["penstock", "budget"].measured)
    del results["penstock", "retries"]
    write_results(tmp_path / "results.json", results)
    cells = read_cells(read_results(tmp_path / "results.json"))
    assert cells["penstock", "budget"].verdict.kind is Kind.ERROR
    assert cells["penstock", "retries"].verdict.text == "not run"


def test_cells_are_chosen_by_name() -> None:
    assert list(chosen(["langgraph:budget"])) == [("langgraph", "budget")]
    assert set(chosen(["agno", ":resume"])) == {("agno", probe) for probe in PROBES} | {
        (contestant, "resume") for contestant in CONTESTANTS
    }
    assert len(list(chosen([]))) == len(CONTESTANTS) * len(PROBES)
    for wrong in ("unknown", "agno:nothing"):
        with pytest.raises(ValueError, match="one of"):
            chosen([wrong])
