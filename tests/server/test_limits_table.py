"""INV 19: the published limits are those of the code, and each is tried from both sides."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from penstock.chat import conversation
from penstock.chat import service as chat_service
from penstock.chat.conversation import MessageTree
from penstock.errors import PenstockError
from penstock.hosting.host import HostSettings
from penstock.hosting.limits import RunLimits
from penstock.hosting.queue import Overloaded
from penstock.kernel.document import parse_graph
from penstock.kernel.graph import GraphInvalid
from penstock.nodes import loop, memory
from penstock.nodes import map as map_node
from penstock.nodes.loop import Loop
from penstock.nodes.map import Map
from penstock.nodes.memory import MemoryNode
from penstock.nodes.parts import condition, template
from penstock.runtime.graphs.settings import MAX_TEXT
from penstock.server import auth
from penstock.server.auth import Token
from penstock.server.errors import ApiError
from penstock.server.guards import read_json
from penstock.server.metrics import Metrics
from penstock.server.openai.wire import request as bodies
from penstock.server.openai.wire.request import ChatCompletionBody, ChatMessageBody, InputItem, ResponseBody
from penstock.server.schemas import MAX_NAME, MAX_REASON, Cancel, ChatTitle, Limits, NewMessage, NewRun
from penstock.server.settings import ServerSettings
from penstock.server.sse import Streams
from penstock.server.state import MAX_PAGE
from penstock.storage.rules import encode_memory
from tests.server.served import CHAT, ECHO, GATE, edge, node, served

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


@pytest.mark.parametrize("settings", [ServerSettings, HostSettings])
def test_no_limit_of_the_settings_is_left_unpublished(settings: Any) -> None:
    published = {row["name"] for row in ROWS}
    assert {f"{settings.__name__}.{name}" for name in settings.__slots__ if name.startswith("max_")} <= published


@pytest.mark.parametrize("module", [memory, map_node, loop, condition, template, bodies], ids=lambda one: one.__name__)
def test_a_module_that_has_a_published_limit_has_no_other_that_a_client_meets(module: Any) -> None:
    published = {row["name"] for row in ROWS if row["module"] == module.__name__}
    assert published
    assert {name for name in vars(module) if name.startswith("MAX_")} - published <= INSIDE


INSIDE = {"MAX_ADDITIONS", "MAX_VALUES", "MAX_CHARACTERS", "MAX_STEPS"}
"""What keeps a condition or a template from taking long; docs/nodes.md tells of it."""


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
    "a message": (1_000_000, lambda n: NewMessage(content="x" * n)),
    "attachments": (20, lambda n: NewMessage(content="x", attachments=["a"] * n)),
    "user tools": (200, lambda n: NewMessage(content="x", user_tools=["a"] * n)),
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
    "messages one after the other": (10_100, lambda n: tree(n, 1)),
    "messages in all": (100_000, lambda n: tree(1, n)),
    "messages for OpenAI": (
        10_000,
        lambda n: ChatCompletionBody(model="g", messages=[ChatMessageBody(role="user")] * n),
    ),
    "items for OpenAI": (10_000, lambda n: ResponseBody(model="g", input=[InputItem(role="user")] * n)),
    "metadata for OpenAI": (
        16,
        lambda n: ResponseBody(model="g", input="x", metadata={str(at): "x" for at in range(n)}),
    ),
    "items of a map": (10_000, lambda n: Map.settings.read({"max_items": n})),
    "rounds of a loop": (10_000, lambda n: Loop.settings.read({"graph": ECHO, "max_iterations": n})),
    "a text of a node": (100_000, lambda n: Loop.settings.read({"graph": ECHO, "max_iterations": 1, "until": "x" * n})),
    "a name of a node": (200, lambda n: MemoryNode.settings.read({"key": "x" * n})),
    "a condition": (1_000, lambda n: condition.Condition("true".ljust(n), ())),
    "a template": (100_000, lambda n: template.Template("x" * n)),
    "places of a template": (1_000, lambda n: template.Template("{{x}}" * n)),
    "what comes of a template": (1_000_000, lambda n: template.Template("{{x}}").render({"x": "x" * n})),
    "the key of a memory": (200, lambda n: encode_memory("s", "k" * n, 1)),
    "a memory": (100_000, lambda n: encode_memory("s", "k", "x" * (n - len('""')))),
    "memories found": (100, lambda n: MemoryNode.settings.read({"limit": n})),
}
"""Others that wait, are truncated or go to a model: tests/hosting/test_host.py, tests/storage/test_memories.py and
tests/agents/test_tool_calling.py."""


def tree(depth: int, wide: int) -> None:
    """A conversation so deep, and so wide below its beginning."""
    made = MessageTree()
    for at in range(depth):
        made.append(f"m{at}", "user", "x", at_ms=1)
    for at in range(1, wide):
        made.edit("m0", f"n{at}", "x", at_ms=1)


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


def tokens(count: int) -> list[str]:
    return [f"user-{at}:user:secret-of-number-{at}" for at in range(count)]


def test_tokens_at_the_limit_are_fine_and_one_more_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "MAX_TOKENS", 50)
    assert len(auth.parse_tokens(tokens(50))) == 50
    with pytest.raises(auth.TokensInvalid, match="at most 50 tokens"):
        auth.parse_tokens(tokens(51))


async def test_a_chat_at_its_limit_refuses_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (conversation, chat_service):
        monkeypatch.setattr(module, "MAX_DEPTH", 2)
    async with served() as server, server.client("ann") as ann:
        await server.save("chat", CHAT)
        await ann.post("/api/chats", json={"graph_id": "chat", "chat_id": "c"})
        first = await ann.post("/api/chats/c/messages", json={"content": "x"})
        await server.host.wait(first.json()["run_id"])
        more = await ann.post("/api/chats/c/messages", json={"content": "x"})
        assert (first.status_code, more.status_code, more.json()["error"]["code"]) == (200, 422, "invalid_value")


ASKING_TOO_MUCH: dict[str, dict[str, Any]] = {
    "map": {"graph": ECHO, "max_items": map_node.MAX_ITEMS + 1},
    "loop": {"graph": ECHO, "max_iterations": loop.MAX_ITERATIONS + 1},
    "memory": {"limit": memory.MAX_FOUND + 1},
    "prompt-template": {"template": "{{input}}" * (template.MAX_PLACES + 1)},
    "conditional": {"when": "true".ljust(condition.MAX_EXPRESSION + 1)},
    "text": {"text": "x" * (MAX_TEXT + 1)},
}


@pytest.mark.parametrize(("type", "data"), ASKING_TOO_MUCH.items(), ids=ASKING_TOO_MUCH)
async def test_a_graph_with_node_options_over_the_limit_does_not_run(type: str, data: dict[str, Any]) -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("g", {"nodes": [node("in", "input"), node("n", type, **data)], "edges": [edge("in", "n")]})
        answer = await ann.post("/api/runs", json={"graph_id": "g"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "graph_invalid")
        assert {one["path"] for one in answer.json()["error"]["details"]} == {f"$.nodes[1].data.{list(data)[-1]}"}


@pytest.mark.parametrize(("path", "field"), [("chat/completions", "messages"), ("responses", "input")])
async def test_openai_messages_at_the_limit_are_answered_and_one_more_is_a_bad_request(path: str, field: str) -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("chat", CHAT)
        body = {"model": "chat", **({"instructions": "Be short."} if field == "input" else {})}
        full_list = [{"role": "user", "content": "x"}] * bodies.MAX_MESSAGES
        most = await ann.post(f"/v1/{path}", json={**body, field: full_list})
        assert most.status_code == 200, most.text
        more = await ann.post(f"/v1/{path}", json={**body, field: [*full_list, *full_list[:1]]})
        assert (more.status_code, more.json()["error"]["code"]) == (400, "invalid_request")
        assert more.json()["error"]["param"] == field
