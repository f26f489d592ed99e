"""The same programs on one server with SQLite, on servers that share PostgreSQL, and on workers behind Temporal.

`penstock serve` and `penstock worker` are processes, started as operators start them; clients are the command line,
OpenAI's SDK and a browser. The programs log which process executed them.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import OpenAI
from playwright.async_api import expect

from penstock.cli.remote.connection import Connection
from penstock.ids import new_run_id
from penstock.nodes.program import NODE
from tests.cli.conftest import Ended, Penstock, directory, penstock
from tests.cli.service.test_serve import Server, served
from tests.engines.temporal_server import TemporalServer, temporal_server
from tests.forked import Program
from tests.hosting.graphs import graph as document
from tests.storage.postgres import postgres_server, postgres_url
from tests.telemetry.test_inv_13_dead_collector import collector
from tests.ui.browser import browsing, tab

__all__ = ["directory", "penstock", "postgres_server", "postgres_url", "temporal_server"]

pytestmark = [pytest.mark.usefixtures("forks"), pytest.mark.requirement("X-4")]

PROGRAMS = '''
import os
from penstock import Graph
from penstock.agents import Agent, ScriptedModel, ToolCall
from penstock.agents.tools import Tool


def log(what):
    with open("ran.log", "a") as file:
        file.write(f"{what} {os.getpid()}\\n")


graph = Graph("publisher")


@graph.step
async def draft(ctx):
    log("draft")
    return f"draft of {ctx.input}"


@graph.step(depends_on=["draft"])
async def publish(ctx):
    log("publish")
    return f"{ctx.input}, published"


def pay(to: str) -> str:
    """Pay a person."""
    log("pay")
    return f"paid {to}"


def reply(request):
    log("model")
    last = request.messages[-1]
    if last.role == "user" and last.text.startswith("pay "):
        return ToolCall("1", "pay", {"to": last.text.removeprefix("pay ")})
    return f"You wrote: {last.text}."


model = ScriptedModel(reply, piece_characters=4)
models = {"m": model}
agent = Agent(model, tools=[Tool(pay, needs_approval=True)], name="payer")
'''
CHAT = document(
    ("start", "chat-start", {}), ("ask", "llm-completion", {"model": "m", "stream": True}), edges="start>ask"
)
KINDS = ("sqlite", "postgres", "postgres+temporal")


@dataclass
class Service:
    """A server, and the processes that execute runs for it."""

    server: Server
    penstock: Penstock
    workers: set[int]

    def runs(self, *arguments: object) -> Ended:
        ended = self.penstock("runs", *arguments, "--url", self.server.url)
        assert not ended.err, ended.err
        return ended

    def start(self, graph: str, input: str, *more: object) -> str:
        return self.runs("start", graph, "--input", input, *more).out.partition(":")[0]

    def until(self, run_id: str, type: str) -> Any:
        with Connection(self.server.url) as server:
            for event in server.events(run_id):
                if event.type == type:
                    return event.data
        raise AssertionError(f"the run ended without {type}")


@contextmanager
def serving(kind: str, penstock: Penstock, db: str, temporal: TemporalServer, *more: str) -> Iterator[Service]:
    """Start a server, and on Temporal a worker, which gets the options `more`."""
    with ExitStack() as stack:
        common = ["app.py:graph", "app.py:agent", "--models", "app.py:models", "--db", db, "--lease", "2"]
        options, queue = ["--engine", temporal.url(), "--queue", new_run_id()], kind.endswith("temporal")
        if not queue:
            options = []
        server = stack.enter_context(served(*common, "chat.json", *options))
        workers = {server.process.pid}
        if queue:
            worker = Program(["-m", "penstock.cli", "worker", *common, *options, *more], is_merged=True)
            stack.enter_context(worker)
            stack.callback(worker.kill)
            assert any("queues" in line for line in worker.stdout)
            workers = {worker.pid}
        yield Service(server, penstock, workers)
        if more:
            worker.send_signal(signal.SIGTERM)
            assert worker.wait() == 0


@pytest.fixture
def programs(directory: Path) -> Path:
    (directory / "app.py").write_text(PROGRAMS)
    (directory / "chat.json").write_text(json.dumps({"id": "chat", **CHAT}))
    return directory


@pytest.fixture(params=KINDS)
def service(
    request: pytest.FixtureRequest, programs: Path, penstock: Penstock, temporal_server: TemporalServer
) -> Iterator[Service]:
    kind: str = request.param
    db = "sqlite:///runs.db" if kind == "sqlite" else request.getfixturevalue("postgres_url")
    with serving(kind, penstock, db, temporal_server) as found:
        yield found


def ran(folder: Path) -> dict[str, set[int]]:
    """What ran, and in which processes."""
    found: dict[str, set[int]] = {}
    for line in (folder / "ran.log").read_text().splitlines():
        what, pid = line.split()
        found.setdefault(what, set()).add(int(pid))
    return found


@pytest.mark.timeout(180)
def test_programs_are_started_watched_answered_granted_forked_and_cancelled_alike(
    service: Service, programs: Path
) -> None:
    # A graph in Python, from the command line, which reads the stream of events to its end.
    run_id = service.start("publisher", "this")
    tail = service.runs("tail", run_id)
    assert (tail.code, "run.completed" in tail.out.splitlines()[-1]) == (0, True)
    assert json.loads(service.runs("show", run_id, "--json").out)["output"] == "draft of this, published"
    # A fork of it, from a node on.
    fork = service.runs("fork", run_id, "--at", NODE, "--input", "that").out.split(":")[0]
    assert service.runs("tail", re.findall(r"[\w-]+", fork)[-1]).code == 0
    # Halted by its limit, and granted more.
    halted = service.start("publisher", "halted", "--max-steps", 1)
    assert service.runs("tail", halted).code == 3
    service.runs("grant", halted, "--max-steps", 20)
    assert service.until(halted, "run.completed")["output"] == "draft of halted, published"
    # An agent that asks before it pays: answered, and cancelled while it waits.
    for verdict in ("yes", "cancel"):
        run_id = service.start("payer", f"pay {verdict}")
        service.until(run_id, "run.waiting")
        if verdict == "yes":
            service.runs("answer", run_id, "yes")
            assert service.until(run_id, "run.completed")["output"] == "You wrote: paid yes."
        else:
            service.runs("cancel", run_id, "--reason", "enough")
            assert service.runs("tail", run_id).code == 130
    # A chat, streamed to OpenAI's SDK.
    with OpenAI(api_key="none", base_url=f"{service.server.url}/v1", timeout=60, max_retries=0) as client:
        for model in ("chat", "payer"):
            question: Any = [{"role": "user", "content": "hello"}]
            with client.chat.completions.create(model=model, messages=question, stream=True) as chunks:
                pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
            assert "".join(pieces) == "You wrote: hello."
    found = ran(programs)
    assert found.keys() == {"draft", "publish", "model", "pay"}
    assert set().union(*found.values()) == service.workers
    assert os.getpid() not in service.workers


@pytest.mark.timeout(180)
async def test_the_web_ui_shows_a_run_of_a_worker_and_answers_it(
    programs: Path, penstock: Penstock, postgres_url: str, temporal_server: TemporalServer
) -> None:
    with (
        collector(answers=True) as spans,
        serving(
            "postgres+temporal", penstock, postgres_url, temporal_server, "--otlp-endpoint", spans.endpoint
        ) as service,
    ):
        run_id = await asyncio.to_thread(service.start, "payer", "pay Ann")
        async with browsing() as browser, tab(browser) as opened:
            page = opened.page
            await page.goto(f"{service.server.url}/#/runs/{run_id}")
            status = page.get_by_role("status").filter(has_text="The run is")
            await expect(status).to_have_text("The run is waiting")
            await page.get_by_role("button", name="Approve", exact=True).click()
            await expect(status).to_have_text("The run is completed")
        shown = await asyncio.to_thread(service.runs, "show", run_id, "--json")
        assert json.loads(shown.out)["output"] == "You wrote: paid Ann."
        assert set().union(*ran(programs).values()) == service.workers
    assert any("payer" in name for name in spans.names), spans.names


@pytest.mark.timeout(180)
def test_a_run_of_a_worker_is_part_of_the_trace_of_the_request_that_submitted_it(
    programs: Path, penstock: Penstock, postgres_url: str, temporal_server: TemporalServer
) -> None:
    trace_id, span_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with (
        collector(answers=True) as spans,
        serving(
            "postgres+temporal", penstock, postgres_url, temporal_server, "--otlp-endpoint", spans.endpoint
        ) as service,
    ):
        headers = {"traceparent": f"00-{trace_id}-{span_id}-01", "tracestate": "vendor=1"}
        sent = {"graph_id": "publisher", "input": "this"}
        posted = httpx2.post(f"{service.server.url}/api/runs", json=sent, headers=headers)
        assert posted.status_code == 201, posted.text
        assert service.until(posted.json()["id"], "run.completed")["output"] == "draft of this, published"
        assert (
            service.until(service.start("publisher", "that"), "run.completed")["output"] == "draft of that, published"
        )
    (first, second) = (span for span in spans.spans if span.name.startswith("invoke_workflow"))
    assert (first.trace_id.hex(), first.parent_span_id.hex(), first.trace_state) == (trace_id, span_id, "vendor=1")
    assert (second.trace_id != first.trace_id, second.parent_span_id) == (True, b"")
    assert len({span.trace_id for span in spans.spans}) == 2, "nodes and calls are in the traces of their runs"
