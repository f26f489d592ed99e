"""Assembles the commands, and maps errors that no command handles to exit codes.

typer parses the command line. It is called in non-standalone mode, in which it neither prints errors nor exits, because
Penstock defines its own exit codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from penstock.cli import completion, graph, init, program, run
from penstock.cli.exits import Exit, Refused
from penstock.cli.remote import chat, runs
from penstock.cli.render.screen import flush, prepare_streams, print_error, print_text, printing
from penstock.cli.service import audit, db, doctor, gateway, grafana, people, serve, tokens, worker
from penstock.cli.version import version

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""Base class of typer's command-line errors; typer does not export it under a public name."""

app = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})
app.command("init", short_help="Write a small project to start from.")(init.init)
app.command("run", no_args_is_help=False)(run.run)
app.command("exec", short_help="Run a program of any language under limits.", context_settings=program.CONTEXT)(
    program.exec_program
)
app.add_typer(graph.app, name="graph")
app.command("serve", short_help="Serve graphs over HTTP.")(serve.serve)
app.command("worker", short_help="Execute the runs that an engine dispatches.")(worker.worker)
app.command("gateway", short_help="Serve model APIs to a team, with a budget for each key.")(gateway.gateway)
app.command("chat")(chat.chat)
app.add_typer(runs.app, name="runs")
app.command("mcp", short_help="Serve graphs as MCP tools on standard input and output.")(serve.mcp)
app.add_typer(db.app, name="db")
app.add_typer(tokens.app, name="tokens")
app.add_typer(people.app, name="people")
app.command("audit", short_help="List what people did: cancels, grants, approvals, bills, graphs, tokens.")(audit.audit)
app.command("grafana", short_help="Print a Grafana dashboard of the server's metrics.")(grafana.grafana)
app.command("doctor", short_help="Check the installation and the configuration.")(doctor.doctor)
app.command("completion", short_help="Print the completion script for a shell.")(completion.completion)


@app.callback(invoke_without_command=True)
def penstock(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> int:
    """Run agent graphs under limits that hold.

    \b
    Examples:
      penstock run flow.json --executors nodes:registry --input '"hello"' --max-cost 0.50
      penstock run story.py --timeout 60 --json
      penstock exec --max-cost 2 -- node agent.js
      penstock graph validate flow.json
      penstock serve
      penstock chat assistant

    \b
    Exit codes:
      0 ok   2 failed, or the graph is not valid   3 halted by a limit
      4 a chat waits for an answer that cannot be given here   64 wrong command line
      75 connection to the server lost   130 cancelled
    """
    if show_version:
        print_text(version())
        raise typer.Exit
    if context.invoked_subcommand is None:
        print_text(context.get_help())
    return Exit.OK


def invoke(arguments: Sequence[str]) -> int:
    """Run the command that `arguments` name and return its exit code."""
    prepare_streams()
    completion.register_shells()
    try:
        with printing():
            code = app(arguments, prog_name="penstock", standalone_mode=False)
    except UsageError as wrong:
        print_error(_sentence(wrong))
        code = Exit.USAGE
    except Refused as refused:
        print_error(str(refused))
        code = refused.code
    except (KeyboardInterrupt, typer.Abort):
        code = Exit.CANCELLED
    flush()
    return int(code or Exit.OK)


def _sentence(wrong: Exception) -> str:
    message = " ".join(wrong.format_message().split()).replace("Value error, ", "").rstrip(".")  # type: ignore[attr-defined]
    context = getattr(wrong, "ctx", None)
    command = "penstock" if context is None else context.command_path
    return f"{message[:1].lower()}{message[1:]}{' See' if message.endswith('?') else '; see'} {command} --help"
