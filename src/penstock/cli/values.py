"""Parses values of the command line: JSON (inline, `@file`, or `-` for standard input) or text, numbers and ids."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any, NoReturn

from penstock.cli.exits import Refused
from penstock.errors import InvalidValue
from penstock.ids import AN_ID, ID
from penstock.kernel.graph import shown
from penstock.money import is_decimal, to_nanos

MAX_INPUT_BYTES = 64 * 1024 * 1024


STARTS_JSON = ("{", "[", '"')
"""Beginnings of an inline value that is meant as JSON, so that a mistake in it is reported."""
NOT_NUMBERS = ("NaN", "Infinity", "-Infinity")
"""Values that Python reads as JSON numbers, and that JSON does not have."""


def read_input(given: str | None, option: str = "--input") -> Any:
    """Return the value of an option; None if it was not given.

    An inline value that is not JSON, and does not begin like an object, a list or a quoted string, is text.
    """
    if given is None:
        return None
    if given == "-":
        return parse_json(_from_stdin(option), f"{option} -")
    if given.startswith("@"):
        return parse_json(read_bytes(Path(given[1:]), option), f"{option} {given}")
    if _is_text(given):
        return given
    return parse_json(
        given, option, "; to pass it as text, quote it as JSON, or put JSON into a file and name it @file"
    )


def _is_text(given: str) -> bool:
    if given.lstrip().startswith(STARTS_JSON) or given.strip() in ("", *NOT_NUMBERS):
        return False
    try:
        json.loads(given)
    except ValueError:
        return True
    return False


def read_bytes(path: Path, what: str) -> bytes:
    """Read the file; Refused, with the reason, if it cannot be read."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_INPUT_BYTES + 1)
    except FileNotFoundError:
        raise Refused(f"{what}: there is no file {str(path)!r}") from None
    except IsADirectoryError:
        raise Refused(f"{what}: {str(path)!r} is a directory; name a file in it") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise Refused(f"{what}: {str(path)!r} cannot be read: {reason}") from None
    if len(content) > MAX_INPUT_BYTES:
        raise Refused(f"{what}: {str(path)!r} is larger than {MAX_INPUT_BYTES} bytes")
    return content


def whole_number(text: str) -> int:
    """Parse a whole number in plain notation, as for amounts; ValueError if `text` is not one."""
    try:
        if is_decimal(text):
            return int(text)
    except ValueError:  # a decimal point, an exponent, or too many digits
        pass
    raise ValueError(f"{shown(text)} is not a whole number")


def number(text: str) -> float:
    """Parse a finite number in plain notation, as for amounts; ValueError if `text` is not one."""
    if is_decimal(text) and math.isfinite(found := float(text)):
        return found
    raise ValueError(f"{shown(text)} is not a number")


def identifier(text: str) -> str:
    """Return `text` if servers accept it as an id; otherwise ValueError describes the format."""
    if ID.fullmatch(text):
        return text
    raise ValueError(f"{shown(text)} is not an id: {AN_ID}")


def amount(text: str) -> str:
    """Return `text` if it is an amount of US dollars; otherwise ValueError describes the format."""
    try:
        to_nanos(str(text))
    except InvalidValue as invalid:
        raise ValueError(f"it must be {invalid.expected}, not {shown(text)}") from None
    return text


def _from_stdin(option: str) -> bytes:
    if sys.stdin is None:
        raise Refused(f"{option} - cannot be read: standard input is closed")
    if sys.stdin.isatty():
        print(f"penstock: reading {option} from this terminal; Ctrl-D ends it", file=sys.stderr)
    content = sys.stdin.buffer.read(MAX_INPUT_BYTES + 1)
    if len(content) > MAX_INPUT_BYTES:
        raise Refused(f"{option} -: standard input is larger than {MAX_INPUT_BYTES} bytes")
    return content


def parse_json(text: str | bytes, what: str, hint: str = "") -> Any:
    """Parse `text` as JSON; Refused, naming it `what`, if it is not JSON."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise Refused(f"{what} is nested too deeply") from None
    except ValueError as error:
        raise Refused(f"{what} is not JSON: {error}{hint}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
