"""The kernel orders nodes; what they are about, it has no word for.

Every word of its source is looked at: names, strings, comments.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

KERNEL = Path(__file__).parents[2] / "src" / "penstock" / "kernel"
WORDS = """
agent assistant chat completion conversation embedding gpt history human llm mcp memory message model openai anthropic
persona prompt provider react role skill team token tool toolset turn user vendor
"""
DOMAIN = frozenset(WORDS.split())
RUNS_OF_LETTERS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def words(text: str) -> list[str]:
    """The words of a text, those inside `snake_case` and `CamelCase` names too."""
    return [word.lower() for word in RUNS_OF_LETTERS.findall(text)]


def domain_words(text: str) -> list[str]:
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        found += [
            f"line {number}: {word}" for word in words(line) if word in DOMAIN or word.removesuffix("s") in DOMAIN
        ]
    return found


@pytest.mark.requirement("K-1")
@pytest.mark.parametrize("path", sorted(KERNEL.rglob("*.py")), ids=lambda path: path.name)
def test_a_kernel_module_has_no_domain_word(path: Path) -> None:
    assert domain_words(path.read_text()) == []


def test_the_kernel_is_where_this_test_looks() -> None:
    assert {"graph.py", "plan.py", "frontier.py", "validate.py"} <= {path.name for path in KERNEL.glob("*.py")}


@pytest.mark.parametrize(
    "text",
    [
        "class AgentNode: ...",
        "max_tokens = 1",
        'if kind == "chat-start":',
        "# for the LLM",
        "runLLMCall()",
        "toolCalls",
    ],
)
def test_a_domain_word_is_found_in_names_strings_and_comments(text: str) -> None:
    assert domain_words(text)


@pytest.mark.parametrize("text", ["from functools import cache", "returns the order", "modelled", "reagent"])
def test_a_longer_word_that_contains_a_domain_word_is_allowed(text: str) -> None:
    assert domain_words(text) == []
