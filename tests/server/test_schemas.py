"""What clients send: a number is a number of JSON."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.errors import InvalidValue
from penstock.money import to_nanos
from penstock.server import schemas
from penstock.server.schemas import Body, Grant, Limits, parse_limits
from tests.server.served import ECHO, served

BODIES = sorted((one for one in vars(schemas).values() if isinstance(one, type) and issubclass(one, Body)), key=repr)
FILLED: dict[str, Any] = {"graph_id": "g", "document": {}, "call_id": "1-x/n1", "cost_usd": "0", "x": 0, "y": 0}


def number_fields() -> Iterator[tuple[type[Body], str]]:
    """Every field of every body whose description says that a number goes there, and nothing but one."""
    for body in BODIES:
        for name, field in body.model_json_schema()["properties"].items():
            kinds = {one.get("type") for one in field.get("anyOf", [field])}
            if kinds & {"integer", "number"} and "string" not in kinds:
                yield body, name


@pytest.mark.parametrize(("body", "name"), list(number_fields()))
@pytest.mark.parametrize("value", ["1", "1.0", " 1 ", "", True, False, [1], {"value": 1}], ids=repr)
def test_a_number_must_be_a_json_number(body: type[Body], name: str, value: Any) -> None:
    needed = {one: FILLED[one] for one, field in body.model_fields.items() if field.is_required()}
    body.model_validate({**needed, name: 1})
    with pytest.raises(ValidationError) as caught:
        body.model_validate({**needed, name: value})
    assert {one["loc"][0] for one in caught.value.errors()} == {name}


def test_every_number_field_is_covered() -> None:
    assert {name for _, name in number_fields()} == {
        "version", "expected_version", "timeout_s", "max_steps", "max_tokens", "max_api_calls", "max_retries",
        "tokens_in", "tokens_out", "x", "y",
    }  # fmt: skip


@pytest.mark.parametrize("value", ["0.50", 0.5, "5e-1"])
def test_money_is_a_number_or_a_decimal_string(value: Any) -> None:
    assert Limits.model_validate({"max_cost_usd": value}).max_cost_usd == Decimal("0.5")
    for wrong in (True, "", "much", "NaN", [1]):
        with pytest.raises(ValidationError):
            Limits.model_validate({"max_cost_usd": wrong})


@pytest.mark.parametrize(
    ("amount", "nanos"),
    [
        ("10", 10_000_000_000), (" 0.5 ", 500_000_000), (".5", 500_000_000), (0, 0), ("0.00", 0),
        (0.1 + 0.2, 300_000_000),
        ("1e-9", 1), (1e-9, 1), ("0.0000000001", None), (1e-10, None), ("1e-1000100", None), ("1_0", None), ("١", None),
        ("Infinity", None), ("-1", None), ("1000001", None), (1_000_001, None), (True, None), ("", None), ("0x1", None),
    ],
)  # fmt: skip
def test_money_is_parsed_alike_in_every_api(amount: Any, nanos: int | None) -> None:
    """/v1 and /mcp read limits by `parse_limits`, all other routes by `Limits`."""
    given = {"max_cost_usd": amount}
    if nanos is None:
        with pytest.raises(ValidationError) as refused:
            Limits.model_validate(given)
        assert str(refused.value.errors()[0]["msg"]).isascii()
        with pytest.raises(InvalidValue):
            parse_limits(given)
    else:
        read = [Limits.model_validate(given).to_run_limits(), parse_limits(given)]
        assert [one is not None and to_nanos(one.max_cost_usd or 0) for one in read] == [nanos, nanos]


def test_seconds_may_have_a_fraction_and_need_none() -> None:
    for seconds in (0, 1, 0.25, None):
        assert Grant.model_validate({"limits": {"timeout_s": seconds}}).limits.timeout_s == seconds


@pytest.mark.parametrize(
    ("method", "path", "body", "where"),
    [
        ("POST", "/api/runs", {"graph_id": "echo", "version": "1"}, "$.version"),
        ("POST", "/api/runs", {"graph_id": "echo", "limits": {"timeout_s": "1"}}, "$.limits.timeout_s"),
        ("POST", "/api/runs", {"graph_id": "echo", "limits": {"max_steps": "5"}}, "$.limits.max_steps"),
        ("PUT", "/api/graphs/echo", {"document": ECHO, "expected_version": "1"}, "$.expected_version"),
        ("POST", "/api/agents/echo/chat", {"content": "x", "limits": {"timeout_s": True}}, "$.limits.timeout_s"),
    ],
)
async def test_text_in_place_of_a_number_is_refused_with_its_path(
    method: str, path: str, body: Any, where: str
) -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("echo", ECHO)
        answer = await ann.request(method, path, json=body)
        assert (answer.status_code, answer.json()["error"]["path"]) == (422, where)
