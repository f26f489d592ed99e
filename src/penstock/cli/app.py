"""The commands, put together, and what becomes of errors that no command handles.

typer reads the command line; it is called so that it neither prints errors nor leaves by itself, because the exit codes
are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from penstock.cli import completion, graph, run, version
from penstock.cli.exits import Exit, Refused
from penstock.cli.remote import chat, runs
from penstock.cli.service import db, doctor, mcp, serve
from penstock.cli.showing.screen import complain, flush, prepare_streams, printing, say

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""Everything typer finds wrong with a command line; it has no public name of its own."""

app = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})
app.command("run", no_args_is_help=False)(run.run)
app.add_typer(graph.app, name="graph")
app.command("serve", short_help="Serve graphs over HTTP, to people and programs.")(serve.serve)
app.command("chat")(chat.chat)
app.add_typer(runs.app, name="runs")
app.command("mcp", short_help="Be an MCP server whose tools are graphs.")(mcp.mcp)
app.add_typer(db.app, name="db")
app.command("doctor", short_help="See what is missing or broken, and what to do.")(doctor.doctor)
app.command("completion", short_help="Print a script for your shell's completion.")(completion.completion)


@app.callback(invoke_without_command=True)
def penstock(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> int:
    """Run graphs of agents under limits that hold.

    \b
    Examples:
      penstock run flow.json --executors nodes:registry --input '"hello"' --max-cost 0.50
      penstock run story.py --timeout 60 --json
      penstock graph validate flow.json
      penstock serve
      penstock chat assistant

    \b
    Exit codes:
      0 ok   2 failed, or the graph is not valid   3 halted by a limit
      4 a chat waits for an answer that nobody here can give   64 wrong command line
      75 a server that was followed has gone   130 cancelled
    """
    if show_version:
        say(version())
        raise typer.Exit
    if context.invoked_subcommand is None:
        say(context.get_help())
    return Exit.OK


def invoke(arguments: Sequence[str]) -> int:
    """Run the command that `arguments` ask for; its exit code."""
    prepare_streams()
    completion.know_the_shells()
    try:
        with printing():
            code = app(arguments, prog_name="penstock", standalone_mode=False)
    except UsageError as wrong:
        complain(_sentence(wrong))
        code = Exit.USAGE
    except Refused as refused:
        complain(str(refused))
        code = refused.code
    except (KeyboardInterrupt, typer.Abort):
        code = Exit.CANCELLED
    flush()
    return int(code or Exit.OK)


def _sentence(wrong: Exception) -> str:
    said = " ".join(wrong.format_message().split()).replace("Value error, ", "").rstrip(".")  # type: ignore[attr-defined]
    context = getattr(wrong, "ctx", None)
    command = "penstock" if context is None else context.command_path
    return f"{said[:1].lower()}{said[1:]}; {command} --help shows what there is"
