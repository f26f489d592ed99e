"""`penstock serve` as a process: what it says, whom it refuses, how it stops, and what survives it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import sqlite3
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from penstock.cli.remote.connection import Connection
from penstock.server.examples import example_graphs
from tests.cli.conftest import Penstock
from tests.cli.remote.live import Terminal
from tests.forked import Program

PENSTOCK = [sys.executable, "-m", "penstock.cli"]
INSTALLED = Path(sys.executable).parent / "penstock"

pytestmark = pytest.mark.usefixtures("forks")

SLOW = """
from penstock.server.examples import ExampleModel

models = {"example": ExampleModel(words_per_second=50)}
"""
QUICK = SLOW.replace("50", "50_000")
"""For the next server: what the first left open need not take as long again."""


class Server:
    """A server as a process: its greeting, its address, and itself."""

    def __init__(self, process: subprocess.Popen[str] | Program) -> None:
        self.process = process
        assert process.stdout is not None
        self.greeting = ""
        for line in process.stdout:
            self.greeting += line
            if "try it" in line:
                break
        self.url = self.greeting.partition("\n")[0].rpartition(" ")[2]

    def rest(self) -> str:
        """What it says behind its greeting, until it has stopped."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.stdout is not None
        return self.process.stdout.read()

    def stop(self, *signals: signal.Signals) -> tuple[int, str]:
        """Its exit code and what it complained about."""
        for one in signals:
            self.process.send_signal(one)
        _, err = self.process.communicate()
        return self.process.wait(), err


def _forked(command: list[str], env: Mapping[str, str]) -> Program:
    return Program(["-m", "penstock.cli", *command], env=env)


