"""INV 19: the published limits are those of the code, and each is tried from both sides."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import PenstockError
from penstock.hosting.admission import Overloaded
from penstock.hosting.host import HostSettings
from penstock.hosting.limits import RunLimits
from penstock.kernel.document import parse_graph
from penstock.kernel.graph import GraphInvalid
from penstock.server.auth import Token
from penstock.server.errors import ApiError
from penstock.server.guards.json_text import read_json
from penstock.server.metrics import Metrics
from penstock.server.parts import MAX_PAGE
from penstock.server.schemas import MAX_NAME, MAX_REASON, Cancel, ChatTitle, Limits, NewRun, Say
from penstock.server.settings import ServerSettings
from penstock.server.sse import Streams
from tests.server.served import GATE, served

PAGE = Path(__file__).parents[2] / "docs" / "limits-table.md"
ROW = re.compile(
    r"^\| (?P<what>.+?) \| (?P<limit>[\d,]+)[^|]* \| `(?P<module>[\w.]+):(?P<name>[\w.]+)` \| (?P<beyond>.+?) \|$", re.M
)
ROWS = [match.groupdict() for match in ROW.finditer(PAGE.read_text())]
DEFAULTS = ServerSettings()


def value(row: dict[str, str]) -> Any:
    found: Any = import_module(row["module"])
    for name in row["name"].split("."):
        found = getattr(found(), name) if isinstance(found, type) else getattr(found, name)
    return found


def test_every_row_of_the_page_is_read() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "constant" not in line]
    assert len(ROWS) == len(rows) > 25


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_a_published_limit_is_the_one_in_the_code(row: dict[str, str]) -> None:
    assert value(row) == int(row["limit"].replace(",", ""))


def test_no_limit_of_the_settings_is_left_unpublished() -> None:
    published = {row["name"].rpartition(".")[2] for row in ROWS}
    assert {name for name in ServerSettings.__slots__ if name.startswith("max_")} <= published  # type: ignore[attr-defined]


def read(raw: bytes) -> None:
    read_json(raw, max_depth=DEFAULTS.max_json_depth, max_values=DEFAULTS.max_json_values)


def streams(user: str, most: int) -> Callable[[int], None]:
    def enter(count: int) -> None:
        opened = Streams(ServerSettings(max_streams=most if user == "all" else 10_000), Metrics())
        for at in range(count):
            opened.enter(str(at) if user == "all" else user)

    return enter


SIDES: dict[str, tuple[int, Callable[[int], Any]]] = {
    "depth of JSON": (DEFAULTS.max_json_depth, lambda n: read(b"[" * n + b"]" * n)),
    "values of JSON": (DEFAULTS.max_json_values, lambda n: read(b"[" + b",".join([b"0"] * (n - 1)) + b"]")),
    "a whole number": (2**63 - 1, lambda n: read(str(n).encode())),
    "a title": (MAX_NAME, lambda n: ChatTitle(title="x" * n)),
    "a reason": (MAX_REASON, lambda n: Cancel(reason="x" * n)),
    "a message": (1_000_000, lambda n: Say(content="x" * n)),
    "attachments": (20, lambda n: Say(content="x", attachments=["a"] * n)),
    "user tools": (200, lambda n: Say(content="x", user_tools=["a"] * n)),
    "money": (1_000_000, lambda n: Limits.model_validate({"max_cost_usd": n})),
    "time": (30 * 86_400, lambda n: Limits.model_validate({"timeout_s": n})),
    "counts": (2**53 - 1, lambda n: Limits(max_steps=n)),
    "counts of a host": (2**53 - 1, lambda n: RunLimits(max_tokens=n)),
    "an id": (100, lambda n: NewRun(graph_id="a" * n)),
    "a long secret": (512, lambda n: Token.of("a", "user", "s" * n)),
    "a short secret": (-16, lambda n: Token.of("a", "user", "s" * -n)),
    "streams": (1_000, streams("all", 1_000)),
    "streams of a user": (100, streams("ann", 1_000)),
    "depth of a graph": (64, lambda n: parse_graph({"nodes": [], "edges": [], "data": nested(n - 1)})),
}


def nested(levels: int) -> Any:
    made: Any = []
    for _ in range(levels - 1):
        made = [made]
    return made


@pytest.mark.parametrize(("most", "act"), SIDES.values(), ids=SIDES)
def test_the_limit_is_fine_and_one_more_is_a_typed_error(most: int, act: Callable[[int], Any]) -> None:
    act(most)
    with pytest.raises((PenstockError, ValueError)) as caught:
        act(most + 1)
    assert isinstance(caught.value, (ApiError, PenstockError)) or type(caught.value).__name__ == "ValidationError"


@pytest.mark.parametrize(("what", "most"), [("nodes", 100_000), ("edges", 1_000_000)])
def test_a_graph_that_is_too_large_is_refused_by_counting_alone(what: str, most: int) -> None:
    with pytest.raises(GraphInvalid) as caught:
        parse_graph({"nodes": [], "edges": [], what: [None] * (most + 1)})
    assert [problem.code for problem in caught.value.problems] == ["too_large"]


async def test_a_page_at_the_limit_is_fine_and_one_more_is_not() -> None:
    async with served() as server, server.client("ann") as ann:
        for path in ("/api/runs", "/api/graphs", "/api/chats", "/api/approvals"):
            for limit, status in ((MAX_PAGE, 200), (MAX_PAGE + 1, 422), (0, 422)):
                assert (await ann.get(path, params={"limit": limit})).status_code == status


async def test_a_queue_at_the_limit_is_fine_and_one_more_is_overloaded() -> None:
    settings = HostSettings(tick_s=0.05, drain_s=0, max_running=1, max_queued_per_owner=3)
    async with served(host_settings=settings) as server:
        await server.save("gate", GATE)
        await server.host.submit(owner="ann", graph_id="gate")
        await server.gate.entered.wait()
        for _ in range(3):
            await server.host.submit(owner="ann", graph_id="gate")
        with pytest.raises(Overloaded):
            await server.host.submit(owner="ann", graph_id="gate")
        server.gate.opened.set()
