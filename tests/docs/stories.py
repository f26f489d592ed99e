"""What pages leave to their readers: files, other servers, answers of people, and waiting. One story for each page.

A story calls `reader.do(until=…)` to do the page up to a command or a text, and then does what stands in no block.
What is left of the page is done after the story.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx2

from penstock import Reported
from penstock.cli.render.call_tree import Calls, frame
from penstock.cli.render.local import Shown, run_event
from penstock.front_door import ContainedRun, contain
from penstock.server.event_schemas import RUN_EVENT
from penstock.testing.provider import Cut, Say
from tests.docs.reader import Reader

Story = Callable[[Reader], None]
STORIES: dict[str, Story] = {}


def story(page: str) -> Callable[[Story], Story]:
    """Register the story of a page."""

    def register(function: Story) -> Story:
        STORIES[page] = function
        return function

    return register


def plain(page: str) -> None:
    """Register a page whose reader only does what it says."""
    STORIES[page] = lambda reader: None


AGENT = """
from penstock.agents import Agent
from penstock.server.examples import ExampleModel

agent = Agent(ExampleModel(words_per_second=0), name="{name}")
"""
GRAPH = """
from penstock import Graph

graph = Graph("{name}")
graph.step(lambda context: str(context.input), "{step}")
"""


def document(*models: str, **agent: Any) -> str:
    """Return a graph in JSON: an agent for each model, one after the other."""
    nodes: list[dict[str, Any]] = [{"id": "start", "type": "chat-start"}]
    edges = []
    for model in models or ("example",):
        id = "assistant" if len(nodes) == 1 else f"assistant{len(nodes)}"
        edges.append({"id": id, "source": nodes[-1]["id"], "target": id, "data": {"channel": "flow"}})
        nodes.append({"id": id, "type": "agent", "data": {"instructions": "Be brief.", "model": model, **agent}})
    return json.dumps({"nodes": nodes, "edges": edges})


@story("README.md")
def _(reader: Reader) -> None:
    (reader.folder / "graphs").mkdir()
    reader.write(app__py=GRAPH.format(name="report", step="write"), agent__py=AGENT.format(name="assistant"))
    reader.write(**{"graphs/flow__json": document()})


plain("docs/comparison.md")
plain("docs/web-ui.md")


SLOW = """
from penstock.server.examples import ExampleModel

models = {"example": ExampleModel(words_per_second=25)}
"""
UNPRICED = """
from penstock.agents import ScriptedModel

models = {"unpriced": ScriptedModel(lambda request: "done", name="unpriced-1")}
"""
LOSING = """
from penstock import Price, Usage
from penstock.agents import ScriptedModel

answers = iter([ConnectionResetError("the peer has gone")])
losing = ScriptedModel(lambda request: next(answers), name="gpt-4o", usage=Usage.of(cost_usd="0.01"))
losing.retries = 1
models = {"writer": losing}
prices = {"gpt-4o": Price(0, 100)}
"""
MAILER = """
from penstock.agents import Agent, ScriptedModel, ToolCall, tool


@tool(needs_approval=True)
def send_mail(to: str, text: str) -> str:
    return "sent"


call = ToolCall("call-1", "send_mail", {"to": "ann@example.org", "text": "The gate held."})
agent = Agent(ScriptedModel([[call], "sent"]), tools=[send_mail], name="mailer")
"""
GATES = """
import asyncio
from pathlib import Path

from penstock import Graph


async def wait(context):
    while not Path(context.input).exists():
        await asyncio.sleep(0.01)


low, high = Graph("low"), Graph("high")
low.step(wait, "wait", input="low")
high.step(wait, "wait", input="high")
"""
"""Graphs that end when there is a file of their name."""
IMPATIENT = """
import sys
import time

from penstock.cli import main

