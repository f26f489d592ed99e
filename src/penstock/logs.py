"""What a service logs: one record for each request and each ended run, as a name and fields.

Records go through `logging`, so that nothing is built while the loggers are not enabled; how they are written is up
to the program. Fields are ids, names, numbers and reasons: never what people or models wrote.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

REQUESTS = logging.getLogger("penstock.requests")
"""One record for each HTTP request, when its response has ended."""
RUNS = logging.getLogger("penstock.runs")
"""One record for each hosted run that has ended or is parked."""
FIELDS = "penstock_fields"
"""Attribute of a record that has its fields."""

current_request: ContextVar[dict[str, Any] | None] = ContextVar("penstock_current_request", default=None)
"""Fields of the request that is being served, if requests are logged."""


def record(logger: logging.Logger, event: str, fields: Mapping[str, Any]) -> None:
    """Log an event with its fields; those that are None are left out."""
    logger.info(event, extra={FIELDS: {name: value for name, value in fields.items() if value is not None}})


def note(**fields: Any) -> None:
    """Add fields to the record of the request that is being served, if requests are logged."""
    found = current_request.get()
    if found is not None:
        found.update(fields)
