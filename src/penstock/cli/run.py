"""`penstock run`: its options; what it does is in `running`, which is loaded when there is something to run."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.options import Approve, Executors, Models, Prices, Target, Tools, Unpriced


def run(
    target: Target,
    input: Annotated[
        str | None, typer.Option(metavar="JSON|@FILE|-", help="The input: JSON, @file, or - for standard input.")
    ] = None,
    max_cost: Annotated[str | None, typer.Option(metavar="USD", help="Spend at most this many US dollars.")] = None,
    max_steps: Annotated[str | None, typer.Option(metavar="N", help="Let at most N steps and calls succeed.")] = None,
    max_tokens: Annotated[str | None, typer.Option(metavar="N", help="Use at most N tokens.")] = None,
    max_retries: Annotated[str | None, typer.Option(metavar="N", help="Let at most N calls fail.")] = None,
    timeout: Annotated[str | None, typer.Option(metavar="SECONDS", help="Stop after so many seconds.")] = None,
    max_parallel: Annotated[
        str | None, typer.Option(metavar="N", help="Run at most N steps at once, whatever the graph says.")
    ] = None,
    models: Models = None,
    tools: Tools = None,
    executors: Executors = None,
    prices: Prices = None,
    unknown_prices: Unpriced = None,
    approve: Annotated[
        Approve | None, typer.Option(help="Say this to everything that is asked, instead of asking at the terminal.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of lines.")] = False,
) -> int:
    """Run a graph under limits, and watch it.

    Progress goes to standard error, results to standard output. The first Ctrl-C cancels the run and shows what is
    there, a second one leaves at once. A limit that is not given is no limit; 0 is nothing. Models, tools, executors,
    prices and approvals are for graphs in JSON; the model called example is always there, and needs no key.

    A graph that asks for approval asks at the terminal; where there is none, --approve says what to answer.

    \b
    Examples:
      penstock run story.py --input '"a dam in winter"' --max-cost 0.50
      penstock run flow.json --executors nodes:registry --input @question.json --timeout 60
      penstock run agent.json --models my_models.py:models --input '"hello"' --max-cost 0.10
      echo '{"n": 3}' | penstock run package.flows:main --input - --json > result.json

    \b
    Exit codes:
      0 ok   2 failed, or the graph is not valid   3 halted by a limit
      64 wrong command line   130 cancelled
    """
    from penstock.cli.loading.offers import Named
    from penstock.cli.running import Asked, run_graph

    limits = {
        "--max-cost": max_cost,
        "--max-steps": max_steps,
        "--max-tokens": max_tokens,
        "--max-retries": max_retries,
        "--timeout": timeout,
    }
    named = Named(models, tools, prices, unknown_prices)
    return run_graph(Asked(target, input, limits, max_parallel, tuple(executors or ()), named, approve, as_json))
