"""INV 17: a server of an old release goes on working while its database is upgraded, beside one of this code.

`upgrade/old_server.tar.xz` has the package as it was at schema version 7, the oldest code there is: a real `penstock
serve` of it opens the oldest fixture. Both servers are processes, and the test uses nothing but HTTP. The old code
runs with the packages that are installed now.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.exits import Refused
from penstock.cli.remote.connection import Connection
from penstock.hosting.durability import day_of
from penstock.storage import newest_version, open_stores, schema_version
from tests.reliability.test_inv_17_upgrade import Old, kind, old, postgres_server, postgres_url

__all__ = ["kind", "old", "postgres_server", "postgres_url"]

pytestmark = pytest.mark.reliability

PACKAGE = Path(__file__).parent / "upgrade" / "old_server.tar.xz"
OLD_VERSION = 7
"""The version of the database that the old code makes."""
MODELS = """
from penstock import Price, Usage
from penstock.agents.model import Model, ModelResponse


class Echo(Model):
    async def request(self, request):
        return ModelResponse("echo", (), Usage(100, 10), "stop", self.name)


models = {"echo": Echo("echo"), "thinker": Echo("thinker")}
prices = {name: Price("1", "1") for name in models}
"""
CALL_NANOS = 110_000


def _node(id: str, type: str, **data: Any) -> dict[str, Any]:
    return {"id": id, "type": type, "position": {"x": 0, "y": 0}, "data": data}


def _edge(source: str, handle: str, target: str) -> dict[str, Any]:
    ends = {"source": source, "sourceHandle": handle, "target": target, "targetHandle": "input"}
    return {"id": f"{source}-{target}", **ends, "data": {"channel": "flow"}}


GRAPHS = {
    "talk": {
        "nodes": [_node("start", "chat-start"), _node("answer", "agent", model="echo")],
        "edges": [_edge("start", "output", "answer")],
    },
    "ask": {
        "nodes": [
            _node("start", "input"),
            _node("draft", "llm-completion", model="echo"),
            _node("may", "approval", question="May it?"),
            _node("last", "llm-completion", model="echo"),
        ],
        "edges": [
            _edge("start", "output", "draft"),
            _edge("draft", "output", "may"),
            _edge("may", "approved", "last"),
        ],
    },
}


class Server:
    """`penstock serve` of the old code, or of this one if `code` is None, and a connection to it."""

    def __init__(self, folder: Path, url: str, code: Path | None) -> None:
        options = ["--db", url, "--port", "0", "--models", "echo:models", "--prices", "echo:prices", "--daily", "5"]
        command = ["serve", "talk.json", "ask.json", *options, "--lease", "3", "--drain", "0"]
        self.process = _penstock(folder, code, *command)
        assert self.process.stdout is not None
        self.greeting = ""
        for line in self.process.stdout:
            self.greeting += line
            if "try it" in line:
                break
        self.url = self.greeting.partition("\n")[0].rpartition(" ")[2]

    def submit(self, graph: str) -> str:
        """Start a run."""
        with Connection(self.url) as server:
            return str(server.post("/api/runs", {"graph_id": graph, "input": "x"})["id"])

    def follow(self, run_id: str, until: str) -> None:
        """Wait for an event of the run."""
        with Connection(self.url) as server:
            types = []
            for event in server.events(run_id):
                types.append(event.type)
                if event.type == until:
                    return
        raise AssertionError(f"there was no {until}: {types}")

    def run(self, run_id: str) -> dict[str, Any]:
        with Connection(self.url) as server:
            return dict(server.get(f"/api/runs/{run_id}"))

    def approve(self, run_id: str) -> None:
        """Answer the question of a run."""
        with Connection(self.url) as server:
            [question] = server.get("/api/approvals", run_id=run_id)["approvals"]
            server.post(f"/api/approvals/{question['id']}/approve", {})

    def talk(self) -> str:
        """Ask for one answer as OpenAI's clients do."""
        messages = [{"role": "user", "content": "hello"}]
        with Connection(self.url) as server:
            answer = server.post("/v1/chat/completions", {"model": "talk", "messages": messages})
        return str(answer["choices"][0]["message"]["content"])

    def stop(self) -> tuple[int, str]:
        """Stop it as an operator does: its exit code, and its errors."""
        self.process.send_signal(signal.SIGTERM)
        _, errors = self.process.communicate()
        return self.process.returncode, errors


