"""Options of `penstock exec`; the implementation is imported when the command runs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.exits import Refused
from penstock.cli.options import Prices, UnknownCostOption, UnknownCosts, Unpriced, Upstreams, dollars, numeric
from penstock.cli.values import number, whole_number

CONTEXT = {"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}
"""Options after the program's name belong to the program."""


class OnHalt(StrEnum):
    """Effects on the program when a limit refuses one of its calls."""

    REFUSE = "refuse"
    STOP = "stop"


def exec_program(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="The program and its arguments.")],
    max_cost: Annotated[str | None, dollars("Cost limit.")] = None,
    max_calls: Annotated[int | None, numeric(whole_number, "N", "Maximum number of model calls.", minimum=0)] = None,
    max_tokens: Annotated[int | None, numeric(whole_number, "N", "Maximum number of tokens.", minimum=0)] = None,
    max_retries: Annotated[int | None, numeric(whole_number, "N", "Maximum number of failed calls.", minimum=0)] = None,
    timeout: Annotated[
        float | None, numeric(number, "SECONDS", "Time limit; the program is ended when it has passed.", minimum=0.001)
    ] = None,
    max_output: Annotated[
        int, numeric(whole_number, "N", "Output limit of a request that sets none, in tokens.", minimum=1)
    ] = 4_096,
    on_halt: Annotated[
        OnHalt, typer.Option(help="At a limit, refuse further calls, or stop the program too.")
    ] = OnHalt.REFUSE,
    grace: Annotated[
        float, numeric(number, "SECONDS", "Time between the request to terminate and the kill.", minimum=0)
    ] = 5.0,
    allow_model: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Models that may be called, such as gpt-*. Repeatable.")
    ] = None,
    upstream: Upstreams = None,
    keep_env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Keep this variable, which would be removed as a credential. Repeatable."),
    ] = None,
    prices: Prices = None,
    unknown_prices: Unpriced = None,
    unknown_cost: UnknownCostOption = UnknownCosts.COUNT,
    record: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the run to FILE: .html, .json or .txt.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show neither the live line nor the call tree.")] = False,
) -> int:
    """Run a program of any language under limits.

    The program gets the address of a gateway on this machine and a key for it, in the variables that the clients of
    OpenAI, Anthropic and Google read; the provider keys of your environment stay with Penstock. Every model call of the
    program, its threads and its child processes is counted, and its cost is held before it is sent.

    There is no limit unless you set one; 0 allows nothing. Ctrl-C goes to the program. Options of Penstock come before
    the program's name.

    \b
    Examples:
      penstock exec --max-cost 2 --timeout 600 -- node agent.js
      penstock exec --max-cost 0.50 --on-halt stop -- python crew.py --topic dams
      penstock exec --max-cost 5 --record run.html -- claude
      penstock exec --upstream ollama=http://127.0.0.1:11434/v1 -- ./agent

    \b
    Exit codes:
      the program's own; 128 and the signal's number if a signal ended it
      3 a limit ended the program, or refused a call and the program failed
      64 wrong command line   126 the program cannot be executed   127 there is no such program
    """
    try:
        from penstock.cli.wrap.command import ExecArguments, exec_command
    except ImportError as error:
        raise Refused(f"penstock exec needs {error.name}: pip install 'penstock[server]'") from None
    from penstock.cli.loading.services import ServiceOptions, load_price_book

    limits = {
        "max_cost_usd": max_cost,
        "max_api_calls": max_calls,
        "max_tokens": max_tokens,
        "max_retries": max_retries,
        "timeout_s": timeout,
    }
    return exec_command(
        ExecArguments(
            command,
            limits,
            load_price_book(ServiceOptions(prices=prices, unknown_prices=unknown_prices)),
            on_halt.value,
            unknown_cost.value,
            allow_model or (),
            upstream or (),
            keep_env or (),
            max_output,
            grace,
            record,
            quiet,
        )
    )
