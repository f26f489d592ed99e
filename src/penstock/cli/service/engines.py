"""The engine that `--engine` names, and its requirements."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.cli.exits import Refused
from penstock.storage.stores import scheme_of

if TYPE_CHECKING:
    from penstock.engines.temporal import TemporalEngine, TemporalSettings


def temporal_settings(url: str) -> TemporalSettings:
    """Parse the URL of an engine; Refused if its packages are not installed, InvalidValue if the URL is wrong."""
    return _temporal().TemporalSettings.parse(url, os.environ)  # type: ignore[no-any-return]


def open_engine(url: str, db: str, lease_s: float) -> Callable[..., TemporalEngine]:
    """Return a factory of the engine, which takes its queues; Refused if it cannot work with this database.

    A worker that is silent for `lease_s` is considered dead.
    """
    if scheme_of(db) != "postgresql":
        raise Refused(
            "--engine needs a database that all servers and workers reach: --db postgresql://…; "
            f"{scheme_of(db)} belongs to one process or machine, where runs need no engine"
        )
    settings = temporal_settings(url)
    engine = _temporal().TemporalEngine
    return lambda **more: engine(settings, heartbeat_s=lease_s, **more)


def _temporal() -> Any:
    try:
        return import_module("penstock.engines.temporal")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "temporalio":
            raise
        raise Refused("--engine temporal://… needs temporalio: pip install 'penstock[temporal]'") from None