time.sleep = lambda seconds: None
sys.exit(main())
"""
"""The command line without its pauses."""


def until(process: subprocess.Popen[str], *texts: str) -> None:
    """Read what a program prints up to a line that contains the texts."""
    assert process.stdout is not None
    assert any(all(text in line for text in texts) for line in process.stdout)


ANN, BOB, EVE = (f"{name}:user:secret-of-{name}-0123456789" for name in ("ann", "bob", "eve"))
PAST = " until=2020-01-01"


@story("docs/cli-service.md")
def _(reader: Reader) -> None:
    reader.do("penstock serve --tokens")
    reader.write(tokens__txt=f"{ANN}{PAST}\n{BOB}\n{EVE}{PAST}\n")
    reader.step()
    reader.write(tokens__txt=f"{ANN}\n{BOB}\n")
    reader.step()
    reader.serve("penstock serve --cost-ceiling 5")
    reader.step()
    (reader.folder / "graphs").mkdir()
    for instructions in ("first", "second"):
        reader.write(**{"graphs/flow__json": document(instructions=instructions)})
        reader.serve("penstock serve graphs/")
    reader.write(**{"graphs/flow__json": document("gpt-9")}, app__py=GRAPH.format(name="report", step="write"))
    reader.step()
    reader.write(unpriced__py=UNPRICED, twice__json=document("unpriced", "unpriced"))
    reader.serve("penstock serve twice.json --models unpriced.py:models")
    reader.ids["01a1e22d-0b4c-7d0e-8e6b-6f0f3a1c9a44"] = reader.run("twice", "--input", '"dams"')
    reader.step()

    # A server that is stopped, while one of its runs ends and another one does not.
    reader.write(gates__py=GATES)
    reader.serve("penstock serve gates.py:low gates.py:high --log-format json")
    for gate in ("low", "high"):
        until(reader.start("penstock", "runs", "tail", started(reader, gate)), "node.started")
    reader.signal(signal.SIGINT, "stopping: ")
    (reader.folder / "low").touch()
    reader.signal(None, '"status": "completed"')
    reader.compare("".join(line for line in reader.stop().splitlines(True) if not line.startswith("{")))


@story("docs/chat-terminal.md")
def _(reader: Reader) -> None:
    reader.serve("penstock serve")
    reader.do("· calls send_mail")
    reader.write(mailer__py=MAILER, slow__py=SLOW, impatient__py=IMPATIENT)
    reader.serve("penstock serve mailer.py")
    with reader.terminal("chat", "mailer", "-m", "write to Ann") as terminal:
        reader.compare(terminal.until("[y/n]") + "[y/n]")

    # A server that is killed under those who follow a run, and who stop an answer.
    reader.serve("penstock serve --models slow.py:models")
    run = started(reader, "pipeline", "--input", '"count to 1000"')
    following = reader.start(sys.executable, "impatient.py", "runs", "tail", run, "--all")
    until(following, "text.delta")
    with reader.terminal("chat", "assistant", "-m", "count to 1000") as terminal:
        terminal.until("1, 2, 3,")
        reader.kill()
        assert following.stdout is not None
        reader.compare("".join(line for line in following.stdout if line.startswith("penstock: ")))
        terminal.type("\x03")
        terminal.until("penstock: the cancel")
        reader.compare("penstock: the cancel" + terminal.until("\n") + "\n")


@story("docs/runs.md")
def _(reader: Reader) -> None:
    reader.serve("penstock serve")
    reader.do("penstock runs show 01a1e228-d1a4")
    reader.penstock("runs", "tail", reader.ids["01a1e029-24b4-7629-8e04-a429c61ef6a1"])

    # Budgets that no grant raises: one inside a graph, and one of a day.
    reader.set(PENSTOCK_DB="sqlite:///other.db")
    reader.write(assistant__json=document(budget={"max_cost_usd": 0.00001}))
    reader.serve("penstock serve assistant.json")
    reader.ids["01a1e228-d1a4-7040-a229-cc72d3c3d8f7"] = reader.run("assistant", "--input", '"dams"', code=3)
    reader.do("penstock runs show 01a1e228-d8f9")
    reader.serve("penstock serve --user-daily 0.00001")
    reader.ids["01a1e228-d8f9-7724-a978-5fb918a83174"] = reader.run("pipeline", "--input", '"dams"', code=3)
    reader.step()

    # The runs of the page are in the first database.
    reader.set(PENSTOCK_DB="sqlite:///penstock.db")
    reader.serve("penstock serve")


@story("docs/bills.md")
def _(reader: Reader) -> None:
    reader.write(losing__py=LOSING, report__json=document("writer", max_output_tokens=4096))
    reader.serve("penstock serve report.json --models losing.py:models --prices losing.py:prices")
    reader.run("report", "--input", '"dams"', "--max-cost", "0.41", code=3)


@story("docs/backups.md")
def _(reader: Reader) -> None:
    reader.serve("penstock serve")


@story("docs/doctor.md")
def _(reader: Reader) -> None:
    soon = (datetime.now(UTC) + timedelta(days=3)).date().isoformat()
    reader.write(tokens__txt=f"{ANN}{PAST}\n{BOB} until={soon}\n")
    reader.serve("penstock serve --db sqlite:///penstock.db")
    reader.kill()


@story("docs/cli.md")
def _(reader: Reader) -> None:
    reader.do("cost ")
    reader.compare(live_view())
    reader.do("? Publish this?")
    reader.write(publish__json=PUBLISH)
    options = ("--executors", "penstock.nodes:executors", "--input", '"The gate held."')
    with reader.terminal("run", str(reader.folder / "publish.json"), *options) as terminal:
        terminal.until("? ")
        question = terminal.until(" › ")
        reader.compare(f"? {question} › edit The gate held, and the lake froze.")
        terminal.type("edit The gate held, and the lake froze.\n")
        terminal.until("completed")


PUBLISH = """{
  "nodes": [
    {"id": "start", "type": "input"},
    {"id": "editor", "type": "approval", "data": {"question": "Publish this?"}}
  ],
  "edges": [{"id": "e", "source": "start", "target": "editor", "data": {"channel": "flow"}}]
}"""


def live_view() -> str:
    """Return a frame of a run: what the live view draws while the last call of a step is under way."""
    calls = Calls(["outline", "draft", "review"])

    def draw(run: ContainedRun) -> str:
        log = run.history()
        for trace in log:
            if isinstance(trace, Shown):
                calls.add(run_event(trace, log[0].at_ms))
        lines = frame(calls, run.balance, 2.8, 70, 24)
        return "".join(f"{''.join(text for text, _ in line).rstrip()}\n" for line in lines)

    def draft(run: ContainedRun) -> str:
        run.tool(str, name="search")
        read = Reported.of("read", cost_usd="0.0348", input_tokens=11_000, output_tokens=420, model="fake-1")
        run.llm(lambda: read, name="read", model="fake-1", cost_hint_usd=0.04)
        return str(run.llm(lambda: draw(run), name="conclude", model="fake-1", cost_hint_usd=0.093))

    with contain(max_cost_usd=0.20, max_steps=20) as run:
        run.tool(str, name="outline")
        return str(run.tool(lambda: draft(run), name="draft"))


@story("docs/server.md")
def _(reader: Reader) -> None:
    reader.do("id: ")
    id, event, data = (line.partition(": ")[2] for line in reader.next_text().splitlines())
    shown = json.loads(data)
    RUN_EVENT.validate_python(shown)
    assert (id, event) == (str(shown["seq"]), shown["type"])
    first, second = (reader.run("assistant", "--input", '"count to 2"') for _ in range(2))
    reader.replaced = {"RUN@": f"{first}@", "RUN2@17": f"{second}@1"}
    reader.do("penstock serve graphs/")
    (reader.folder / "graphs").mkdir()
    reader.write(**{"graphs/flow__json": document()})


@story("docs/money.md")
def _(reader: Reader) -> None:
    reader.serve("penstock serve --daily 20")
    reader.run("assistant", "--input", '"count to 2"')


@story("docs/openai-embeddings.md")
def _(reader: Reader) -> None:
    reader.set(OLLAMA_HOST=reader.provider().url)


@story("docs/deployment.md")
def _(reader: Reader) -> None:
    reader.replaced = {"postgresql://db/penstock": '"$FULL"', "postgresql://db/empty": '"$EMPTY"'}
    reader.set(FULL=reader.database(), EMPTY=reader.database())
    reader.penstock("db", "upgrade", "--db", reader.env["FULL"])


@story("docs/tutorial/two-machines.md")
def _(reader: Reader) -> None:
    reader.replaced = {"postgresql://penstock@db.internal/penstock": '"$DB"'}
    reader.set(DB=reader.database())
    reader.write(tokens__txt="ann:admin:secret-of-ann-0123456789\n", app__py=GRAPH.format(name="report", step="write"))
    reader.write(desk__py=MAILER)
    reader.step()
    reader.set(PENSTOCK_TOKEN="secret-of-ann-0123456789")


@story("docs/engines.md")
def _(reader: Reader) -> None:
    reader.replaced = {"postgresql://db/penstock": '"$DB"', "temporal:7233": reader.env["TEMPORAL_ADDRESS"]}
    reader.set(DB=reader.database())
    reader.write(app__py=GRAPH.format(name="report", step="write"))
    reader.do("penstock worker ")
    until(reader.begin(), "worker")
    reader.run("report", "--input", '"dams"')


@story("docs/exec.md")
def _(reader: Reader) -> None:
    provider = reader.provider()
    reader.set(OPENAI_BASE_URL=provider.openai_url)
    reader.replaced = {"sk-…": "sk-of-the-provider", "http://127.0.0.1:11434/v1": provider.openai_url}
    reader.write(agent__js=AGENT_JS, agent__py=AGENT_PY)


AGENT_JS = """
for (const prompt of ["How high is Hoover Dam?", "And Aswan?", "And Verzasca?"]) {
  const response = await fetch(process.env.OPENAI_BASE_URL + "/chat/completions", {
    method: "POST",
    headers: { Authorization: `Bearer ${process.env.OPENAI_API_KEY}`, "Content-Type": "application/json" },
    body: JSON.stringify({ model: "gpt-4o", max_tokens: 50, messages: [{ role: "user", content: prompt }] }),
  });
  if (!response.ok) process.exit(1);
}
"""
AGENT_PY = """
from openai import OpenAI

