"""Whether the commands that pages and configuration files show exist: programs, options, arguments, targets, extras."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from typing import Any

import typer

from penstock.cli.app import UsageError, app
from penstock.cli.exits import Refused
from tools.blocks import ROOT

ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
OPERATORS = {"|", "||", "&&", "&", ";", "(", ")"}
REDIRECTIONS = {">", ">>", "<", "2>", "2>>", ">&"}
UNCHECKED = {
    *(".", "cd", "curl", "export", "grep", "jq", "kill", "node", "pgrep", "python", "python3", "sh"),
    *("tail", "useradd", "aider", "claude", "codex", "gemini", "temporal"),
}
"""Programs of others: of the system, of languages, and coding CLIs."""


def problems(line: str) -> Iterator[str]:
    """Yield what is wrong with the commands of a line."""
    for words in simple_commands(line):
        if problem := _problem(words):
            yield f"{' '.join(words)}: {problem}"


def simple_commands(line: str) -> Iterator[list[str]]:
    """Yield the words of each command of a line, without assignments before it and without redirections."""
    lexer = shlex.shlex(line.replace("\\\n", " "), posix=True, punctuation_chars="|&;()<>")
    lexer.commenters = "#"
    lexer.whitespace_split = True
    words: list[str] = []
    is_target = False
    for word in lexer:
        if word in OPERATORS:
            yield from _without_assignments(words)
            words = []
        elif word in REDIRECTIONS:
            is_target = True
            if words and words[-1].isdigit():
                words.pop()  # the number of a stream
        elif is_target:
            is_target = False
        else:
            words.append(word)
    yield from _without_assignments(words)


def _without_assignments(words: list[str]) -> Iterator[list[str]]:
    while words and ASSIGNMENT.match(words[0]):
        words = words[1:]
    if words:
        yield words


def _problem(words: list[str]) -> str | None:
    name, *arguments = words
    if name.rpartition("/")[2] == "penstock":
        return _problem_of_penstock(arguments)
    if name == "make":
        return _problem_of_make(arguments)
    if name == "pip":
        return _problem_of_pip(arguments)
    return None if name in UNCHECKED else "unknown program: add it to UNCHECKED, or write a check for it"


def _problem_of_penstock(arguments: list[str]) -> str | None:
    """Parse a command line of ours, as it would be parsed, without running it."""
    command: Any = _command_line()
    context = None
    name = "penstock"
    try:
        while True:
            context = command.make_context(name, list(arguments), parent=context)
            if not hasattr(command, "commands"):
                break
            rest = [*context._protected_args, *context.args]
            if not rest:
                break
            name, command, arguments = command.resolve_command(context, rest)
    except UsageError as wrong:
        return str(wrong.format_message())  # type: ignore[attr-defined]
    except Refused as wrong:
        return str(wrong)
    if command.name == "exec":
        return next(problems(shlex.join(context.params["command"])), None)
    return None


def _problem_of_make(arguments: list[str]) -> str | None:
    unknown = [one for one in arguments if not ASSIGNMENT.match(one) and one not in _targets()]
    return f"the Makefile has no target {', '.join(unknown)}" if unknown else None


def _problem_of_pip(arguments: list[str]) -> str | None:
    """Whether `pip install 'penstock[…]'` names extras that there are."""
    extras = {extra for one in arguments for extra in re.findall(r"[\w-]+", one.partition("[")[2])}
    unknown = extras - _extras()
    return f"pyproject.toml has no extra {', '.join(sorted(unknown))}" if unknown else None


@cache
def _command_line() -> Any:
    return typer.main.get_command(app)


@cache
def _targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


@cache
def _extras() -> set[str]:
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"])