def _penstock(folder: Path, code: Path | None, *arguments: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(str(one) for one in (code, folder) if one is not None)
    return subprocess.Popen(
        [sys.executable, "-m", "penstock.cli", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def serving(folder: Path, url: str, code: Path | None = None) -> Iterator[Server]:
    server = Server(folder, url, code)
    with server.process as process:
        try:
            yield server
        finally:
            process.kill()


@contextmanager
def talking(server: Server) -> Iterator[Counter[str]]:
    """Ask for answers one after the other, until the block has ended; the answers, and the errors."""
    found: Counter[str] = Counter()
    has_ended = threading.Event()

    def go_on() -> None:
        while not has_ended.is_set():
            try:
                found[server.talk()] += 1
            except Refused as error:
                found[str(error)] += 1

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield found
    finally:
        has_ended.set()
        thread.join()


def _ran(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate()
    return process.returncode, out, err


async def _money(url: str, run_ids: list[str]) -> tuple[int, int]:
    """What the runs of these runs' days have cost, and what the ledger says was spent on these days."""
    async with await open_stores(url) as stores:
        runs = await stores.runs.list(limit=10_000)
        days = {day_of(run.created_ms) for run in runs if run.id in run_ids}
        spent = [(await asyncio.to_thread(stores.ledger.balance, f"all:{day}")).spent_nanos for day in days]
        return sum(run.cost_nanos for run in runs if day_of(run.created_ms) in days), sum(spent)


@pytest.fixture
def old_code(tmp_path: Path) -> Path:
    with tarfile.open(PACKAGE) as packed:
        packed.extractall(tmp_path / "old", filter="data")
    return tmp_path / "old"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "work"
    path.mkdir()
    (path / "echo.py").write_text(MODELS)
    for name, graph in GRAPHS.items():
        (path / f"{name}.json").write_text(json.dumps({"id": name, **graph}))
    return path


@pytest.mark.requirement("X-19")
def test_an_old_server_works_on_during_an_upgrade_and_beside_a_new_one(old: Old, old_code: Path, folder: Path) -> None:
    url = old.url if "://" in old.url else f"sqlite:///{old.url}"
    code, output, errors = _ran(_penstock(folder, old_code, "db", "upgrade", "--db", url))
    assert (code, f"version {OLD_VERSION}" in output, errors) == (0, True, "")
    with serving(folder, url, old_code) as before:
        here, there = before.submit("ask"), before.submit("ask")
        for run_id in (here, there):
            before.follow(run_id, "approval.requested")
        with talking(before) as answers:
            assert _ran(_penstock(folder, None, "db", "upgrade", "--db", url))[::2] == (0, "")
        assert set(answers) == {"echo"}
        assert asyncio.run(schema_version(url)) == newest_version()
        with serving(folder, url) as after:
            with talking(before) as at_old, talking(after) as at_new:
                after.approve(here)
                before.follow(here, "run.completed")
            assert before.stop()[0] == 0
            after.approve(there)
            after.follow(there, "run.completed")
            runs = [after.run(id) for id in (here, there)]
            assert after.stop() == (0, "")
        assert (set(at_old), set(at_new)) == ({"echo"}, {"echo"})
    assert [(run["output"], run["cost_nanos"]) for run in runs] == [("echo", 2 * CALL_NANOS)] * 2
    cost_nanos, spent_nanos = asyncio.run(_money(url, [here, there]))
    assert cost_nanos == spent_nanos >= (4 + sum((answers + at_old + at_new).values())) * CALL_NANOS
    restarted, _, errors = _ran(_penstock(folder, old_code, "serve", "talk.json", "--db", url, "--port", "0"))
    assert (restarted != 0, "newer" in errors) == (True, True)
