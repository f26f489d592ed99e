"""Texts with placeholders for values: `{{ name }}`, `{{ a.b[0] }}`, `{{ a["any key"] }}`.

Looks values up in JSON (objects by key, lists by position) and does nothing else: no attributes, no calls, no filters,
no loops. The content of a value is never parsed as a template. `\\{{` is a literal `{{`. A template, its placeholders
and its output are bounded, and both parsing and rendering take time in proportion to them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from penstock.errors import PenstockError

MAX_TEMPLATE = 100_000
MAX_PLACES = 1_000
MAX_STEPS = 32
MAX_RENDERED = 1_000_000

NAME = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)
STEP = re.compile(r"""\.([A-Za-z_][\w-]*)|\[(\d{1,9})\]|\["([^"\\]{0,200})"\]""", re.ASCII)

Path = tuple[str | int, ...]


class TemplateInvalid(PenstockError):
    """A template cannot be parsed; has the position and the reason."""

    def __init__(self, at: int, why: str) -> None:
        self.at = at
        self.why = why
        super().__init__(f"at character {at}: {why}")


class TemplateFailed(PenstockError):
    """A template could not be rendered with the given values."""


class Template:
    """A parsed text with placeholders."""

    __slots__ = ("_pieces",)

    def __init__(self, text: str) -> None:
        if len(text) > MAX_TEMPLATE:
            raise TemplateInvalid(MAX_TEMPLATE, f"the template has more than {MAX_TEMPLATE:,} characters, the maximum")
        self._pieces: tuple[str | Path, ...] = tuple(_read(text))

    @property
    def names(self) -> frozenset[str]:
        """The names of the values it uses."""
        return frozenset(str(piece[0]) for piece in self._pieces if isinstance(piece, tuple))

    def render(
        self, values: Mapping[str, Any], *, missing: str | None = None, escape: Callable[[str], str] | None = None
    ) -> str:
        """Return the text with the values; `missing` replaces an absent value, None raises TemplateFailed instead."""
        return _whole(
            text
            for piece in self._pieces
            for text in ((piece,) if isinstance(piece, str) else _filled(piece, values, missing, escape))
        )


def placeholders(text: str) -> list[str]:
    """Return the names that a text uses, in order and each once, as far as it is a valid template."""
    names: dict[str, None] = {}
    try:
        for piece in _read(text):
            if isinstance(piece, tuple):
                names[str(piece[0])] = None
    except TemplateInvalid:
        pass
    return list(names)


def _read(text: str) -> Iterator[str | Path]:
    at = places = 0
    while (opened := text.find("{{", at)) >= 0:
        if opened and text[opened - 1] == "\\":
            yield text[at : opened - 1] + "{{"
            at = opened + 2
            continue
        if opened > at:
            yield text[at:opened]
        closed = text.find("}}", opened)
        if closed < 0:
            raise TemplateInvalid(opened, "this {{ is not closed by }}")
        places += 1
        if places > MAX_PLACES:
            raise TemplateInvalid(opened, f"the template has more than {MAX_PLACES:,} placeholders, the maximum")
        yield _path(text[opened + 2 : closed], opened)
        at = closed + 2
    if at < len(text):
        yield text[at:]


def _path(written: str, at: int) -> Path:
    written = written.strip()
    found = NAME.match(written)
    steps: list[str | int] = []
    end = 0
    while found is not None and len(steps) < MAX_STEPS:
        steps.append(_step(found) if steps else found[0])
        end = found.end()
        found = STEP.match(written, end)
    if not steps or end < len(written):
        raise TemplateInvalid(
            at,
            f"{written[:40]!r} is not a valid placeholder: write a name, then steps such as .key, [0] or "
            '["key"]; expressions are not evaluated',
        )
    return tuple(steps)


def _step(found: re.Match[str]) -> str | int:
    key, position, quoted = found.groups()
    return key if key is not None else quoted if quoted is not None else int(position)


def _filled(
    path: Path, values: Mapping[str, Any], missing: str | None, escape: Callable[[str], str] | None
) -> Iterable[str]:
    shown = _shown(path, values, missing)
    return shown if escape is None else (escape(_whole(shown)),)


def _whole(pieces: Iterable[str]) -> str:
    whole: list[str] = []
    left = MAX_RENDERED
    for piece in pieces:
        left -= len(piece)
        if left < 0:
            raise TemplateFailed(f"the rendered text would have more than {MAX_RENDERED:,} characters, the maximum")
        whole.append(piece)
    return "".join(whole)


def _shown(path: Path, values: Mapping[str, Any], missing: str | None) -> Iterable[str]:
    value: Any = values
    for done, step in enumerate(path):
        if _has(value, step):
            value = value[step]
        elif missing is not None:
            return (missing,)
        else:
            raise TemplateFailed(f"{_written(path[: done + 1])} has no value{_known(values) if not done else ''}")
    return (value,) if isinstance(value, str) else _as_json(value, path)


def _has(value: Any, step: str | int) -> bool:
    if isinstance(step, str):
        return isinstance(value, Mapping) and step in value
    return isinstance(value, list | tuple) and step < len(value)


def _as_json(value: Any, path: Path) -> Iterator[str]:
    """Yield JSON in pieces, so that the caller can stop at its size limit."""
    try:
        yield from json.JSONEncoder(ensure_ascii=False, allow_nan=False).iterencode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise TemplateFailed(f"{_written(path)} is not JSON: {str(error)[:100]}") from error


def _written(path: Path) -> str:
    first, *rest = path
    return str(first) + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in rest)


def _known(values: Mapping[str, Any]) -> str:
    names = ", ".join(sorted(map(str, values))[:20])
    return f"; there are values for: {names}" if names else ": no values arrived"