def _started(command: list[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


@contextmanager
def served(*arguments: str, program: Sequence[str] | None = None, path: Path = INSTALLED.parent) -> Iterator[Server]:
    """A server that is up: forked, or a program that is started from nothing."""
    command, env = ["serve", "--port", "0", *arguments], os.environ | {"PATH": str(path)}
    with _forked(command, env) if program is None else _started([*program, *command], env) as process:
        try:
            yield Server(process)
        finally:
            process.kill()


@pytest.fixture
def refused(penstock: Penstock) -> Any:
    """How `penstock serve` leaves that does not begin: its exit code, and the one thing it says."""

    def call(*arguments: str) -> tuple[int, str]:
        ended = penstock("serve", *arguments)
        assert ended.out == ""
        return ended.code, ended.err

    return call


def started(url: str, content: str, graph: str = "assistant") -> str:
    """A run that has begun to say something."""
    with Connection(url) as server:
        run_id = str(server.post(f"/api/agents/{graph}/chat", {"content": content})["run_id"])
        for event in server.events(run_id):
            if event.type == "text.delta":
                return run_id
    raise AssertionError("the run emitted no text")


def test_server_greets_answers_and_stops_gracefully() -> None:
    with served("--db", "sqlite:///kept.db") as server:
        assert "graphs        assistant, pipeline, publish\n" in server.greeting
        assert f"try it        penstock chat assistant --url {server.url}\n" in server.greeting
        assert "/kept.db\n" in server.greeting
        with urllib.request.urlopen(f"{server.url}/health") as answer:
            assert json.load(answer) == {"status": "ok"}
        with urllib.request.urlopen(f"{server.url}/") as answer:
            assert "<title>Penstock</title>" in answer.read().decode()
        assert server.stop(signal.SIGTERM) == (0, "")


@pytest.mark.requirement("X-15")
def test_server_logs_json_to_standard_error(penstock: Penstock) -> None:
    with served("--db", "memory:", "--log-format", "json") as server:
        run = penstock("runs", "start", "pipeline", "--input", "a secret dam", "--url", server.url)
        run_id = run.out.partition(":")[0]
        assert penstock("runs", "tail", run_id, "--url", server.url).code == 0
        code, err = server.stop(signal.SIGTERM)
    lines = [json.loads(line) for line in err.splitlines()]
    assert code == 0
    (ended,) = [line for line in lines if line["event"] == "run"]
    assert (ended["run_id"], ended["owner"], ended["status"]) == (run_id, "local", "completed")
    assert [line["route"] for line in lines if line["event"] == "request" and line["method"] == "POST"] == ["/api/runs"]
    assert "secret dam" not in err


@pytest.mark.requirement("X-15")
def test_server_whose_log_is_closed_goes_on(penstock: Penstock) -> None:
    with served("--db", "memory:", "--log-format", "text") as server:
        assert server.process.stderr is not None
        server.process.stderr.close()
        run = penstock("runs", "start", "pipeline", "--input", "x", "--url", server.url)
        assert penstock("runs", "tail", run.out.partition(":")[0], "--url", server.url).code == 0
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait() == 0


@pytest.mark.parametrize("program", [PENSTOCK, [str(INSTALLED)]], ids=["module", "script"])
def test_what_is_to_be_tried_is_called_as_the_server_was_where_it_is_not_found(
    directory: Path, program: list[str]
) -> None:
    with served("--db", "memory:", program=program, path=directory) as server:
        called = shlex.join(program)
        assert f"  try it        {called} chat assistant --url {server.url}\n" in server.greeting


def test_what_is_to_be_tried_is_what_converses_and_needs_a_token_where_there_are_some(directory: Path) -> None:
    flow: dict[str, Any] = {"nodes": [{"id": "in", "type": "input"}, {"id": "out", "type": "output"}]}
    edge = {"id": "e", "source": "in", "sourceHandle": "output", "target": "out", "targetHandle": "input"}
    flow["edges"] = [{**edge, "data": {"channel": "flow"}}]
    (directory / "a.json").write_text(json.dumps(flow))
    (directory / "tokens.txt").write_text("ann:user:ann-0123456789abcdef\n")
    with served("a.json", "--db", "memory:") as server:
        assert f"  try it        penstock chat a --url {server.url}\n" in server.greeting
    (directory / "b.json").write_text(json.dumps({**example_graphs()["assistant"], "id": "b"}))
    with served(".", "--db", "memory:", "--tokens", "tokens.txt") as server:
        token = ", with your token in PENSTOCK_TOKEN"
        assert f"  try it        penstock chat b --url {server.url}{token}\n" in server.greeting


def test_an_example_that_was_saved_is_not_reverted_by_the_next_start_and_a_file_is_followed(directory: Path) -> None:
    changed = {"nodes": [{"id": "a", "type": "agent", "data": {"model": "gpt-9"}}], "edges": []}
    (directory / "flow.json").write_text(json.dumps({**example_graphs()["pipeline"], "id": "flow"}))
    for arguments in (["--db", "sqlite:///kept.db"], ["flow.json", "--db", "sqlite:///kept.db"]):
        with served(*arguments) as server:
            name = "flow" if "flow.json" in arguments else "assistant"
            body = json.dumps({"document": changed}).encode()
            headers = {"content-type": "application/json"}
            put = urllib.request.Request(f"{server.url}/api/graphs/{name}", body, headers, method="PUT")
            urllib.request.urlopen(put).close()
            assert server.stop(signal.SIGTERM) == (0, "")
    with served("--db", "sqlite:///kept.db") as server, Connection(server.url) as to:
        assert to.get("/api/graphs/assistant")["version"] == 2
        assert "cannot run    assistant: $.nodes[0].data.model: there is no model 'gpt-9'" in server.greeting
        assert server.stop(signal.SIGTERM) == (0, "")
    with served("flow.json", "--db", "sqlite:///kept.db") as server, Connection(server.url) as to:
        assert to.get("/api/graphs/flow")["version"] == 3
        assert "updated       flow.json: flow is now version 3" in server.greeting
        assert server.stop(signal.SIGTERM) == (0, "")


@pytest.mark.parametrize("endpoint", ["localhost:4318", "ftp://x", "http://", "http:// x"])
def test_what_is_no_otlp_endpoint_is_refused(refused: Any, endpoint: str) -> None:
    code, message = refused("--db", "memory:", "--port", "0", "--otlp-endpoint", endpoint)
    assert (code, "--otlp-endpoint must be a URL such as" in message) == (64, True)


def test_a_graph_in_which_nothing_runs_is_refused(directory: Path, refused: Any) -> None:
    (directory / "flow.json").write_text('{"nodes": [], "edges": []}')
    code, message = refused("flow.json")
    assert code == 2
    assert "the graph has no node that runs" in message


def test_running_runs_are_parked_at_shutdown_and_resumed_by_the_next_server(
    directory: Path, penstock: Penstock
) -> None:
    (directory / "slow.py").write_text(SLOW)
    options = ("--db", "sqlite:///kept.db", "--models", "slow.py:models")
    with served(*options, "--drain", "0") as server:
        run_id = started(server.url, "count to 200")
        assert server.stop(signal.SIGTERM) == (0, "")
    with closing(sqlite3.connect("kept.db")) as kept:
        assert kept.execute("SELECT status FROM runs").fetchall() == [("parked",)]
    (directory / "slow.py").write_text(QUICK)
    with served(*options) as server:
        tail = penstock("runs", "tail", run_id, "--url", server.url)
        assert (tail.code, "run.parked" in tail.out, "run.resumed" in tail.out) == (0, True, True)
        assert server.stop(signal.SIGINT) == (0, "")


def test_a_second_ctrl_c_parks_at_once_what_would_have_been_waited_for(directory: Path) -> None:
    (directory / "slow.py").write_text(SLOW)
    with served("--db", "sqlite:///kept.db", "--models", "slow.py:models", "--drain", "1000") as server:
        started(server.url, "count to 1000")
        assert server.stop(signal.SIGINT, signal.SIGTERM) == (0, "")
    with closing(sqlite3.connect("kept.db")) as kept:
        assert kept.execute("SELECT status FROM runs").fetchall() == [("parked",)]


def test_answer_of_a_killed_server_is_resumed_after_restart(directory: Path, penstock: Penstock) -> None:
    (directory / "slow.py").write_text(SLOW)
    options = ("--db", "sqlite:///kept.db", "--models", "slow.py:models", "--lease", "2")
    with served(*options) as server:
        run_id = started(server.url, "count to 150")
        assert server.stop(signal.SIGKILL)[0] == -signal.SIGKILL
    (directory / "slow.py").write_text(QUICK)
    with served(*options) as server:
        tail = penstock("runs", "tail", run_id, "--url", server.url)
        assert tail.code == 0
        assert "149, 150." in tail.out
        assert "run.resumed" in tail.out
        shown = json.loads(penstock("runs", "show", run_id, "--json", "--url", server.url).out)
        assert (shown["status"], shown["epoch"]) == ("completed", 2)
        assert shown["unresolved_usd"] > 0  # the provider's price for the call that was cut off is unknown
        assert server.stop(signal.SIGTERM) == (0, "")


def test_a_call_that_would_cost_more_than_is_left_never_leaves(penstock: Penstock) -> None:
    with served("--db", "memory:") as server:
        ended = penstock("chat", "assistant", "-m", "hello", "--max-cost", "0.00001", "--url", server.url)
        assert (ended.code, "You wrote" in ended.out) == (3, False)
        assert "would hold" in ended.out
        assert server.stop(signal.SIGTERM) == (0, "")


@pytest.mark.parametrize(("policy", "code"), [("count", 0), ("refuse", 3)])
def test_a_model_without_a_price_is_counted_or_refused(
    directory: Path, penstock: Penstock, policy: str, code: int
) -> None:
    (directory / "mine.py").write_text(
        "from penstock.agents.model import Model, ModelResponse\n"
        "from penstock.runtime.billing.usage import Usage\n\n\n"
        "class Mine(Model):\n"
        "    async def request(self, request):\n"
        "        return ModelResponse('mine', usage=Usage(1, 1))\n\n\n"
        "models = {'example': Mine('mine-1')}\n"
    )
    with served("--db", "memory:", "--models", "mine.py:models", "--unknown-prices", policy) as server:
        ended = penstock("chat", "assistant", "-m", "hello", "--url", server.url)
        assert ended.code == code, ended
        stopped, log = server.stop(signal.SIGTERM)
    assert stopped == 0
    assert log.count("model 'mine-1' has no known price") == (policy == "count")


def test_prices_of_ones_own_are_what_is_paid(directory: Path, penstock: Penstock) -> None:
    (directory / "mine.py").write_text(
        "from penstock.agents.model import Model, ModelResponse\n"
        "from penstock.runtime.billing.prices import Price\n"
        "from penstock.runtime.billing.usage import Usage\n\n\n"
        "class Mine(Model):\n"
        "    async def request(self, request):\n"
        "        return ModelResponse('mine', usage=Usage(1000, 1000))\n\n\n"
        "models = {'example': Mine('mine-1')}\n"
        "prices = {'mine-1': Price('1', '2')}\n"
    )
    options = ("--models", "mine.py:models", "--prices", "mine.py:prices", "--unknown-prices", "refuse")
    with served("--db", "memory:", *options) as server:
        ended = penstock("chat", "assistant", "-m", "hello", "--url", server.url)
        assert (ended.code, "$0.003 · 2,000 tokens" in ended.out) == (0, True), ended
        assert server.stop(signal.SIGTERM) == (0, "")


def test_an_address_that_others_can_reach_needs_tokens(refused: Any) -> None:
    code, message = refused("--host", "0.0.0.0", "--port", "0")
    assert (code, message.count("\n")) == (64, 1)
    assert message.endswith("not '0.0.0.0'; name the users who may connect from elsewhere with --tokens\n")


def test_a_port_that_is_taken_is_one_sentence(refused: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, message = refused("--port", str(taken.getsockname()[1]), "--db", "memory:")
    assert (code, message.count("\n")) == (64, 1)
    assert "the port is already in use" in message
    assert message.endswith("; use --port to choose another port, or 0 for any free one\n")


def test_expired_tokens_are_listed_at_start_and_refused(directory: Path, penstock: Penstock) -> None:
    lines = ["ann:user:canary-of-ann-old until=2020-01-01", "bob:user:canary-of-bob-01", "eve:user:canary-of-eve-01"]
    (directory / "tokens").write_text("\n".join([*lines[:2], f"{lines[2]} until=2020-06-30T12:00:00+02:00"]))
    with served("--db", "memory:", "--tokens", "tokens") as server:
        assert "  access        1 token\n" in server.greeting
        assert server.process.stdout is not None
        expired = server.process.stdout.readline()
        assert expired == "  expired       tokens of ann, eve: renew or remove these lines\n"
        ended = penstock("runs", "ls", "--url", server.url, "--token", "canary-of-eve-01")
        assert (ended.code, "this token was valid until 2020-06-30T10:00:00Z; ask" in ended.err) == (2, True)
        assert penstock("runs", "ls", "--url", server.url, "--token", "canary-of-bob-01").code == 0
        assert server.stop(signal.SIGTERM) == (0, "")


def test_cost_ceiling_holds_for_every_user(directory: Path, penstock: Penstock) -> None:
    (directory / "tokens").write_text("ann:user:canary-of-ann-01\nroot:admin:canary-of-root-01\n")
    with served("--db", "memory:", "--tokens", "tokens", "--cost-ceiling", "0.5") as server:
        for token in ("canary-of-ann-01", "canary-of-root-01"):
            who = ("--url", server.url, "--token", token)
            much = penstock("runs", "start", "pipeline", "--input", '"x"', "--max-cost", "0.6", *who)
            ceiling = "max_cost_usd must be at most 0.5, which is the ceiling of a run here, not '0.6'"
            assert (much.code, much.err) == (2, f"penstock: {ceiling}\n")
            assert penstock("runs", "start", "pipeline", "--input", '"x"', "--max-cost", "0.5", *who).code == 0
        usual = penstock("runs", "start", "pipeline", "--input", '"x"', *who).out.partition(":")[0]
        shown = json.loads(penstock("runs", "show", usual, "--json", *who).out)
        assert shown["limits"]["max_cost_usd"] == "0.5", "what is usual is not above it"
        assert "warning" not in server.rest()


def test_several_users_without_a_ceiling_are_warned_about(directory: Path) -> None:
    (directory / "tokens").write_text("ann:user:canary-of-ann-01\nbob:user:canary-of-bob-01\n")
    with served("--db", "memory:", "--tokens", "tokens") as server:
        assert server.process.stdout is not None
        each = (
            "each of 2 users may start runs without a cost ceiling; set --cost-ceiling per run or --user-daily per day"
        )
        assert server.process.stdout.readline() == f"  warning       {each}\n"
        assert server.stop(signal.SIGTERM) == (0, "")


@pytest.mark.parametrize(
    ("name", "text", "where"),
    [
        ("PENSTOCK_TOKENS", "", "PENSTOCK_TOKENS"),
        ("PENSTOCK_TOKENS", "# later", "PENSTOCK_TOKENS"),
        ("PENSTOCK_TOKENS_FILE", "none.txt", "'none.txt'"),
        ("PENSTOCK_TOKENS_FILE", "", "PENSTOCK_TOKENS_FILE"),
    ],
)
def test_empty_tokens_file_lets_no_client_in(
    directory: Path, refused: Any, monkeypatch: pytest.MonkeyPatch, name: str, text: str, where: str
) -> None:
    (directory / "none.txt").write_text("# no users yet\n")
    monkeypatch.setenv(name, text)
    code, message = refused("--port", "0", "--db", "memory:")
    assert (code, message.count("\n")) == (2, 1)
    assert message.startswith(f"penstock: there is no token in {where}: add lines of name:role:secret")


def test_unknown_token_is_reported(directory: Path, penstock: Penstock) -> None:
    (directory / "tokens").write_text("ann:user:canary-of-ann-01\n")
    with served("--db", "memory:", "--tokens", "tokens") as server:
        ended = penstock("runs", "ls", "--url", server.url, "--token", "canary-of-ann-02")
        assert (ended.code, "this server does not know this token; ask its operator for one" in ended.err) == (2, True)
        assert "canary" not in ended.err
        assert server.stop(signal.SIGTERM) == (0, "")


def test_valid_tokens_are_not_mentioned_at_start(directory: Path) -> None:
    (directory / "tokens").write_text("ann:user:canary-of-ann-01 until=9999-12-31\n")
    with served("--db", "memory:", "--tokens", "tokens") as server:
        assert server.rest() == ""


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ('{"id": "x", "nodes": [{"id": "a", "type": "nope"}], "edges": []}', "unknown_type  $.nodes[0].type"),
        ('{"id": "x", "nodes": 3}', "$.nodes"),
        ('{"id":', "bad_json  $"),
    ],
)
def test_invalid_graph_is_reported_with_its_file(directory: Path, refused: Any, document: str, expected: str) -> None:
    (directory / "mine.json").write_text(document)
    code, message = refused("mine.json", "--port", "0", "--db", "memory:")
    assert code == 2
    assert expected in message
    assert any(line.startswith("penstock: mine.json is not a valid graph: ") for line in message.splitlines())


def test_second_of_two_graphs_of_one_name_is_not_served(directory: Path) -> None:
    document = json.dumps(example_graphs()["assistant"])
    for name in ("a.json", "b.json"):
        (directory / name).write_text(document)
    with served(".", "--db", "memory:") as server:
        assert "graphs        assistant\n" in server.greeting
        why = "b.json and a.json both have a graph called 'assistant'; rename one"
        assert f"  not served    {why}\n" in server.greeting
        assert server.stop(signal.SIGTERM) == (0, "")


def test_graphs_without_an_id_are_called_as_their_files_are(directory: Path) -> None:
    nodes = example_graphs()["assistant"]["nodes"]
    for name in ("a.json", "b.json"):
        (directory / name).write_text(json.dumps({"nodes": nodes, "edges": []}))
    with served("a.json", "b.json", "--db", "memory:") as server:
        assert "graphs        a, b\n" in server.greeting
        assert server.stop(signal.SIGTERM) == (0, "")


@pytest.mark.parametrize("name", ["my report", "größe", "-x", "x" * 101])
@pytest.mark.parametrize("by_file", [True, False])
def test_invalid_graph_id_is_refused(directory: Path, penstock: Penstock, name: str, by_file: bool) -> None:
    graph = example_graphs()["assistant"]
    document = {"nodes": graph["nodes"], "edges": []} if by_file else {**graph, "id": name}
    (directory / (f"{name}.json" if by_file else "flow.json")).write_text(json.dumps(document))
    for command in ("serve", "mcp"):
        ended = penstock(command, ".", "--db", "memory:")
        assert (ended.code, ended.out, ended.err.count("\n")) == (64, "", 1)
        assert "is not a valid graph id" in ended.err
        assert 'rename the file, or give the graph another "id": a letter or digit, then up to 99' in ended.err


def test_a_graph_that_lacks_its_model_is_not_what_is_to_be_tried(directory: Path) -> None:
    lacks = {"nodes": [{"id": "a", "type": "agent", "data": {"model": "gpt-9"}}], "edges": []}
    (directory / "a.json").write_text(json.dumps(lacks))
    with served("a.json", "--db", "memory:") as server:
        assert server.greeting.endswith("  try it        none of these graphs can run\n")
        assert server.stop(signal.SIGTERM) == (0, "")
    (directory / "b.json").write_text(json.dumps({**example_graphs()["assistant"], "id": "b"}))
    with served("a.json", "b.json", "--db", "memory:") as server:
        assert server.greeting.endswith(f"  try it        penstock chat b --url {server.url}\n")
        assert server.stop(signal.SIGTERM) == (0, "")


def test_a_run_has_the_steps_and_the_time_that_serve_was_given_and_no_more_than_it_allows(
    directory: Path, penstock: Penstock
) -> None:
    options = ("--max-steps", "7", "--timeout", "90.5", "--steps-ceiling", "9", "--timeout-ceiling", "100")
    with served("--db", "memory:", *options) as server:
        start = ("runs", "start", "pipeline", "--url", server.url)
        usual = penstock(*start).out.partition(":")[0]
        limits = json.loads(penstock("runs", "show", usual, "--json", "--url", server.url).out)["limits"]
        assert (limits["max_steps"], limits["timeout_s"], limits["max_cost_usd"]) == (7, 90.5, "1")
        for option, amount, ceiling in (
            ("--max-steps", "10", "at most 9, "),
            ("--timeout", "100.5", "at most 100.0, "),
        ):
            refused = penstock(*start, option, amount)
            assert (refused.code, ceiling in refused.err) == (2, True), refused.err
        assert server.stop(signal.SIGTERM) == (0, "")


def test_unknown_host_names_are_refused_with_advice(directory: Path) -> None:
    (directory / "tokens").write_text("ann:user:canary-of-ann-01\n")
    known = {}
    for names in ([], ["--allow-host", "penstock.example", "--allow-host", "other.example"]):
        with served("--db", "memory:", "--host", "0.0.0.0", "--tokens", "tokens", *names) as server:
            port = server.url.rpartition(":")[2]
            request = urllib.request.Request(f"http://127.0.0.1:{port}/health", headers={"Host": "Other.example"})
            try:
                with urllib.request.urlopen(request) as answer:
                    known[bool(names)] = (answer.status, "")
            except urllib.error.HTTPError as error:
                known[bool(names)] = (error.code, json.load(error)["error"]["message"])
                error.close()
            warning = "clients elsewhere are refused; name the host that they use with --allow-host NAME"
            assert server.rest() == ("" if names else f"  warning       {warning}\n")
    assert (known[True], known[False][0]) == ((200, ""), 421)
    assert "penstock serve --allow-host NAME, PENSTOCK_ALLOWED_HOSTS" in known[False][1]


@pytest.mark.parametrize(
    ("db", "becomes", "rest"),
    [
        ("sqlite:///kept.db", "park", "1 run parked for the next server"),
        ("memory:", "end", "1 run lost with the memory"),
    ],
)
def test_shutdown_reports_running_runs(directory: Path, db: str, becomes: str, rest: str) -> None:
    (directory / "slow.py").write_text(SLOW)
    with served("--db", db, "--models", "slow.py:models", "--drain", "1000") as server:
        started(server.url, "count to 1000")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.stdout is not None
        line = server.process.stdout.readline()
        under_way = "stopping: 1 run in progress, with up to 1000 s to end"
        assert line == f"{under_way}; press Ctrl-C again to {becomes} running runs immediately\n"
        assert server.rest() == f"stopped: {rest}\n"


def test_a_database_that_cannot_be_used_is_one_sentence(directory: Path, refused: Any) -> None:
    (directory / "text.db").write_text("no database at all, but a text that goes on for a while\n" * 20)
    for file, expected in (("text.db", "not a database"), ("no/such/folder/x.db", "make it, or name another file")):
        code, message = refused("--port", "0", "--db", f"sqlite:///{file}")
        assert (code, message.count("\n")) == (2, 1)
        assert expected in message
    code, message = refused("--port", "0", "--db", "mysql://here")
    assert (code, message.count("\n")) == (64, 1)


def test_a_database_of_a_newer_penstock_is_left_alone(directory: Path, penstock: Penstock, refused: Any) -> None:
    assert penstock("db", "upgrade", "--db", "sqlite:///newer.db").code == 0
    with closing(sqlite3.connect("newer.db")) as newer:
        newer.execute("PRAGMA user_version = 99")
    before = (directory / "newer.db").read_bytes()
    code, message = refused("--port", "0", "--db", "sqlite:///newer.db")
    assert (code, message.count("\n")) == (2, 1)
    assert "version 99" in message
    assert (directory / "newer.db").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["--tokens", "nothing.txt"], 64, "--tokens: there is no file 'nothing.txt'"),
        (["--tokens", "short.txt"], 2, "line 1 of the tokens: the secret must be 16 to 512"),
        (["--tokens", "none.txt"], 2, "there is no token in 'none.txt': add lines of name:role:secret"),
        (["--models", "nothing:models"], 64, "there is no module 'nothing'"),
        (["--models", "models"], 64, "--models takes module:attribute"),
        (["--prices", "os:environ"], 64, "--prices: the price of "),
        (["--max-cost", "much"], 64, "'--max-cost': it must be a number of US dollars, such as '0.50', not 'much';"),
        (["--daily", "-1"], 64, "'--daily': it must be a finite, non-negative number of US dollars"),
        (["--user-daily", "NaN"], 64, "(env var: 'PENSTOCK_USER_DAILY'): it must be a number of US dollars"),
        (["nothing.json"], 64, "there is no file 'nothing.json'"),
        (["empty"], 64, "there is no .json file in 'empty'"),
        (["story.py"], 64, "story.py:graph is of type NoneType; it must be a Graph, an Agent,"),
        (
            ["--allow-host", "http://x"],
            64,
            "penstock.example, without a port, not 'http://x'; set them",
        ),
        (["--db-connections", "3"], 64, "(env var: 'PENSTOCK_DB_CONNECTIONS'): it must be 4 or more, not 3;"),
        (["--db-timeout", "nan"], 64, "(env var: 'PENSTOCK_DB_TIMEOUT'): 'nan' is not a number;"),
        (["--day-zone", "Mars/Olympus"], 64, "day_zone must be the name of a time zone, such as Europe/Berlin or UTC"),
        (
            ["--day-zone", "../../etc/passwd"],
            64,
            "day_zone must be the name of a time zone, such as Europe/Berlin or UTC",
        ),
        (["--log-format", "xml"], 64, "(env var: 'PENSTOCK_LOG_FORMAT'): 'xml' is not one of 'json', 'text';"),
        (["--record-payloads", "yes"], 64, "'yes' is not one of 'off', 'redacted', 'full';"),
        (["--keep-payloads", "nan"], 64, "(env var: 'PENSTOCK_KEEP_PAYLOADS'): 'nan' is not a number;"),
        (["--keep-audit", "-3"], 64, "(env var: 'PENSTOCK_KEEP_AUDIT'): it must be 0.01 or more, not -3.0;"),
        (["--keep-days", "inf"], 64, "'--keep-days': 'inf' is not a number;"),
        (["--team-daily", "-1"], 64, "'--team-daily': it must be a finite, non-negative number of US dollars"),
        (["--allow-model", "a\nb"], 64, "'openai:*', or none, not 'a\\nb'"),
        (["--timeout", "0"], 64, "'--timeout': it must be 0.001 or more, not 0.0;"),
        (["--max-steps", "0"], 64, "'--max-steps': it must be 1 or more, not 0;"),
        (["--max-running", "0"], 64, "'--max-running': it must be 1 or more, not 0;"),
        (["--max-running", "1_0"], 64, "'--max-running': '1_0' is not a whole number;"),
        (["--lease", "inf"], 64, "'--lease': 'inf' is not a number;"),
        (["--max-cost", "1_0"], 64, "'--max-cost': it must be a number of US dollars"),
    ],
    ids=str,
)
def test_what_cannot_be_used_is_refused_before_anything_is_served(
    directory: Path, refused: Any, arguments: list[str], code: int, expected: str
) -> None:
    (directory / "short.txt").write_text("ann:user:short\n")
    (directory / "none.txt").write_text("# ann:user:canary-of-ann-01\n\n")
    (directory / "empty").mkdir()
    (directory / "story.py").write_text("graph = None\n")
    ended, message = refused("--port", "0", "--db", "memory:", *arguments)
    assert (ended, message.count("\n")) == (code, 1)
    assert expected in message
    assert "short\n" not in message


