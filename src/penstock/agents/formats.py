"""Output formats: answers that programs can read.

A format has instructions for the model, and parses its answer. An answer that cannot be parsed is a `FormatError`,
whose message is written for the model: what is wrong, where, and what is expected there. Formats parse text and know
nothing of models; the loop decides how often a model may try again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from penstock.agents.schema import check, problems_of
from penstock.errors import InvalidValue, PenstockError
from penstock.runtime.context import ExecutionContext

MAX_TEXT = 1_000_000
"""Maximum number of characters of an answer; longer ones are refused unread."""


class FormatError(PenstockError):
    """A text is not in the requested format; `correction` is the message to the model."""

    def __init__(self, expected: str, problems: list[str]) -> None:
        self.expected = expected
        self.problems = problems
        super().__init__(f"the answer is not {expected}: {'; '.join(problems)}")

    @property
    def correction(self) -> str:
        """The message that asks the model for a correct answer."""
        listed = "\n".join(f"- {problem}" for problem in self.problems)
        return f"The answer is not {self.expected}:\n{listed}\nAnswer again, with nothing but {self.expected}."


@runtime_checkable
class TextOutputFormat(Protocol):
    """Instructions for an answer, and its parser."""

    @property
    def instructions(self) -> str:
        """Instructions for the model."""

    def parse(self, text: str, context: ExecutionContext | None = None) -> Any:
        """Return the value of an answer; raises FormatError if it is not in the format."""


class JsonFormat:
    """JSON that follows a Python type (a pydantic model, a dataclass, `list[int]`, …) or a JSON Schema."""

    __slots__ = ("_adapter", "instructions", "schema")

    def __init__(self, shape: Any) -> None:
        self._adapter: Any = None
        if isinstance(shape, Mapping):
            self.schema: Mapping[str, Any] = shape
        else:
            from pydantic import TypeAdapter

            self._adapter = TypeAdapter(shape)
            self.schema = self._adapter.json_schema()
        self.instructions = (
            f"Answer with JSON, and nothing but JSON, that follows this JSON Schema:\n{json.dumps(self.schema)}"
        )

    def parse(self, text: str, context: ExecutionContext | None = None) -> Any:
        """The first JSON value in the text, with prose and code fences around it left out."""
        value = _first_json(_bounded(text, "JSON"))
        if self._adapter is None:
            problems = check(value, self.schema)
            if problems:
                raise FormatError("JSON that follows the schema", problems)
            return value
        from pydantic import ValidationError

        try:
            return self._adapter.validate_json(json.dumps(value))
        except ValidationError as error:
            raise FormatError("JSON that follows the schema", problems_of(error)) from error


class JsonTextFormat:
    """JSON that follows a JSON Schema, as text: the answer without any text that a model writes around the JSON."""

    __slots__ = ("_json", "instructions")

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._json = JsonFormat(schema)
        self.instructions = self._json.instructions

    def parse(self, text: str, context: ExecutionContext | None = None) -> str:
        """Return the first JSON value in the text, as text: unchanged if there is nothing around it."""
        value = self._json.parse(text, context)
        try:
            json.loads(text)
        except ValueError:
            return json.dumps(value, ensure_ascii=False)
        return text


class XmlFormat:
    """Text in tags: `<title>…</title><body>…</body>` becomes a dict by tag."""

    __slots__ = ("instructions", "tags")

    def __init__(self, tags: Mapping[str, str]) -> None:
        self.tags = dict(_named("tags", tags))
        """Descriptions of the contents, by tag."""
        wanted = "\n".join(f"<{tag}>{description}</{tag}>" for tag, description in self.tags.items())
        self.instructions = f"Answer with each of these tags once, filled in:\n{wanted}"

    def parse(self, text: str, context: ExecutionContext | None = None) -> dict[str, str]:
        """Return the stripped content of each tag; text around the tags is ignored."""
        text = _bounded(text, "text in tags")
        found: dict[str, str] = {}
        problems: list[str] = []
        for tag in self.tags:
            begin = text.find(f"<{tag}>")
            end = text.find(f"</{tag}>", begin)
            if begin < 0:
                problems.append(f"<{tag}> is missing")
            elif end < 0:
                problems.append(f"<{tag}> is not closed by </{tag}>")
            elif text.find(f"<{tag}>", end) >= 0:
                problems.append(f"<{tag}> occurs more than once")
            else:
                found[tag] = text[begin + len(tag) + 2 : end].strip()
        if problems:
            raise FormatError(f"text in the tags {', '.join(f'<{tag}>' for tag in self.tags)}", problems)
        return found


class MarkdownFormat:
    """Text in sections: the text under `## Title` becomes a dict by title."""

    __slots__ = ("instructions", "sections")

    def __init__(self, sections: Mapping[str, str]) -> None:
        self.sections = dict(_named("sections", sections))
        """Descriptions of the contents, by title."""
        wanted = "\n\n".join(f"## {title}\n{description}" for title, description in self.sections.items())
        self.instructions = f"Answer in Markdown with these sections, each once, filled in:\n\n{wanted}"

    def parse(self, text: str, context: ExecutionContext | None = None) -> dict[str, str]:
        """Return the stripped content of each section; headings of any level count, those in code fences do not."""
        wanted = {title.casefold(): title for title in self.sections}
        found: dict[str, list[str]] = {}
        problems: list[str] = []
        current: list[str] | None = None
        for line, heading in _headings(_bounded(text, "Markdown")):
            title = wanted.get(heading.casefold()) if heading is not None else None
            if title is None:
                if current is not None:
                    current.append(line)
                continue
            if title in found:
                problems.append(f"the section {title!r} occurs more than once")
            current = found.setdefault(title, [])
        problems += [f"the section {title!r} is missing" for title in self.sections if title not in found]
        if problems:
            raise FormatError(f"Markdown with the sections {', '.join(self.sections)}", problems)
        return {title: "\n".join(found[title]).strip() for title in self.sections}


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a ReAct agent: a thought, and an action or the final answer."""

    thought: str = ""
    action: str | None = None
    action_input: str = ""
    answer: str | None = None


