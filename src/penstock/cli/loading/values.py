"""Values as people write them: JSON (as it is, in an `@file`, or `-` for what comes in), numbers, and ids."""

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


def read_input(given: str | None, option: str = "--input") -> Any:
    """The value that an option stands for; None if it was not given."""
    if given is None:
        return None
    if given == "-":
        return parsed(_from_stdin(option), f"{option} -")
    if given.startswith("@"):
        return parsed(read_bytes(Path(given[1:]), option), f"{option} {given}")
    return parsed(given, option, "; quote text as '\"text\"', or name a file as @file")


def read_bytes(path: Path, what: str) -> bytes:
    """What is in the file; Refused says why if nothing can be read from it."""
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
        raise Refused(f"{what}: {str(path)!r} has more than the {MAX_INPUT_BYTES} bytes that are read")
    return content


def whole_number(text: str) -> int:
    """The whole number in `text`, plainly written as an amount is; ValueError if there is none."""
    try:
        if is_decimal(text):
            return int(text)
    except ValueError:  # a point, an exponent, or more digits than anybody means
        pass
    raise ValueError(f"{shown(text)} is not a whole number")


def number(text: str) -> float:
    """The finite number in `text`, plainly written as an amount is; ValueError if there is none."""
    if is_decimal(text) and math.isfinite(found := float(text)):
        return found
    raise ValueError(f"{shown(text)} is not a number")


def an_id(text: str) -> str:
    """`text`, if servers take it for an id; ValueError says what one looks like."""
    if ID.fullmatch(text):
        return text
    raise ValueError(f"{shown(text)} is no id: {AN_ID}")


def amount(text: str) -> str:
    """`text`, if it is an amount of US dollars; ValueError says what one looks like."""
    try:
        to_nanos(str(text))
    except InvalidValue as invalid:
        raise ValueError(f"it must be {invalid.expected}, not {shown(text)}") from None
    return text


def _from_stdin(option: str) -> bytes:
    if sys.stdin is None:
        raise Refused(f"{option} - reads what comes in, and nothing does: standard input is closed")
    if sys.stdin.isatty():
        print(f"penstock: reading {option} from this terminal; Ctrl-D ends it", file=sys.stderr)
    content = sys.stdin.buffer.read(MAX_INPUT_BYTES + 1)
    if len(content) > MAX_INPUT_BYTES:
        raise Refused(f"{option} -: more than the {MAX_INPUT_BYTES} bytes that are read")
    return content


def parsed(text: str | bytes, what: str, hint: str = "") -> Any:
    """The JSON in `text`; Refused, in which it is called `what`, if there is none."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise Refused(f"{what} is nested too deeply") from None
    except ValueError as error:
        raise Refused(f"{what} is not JSON: {error}{hint}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")
