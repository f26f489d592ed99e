"""The trace that a run is part of, in the form of W3C Trace Context: `traceparent` and `tracestate`.

A run is submitted in one process and executed in another one, perhaps days later and several times. So the trace is
stored in the origin of the run when it is submitted, and is current again while the run is passed to observers. Knows
no tracer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

ABOUT, TRACE = "about", "trace"
"""Keys of the trace in the origin of a run; `about` is not compared when a run is submitted again."""
PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]{1,200})?")
STATE = re.compile(r"[ -~]{1,512}")
NONE: Mapping[str, str] = {}

current: ContextVar[Mapping[str, str]] = ContextVar("penstock_trace_context", default=NONE)
"""The headers of the request that is being served, or of the run that is passed to observers."""


def parse(traceparent: str, tracestate: str = "") -> Mapping[str, str]:
    """Return the headers if they are valid; an invalid `traceparent` is ignored, as the standard says."""
    if not PARENT.fullmatch(traceparent):
        return NONE
    state = {"tracestate": tracestate} if STATE.fullmatch(tracestate) else {}
    return {"traceparent": traceparent, **state}


def headers_of(span: Any) -> Mapping[str, str]:
    """Return the headers that describe a span, given its `SpanContext`."""
    parent = f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"
    return parse(parent, span.trace_state.to_header())


def stored(origin: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the origin of a new run with these headers as its trace."""
    return {**origin, ABOUT: {**(origin.get(ABOUT) or {}), TRACE: dict(headers)}}


@contextmanager
def restored(origin: Mapping[str, Any]) -> Iterator[None]:
    """Make the trace of a run the current one; none if it was submitted outside of any."""
    about = origin.get(ABOUT)
    found = about.get(TRACE) if isinstance(about, Mapping) else None
    fields = found if isinstance(found, Mapping) else NONE
    token = current.set(parse(str(fields.get("traceparent", "")), str(fields.get("tracestate", ""))))
    try:
        yield
    finally:
        current.reset(token)