def test_mcp_at_a_terminal_explains_what_it_waits_for() -> None:
    with Terminal("mcp") as terminal:
        terminal.until("waiting for an MCP client on standard input, which is a terminal; Ctrl-D exits")
        terminal.type("\x04")
        assert terminal.end() == 0


def test_mcp_on_standard_input_offers_the_graphs_as_tools() -> None:
    requests: list[dict[str, Any]] = [
        {
            "jsonrpc": "2.0",
            "id": 1,
            "method": "initialize",
            "params": {
                "protocolVersion": "2025-06-18",
                "capabilities": {},
                "clientInfo": {"name": "test", "version": "1"},
            },
        },
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "id": 2, "method": "tools/list"},
    ]
    process = subprocess.Popen(
        [*PENSTOCK, "mcp"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("".join(json.dumps(one) + "\n" for one in requests))
        process.stdin.flush()
        answers = [json.loads(process.stdout.readline()) for _ in range(2)]
        _, err = process.communicate()
    assert {tool["name"] for tool in answers[1]["result"]["tools"]} >= {"assistant", "pipeline", "publish"}
    assert (process.returncode, "Traceback" in err) == (0, False)


def test_a_tail_outlives_the_server_it_began_at(directory: Path) -> None:
    (directory / "slow.py").write_text(SLOW)
    options = ("--db", "sqlite:///kept.db", "--models", "slow.py:models", "--drain", "0")
    with served(*options) as server:
        url, run_id = server.url, started(server.url, "count to 200")
        tail = Program(["-m", "penstock.cli", "runs", "tail", run_id, "--json", "--url", url])
        first = tail.stdout.readline()
        assert server.stop(signal.SIGTERM) == (0, "")
    (directory / "slow.py").write_text(QUICK)
    with tail, served(*options, "--port", url.rpartition(":")[2]) as server:
        events = [json.loads(line) for line in [first, *tail.stdout]]
        assert tail.wait() == 0
        assert server.stop(signal.SIGTERM) == (0, "")
    assert [one["seq"] for one in events] == list(range(1, len(events) + 1))
    assert events[-1]["type"] == "run.completed"
    assert "run.parked" in {one["type"] for one in events}


def test_an_embedding_model_is_served_under_its_name(directory: Path) -> None:
    (directory / "mine.py").write_text(
        "from penstock.agents import EmbeddingModel, Embeddings\n"
        "class Lengths(EmbeddingModel):\n"
        "    async def request(self, request):\n"
        "        return Embeddings([[float(len(text))] for text in request.texts])\n"
        "models = {'small': Lengths('lengths')}\n"
    )
    with (
        served("--db", "memory:", "--models", "mine.py:models") as server,
        OpenAI(api_key="none", base_url=f"{server.url}/v1", timeout=60, max_retries=0) as client,
    ):
        answer = client.embeddings.create(model="small", input=["a", "four"])
        assert [one.embedding for one in answer.data] == [[1.0], [4.0]]
        assert server.stop(signal.SIGTERM)[0] == 0