class ReActFormat:
    """`Thought:`, then `Action:` with `Action Input:`, or `Final Answer:`."""

    instructions = (
        "Work in steps. In each step write either\n\n"
        "Thought: what you think\nAction: the name of one tool\nAction Input: its arguments as one JSON object\n\n"
        "and wait for the observation; or, when you know the answer,\n\n"
        "Thought: what you think\nFinal Answer: the answer"
    )

    def parse(self, text: str, context: ExecutionContext | None = None) -> Step:
        """Parse a step; anything a model makes up after its first action is ignored."""
        parts = _labelled(_bounded(text, "a step"))
        expected = "a step: Thought, then Action and Action Input, or Final Answer"
        if "Action" in parts and "Final Answer" in parts:
            raise FormatError(expected, ["it has both an Action and a Final Answer; write one of them"])
        if "Final Answer" in parts:
            return Step(parts.get("Thought", ""), answer=parts["Final Answer"])
        if not parts.get("Action"):
            raise FormatError(expected, ["it has neither an Action nor a Final Answer"])
        if "Action Input" not in parts:
            raise FormatError(expected, ["the Action has no Action Input; write {} if it needs none"])
        return Step(parts.get("Thought", ""), parts["Action"].strip("`* "), _unfenced(parts["Action Input"]))


LABELS = ("Thought", "Action Input", "Action", "Final Answer", "Observation")


def _labelled(text: str) -> dict[str, str]:
    """The text after each label; each counts once, and an observation that the model invents ends the step."""
    found: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in text.splitlines():
        plain = line.lstrip("* #")
        label = next((known for known in LABELS if plain[: len(known) + 1].lower() == f"{known.lower()}:"), None)
        if "Final Answer" in found:
            label = None
        elif label == "Observation" or (label == "Thought" and "Action" in found):
            break
        if label is not None and label not in found:
            current = found.setdefault(label, [plain[len(label) + 1 :].lstrip("* ")])
        elif current is not None:
            current.append(line)
    return {label: "\n".join(lines).strip() for label, lines in found.items()}


def _unfenced(text: str) -> str:
    lines = text.strip().splitlines()
    if len(lines) >= 2 and lines[0].startswith("```") and lines[-1].startswith("```"):
        return "\n".join(lines[1:-1])
    return text.strip()


def as_format(output: Any) -> TextOutputFormat | None:
    """Return a format unchanged, and JsonFormat for a type or a JSON Schema; None and `str` mean no format."""
    if output is None or output is str:
        return None
    return output if not isinstance(output, type) and isinstance(output, TextOutputFormat) else JsonFormat(output)


def _first_json(text: str) -> Any:
    """The first object or list in the text; otherwise the whole text as JSON."""
    decoder = json.JSONDecoder()
    first: json.JSONDecodeError | None = None
    starts = [at for at in (text.find("{"), text.find("[")) if at >= 0]
    try:
        for at in sorted(starts):
            try:
                return decoder.raw_decode(text, at)[0]
            except json.JSONDecodeError as error:
                first = first or error
        if starts:
            assert first is not None
            raise first
        return decoder.decode(_unfenced(text))
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise FormatError("JSON", [f"{error.msg} at {where}"]) from error
    except (RecursionError, ValueError) as error:
        raise FormatError("JSON", [f"it cannot be parsed: {type(error).__name__}"]) from error


def _headings(text: str) -> Iterator[tuple[str, str | None]]:
    """Every line, with its heading if it is one."""
    fenced = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        is_heading = not fenced and line.startswith("#")
        yield line, line.lstrip("#").strip().rstrip(":") if is_heading else None


def _bounded(text: str, what: str) -> str:
    if len(text) > MAX_TEXT:
        raise FormatError(what, [f"it has {len(text):,} characters; the maximum is {MAX_TEXT:,}"])
    return text


def _named(field: str, given: Mapping[str, str]) -> Mapping[str, str]:
    if not given or not all(name.strip() == name != "" for name in given):
        raise InvalidValue(field, given, "at least one name with a description of its content")
    return given
