"""Every failure of ours is a status and a code; an unknown error is a plain 500."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import Halted, InvalidValue, LedgerUnavailable, PenstockError
from penstock.hosting.control import ApprovalNotFound, RunNotFound
from penstock.hosting.host import GraphArchived, GraphNotFound, HostSettings, RunLimits
from penstock.hosting.ports import Conflict, Fenced, StoreCorrupt, StoreUnavailable
from penstock.hosting.queue import Overloaded
from penstock.kernel.graph import GraphInvalid, Problem
from penstock.server.errors import MAX_DETAILS, STATUS, ApiError, api_error, error_response
from penstock.stops import Stop, StopReason
from tests.server.served import CHAT, ECHO, node, served


@pytest.mark.parametrize(
    ("error", "status", "code", "retry"),
    [
        (StoreUnavailable("full"), 503, "store_unavailable", "2"),
        (LedgerUnavailable("gone"), 503, "ledger_unavailable", "2"),
        (Overloaded(5, 5, 7.2), 429, "overloaded", "8"),
        (Conflict("no"), 409, "conflict", None),
        (Fenced("r", 1), 409, "conflict", None),
        (InvalidValue("x", 1, "2"), 422, "invalid_value", None),
        (GraphNotFound("g", None), 404, "not_found", None),
        (GraphArchived("g"), 409, "conflict", None),
        (RunNotFound("r"), 404, "not_found", None),
        (ApprovalNotFound("a"), 404, "not_found", None),
        (Halted(Stop(StopReason.TIMEOUT, "late")), 409, "halted", None),
        (PenstockError("unknown"), 500, "internal", None),
        (KeyError("canary"), 500, "internal", None),
        (RuntimeError("canary"), 500, "internal", None),
    ],
)
def test_an_error_is_its_status_and_code(error: Exception, status: int, code: str, retry: str | None) -> None:
    found = api_error(error)
    assert (found.status, found.code, found.headers.get("Retry-After")) == (status, code, retry)
    assert "canary" not in str(found)


def test_a_message_is_short_and_without_secrets() -> None:
    found = api_error(Conflict("token=canary-12345678 " + "x" * 5_000))
    assert "canary" not in str(found)
    assert len(str(found)) < 1_100


def test_the_problems_of_a_graph_are_listed_by_path_up_to_a_limit() -> None:
    found = api_error(GraphInvalid([Problem("bad", f"$.nodes[{at}]", "wrong") for at in range(200)]))
    assert (found.status, found.path, len(found.details)) == (422, "$.nodes[0]", MAX_DETAILS)


async def test_an_invalid_id_is_described_in_words_in_every_place() -> None:
    words = "must be an id: a letter or digit, then up to 99 letters, digits or any of ._:-, all of them ASCII"
    async with served() as server, server.client("ann") as ann:
        requests = {
            "path.graph_id": ann.get("/api/graphs/my report"),
            "query.before": ann.get("/api/runs", params={"before": "größe"}),
            "$.graph_id": ann.post("/api/runs", json={"graph_id": "my report"}),
        }
        for path, request in requests.items():
            error = (await request).json()["error"]
            assert (error["path"], error["message"]) == (path, f"{path}: {words}")
        name = (await ann.post("/api/attachments?name=a&media_type=no", content=b"x")).json()["error"]
        assert "pattern" in name["message"], "of other patterns there are no such words"


async def test_the_reason_of_an_invalid_value_is_a_sentence_of_ours() -> None:
    async with served() as server, server.client("ann") as ann:
        refused = await ann.post("/api/runs", json={"graph_id": "g", "limits": {"max_cost_usd": -1}})
    assert refused.json()["error"]["message"] == (
        "$.limits.max_cost_usd: must be a finite, non-negative number of US dollars below one billion"
    )


ODD = {**ECHO, "edges": [{"id": "e", "source": "in"}]}
DRAFT = {"nodes": [*ECHO["nodes"], node("odd", "unheard-of")], "edges": ECHO["edges"]}
LONG = {"content": "x" * 10, "limits": {"max_steps": 51}}
PLACES: list[tuple[str, str, Any, str | None]] = [
    ("POST", "/api/runs", {"graph_id": "echo", "limits": {"max_steps": 51}}, "$.limits.max_steps"),
    ("POST", "/api/agents/chat/chat", LONG, "$.limits.max_steps"),
    ("POST", "/api/agents/chat/chat", {"content": ""}, "$.content"),
    ("POST", "/api/chats/c/messages/{user}/retry", {}, "path.message_id"),
    ("POST", "/api/chats/c/messages/{user}/continue", None, "path.message_id"),
    ("POST", "/api/runs/{run}/fork", {"at": "nowhere"}, "$.at"),
    ("POST", "/api/graphs", {"id": "g", "name": "G", "document": ODD}, "$.document.edges[0]"),
    ("PUT", "/api/graphs/g", {"document": ODD}, "$.document.edges[0]"),
    ("POST", "/api/runs", {"graph_id": "draft"}, "$.graph_id"),
    ("POST", "/api/agents/draft/chat", {"content": "x"}, "path.graph_id"),
    ("POST", "/api/chats/d/messages", {"content": "x"}, None),
    ("POST", "/api/runs", {"graph_id": "echo", "run_id": "bob:x"}, "$.run_id"),
    ("POST", "/api/chats", {"graph_id": "chat", "chat_id": "bob:x"}, "$.chat_id"),
]


async def test_the_path_of_an_error_points_into_the_request() -> None:
    most = HostSettings(tick_s=0.05, drain_s=0, ceilings=RunLimits(max_steps=50))
    async with served(host_settings=most) as server, server.client("ann") as ann:
        for name, document in (("echo", ECHO), ("chat", CHAT), ("draft", DRAFT)):
            await server.save(name, document)
        await ann.post("/api/chats", json={"graph_id": "chat", "chat_id": "c"})
        await ann.post("/api/chats", json={"graph_id": "draft", "chat_id": "d"})
        turn = (await ann.post("/api/chats/c/messages", json={"content": "x"})).json()
        await server.host.wait(turn["run_id"])
        ids = {"user": turn["user_message_id"], "run": turn["run_id"]}
        for method, path, body, where in PLACES:
            answer = await ann.request(method, path.format(**ids), json=body)
            assert answer.status_code == 422, (path, body, answer.text)
            found = answer.json()["error"].get("path")
            assert (found if where is None else str(found)[: len(where)]) == where, (path, body)


async def test_the_details_of_an_invalid_graph_point_into_its_document() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("draft", DRAFT)
        checked = (await ann.post("/api/graphs/validate", json={"document": DRAFT})).json()["problems"]
        assert (await ann.post("/api/runs", json={"graph_id": "draft"})).json()["error"]["details"] == checked
        odd = (await ann.post("/api/graphs/validate", json={"document": ODD})).json()["problems"]
        refused = (await ann.put("/api/graphs/g", json={"document": ODD})).json()["error"]["details"]
        assert [one["code"] for one in refused] == ["missing_field"] * 2
        assert refused == odd[: len(refused)], "a draft is refused only for what cannot be stored"


def test_errors_under_v1_have_openais_format() -> None:
    error = ApiError(422, "no", path="$.model")
    assert b'"param":"model"' in error_response(error, "/v1/responses").body
    assert b'"type":"invalid_request_error"' in error_response(error, "/v1/responses").body
    assert (
        error_response(error, "/api/runs").body == b'{"error":{"code":"invalid_value","message":"no","path":"$.model"}}'
    )


def test_no_known_error_is_a_plain_server_error() -> None:
    others = [found for kind, found in STATUS.items() if kind is not StoreCorrupt]
    assert all(status in {404, 409, 422, 429, 503} for status, _ in others)
    assert STATUS[StoreCorrupt] == (500, "unreadable_row")  # the server's own data, but a code of its own
