"""`penstock serve app.py:graph agent.py:agent`: programs over every interface, killed, changed, reloaded and broken."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import OpenAI

from penstock.cli.exits import Failed
from penstock.cli.remote.connection import Connection
from penstock.cli.render.events import RunEvent
from tests.cli.conftest import Penstock
from tests.cli.service.test_serve import Server, served
from tests.mcp_library import over_http
from tests.storage.postgres import postgres_server, postgres_url

__all__ = ["postgres_server", "postgres_url"]

pytestmark = [pytest.mark.usefixtures("forks"), pytest.mark.requirement("X-13")]

COMMON = '''
import asyncio
from pathlib import Path


def log(text):
    with open("ran.log", "a") as file:
        file.write(text + "\\n")


async def until_allowed():
    """Wait for a file that the test creates."""
    while not Path("go").exists():
        await asyncio.sleep(0.01)
'''

APP = '''"""Publishes texts."""
from common import log, until_allowed
from penstock import Graph

graph = Graph("publisher")


@graph.step
async def draft(ctx):
    log("draft")
    return f"draft of {ctx.input}"


@graph.step(depends_on=["draft"])
async def check(ctx):
    log("check")
    return f"{ctx.input}, checked"


@graph.step(depends_on=["check"])
async def publish(ctx):
    log("publish")
    await until_allowed()
    return f"{ctx.input}, published"
'''

AGENT = '''"""Answers questions."""
from common import log, until_allowed
from penstock.agents import Agent, ScriptedModel, ToolCall


def look(what: str) -> str:
    """Look something up."""
    log(f"look {what}")
    return f"{what} is 7"


async def wait() -> str:
    """Wait for permission."""
    log("wait")
    await until_allowed()
    return "go on"


def reply(request):
    results = sum(message.role == "tool" for message in request.messages)
    users = [message.text for message in request.messages if message.role == "user"]
    log(f"model {results}")
    if results == 0 and users[-1].startswith("look"):
        return ToolCall("1", "look", {"what": "x"})
    if results == 1:
        return ToolCall("2", "wait", {})
    return f"You wrote {' and '.join(users)}."


agent = Agent(ScriptedModel(reply, piece_characters=4), "Be brief.", [look, wait], name="helper")
'''

CALLING = '''"""Calls tools of the client."""
from common import log
from penstock.agents import Agent, ScriptedModel, ToolCall


def reply(request):
    results = [message.text for message in request.messages if message.role == "tool"]
    log(f"model {len(results)}")
    return f"It is {results[-1]}." if results else ToolCall("1", "weather", {"city": "Rome"})


models = {"caller": ScriptedModel(reply)}
agent = Agent(models["caller"], name="helper")
'''


@pytest.fixture
def programs(directory: Path) -> Path:
    """A folder with two programs and a module that they share, which may run to their ends."""
    for name, text in (("common.py", COMMON), ("app.py", APP), ("agent.py", AGENT)):
        (directory / name).write_text(text)
    (directory / "go").touch()
    return directory


def ran(directory: Path) -> list[str]:
    """What the programs have done since the last call of this function, in any process."""
    log = directory / "ran.log"
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    log.unlink(missing_ok=True)
    return lines


KEPT = "sqlite:///kept.db"


@contextmanager
def both(*options: str, database: str = KEPT) -> Iterator[Server]:
    with served("app.py:graph", "agent.py:agent", "--db", database, "--lease", "2", *options) as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> str:
    return KEPT if request.param == "sqlite" else str(request.getfixturevalue("postgres_url"))


def until(server: Connection, run_id: str, type: str, **data: Any) -> RunEvent:
    """Wait for an event of a run."""
    for event in server.events(run_id):
        if event.type == type and data.items() <= {**event.data, **_inner(event)}.items():
            return event
    raise AssertionError(f"the run ended without {type} {data}")


def _inner(event: RunEvent) -> dict[str, Any]:
    inner = event.data.get("data")
    return {key: value for key, value in inner.items() if isinstance(value, str)} if isinstance(inner, dict) else {}


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


# Every interface.


def test_openai_sdk_gets_answers_of_a_graph_and_of_an_agent_whole_and_in_pieces(programs: Path) -> None:
    answers = {"publisher": "draft of hello, checked, published", "helper": "You wrote hello."}
    with both() as server, OpenAI(api_key="none", base_url=f"{server.url}/v1", timeout=60, max_retries=0) as client:
        assert {model.id for model in client.models.list()} == set(answers)
        for model, answer in answers.items():
            whole = client.chat.completions.create(model=model, messages=user("hello"))
            assert whole.choices[0].message.content == answer
            with client.chat.completions.create(model=model, messages=user("hello"), stream=True) as chunks:
                pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
            assert "".join(pieces) == answer
            history = [*user("one"), {"role": "assistant", "content": "yes"}, *user("two")]
            later: Any = client.chat.completions.create(model=model, messages=history)
            assert later.choices[0].message.content in ("draft of two, checked, published", "You wrote one and two.")
        assert server.stop(signal.SIGTERM)[0] == 0


async def test_programs_are_tools_of_an_mcp_client(programs: Path) -> None:
    with both() as server:
        async with over_http(f"{server.url}/mcp", {}) as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
            published = await client.call_tool("publisher", {"input": ["this", 7]})
            answered = await client.call_tool("helper", {"input": "hello"})
    assert (tools["publisher"].description, tools["helper"].description) == ("Publishes texts.", "Answers questions.")
    texts = [content.text for answer in (published, answered) for content in answer.content]
    assert texts == ["draft of ['this', 7], checked, published", "You wrote hello."]


def test_rest_runs_programs_and_chats_have_their_history(programs: Path, penstock: Penstock) -> None:
    with both() as server, Connection(server.url) as connection:
        run_id = connection.post("/api/runs", {"graph_id": "publisher", "input": "this"})["id"]
        assert until(connection, run_id, "run.completed").data["output"] == "draft of this, checked, published"
        turn = connection.post("/api/agents/helper/chat", {"content": "one"})
        until(connection, turn["run_id"], "run.completed")
        again = connection.post(f"/api/chats/{turn['chat_id']}/messages", {"content": "two"})
        assert until(connection, again["run_id"], "run.completed").data["output"] == "You wrote one and two."
        ended = penstock("chat", "publisher", "--message", "that", "--url", server.url)
        assert ended.out.startswith("draft of that, checked, published")


def test_graphs_of_programs_are_listed_with_their_source_and_cannot_be_changed(programs: Path) -> None:
    with both() as server, Connection(server.url) as connection, httpx2.Client(base_url=server.url) as http:
        listed = {graph["id"]: graph for graph in connection.get("/api/graphs")["graphs"]}
        assert {id: (one["source"], one["valid"], one["chat"], one["made_for_chat"]) for id, one in listed.items()} == {
            "publisher": ("program", True, True, False),
            "helper": ("program", True, True, True),
        }
        document = connection.get("/api/graphs/publisher")["document"]
        steps = document["nodes"][1]["data"]["structure"]["steps"]
        assert [(step["id"], step["after"]) for step in steps] == [
            ("draft", []),
            ("check", ["draft"]),
            ("publish", ["check"]),
        ]
        other = {"nodes": [], "edges": []}
        refused = [
            http.put("/api/graphs/publisher", json={"document": other}),
            http.delete("/api/graphs/publisher"),
            http.post("/api/graphs", json={"id": "publisher", "name": "p", "document": other}),
        ]
        for response in refused:
            assert response.status_code == 409
            assert "graph publisher is a Python program and cannot be changed here; change its code" in response.text
        copied = http.post("/api/graphs", json={"id": "copy", "name": "c", "document": document})
        assert (copied.status_code, "only the server saves graphs" in copied.text) == (422, True)
        mine = http.post("/api/graphs", json={"id": "mine", "name": "m", "document": other})
        assert (mine.status_code, mine.json()["source"]) == (201, "document")


def test_program_that_is_no_longer_served_is_listed_as_such_and_may_be_removed(programs: Path) -> None:
    with both() as server:
        assert "graphs        publisher, helper\n" in server.greeting
    with served("agent.py", "--db", "sqlite:///kept.db") as server, Connection(server.url) as connection:
        assert "graphs        helper\n" in server.greeting
        graph = connection.get("/api/graphs/publisher")
        assert [problem["code"] for problem in graph["problems"]] == ["unknown_program"]
        assert "program 'publisher' is not served here; start penstock serve with it" in graph["problems"][0]["message"]
        with pytest.raises(Failed, match="program 'publisher' is not served here"):
            connection.post("/api/runs", {"graph_id": "publisher"})
        assert httpx2.delete(f"{server.url}/api/graphs/publisher").status_code == 204


# Killed and resumed.


def test_killed_graph_is_resumed_without_repeating_recorded_steps(programs: Path, database: str) -> None:
    (programs / "go").unlink()
    with both(database=database) as server, Connection(server.url) as connection:
        run_id = connection.post("/api/runs", {"graph_id": "publisher", "input": "this"})["id"]
        until(connection, run_id, "node.progress", node="publish", event="started")
        assert server.stop(signal.SIGKILL)[0] == -signal.SIGKILL
    assert ran(programs) == ["draft", "check", "publish"]
    (programs / "go").touch()
    with both(database=database) as server, Connection(server.url) as connection:
        assert until(connection, run_id, "run.completed").data["output"] == "draft of this, checked, published"
        assert connection.get(f"/api/runs/{run_id}")["epoch"] == 2
    assert ran(programs) == ["publish"]


def test_killed_agent_is_resumed_without_repeating_recorded_calls(programs: Path, database: str) -> None:
    (programs / "go").unlink()
    with both(database=database) as server, Connection(server.url) as connection:
        run_id = connection.post("/api/runs", {"graph_id": "helper", "input": "look at x"})["id"]
        until(connection, run_id, "call.started", kind="tool", name="wait")
        assert server.stop(signal.SIGKILL)[0] == -signal.SIGKILL
    assert ran(programs) == ["model 0", "look x", "model 1", "wait"]
    (programs / "go").touch()
    with both(database=database) as server, Connection(server.url) as connection:
        assert until(connection, run_id, "run.completed").data["output"] == "You wrote look at x."
        replayed = [event.data["name"] for event in connection.log(run_id) if event.data.get("replayed") is True]
    assert ran(programs) == ["wait", "model 2"]
    assert "look" in replayed


WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


@pytest.mark.requirement("X-14")
@pytest.mark.parametrize("model", ["helper", "clerk"])
def test_run_that_waits_for_the_clients_tools_is_resumed_by_the_next_request(
    programs: Path, database: str, model: str
) -> None:
    """An agent in Python and an agent node: the server is killed between the calls and their results."""
    clerk: dict[str, Any] = {
        "id": "clerk",
        "nodes": [
            {"id": "start", "type": "chat-start", "data": {}},
            {"id": "agent", "type": "agent", "data": {"model": "caller", "stream": True}},
        ],
        "edges": [{"id": "e", "source": "start", "target": "agent", "data": {"channel": "flow"}}],
    }
    (programs / "clerk.json").write_text(json.dumps(clerk))
    (programs / "agent.py").write_text(CALLING)
    options = ("clerk.json", "--models", "agent.py:models")
    question: list[Any] = user("How is the weather?")
    with (
        both(*options, database=database) as server,
        OpenAI(api_key="none", base_url=f"{server.url}/v1", timeout=60, max_retries=0) as client,
    ):
        first: Any = client.chat.completions.create(model=model, messages=question, tools=[WEATHER])
        (call,) = first.choices[0].message.tool_calls
        assert server.stop(signal.SIGKILL)[0] == -signal.SIGKILL
    assert ran(programs) == ["model 0"]
    results = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    with (
        both(*options, database=database) as server,
        OpenAI(api_key="none", base_url=f"{server.url}/v1", timeout=60, max_retries=0) as client,
        Connection(server.url) as connection,
    ):
        history: Any = [*question, first.choices[0].message, results]
        last: Any = client.chat.completions.create(model=model, messages=history, tools=[WEATHER])
        assert last.choices[0].message.content == "It is sunny."
        assert last.penstock["run_id"] == first.penstock["run_id"]
        (run,) = connection.get("/api/runs")["runs"]
        assert (run["status"], run["id"]) == ("completed", first.penstock["run_id"])
        assert server.stop(signal.SIGTERM)[0] == 0
    assert ran(programs) == ["model 1"]


def test_changed_program_resumes_what_matches_and_says_what_does_not(programs: Path, penstock: Penstock) -> None:
    (programs / "go").unlink()
    with both() as server, Connection(server.url) as connection:
        run_id = connection.post("/api/runs", {"graph_id": "publisher", "input": "this"})["id"]
        until(connection, run_id, "node.progress", node="publish", event="started")
        assert server.stop(signal.SIGKILL)[0] == -signal.SIGKILL
    ran(programs)
    (programs / "go").touch()
    (programs / "app.py").write_text(APP.replace("check", "proofread"))
    with both() as server, Connection(server.url) as connection:
        assert "updated       app.py:graph: publisher is now version 2" in server.greeting
        assert until(connection, run_id, "run.completed").data["output"] == "draft of this, proofreaded, published"
        shown = penstock("runs", "show", run_id, "--url", server.url).out
        assert server.stop(signal.SIGTERM)[0] == 0
    assert ran(programs) == ["proofread", "publish"]
    assert "program  program 'publisher' has changed since this run was submitted" in shown
    assert "used       draft\n" in shown
    assert "not used   check: there is no such step any more\n" in shown


# Reload.


def test_reload_serves_changed_programs_modules_and_graphs_and_keeps_the_old_ones_if_they_fail(programs: Path) -> None:
    (programs / "flows").mkdir()
    flow: dict[str, Any] = {"nodes": [{"id": "a", "type": "text", "data": {"text": "first"}}], "edges": []}
    (programs / "flows" / "flow.json").write_text(json.dumps(flow))
    (programs / "go").unlink()
    with both("flows", "--reload") as server, Connection(server.url) as connection:

        def output(graph: str) -> Any:
            run_id = connection.post("/api/runs", {"graph_id": graph, "input": "it"})["id"]
            return until(connection, run_id, "run.completed").data["output"]

        def after(text: str) -> str:
            return printed_until(server, text)

        old = connection.post("/api/runs", {"graph_id": "publisher", "input": "it"})["id"]
        until(connection, old, "node.progress", node="publish", event="started")
        replaced(programs / "common.py", COMMON.replace("file.write(text", "file.write('log: ' + text"))
        after("reloaded      common.py")
        replaced(programs / "app.py", APP.replace("published", "printed").replace('"check"]', '"draft"]'))
        assert "updated       app.py:graph: publisher is now version 2" in after("updated")
        (programs / "go").touch()
        assert until(connection, old, "run.completed").data["output"] == "draft of it, checked, published"
        ran(programs)
        assert output("publisher") == {"check": "draft of it, checked", "publish": "draft of it, printed"}
        assert ran(programs)[0] == "log: draft"
        replaced(programs / "app.py", APP + "\n1 / 0\n")
        printed = after("not reloaded")
        assert "app.py cannot be imported: ZeroDivisionError: division by zero (app.py, line 26)" in printed
        assert output("publisher") == {"check": "draft of it, checked", "publish": "draft of it, printed"}
        assert output("helper") == "You wrote it."
        flow["nodes"][0]["data"]["text"] = "second"
        replaced(programs / "flows" / "flow.json", json.dumps(flow))
        after("flow is now version 2")
        assert output("flow") == "second"
        replaced(programs / "app.py", APP)
        after("publisher is now version 3")
        assert output("publisher") == "draft of it, checked, published"
        assert server.stop(signal.SIGTERM)[0] == 0


def test_reload_names_what_was_added_and_removed_and_ignores_other_files(programs: Path) -> None:
    (programs / "flows").mkdir()
    flow = {"nodes": [{"id": "a", "type": "text", "data": {"text": "first"}}], "edges": []}
    (programs / "flows" / "flow.json").write_text(json.dumps(flow))
    with both("flows", "--reload") as server:
        replaced(programs / "notes.py", "1 / 0")
        replaced(programs / "flows" / "more.json", json.dumps(flow))
        printed = printed_until(server, "added")
        assert printed.endswith(f"  reloaded      more.json\n  added         {Path('flows', 'more.json')}: more\n")
        assert "notes.py" not in printed
        replaced(programs / "agent.py", AGENT.replace('"helper"', '"clerk"'))
        assert "  added         agent.py:agent: clerk\n" in (printed := printed_until(server, "no longer"))
        assert printed.endswith("  removed       agent.py:agent: helper is no longer served\n")
        (programs / "flows" / "more.json").unlink()
        printed = printed_until(server, "removed")
        assert printed.endswith("it is served as it was stored; archive it with DELETE /api/graphs/more\n")


def test_server_ends_while_a_changed_program_is_imported_for_ever(programs: Path) -> None:
    with both("--reload") as server:
        replaced(
            programs / "agent.py", f"{AGENT}\nopen('begun', 'w').close()\nwhile True: __import__('time').sleep(1)\n"
        )
        while not (programs / "begun").exists():
            assert httpx2.get(f"{server.url}/health").status_code == 200
        assert server.stop(signal.SIGTERM)[0] == 0


def printed_until(server: Server, text: str) -> str:
    """Everything printed up to the line that has this text."""
    printed = ""
    for line in server.process.stdout:
        printed += line
        if text in line:
            return printed
    raise AssertionError(printed)


def replaced(path: Path, text: str) -> None:
    """Write a file at once, as editors do."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


