"""A run as one HTML page that needs nothing else.

The page loads nothing and sends nothing, and its policy forbids both. `page.html` is the template, with `page.css` and
`page.js` inside it. The data is in the page as JSON; the script creates every element from text, never from markup, so
a name cannot become an element. Only visible rows are created, so ten thousand calls open as fast as ten. Knows the
data of `trace_data`, and nothing of runs.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Mapping
from importlib.resources import files
from string import Template
from typing import Any

from penstock.tracing.redaction import redact
from penstock.tracing.tree import Traced, trace_data

MAX_ROWS = 50_000
"""Maximum number of calls, and of events, on a page; the page shows how many are left out."""

STATUSES = ("created", "running", "success", "fail", "halt")
KINDS = ("llm", "tool", "step", "agent", "run")
OF_EVERY_EVENT = frozenset(("kind", "run_id", "seq", "at_ms", "source", "depth", "iteration", "parent_id", "node_id"))
SHOWN_BY_CALLS = frozenset(("call_kind", "name", "model", "metadata", "duration_ms", "input_tokens", "output_tokens"))
MAX_EVENT_TEXT = 300


def _read(name: str) -> str:
    """Return the text of a file beside this module, after a line feed."""
    return "\n" + (files("penstock.tracing") / name).read_text(encoding="utf-8")


# Read with the module, so that no event loop waits for a disk when it renders a page.
TEMPLATE = Template(_read("page.html").lstrip())
STYLE = _read("page.css")
SCRIPT = _read("page.js")


def trace_html(of: Traced, *, secrets: Iterable[str] = (), title: str | None = None) -> str:
    """Return the run, or a context's part of it, as one page: limits, call tree, timeline, costs and events."""
    data = trace_data(of, secrets=secrets)
    heading = (
        redact(title, secrets) if title else f"{data['name'] or 'run'} · {data['termination_reason'] or data['status']}"
    )
    return page_html(data, heading)


def page_html(data: Mapping[str, Any], heading: str) -> str:
    """Return the page of `trace_data`, however it was made; every text in it is shown as text."""
    return TEMPLATE.substitute(
        policy=(
            f"default-src 'none'; script-src '{_hash(SCRIPT)}'; style-src '{_hash(STYLE)}'; "
            "base-uri 'none'; form-action 'none'"
        ),
        title=html.escape(heading),
        style=STYLE,
        trace=embedded(compact(data)),
        script=SCRIPT,
    )


def embedded(data: object) -> str:
    """Return JSON text that is safe inside a script element: it can neither end the element nor open a comment."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def compact(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data of a trace as the page reads it: calls and events as rows, repeated texts in tables."""
    calls, events = data["calls"][:MAX_ROWS], data["events"][:MAX_ROWS]
    at = {call["node_id"]: number for number, call in enumerate(calls)}
    contexts, kinds = _Table(), _Table()
    about = {name: value for name, value in data.items() if name not in ("calls", "events")}
    start_ms = data["start_ts_ms"] or 0
    return {
        "about": about,
        "calls": [_call_row(call, at, contexts) for call in calls],
        "events": [_event_row(event, at, start_ms, contexts, kinds) for event in events],
        "contexts": contexts.values,
        "kinds": kinds.values,
        "left_out": [len(data["calls"]) - len(calls), len(data["events"]) - len(events)],
    }


class _Table:
    """Distinct texts, by number."""

    def __init__(self) -> None:
        self.values: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        number = self._numbers.setdefault(text, len(self.values))
        if number == len(self.values):
            self.values.append(text)
        return number


def _call_row(call: Mapping[str, Any], at: Mapping[str, int], contexts: _Table) -> list[Any]:
    kind = call["kind"]
    if kind == "system":
        kind = "step" if not call["is_context"] else "agent" if call["parent_id"] in at else "run"
    return [
        call["node_id"],
        at.get(call["parent_id"], -1),
        KINDS.index(kind),
        call["name"],
        call["model"],
        STATUSES.index(call["status"]),
        round(call["offset_ms"], 4),
        round(call["duration_ms"], 4),
        call["cost_usd"],
        call["tokens_in"],
        call["tokens_out"],
        call["stop_reason"],
        call["error_class"],
        call["retries_used"],
        call["iteration"],
        contexts.number(call["context"]),
        call["metadata"] or 0,
    ]


def _event_row(
    event: Mapping[str, Any], at: Mapping[str, int], start_ms: int, contexts: _Table, kinds: _Table
) -> list[Any]:
    call = at.get(event.get("node_id") or event["parent_id"] or "", -1)
    hidden: frozenset[str] = OF_EVERY_EVENT | (SHOWN_BY_CALLS if event["kind"].startswith("call_") else frozenset())
    fields = {name: value for name, value in event.items() if name not in hidden and value not in (None, "", 0, {}, [])}
    text = ", ".join(f"{name}: {_plain(value)}" for name, value in fields.items())
    kind, context = kinds.number(event["kind"]), contexts.number(event["source"])
    return [event["seq"], event["at_ms"] - start_ms, kind, context, call, text[:MAX_EVENT_TEXT]]


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def trace_frame(of: Traced) -> str:
    """Return the page in a frame, for notebooks: nothing of it reaches the page around it."""
    page = html.escape(trace_html(of))
    style = "width:100%;height:32rem;border:1px solid #8884;border-radius:6px"
    return f'<iframe title="Penstock run" sandbox="allow-scripts" srcdoc="{page}" style="{style}"></iframe>'


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
