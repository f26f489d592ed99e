"""Arguments and options shared by several commands."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Literal, TypeVar

import typer
from typer.models import OptionInfo

from penstock.cli.exits import Refused
from penstock.cli.values import amount, number, whole_number

N = TypeVar("N", int, float)

URL = "http://127.0.0.1:8642"

Target = Annotated[
    str, typer.Argument(metavar="FILE", help="Graph or agent: file.json, file.py, file.py:name or package.module:name.")
]
Graphs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="GRAPHS",
        help="Graphs in JSON (files or directories), and graphs and agents in Python (app.py:graph, agent.py:agent, "
        "package.module:name); default: example graphs.",
    ),
]
Executors = Annotated[
    list[str] | None,
    typer.Option(metavar="MODULE:NAME", help="Executors by node type: a registry or a mapping. Repeatable."),
]
Models = Annotated[
    list[str] | None,
    typer.Option(metavar="MODULE:NAME", help="Models by name. Repeatable."),
]
Tools = Annotated[
    list[str] | None,
    typer.Option(metavar="MODULE:NAME", help="Tools by name. Repeatable."),
]
AllowModels = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-model",
        metavar="PATTERN",
        help="Providers' models that graphs in JSON may name, such as 'openai:gpt-4o*', or none; default: all. "
        "Repeatable.",
    ),
]
Prices = Annotated[
    list[str] | None,
    typer.Option(metavar="MODULE:NAME", help="Prices by model; they override known prices. Repeatable."),
]


class UnknownPrices(StrEnum):
    """Handling of calls to a model without a known price."""

    COUNT = "count"
    REFUSE = "refuse"


class PayloadRecording(StrEnum):
    """The extent to which a server stores requests and responses."""

    OFF = "off"
    REDACTED = "redacted"
    FULL = "full"

    @property
    def mode(self) -> Literal["off", "redacted", "full"]:
        """The corresponding setting of a host."""
        return self.value


Unpriced = Annotated[
    UnknownPrices | None,
    typer.Option(
        "--unknown-prices",
        help="Calls of models without a price: count them as unknown (default), or refuse them.",
    ),
]


class LogFormat(StrEnum):
    """Formats of a service's log."""

    JSON = "json"
    TEXT = "text"


LogFormatOption = Annotated[
    LogFormat | None,
    typer.Option(
        "--log-format",
        envvar="PENSTOCK_LOG_FORMAT",
        help="Log each request and each ended run to standard error, one line each; without it, only failures.",
    ),
]


class UnknownCosts(StrEnum):
    """Handling of requests whose worst-case cost is unknown."""

    COUNT = "count"
    REFUSE = "refuse"


UnknownCostOption = Annotated[
    UnknownCosts,
    typer.Option(
        "--unknown-cost",
        help="Requests whose worst case is unknown, such as images, the provider's own tools and stored turns: "
        "count what they cost, or refuse them.",
    ),
]
Upstreams = Annotated[
    list[str] | None,
    typer.Option(
        "--upstream",
        metavar="NAME=[WIRE+]URL",
        help="Another provider, under /NAME; its key is in NAME_API_KEY. Wires: openai (default), anthropic, gemini. "
        "Repeatable.",
    ),
]


class Approve(StrEnum):
    """The answer given to every approval question of a run."""

    ALL = "all"
    NONE = "none"