def test_reload_without_anything_to_watch_is_refused(penstock: Penstock) -> None:
    ended = penstock("serve", "--reload", "--port", "0", "--db", "memory:")
    assert ended.code == 64
    assert ended.err.startswith("penstock: --reload needs graphs or programs to watch")


# Programs that cannot be served.

BROKEN = "from penstock import Graph\ngraph = Graph('g')\nnumber = 7\nraise RuntimeError('no key')\n"
CYCLE = """
from penstock import Graph
graph = Graph('cycle')
graph.step(lambda ctx: 1, 'a', depends_on=['b'])
graph.step(lambda ctx: 1, 'b', depends_on=['a'])
"""


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("broken.py:graph", "broken.py cannot be imported: RuntimeError: no key (broken.py, line 4)"),
        ("nothing.py:graph", "there is no file 'nothing.py'"),
        ("no_module:graph", "there is no module 'no_module', neither in this directory nor installed"),
        ("agent.py:agnt", "agent.py has no attribute 'agnt'; did you mean 'agent'? its graphs and agents are: agent"),
        ("agent.py:look", "agent.py:look is a function that needs arguments"),
        ("common.py:Path", "common.py:Path is a class; it must be a Graph, an Agent, a GraphSpec or a function"),
        ("common.py", "common.py has no Graph and no Agent; add one called 'graph' or 'agent'"),
        ("same.py:other", "same.py:other and app.py:graph both have a graph called 'publisher'; rename one"),
        ("same.py:spaced", "same.py:spaced: 'my agent' is not a valid graph id; give it another name"),
        ("cycle.py", "cycle.py is not a valid graph: steps: "),
        ("bad.json", "bad.json is not a valid graph: $: this is not JSON"),
    ],
)
def test_program_that_cannot_be_served_is_named_and_the_others_are_served(
    programs: Path, target: str, why: str
) -> None:
    (programs / "broken.py").write_text(BROKEN)
    (programs / "cycle.py").write_text(CYCLE)
    (programs / "bad.json").write_text("{")
    (programs / "same.py").write_text(
        "from penstock import Graph\nfrom penstock.agents import Agent, ScriptedModel\nother = Graph('publisher')\n"
        "other.step(lambda ctx: 1, 'a')\nspaced = Agent(ScriptedModel([]), name='my agent')\n"
    )
    with served("app.py:graph", target, "agent.py:agent", "--db", "memory:") as server:
        assert "graphs        publisher, helper\n" in server.greeting
        (line,) = [line for line in server.greeting.splitlines() if "not served" in line]
        assert why in line
        with Connection(server.url) as connection:
            run_id = connection.post("/api/runs", {"graph_id": "helper", "input": "hello"})["id"]
            assert until(connection, run_id, "run.completed").data["output"] == "You wrote hello."
        assert server.stop(signal.SIGTERM)[0] == 0


def test_server_without_anything_to_serve_exits_with_every_reason(programs: Path, penstock: Penstock) -> None:
    (programs / "broken.py").write_text(BROKEN)
    ended = penstock("serve", "broken.py:graph", "agent.py:agnt", "--port", "0", "--db", "memory:")
    assert (ended.code, ended.out) == (2, "")
    first, second = ended.err.splitlines()
    assert first == "penstock: broken.py cannot be imported: RuntimeError: no key (broken.py, line 4)"
    assert second.startswith("penstock: agent.py has no attribute 'agnt'; did you mean 'agent'?")
