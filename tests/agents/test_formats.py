"""Formats read what models write, and say what is wrong in words a model can act on."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import InvalidValue
from penstock.agents.formats import (
    FormatError,
    JsonFormat,
    MarkdownFormat,
    ReActFormat,
    Step,
    TextOutputFormat,
    XmlFormat,
    as_format,
)

pytestmark = pytest.mark.requirement("T-9")


@dataclasses.dataclass
class Dam:
    name: str
    metres: int
    kind: Literal["arch", "gravity"] = "arch"


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2},
        "metres": {"type": "integer", "minimum": 1},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
    },
    "required": ["name", "metres"],
    "additionalProperties": False,
    "$defs": {"tag": {"enum": ["old", "high"]}},
}

FORMATS = [
    JsonFormat(Dam),
    JsonFormat(SCHEMA),
    XmlFormat({"title": "a title", "body": "the text"}),
    MarkdownFormat({"Title": "a title", "Body": "the text"}),
    ReActFormat(),
]


@pytest.mark.parametrize(
    "text", ['{"name": "Hoover", "metres": 221}', 'Sure:\n```json\n{"name": "Hoover", "metres": 221}\n```\n']
)
def test_json_is_found_in_what_stands_around_it(text: str) -> None:
    assert JsonFormat(Dam).parse(text) == Dam("Hoover", 221)
    assert JsonFormat(SCHEMA).parse(text) == {"name": "Hoover", "metres": 221}


def test_json_of_plain_types_is_read_too() -> None:
    assert JsonFormat(list[int]).parse("[1, 2]") == [1, 2]
    assert JsonFormat(int).parse("42") == 42


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("no idea", "at line 1"),
        ('{"name": "Hoover"', "at line 1"),
        ('{"name": "Hoover"}', "metres"),
        ('{"name": "Hoover", "metres": "high"}', "metres: "),
        ('{"name": "Hoover", "metres": 3, "kind": "wooden"}', "kind: "),
        ("[" * 100_000, "cannot be parsed"),
    ],
)
def test_the_error_for_invalid_json_has_its_place(text: str, problem: str) -> None:
    with pytest.raises(FormatError, match=problem) as wrong:
        JsonFormat(Dam).parse(text)
    assert "Answer again" in wrong.value.correction
    assert "\n" not in str(wrong.value)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("[]", "the whole: expected object, not array"),
        ('{"name": "Hoover"}', "metres: missing"),
        ('{"name": "H", "metres": 1}', "name: expected at least 2 long"),
        ('{"name": "Hoover", "metres": 0}', "metres: expected at least 1"),
        ('{"name": "Hoover", "metres": true}', "metres: expected integer, not boolean"),
        ('{"name": "Hoover", "metres": 1, "colour": "grey"}', "colour: not a known name; known are name, metres, tags"),
        ('{"name": "Hoover", "metres": 1, "tags": ["old", "new"]}', r"tags\[1\]: expected one of"),
        ('{"name": "Hoover", "metres": 1, "tags": ["old", "old", "old"]}', "tags: expected at most 2 long"),
    ],
)
def test_a_given_schema_is_checked_by_the_known_keywords(value: str, problem: str) -> None:
    with pytest.raises(FormatError, match=problem):
        JsonFormat(SCHEMA).parse(value)


def test_tags_are_read_with_what_stands_around_them_left_out() -> None:
    text = "Here:\n<title> Dams </title>\nand\n<body>High\n<b>walls</b></body>"
    assert FORMATS[2].parse(text) == {"title": "Dams", "body": "High\n<b>walls</b>"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<title>Dams</title>", "<body> is missing"),
        ("<title>Dams</title><body>…", "<body> is not closed by </body>"),
        ("<title>a</title><title>b</title><body>c</body>", "<title> occurs more than once"),
    ],
)
def test_the_error_for_wrong_tags_names_them(text: str, problem: str) -> None:
    with pytest.raises(FormatError, match=problem):
        FORMATS[2].parse(text)


def test_sections_are_read_and_code_in_them_is_no_heading() -> None:
    text = "Sure.\n# title:\nDams\n\n## Body\nBuild:\n```\n# Title\nmake\n```\n### Detail\nmore\n"
    assert FORMATS[3].parse(text) == {"Title": "Dams", "Body": "Build:\n```\n# Title\nmake\n```\n### Detail\nmore"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("# Title\nDams", "'Body' is missing"),
        ("# Title\na\n# Body\nb\n# Title\nc", "'Title' occurs more than once"),
    ],
)
def test_the_error_for_wrong_sections_names_them(text: str, problem: str) -> None:
    with pytest.raises(FormatError, match=problem):
        FORMATS[3].parse(text)


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("Thought: hm\nAction: find\nAction Input: {}", Step("hm", "find", "{}")),
        ('**Action:** `find`\nAction Input:\n```json\n{"q": 1}\n```', Step("", "find", '{"q": 1}')),
        ("Thought: I know\nFinal Answer: 60 m\nThought: is high", Step("I know", answer="60 m\nThought: is high")),
        (
            "Thought: a\nAction: find\nAction Input: {}\nObservation: made up\nFinal Answer: made up",
            Step("a", "find", "{}"),
        ),
    ],
)
def test_a_step_is_read(text: str, step: Step) -> None:
    assert ReActFormat().parse(text) == step


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("I wonder.", "neither an Action nor a Final Answer"),
        ("Action: find", "no Action Input"),
        ("Action: find\nAction Input: {}\nFinal Answer: 3", "both"),
    ],
)
def test_the_error_for_an_invalid_step_says_what_is_missing(text: str, problem: str) -> None:
    with pytest.raises(FormatError, match=problem):
        ReActFormat().parse(text)


@given(text=st.text(), format=st.sampled_from(FORMATS))
def test_no_text_gets_anything_but_a_value_or_a_format_error(text: str, format: TextOutputFormat) -> None:
    with suppress(FormatError):
        format.parse(text)


@pytest.mark.parametrize("format", FORMATS)
def test_an_endless_text_is_refused_unread(format: TextOutputFormat) -> None:
    with pytest.raises(FormatError, match="characters"):
        format.parse("x" * 1_000_001)


def test_a_format_is_given_as_a_type_a_schema_or_itself() -> None:
    assert as_format(None) is None
    assert as_format(str) is None
    assert isinstance(as_format(Dam), JsonFormat)
    assert isinstance(as_format(SCHEMA), JsonFormat)
    assert as_format(FORMATS[2]) is FORMATS[2]
    with pytest.raises(InvalidValue, match="tags"):
        XmlFormat({})
