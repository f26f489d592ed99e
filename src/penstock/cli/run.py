"""Options of `penstock run`; the implementation is in `run_command`, which is imported when the command runs."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.options import Approve, Executors, Models, Prices, Target, Tools, Unpriced


def run(
    target: Target,
    input: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT|JSON|@FILE|-",
            help="Input of the run: text, JSON, @file.json, or - for JSON from standard input.",
        ),
    ] = None,
    max_cost: Annotated[str | None, typer.Option(metavar="USD", help="Cost limit in US dollars.")] = None,
    max_steps: Annotated[
        str | None, typer.Option(metavar="N", help="Maximum number of successful steps and calls.")
    ] = None,
    max_tokens: Annotated[str | None, typer.Option(metavar="N", help="Maximum number of tokens.")] = None,
    max_retries: Annotated[str | None, typer.Option(metavar="N", help="Maximum number of failed calls.")] = None,
    timeout: Annotated[str | None, typer.Option(metavar="SECONDS", help="Time limit.")] = None,
    max_parallel: Annotated[
        str | None, typer.Option(metavar="N", help="Maximum number of concurrent steps; overrides the graph.")
    ] = None,
    models: Models = None,
    tools: Tools = None,
    executors: Executors = None,
    prices: Prices = None,
    unknown_prices: Unpriced = None,
    approve: Annotated[
        Approve | None, typer.Option(help="Answer to all approval questions, instead of prompting.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Run a graph or an agent under limits.

    Progress goes to standard error, results to standard output. Ctrl-C cancels the run and shows the results so far;
    press it again to exit immediately. There is no limit unless you set one; 0 allows nothing. Models, tools,
    executors and prices apply to graphs in JSON. The built-in model "example" needs no key.

    Approval questions are shown at the terminal; without a terminal, answer them with --approve.

    \b
    Examples:
      penstock run story.py --input 'a dam in winter' --max-cost 0.50
      penstock run agent.py:agent --input hello --max-cost 0.10
      penstock run flow.json --executors nodes:registry --input @question.json --timeout 60
      penstock run agent.json --models my_models.py:models --input '"hello"' --max-cost 0.10
      echo '{"n": 3}' | penstock run package.flows:main --input - --json > result.json

    \b
    Exit codes:
      0 ok   2 failed, or the graph is not valid   3 halted by a limit
      64 wrong command line   130 cancelled
    """
    from penstock.cli.loading.services import ServiceOptions
    from penstock.cli.run_command import RunArguments, run_graph

    limits = {
        "--max-cost": max_cost,
        "--max-steps": max_steps,
        "--max-tokens": max_tokens,
        "--max-retries": max_retries,
        "--timeout": timeout,
    }
    services = ServiceOptions(models, tools, prices, unknown_prices)
    node_executors = tuple(executors or ())
    return run_graph(RunArguments(target, input, limits, max_parallel, node_executors, services, approve, as_json))
