"""The data of nodes is read strictly, and everything wrong with it is found at its place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest

from penstock.containment.limits import Budget
from penstock.runtime.graphs.settings import BudgetData, Data, DataInvalid, Flag, Json, Name, Settings, Sized, Within


@dataclass(frozen=True, slots=True)
class Inner(Data):
    count: Annotated[int, Within(1, 3)]


@dataclass(frozen=True, slots=True)
class Outer(Data):
    name: Name
    inner: Inner | None = None
    many: Annotated[list[Name | Inner], Sized(0, 2)] = ()  # type: ignore[assignment]
    flag: Flag = False
    budget: BudgetData | None = None


OUTER = Settings(Outer)


def test_data_is_read_as_its_dataclass() -> None:
    read = OUTER.read({"name": "a", "inner": {"count": 3}, "many": ["b", {"count": 1}], "flag": True})
    assert read == Outer("a", Inner(3), ["b", Inner(1)], True)  # type: ignore[arg-type]


def test_fields_of_editors_are_ignored() -> None:
    assert OUTER.read({"name": "a", "label": "A node", "_selected": True}) == Outer("a")


@dataclass(frozen=True, slots=True)
class Loose(Data):
    value: Any = None
    more: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Anything(Data):
    value: Any = None


@pytest.mark.parametrize("value", [True, 1, 1.0, 0, False, 0.0, -0.0, "1", None, [], {"a": 1}, [1]], ids=repr)
def test_data_that_was_read_before_is_not_taken_for_other_data(value: Any) -> None:
    settings = Settings(Anything)
    for before in (True, 1, 1.0, 0, False, 0.0, -0.0, "1", None):
        settings.read({"value": before})
    assert repr(settings.read({"value": value}).value) == repr(value)
    with pytest.raises(DataInvalid):
        OUTER.read({"name": "a", "flag": int(OUTER.read({"name": "a", "flag": True}).flag)})


def test_short_immutable_data_is_parsed_once() -> None:
    settings, loose = Settings(Anything), Settings(Loose)
    assert settings.read({"value": "a"}) is settings.read({"value": "a"})
    assert loose.read({"value": "a"}).more is not loose.read({"value": "a"}).more
    for number in range(2_000):
        settings.read({"value": number})
        settings.read({"value": f"{number} {'x' * 2_000}"})
    assert len(settings._known) < 1_000
    assert max(len(repr(key)) for key in settings._known) < 2_000


@pytest.mark.parametrize(
    ("data", "found"),
    [
        ({}, [(".name", "this is needed, and it is not there")]),
        ({"name": 1}, [(".name", "input should be a valid string")]),
        ({"name": ""}, [(".name", "this is needed, and it is blank")]),
        ({"name": "a", "flag": 1}, [(".flag", "input should be a valid boolean")]),
        ({"name": "a", "inner": {"count": True}}, [(".inner.count", "input should be a valid integer")]),
        ({"name": "a", "inner": {"count": "2"}}, [(".inner.count", "input should be a valid integer")]),
        ({"name": "a", "inner": {"count": 4}}, [(".inner.count", "input should be less than or equal to 3")]),
        ({"name": "a", "inner": 3}, [(".inner", "input should be an object")]),
        ({"name": "a", "inner": {}}, [(".inner.count", "this is needed, and it is not there")]),
        ({"name": "a", "many": [{"count": 9}]}, [(".many[0].count", "…")]),
        ({"name": "a", "many": [[]]}, [(".many[0]", "input should be a valid string"), (".many[0]", "…")]),
        ({"name": "a", "nme": 1}, [(".nme", "there is no such setting; there are: name, inner, many, flag, budget")]),
        ({"name": "a", "any key": 1}, [('["any key"]', "there is no such setting; …")]),
        ({"name": "a", "budget": {"max_cost_usd": -1}}, [(".budget.max_cost_usd", "…")]),
        ({"name": "a", "budget": {"max_cost_usd": float("nan")}}, [(".budget.max_cost_usd", "…")]),
    ],
)
def test_everything_wrong_is_found_at_its_place(data: dict[str, Any], found: list[tuple[str, str]]) -> None:
    findings = OUTER.findings(data)
    assert [path for path, _ in findings] == [path for path, _ in found]
    for (_, problem), (_, expected) in zip(findings, found, strict=True):
        assert problem.startswith(expected.rstrip("…"))
    with pytest.raises(DataInvalid) as invalid:
        OUTER.read(data)
    assert f"data{found[0][0]}: " in str(invalid.value)


def test_a_budget_is_what_the_ledger_takes() -> None:
    assert BudgetData(0.5, 3, 100, 2, 1.5).budget() == Budget(100, 1.5, 3, 2, 0.5)


def test_the_schema_says_what_there_is() -> None:
    schema = OUTER.schema()
    assert schema["required"] == ["name"]
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["Inner"]["properties"]["count"] == {
        "title": "Count",
        "type": "integer",
        "minimum": 1,
        "maximum": 3,
    }
