"""What calls were given and returned, as data for the record: redacted, bounded, and never in the way of the call."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from penstock.agents.messages import Message, Transcript
from penstock.agents.model import ModelRequest
from penstock.tracing.payloads import MAX_PAYLOAD_BYTES, READ_AHEAD, Payloads, RecordPayloads

pytestmark = pytest.mark.requirement("T-12")

KEY = "sk-proj-Q2hhcmxlcw8fJzAxMjM0NTY3ODk"
HIDDEN = "7c1d0b5ee2f94a4fa2d1"
"""A secret without a form of its own: only what stands beside it tells."""


def capture(value: Any, mode: RecordPayloads = "redacted", max_bytes: int = MAX_PAYLOAD_BYTES) -> Any:
    return Payloads(mode, max_bytes).capture(value)


@dataclass
class Account:
    user: str
    api_key: str


class Login(NamedTuple):
    user: str
    password: str


@pytest.mark.parametrize(
    "value",
    [
        {"api_key": HIDDEN},
        {"config": {"deep": [{"access_token": HIDDEN}]}},
        {"headers": {"Authorization": f"Bearer {HIDDEN}", "X-Api-Key": HIDDEN}},
        {"headers": [("x-api-key", HIDDEN), ("Authorization", f"Basic {HIDDEN}==")]},
        {"headers": [(b"x-api-key", HIDDEN.encode())]},
        {"headers": [{"name": "X-Auth-Token", "value": HIDDEN}, {"key": "Cookie", "value": HIDDEN}]},
        {"refresh_tokens": [HIDDEN, HIDDEN]},
        {"url": f"https://api.example.com/v1?token={HIDDEN}&page=2"},
        {"url": f"https://api.example.com/v1?page=2&key={HIDDEN}"},
        {"url": f"https://files.example.com/a?X-Amz-Signature={HIDDEN}"},
        {"url": f"https://bob:{HIDDEN}@example.com/"},
        [f"curl -H 'Authorization: Bearer {HIDDEN}' https://example.com"],
        f"the key is {KEY}, keep it",
        json.dumps({"password": HIDDEN}),
        json.dumps({"body": json.dumps({"password": HIDDEN})}),
        f"-----BEGIN PRIVATE KEY-----\n{HIDDEN}\n-----END PRIVATE KEY-----",
        Account("bob", HIDDEN),
        {"accounts": [Account("bob", f"{HIDDEN} with {HIDDEN}")]},
        Login("bob", HIDDEN),
        {"x" * 30_000: 1, "secret": HIDDEN},
    ],
    ids=lambda value: str(value)[:40],
)
def test_redacted_payload_has_no_secret(value: object) -> None:
    recorded = json.dumps(capture(value))
    for secret in (HIDDEN, KEY):
        assert secret[:12] not in recorded
    assert HIDDEN in json.dumps(value, default=str) or KEY in json.dumps(value, default=str)


@pytest.mark.parametrize("shown", [1, 9, 20, 60, 100])
def test_no_part_of_a_secret_at_the_cut_is_recorded(shown: int) -> None:
    key = "sk-" + "k" * 200
    assert "sk-" not in json.dumps(capture("x" * (MAX_PAYLOAD_BYTES - shown - 1) + f" {key}"))
    # Redacting what comes first brings what was read last into view.
    read = MAX_PAYLOAD_BYTES + READ_AHEAD
    filled = f"password={'p' * 18_000} "
    text = filled + "x" * (read - len(filled) - shown - 1) + f" {key}"
    assert "sk-" not in json.dumps(capture(text))
    url = "x" * (MAX_PAYLOAD_BYTES - 200) + " https://bob:" + "p" * 300 + "@host/"
    assert "pp" not in json.dumps(capture(url))


def test_redacted_payload_keeps_what_is_no_secret() -> None:
    value = {"query": "dams", "page": 2, "max_tokens": 50, "headers": [["accept", "text/html"]], "note": "a token"}
    assert capture(value) == value


def test_full_payload_is_kept_as_it_is() -> None:
    value = {"api_key": HIDDEN, "url": f"https://x/?token={HIDDEN}", "n": [1, 2.5, None, True]}
    assert capture(value, "full") == value


def test_text_longer_than_the_limit_is_truncated_with_its_original_size() -> None:
    assert capture("ü" * 1_000, "full", 500) == {"truncated": True, "original_bytes": 2_002, "content": "ü" * 250}
    fits = "x" * 498
    assert capture(fits, "full", 500) == fits
    assert capture(fits + "x", "full", 500) == {"truncated": True, "original_bytes": 501, "content": fits + "x"}


def test_structure_larger_than_the_limit_is_truncated_as_json() -> None:
    value = {"rows": [{"n": n} for n in range(1_000)]}
    recorded = capture(value, "full", 256)
    assert recorded["original_bytes"] == len(json.dumps(value))
    assert recorded["content"] == json.dumps(value)[:256]


@pytest.mark.parametrize("mode", ["redacted", "full"])
def test_no_more_of_a_huge_text_is_read_than_is_kept(mode: RecordPayloads) -> None:
    recorded = capture(["y" * 10_000_000, "z" * 10_000_000], mode)
    assert recorded["original_bytes"] >= 20_000_000
    assert len(json.dumps(recorded)) < MAX_PAYLOAD_BYTES * 1.1


def test_values_without_a_json_type_are_recorded_by_their_repr() -> None:
    class Odd:
        def __repr__(self) -> str:
            return "<Odd>"

    cycle: list[Any] = []
    cycle.append(cycle)
    assert capture({"odd": Odd(), "raw": b"ab", "kinds": {1}}) == {"odd": "<Odd>", "raw": "b'ab'", "kinds": [1]}
    assert "list of 1" in json.dumps(capture(cycle))


class Hostile(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("no")

    def __repr__(self) -> str:
        raise RuntimeError("no")


class HostileObject:
    @property
    def model_dump(self) -> Any:
        raise RuntimeError("no")

    def __repr__(self) -> str:
        raise RuntimeError("no")


class HostileMessage(Message):
    def to_dict(self) -> dict[str, Any]:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "value",
    [Hostile(a=1), [Hostile(a=1)], HostileObject(), ModelRequest(Transcript([HostileMessage("user", "x")]))],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("mode", ["redacted", "full"])
def test_capturing_never_raises(value: object, mode: RecordPayloads) -> None:
    assert "RuntimeError" in json.dumps(capture(value, mode))


def test_newest_messages_are_recorded_where_not_all_fit() -> None:
    messages = [Message.user(f"{number}: " + "x" * 100) for number in range(10)]
    recorded = capture(ModelRequest(Transcript(messages), instructions="Be brief."), "full", 512)
    omitted, *kept = recorded
    assert omitted["truncated"] is True
    assert omitted["omitted_messages"] == 11 - len(kept)
    assert omitted["original_bytes"] > 1_000
    assert [one["content"][:2] for one in kept] == ["7:", "8:", "9:"]


def test_message_larger_than_the_limit_keeps_its_role() -> None:
    (recorded,) = capture(ModelRequest(Transcript([Message.user("x" * 1_000)])), "full", 256)
    assert (recorded["role"], recorded["truncated"]) == ("user", True)
    assert recorded["original_bytes"] > 1_000