with OpenAI() as client:
    messages = [{"role": "user", "content": "How high is Hoover Dam?"}]
    client.chat.completions.create(model="gpt-4o-mini", max_tokens=50, messages=messages)
"""


@story("docs/gateway.md")
def _(reader: Reader) -> None:
    reader.replaced = {"sk-…": "sk-of-openai", "sk-ant-…": "sk-of-anthropic"}
    whole, cut = Say("word " * 50), Say("word " * 50, then=Cut())
    reader.set(OPENAI_BASE_URL=reader.provider([whole, whole, cut, cut]).openai_url)
    reader.do("curl ")
    key = reader.printed.splitlines()[0]
    reader.set(KEY=key)
    reader.do("penstock tokens runs")
    for run in ("nightly", "day", "day"):
        call(reader, key, run)


def call(reader: Reader, key: str, run: str) -> None:
    """Call the gateway in a run."""
    body = {"model": "gpt-4o-mini", "max_tokens": 50, "messages": [{"role": "user", "content": "hello"}]}
    headers = {"Authorization": f"Bearer {key}", "X-Penstock-Run": run}
    httpx2.post(f"{reader.url}/openai/v1/chat/completions", json=body, headers=headers)


plain("docs/tokens.md")
plain("docs/daily-budgets.md")


def token(reader: Reader, name: str, role: str) -> str:
    """Create a token in the database; return its secret."""
    return reader.penstock("tokens", "create", name, "--role", role, "--db", "sqlite:///penstock.db").splitlines()[0]


@story("docs/monitoring.md")
def _(reader: Reader) -> None:
    reader.set(PENSTOCK_TOKEN=token(reader, "ann", "user"))
    reader.do("tail ")
    started(reader, "assistant", "--input", '"count to 2"')
    until(reader.start("tail", "-n", "+1", "-f", "penstock.log"), '"event": "run"')


@story("docs/audit.md")
def _(reader: Reader) -> None:
    reader.replaced = {"2027-03-01": "2020-01-01"}
    reader.set(PENSTOCK_TOKEN=token(reader, "ann", "user"))
    reader.serve("penstock serve --db sqlite:///penstock.db")
    run = started(reader, "assistant", "--input", '"count to 1000"')
    reader.set(PENSTOCK_TOKEN=token(reader, "root", "admin"))
    reader.penstock("runs", "cancel", run, "--reason", "too dear")


@story("docs/personal-data.md")
def _(reader: Reader) -> None:
    reader.set(PENSTOCK_TOKEN=token(reader, "ann", "user"))
    reader.serve("penstock serve --db sqlite:///penstock.db")
    for _ in range(2):
        reader.run("assistant", "--input", '"count to 2"')
    reader.penstock("chat", "assistant", "-m", "count to 2")


@story("docs/payloads.md")
def _(reader: Reader) -> None:
    reader.set(PENSTOCK_TOKEN=token(reader, "ann", "user"))
    reader.serve("penstock serve --db sqlite:///penstock.db --record-payloads redacted")
    reader.set(RUN=reader.run("assistant", "--input", '"count to 2"'))


def started(reader: Reader, graph: str, *options: str) -> str:
    """Start a run; return its id."""
    return reader.penstock("runs", "start", graph, *options).partition(":")[0]


@story("docs/serving-programs.md")
def _(reader: Reader) -> None:
    (reader.folder / "graphs").mkdir()
    reader.write(**{"graphs/flow__json": document()})
    reader.do("penstock runs start greeter")
    reader.serve("penstock serve agent.py:agent")
    reader.do("penstock runs show")

    # A run whose program is changed after it was killed.
    reader.write(publisher__py=PUBLISHER.format(middle="check"))
    reader.serve("penstock serve publisher.py --lease 1")
    run = started(reader, "publisher")
    until(reader.start("penstock", "runs", "tail", run, "--json"), "node.progress", "announce", "started")
    reader.kill()
    reader.write(publisher__py=PUBLISHER.format(middle="proofread"), announce="")
    reader.serve("penstock serve publisher.py")
    reader.penstock("runs", "tail", run)
    reader.ids["01a1e22d-0b4c-7d0e-8e6b-6f0f3a1c9a44"] = run
    reader.do("  reloaded")

    # A program that is edited.
    app = (reader.folder / "app.py").read_text()
    reader.serve("penstock serve app.py:graph graphs/ --reload")
    for change, printed in (
        ({"app__py": app.replace('(depends_on=["name"])', "")}, "updated"),
        ({"graphs/more__json": document()}, "added"),
        ({"app__py": app.replace("@graph", "@grph", 1)}, "not reloaded"),
    ):
        reader.write(**change)
        reader.signal(None, printed)
    reader.compare(reader.stop())
    reader.write(app__py=app, bad__py="\n\n\nraise RuntimeError('no key')\n", two__py=app)
    agent = (reader.folder / "agent.py").read_text()
    reader.write(agent__py=agent + "other = Agent(ExampleModel(), name='my agent')\n")


PUBLISHER = """
import asyncio
from pathlib import Path

from penstock import Graph

graph = Graph("publisher")


@graph.step
def draft(context):
    return "draft"


@graph.step(depends_on=["draft"])
def {middle}(context):
    return "checked"


@graph.step(depends_on=["{middle}"])
def publish(context):
    return "published"


@graph.step(depends_on=["publish"])
async def announce(context):
    while not Path("announce").exists():
        await asyncio.sleep(0.01)
    return "announced"
"""
