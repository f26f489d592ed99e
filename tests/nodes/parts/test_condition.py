"""Conditions answer true or false, and cannot take long."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.nodes.parts import condition
from penstock.nodes.parts.condition import Condition, ConditionFailed, ConditionInvalid, ConditionUnavailable


@pytest.mark.parametrize(
    ("expression", "input", "holds"),
    [
        ("true", None, True),
        ("input > 3", 4, True),
        ("input > 3", 3, False),
        ("input > 0.5", 1, True),
        ("input == 'yes'", "yes", True),
        ("input.score >= 0.5 && input.kind in ['a', 'b']", {"score": 0.5, "kind": "b"}, True),
        ("input[1].deep", [0, {"deep": True}], True),
        ("has(input.key)", {}, False),
        ("size(input) == 2 && input.size() == 2", [1, 2], True),
        ("input.contains('map') && input.startsWith('a') && !input.endsWith('a')", "a map", True),
        ("input == null", None, True),
        ("(input % 2 == 0 ? 'even' : 'odd') == 'odd'", 3, True),
        ("string(input) == '3' && int('3') == input", 3, True),
    ],
)
def test_a_condition_holds_or_does_not(expression: str, input: Any, holds: bool) -> None:
    assert Condition(expression, ["input"]).holds({"input": input}) is holds


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("", "this is needed, and it is blank"),
        ("input >", "^it cannot be read at line 1, column 8: it ends too early$"),
        ("input ==\n== 1", "^it cannot be read at line 2, column 1: extraneous input '=='$"),
        ("output > 1", "there is no 'output'; there are: input"),
        ("__import__('os').system('x')", "there is no"),
        ("input.matches('(a+)+$')", "there is no function 'matches'"),
        ("timestamp(input) > timestamp('2020-01-01T00:00:00Z')", "there is no function 'timestamp'"),
        ("input.map(i, i).size() > 1", r"map\(…\) iterates over a list"),
        ("[1].filter(input, true) == []", r"filter\(…\)"),
        ("input.all(i, i > 1)", r"all\(…\)"),
        ("input.exists(i, i > 1)", r"exists\(…\)"),
        ("input.exists_one(i, i > 1)", r"exists_one\(…\)"),
        ("input. // a comment\n map // another\n (i, i) == []", r"map\(…\)"),
        ("input.map\t(i, i) == []", r"map\(…\)"),
        ("true || " * 200 + "true", "1,000 characters"),
        ("input" + "+ input" * 17 + " == input", "16 additions"),
        ("(" * 400 + "1" + ")" * 400, "parse"),
    ],
)
def test_an_invalid_or_unbounded_condition_is_refused_when_it_is_parsed(expression: str, why: str) -> None:
    with pytest.raises(ConditionInvalid, match=f"(?i){why}"):
        Condition(expression, ["input"])
    assert condition.findings(expression, ["input"])


@pytest.mark.parametrize(
    ("expression", "input", "why"),
    [
        ("input", "text", "its value is str; it must be true or false"),
        ("input.key", {}, "KeyError"),
        ("input > 3", "text", "TypeError"),
        ("1 / input == 1", 0, "ZeroDivisionError"),
        ("input + 1 > 0", 2**63 - 1, "OverflowError"),
        ("input == 1", object(), "Error"),
        ("input == 'x'", "x" * 100_001, "larger than the maximum of"),
        ("size(input) > 1", [0] * 10_001, "larger than the maximum of"),
        ("size(input) > 1", {"a": [[0] * 5_000, [0] * 5_000]}, "larger than the maximum of"),
    ],
)
def test_what_cannot_be_answered_is_an_error_that_says_why(expression: str, input: Any, why: str) -> None:
    with pytest.raises(ConditionFailed, match=why):
        Condition(expression, ["input"]).holds({"input": input})


@given(st.text(alphabet="input.[]()'\"&|!<>=?:+-*/%,{}\\ab01 \n", max_size=40))
def test_any_text_is_a_condition_or_is_refused(text: str) -> None:
    if condition.findings(text, ["input"]) is None:
        with suppress(ConditionFailed):
            assert Condition(text, ["input"]).holds({"input": {"a": [1, "b"]}}) in (True, False)


def test_a_value_that_contains_itself_is_too_large() -> None:
    around: list[Any] = []
    around.append(around)
    with pytest.raises(ConditionFailed, match="larger than the maximum of"):
        Condition("size(input) == 1", ["input"]).holds({"input": around})


def test_the_library_can_be_imported_as_usual_before_and_after() -> None:
    for first, then in (("import cel", "Condition('true', ())"), ("Condition('true', ())", "import cel")):
        code = f"from penstock.nodes.parts.condition import Condition\n{first}\n{then}\nimport cel\n"
        code += "assert cel.evaluate('1 + 1') == 2 and Condition('true', ()).holds({})"
        subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_without_the_library_a_condition_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, condition.COMPILED, raising=False)
    monkeypatch.setitem(sys.modules, "cel", None)
    with pytest.raises(ConditionUnavailable, match=r"pip install 'penstock\[conditions\]'"):
        Condition("true", [])
    assert "pip install" in str(condition.findings("true", []))