Database = Annotated[
    str | None,
    typer.Option(
        "--db",
        metavar="URL",
        envvar="PENSTOCK_DB",
        help="Database: sqlite:///file.db, postgresql://…, or memory:.",
    ),
]
Url = Annotated[str, typer.Option("--url", metavar="URL", envvar="PENSTOCK_URL", help="Address of the server.")]
Token = Annotated[
    str | None,
    typer.Option(
        "--token", metavar="TOKEN", envvar="PENSTOCK_TOKEN", help="Access token; better set in the environment."
    ),
]
TokensFile = Annotated[
    str | None,
    typer.Option(
        "--tokens",
        metavar="FILE",
        envvar="PENSTOCK_TOKENS_FILE",
        help="File with one token per line: name:role:secret, and optionally a space and until=2026-12-31.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def dollars(help: str, envvar: str | None = None) -> OptionInfo:
    """Return an option for an amount of US dollars; other values are rejected."""
    option: OptionInfo = typer.Option(parser=amount, metavar="USD", envvar=envvar, help=help)
    return option


class BillAction(StrEnum):
    """What to do with an unresolved bill."""

    RESOLVE = "resolve"
    RELEASE = "release"


ActionOnBill = Annotated[
    BillAction | None,
    typer.Argument(metavar="ACTION", help="resolve a bill at its cost, or release it if the call cost nothing."),
]
CallWithBill = Annotated[str | None, typer.Argument(metavar="CALL", help="Id of the call, from the list.")]
CostOfBill = Annotated[str | None, dollars("What the call really cost, to resolve it.")]


def check_bill_arguments(command: str, action: BillAction | None, call: str | None, cost: str | None) -> None:
    """Refuse incomplete or contradictory arguments about a bill; `command` begins the example in the error."""
    if (action is None) != (call is None):
        raise Refused(f"name the action and the call, such as: {command} resolve CALL --cost 0.02")
    if (action is BillAction.RESOLVE) != (cost is not None):
        raise Refused("resolve needs --cost, and only resolve takes it; to release a bill means that it cost nothing")


MaxCost = Annotated[str, dollars("Default cost limit of a run.")]
CostCeiling = Annotated[str | None, dollars("Highest cost limit that a run may request.", "PENSTOCK_COST_CEILING")]
UserDaily = Annotated[str | None, dollars("Daily budget of each user.", "PENSTOCK_USER_DAILY")]

DayZone = Annotated[
    str,
    typer.Option(
        "--day-zone",
        metavar="ZONE",
        envvar="PENSTOCK_DAY_ZONE",
        help="Time zone whose days daily budgets have, such as Europe/Berlin; the same for all servers, workers and "
        "gateways on a database.",
    ),
]


def _team_budget(text: str) -> str:
    amount(text.rpartition("=")[2])
    return text


TeamDaily = Annotated[
    list[str] | None,
    typer.Option(
        "--team-daily",
        parser=_team_budget,
        metavar="[TEAM=]USD",
        help="Daily budget of each team of gateway keys, or of the one that is named. Repeatable.",
    ),
]


def team_budgets(given: list[str] | None) -> dict[str, str]:
    """Return the budgets of `--team-daily` by team; `*` has the budget of all other teams."""
    parts = [text.rpartition("=") for text in given or ()]
    return {team if equals else "*": usd for team, equals, usd in parts}


def numeric(
    read: Callable[[str], N],
    metavar: str,
    help: str,
    *,
    minimum: N | None = None,
    maximum: N | None = None,
    envvar: str | None = None,
) -> OptionInfo:
    """Return an option that `read` parses to a number; values out of bounds are rejected."""

    def parse(text: str) -> N:
        value = read(str(text))  # a default is passed as a number
        if minimum is not None and value < minimum:
            raise ValueError(f"it must be {minimum} or more, not {value}")
        if maximum is not None and value > maximum:
            raise ValueError(f"it must be {maximum} or less, not {value}")
        return value

    # With a parser, typer only displays the bounds and does not check them.
    option: OptionInfo = typer.Option(parser=parse, min=minimum, max=maximum, metavar=metavar, envvar=envvar, help=help)
    return option


Daily = Annotated[str | None, dollars("Daily budget of all users together.")]
DailyBlocks = Annotated[
    bool,
    typer.Option(
        "--daily-blocks",
        help="Set parts of the daily budgets aside for each server and worker; for many of them on PostgreSQL.",
    ),
]
MaxRunning = Annotated[int, numeric(whole_number, "N", "Maximum number of concurrent runs.", minimum=1)]
MaxRunningPerUser = Annotated[
    int, numeric(whole_number, "N", "Maximum number of concurrent runs of each user.", minimum=1)
]
DbConnections = Annotated[
    int,
    numeric(
        whole_number,
        "N",
        "Connections to PostgreSQL that work at once; up to two more only listen.",
        minimum=4,
        maximum=1_000,
        envvar="PENSTOCK_DB_CONNECTIONS",
    ),
]
DbTimeout = Annotated[
    float,
    numeric(
        number,
        "SECONDS",
        "Time limit of a statement on PostgreSQL.",
        minimum=0.1,
        maximum=86_400,
        envvar="PENSTOCK_DB_TIMEOUT",
    ),
]
Lease = Annotated[
    float,
    numeric(number, "SECONDS", "Take over runs of a server that has not renewed its lease for this long.", minimum=0.1),
]
Drain = Annotated[float, numeric(number, "SECONDS", "Time for running runs to end when the server stops.", minimum=0)]
OtlpEndpoint = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        envvar="PENSTOCK_OTLP_ENDPOINT",
        help="Export spans of runs to this OTLP/HTTP collector, such as http://localhost:4318/v1/traces.",
    ),
]
RecordPayloads = Annotated[
    PayloadRecording,
    typer.Option(
        envvar="PENSTOCK_RECORD_PAYLOADS",
        help="Store requests and responses of model and tool calls, with or without what looks like a secret.",
    ),
]
EngineUrl = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="URL",
        envvar="PENSTOCK_ENGINE",
        help="Engine that dispatches runs to workers: temporal://host:7233/namespace, or temporals://… with TLS.",
    ),
]
