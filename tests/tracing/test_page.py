"""A run as one HTML page."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from penstock import ExecutionConfig, ExecutionContext, Halted, WrapOptions
from penstock.tracing.page import MAX_ROWS, SCRIPT, compact, embedded, trace_html
from penstock.tracing.tree import trace_data

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<!--<script>",
    "]]>",
    "' onmouseover='x",
    "\u2028\u2029\x00",
    "&lt;b&gt;",
]


class Page(HTMLParser):
    """The elements of a page: their attributes, and the text inside scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[tuple[dict[str, str | None], str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        tag, attributes = self.elements[-1] if self.elements else ("", {})
        if tag in ("script", "style") and data.strip():
            self.inside.append((attributes, data))

    @property
    def data(self) -> Any:
        return json.loads(next(text for attributes, text in self.inside if attributes.get("id") == "trace"))


def stopped_run() -> ExecutionContext:
    run = ExecutionContext(ExecutionConfig(max_cost_usd=0.02, max_steps=None, max_retries_total=None))
    with run, pytest.raises(Halted):
        for _ in range(3):
            run.llm(lambda: None, name="ask", cost_hint_usd=0.01)
    return run


@pytest.mark.requirement("T-11")
def test_the_page_needs_nothing_but_itself() -> None:
    text = trace_html(stopped_run())
    page = Page(text)
    for tag, attributes in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "form", "base", "svg")
        assert not attributes.keys() & {"src", "srcset", "action", "style"}
        assert not any(name.startswith("on") for name in attributes)
        assert attributes.get("href", "#view") == "#view"
    assert not re.search(r"https?:|@import|url\(", text)


def test_the_policy_allows_the_pages_own_script_and_style_and_nothing_else() -> None:
    page = Page(trace_html(stopped_run()))
    policy = next(a["content"] for t, a in page.elements if t == "meta" and "http-equiv" in a)
    assert policy is not None
    parts = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    own = [text for attributes, text in page.inside if attributes.get("type") != "application/json"]
    hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in own]
    assert parts == {
        "default-src": "'none'",
        "style-src": hashes[0],
        "script-src": hashes[1],
        "base-uri": "'none'",
        "form-action": "'none'",
    }


@pytest.mark.parametrize("way", ["innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval", "Function("])
def test_the_script_makes_elements_from_text_only(way: str) -> None:
    assert way not in SCRIPT


@pytest.mark.parametrize("way", ["fetch", "XMLHttp", "WebSocket", "sendBeacon", "import(", "localStorage", "cookie"])
def test_the_script_sends_and_keeps_nothing(way: str) -> None:
    assert way not in SCRIPT


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_is_only_a_name(name: str) -> None:
    run = ExecutionContext(name=name)
    with run:
        run.tool(lambda: None, name=name)
        run.trace_custom(name, {name: name})
    text = trace_html(run, title=name)
    page = Page(text)
    assert [tag for tag, _ in page.elements].count("script") == 2
    assert not [tag for tag, _ in page.elements if tag == "img"]
    assert page.data["calls"][1][3] == name
    assert not set("<>&") & set(embedded(compact(trace_data(run))))
    text.encode()


def test_the_limit_that_stopped_the_run_is_marked() -> None:
    data = Page(trace_html(stopped_run())).data
    assert data["about"]["limits"] == [
        {"budget": "main", "unit": "usd", "used": 0.02, "held": 0.0, "ceiling": 0.02, "tripped": True}
    ]
    assert data["about"]["termination_reason"] == "limit_exceeded"


def test_calls_and_events_point_at_each_other() -> None:
    data = Page(trace_html(stopped_run())).data
    assert [(row[1], row[3], row[5]) for row in data["calls"]] == [
        (-1, "main", 4),
        (0, "ask", 2),
        (0, "ask", 2),
        (0, "ask", 4),
    ]
    ended = [row for row in data["events"] if data["kinds"][row[2]] == "call_ended"]
    assert [row[4] for row in ended] == [1, 2, 3, 0]


def test_ten_thousand_calls_are_a_page_of_a_few_megabytes() -> None:
    run = ExecutionContext()
    with run:
        for number in range(10_000):
            run.tool(lambda: None, name=f"call {number}", cost_hint_usd=0.001)
    text = trace_html(run)
    assert len(Page(text).data["calls"]) == 10_001
    assert len(text) < 3_000_000


def test_page_is_bounded_and_counts_what_it_leaves_out() -> None:
    data = trace_data(stopped_run())
    data["calls"] = [data["calls"][1] | {"node_id": f"n{number:06d}"} for number in range(MAX_ROWS + 7)]
    data["events"] = data["events"][:1] * (MAX_ROWS + 3)
    shown = compact(data)
    assert (len(shown["calls"]), len(shown["events"])) == (MAX_ROWS, MAX_ROWS)
    assert shown["left_out"] == [7, 3]


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_notebook_shows_the_page_in_a_frame_that_it_cannot_leave(hostile: str) -> None:
    with ExecutionContext() as run:
        run.wrap_tool_call(lambda: None, WrapOptions(operation_name=hostile))
    shown = run._repr_html_()
    ((tag, attributes),) = Page(shown).elements
    assert (tag, attributes["sandbox"]) == ("iframe", "allow-scripts")
    assert Page(attributes["srcdoc"] or "").data == Page(trace_html(run)).data
