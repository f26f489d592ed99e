"""`penstock grafana`: the dashboard of a server's metrics, to import into Grafana."""

from __future__ import annotations

from importlib.resources import files

from penstock.cli.exits import Exit
from penstock.cli.render.screen import print_text


def grafana() -> int:
    """Print a Grafana dashboard of the server's metrics, to import there.

    \b
    Examples:
      penstock grafana > penstock-dashboard.json

    \b
    Exit codes:
      0 printed   64 wrong command line
    """
    print_text(files("penstock.server").joinpath("grafana.json").read_text("utf-8").rstrip())
    return Exit.OK
