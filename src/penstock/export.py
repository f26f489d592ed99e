"""Runs as text, JSON data, Mermaid and HTML, with secrets redacted."""

from __future__ import annotations

from penstock.money import format_usd
from penstock.tracing.page import trace_html
from penstock.tracing.redaction import redact
from penstock.tracing.tree import trace_data, trace_json, trace_mermaid, trace_tree

__all__ = [
    "format_usd",
    "redact",
    "trace_data",
    "trace_html",
    "trace_json",
    "trace_mermaid",
    "trace_tree",
]
