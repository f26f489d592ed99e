"""Every failure of ours is a status and a code; what nobody knows is a plain 500."""

from __future__ import annotations

import pytest

from penstock.errors import Halted, InvalidValue, LedgerUnavailable, PenstockError
from penstock.hosting.admission import Overloaded
from penstock.hosting.control import UnknownApproval, UnknownRun
from penstock.hosting.host import GraphArchived, UnknownGraph
from penstock.hosting.ports import Conflict, Fenced, StoreUnavailable
from penstock.kernel.graph import GraphInvalid, Problem
from penstock.server.errors import MAX_DETAILS, STATUS, ApiError, answer, api_error
from penstock.stops import Stop, StopReason
from tests.server.served import served


@pytest.mark.parametrize(
    ("error", "status", "code", "retry"),
    [
        (StoreUnavailable("full"), 503, "store_unavailable", "2"),
        (LedgerUnavailable("gone"), 503, "ledger_unavailable", "2"),
        (Overloaded(5, 5, 7.2), 429, "overloaded", "8"),
        (Conflict("no"), 409, "conflict", None),
        (Fenced("r", 1), 409, "conflict", None),
        (InvalidValue("x", 1, "2"), 422, "invalid_value", None),
        (UnknownGraph("g", None), 404, "not_found", None),
        (GraphArchived("g"), 409, "conflict", None),
        (UnknownRun("r"), 404, "not_found", None),
        (UnknownApproval("a"), 404, "not_found", None),
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


def test_a_graph_that_is_wrong_is_told_place_by_place_up_to_a_bound() -> None:
    found = api_error(GraphInvalid([Problem("bad", f"$.nodes[{at}]", "wrong") for at in range(200)]))
    assert (found.status, found.path, len(found.details)) == (422, "$.nodes[0]", MAX_DETAILS)


async def test_what_is_no_id_is_told_in_words_wherever_it_stands() -> None:
    words = "must be an id: a letter or digit, then up to 99 letters, digits or any of ._:-, all of them ASCII"
    async with served() as server, server.client("ann") as ann:
        asked = {
            "path.graph_id": ann.get("/api/graphs/my report"),
            "query.before": ann.get("/api/runs", params={"before": "größe"}),
            "$.graph_id": ann.post("/api/runs", json={"graph_id": "my report"}),
        }
        for path, request in asked.items():
            error = (await request).json()["error"]
            assert (error["path"], error["message"]) == (path, f"{path}: {words}")
        name = (await ann.post("/api/attachments?name=a&media_type=no", content=b"x")).json()["error"]
        assert "pattern" in name["message"], "of other patterns there are no such words"


def test_under_v1_errors_have_the_shape_of_openai() -> None:
    error = ApiError(422, "no", path="$.model")
    assert b'"param":"model"' in answer(error, "/v1/responses").body
    assert b'"type":"invalid_request_error"' in answer(error, "/v1/responses").body
    assert answer(error, "/api/runs").body == b'{"error":{"code":"invalid_value","message":"no","path":"$.model"}}'


def test_no_known_error_is_a_plain_server_error() -> None:
    assert all(status in {404, 409, 422, 429, 503} for status, _ in STATUS.values())
