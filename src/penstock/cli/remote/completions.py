"""Completes ids of runs and graphs in a shell, from the server that the command line or the environment names.

A server that does not answer within a second yields no completions.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import typer

from penstock.cli.exits import Refused
from penstock.cli.options import URL

ANSWER_S = 1.0
"""How long a shell waits for the server's answer before it completes nothing."""


def complete_run(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the newest runs whose id begins with the typed text, each with its status and graph."""
    runs = _from_server(context, lambda server: server.get("/api/runs", limit=100)["runs"])
    described = [(str(run["id"]), f"{run['status']}, {run['graph_id']}") for run in runs]
    return [run for run in described if run[0].startswith(incomplete)]


def complete_graph(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the graphs whose id begins with the typed text, each with its name."""
    graphs = _from_server(context, lambda server: server.get("/api/graphs", limit=500)["graphs"])
    return [(str(graph["id"]), str(graph["name"])) for graph in graphs if str(graph["id"]).startswith(incomplete)]


def _from_server(context: typer.Context, read: Callable[[Any], list[Any]]) -> list[Any]:
    from penstock.cli.remote.connection import Connection

    url = context.params.get("url") or os.environ.get("PENSTOCK_URL") or URL
    token = context.params.get("token") or os.environ.get("PENSTOCK_TOKEN") or None
    try:
        with Connection(url, token, timeout_s=ANSWER_S) as server:
            return read(server)
    except Refused:  # the shell has no place for an error
        return []
