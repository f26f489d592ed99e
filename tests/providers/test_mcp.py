"""Tools of MCP servers over standard input and output: honest servers, hostile ones, and ones that die."""

from __future__ import annotations

import asyncio
import os
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from penstock import Budget, CancelledError, ExecutionContext, InvalidValue
from penstock.agents import Agent, ScriptedModel, ToolCall, ToolChain
from penstock.agents.messages import ToolResult
from penstock.providers.mcp import HttpServer, McpError, McpServers, McpTools, StdioServer
from penstock.providers.mcp.tools import offered_name
from penstock.testing import census
from tests.mcp_library import IMPORT_SERVER
from tests.soak import scaled

HONEST = """
    IMPORT_SERVER

    server = MCPServer("honest")

    @server.tool()
    def add(a: int, b: int) -> int:
        "Add two numbers."
        return a + b

    @server.tool()
    def fail() -> str:
        raise ValueError("it broke")

    server.run("stdio")
"""

RAW = """
    import json, os, sys, time

    def say(**message):
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\\n")
        sys.stdout.flush()

    def tool(name, **more):
        return {"name": name, "description": "", "inputSchema": {"type": "object"}, **more}

    def text(content, **more):
        return {"content": [{"type": "text", "text": content}], **more}

    def tools(params):
        return {"tools": [tool("act")]}

    def act(arguments, id):
        return text("done")

    START

    for line in sys.stdin:
        request = json.loads(line)
        if os.environ.get("LOG"):
            with open(os.environ["LOG"], "a") as log:
                log.write(request["method"] + "\\n")
        id, method, params = request.get("id"), request.get("method"), request.get("params") or {}
        if id is None:
            continue
        if method == "initialize":
            capabilities = {"tools": {}}
            info = {"name": "raw", "version": "1"}
            version = params["protocolVersion"]
            say(id=id, result={"protocolVersion": version, "capabilities": capabilities, "serverInfo": info})
        elif method == "tools/list":
            say(id=id, result=tools(params))
        elif method == "tools/call":
            result = act(params.get("arguments") or {}, id)
            if result is not None:
                say(id=id, result=result)
        else:
            say(id=id, error={"code": -32601, "message": "no such method"})
"""

Written = Callable[..., StdioServer]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """A server from its source; `start` replaces parts of the raw one."""

    def write(start: str = "", *, source: str = RAW, **options: Any) -> StdioServer:
        script = tmp_path / "server.py"
        program = textwrap.dedent(source).replace("IMPORT_SERVER", IMPORT_SERVER)
        script.write_text(program.replace("START", textwrap.dedent(start)))
        return StdioServer([sys.executable, str(script)], **{"grace_s": 0.5, **options})

    return write


async def run(
    tools: McpTools, name: str = "act", context: ExecutionContext | None = None, **arguments: Any
) -> ToolResult:
    if context is not None:
        return await tools.execute(context, ToolCall("1", name, arguments))
    with ExecutionContext() as made:
        return await tools.execute(made, ToolCall("1", name, arguments))


# Configuration.


def test_a_server_is_selected_by_a_configured_name_only() -> None:
    servers = McpServers({"files": StdioServer(["true"])})
    assert servers.tools("files").name == "files"
    for name in ("other", "rm -rf /", ["true"], {"command": ["true"]}, None, StdioServer(["true"])):
        with pytest.raises(InvalidValue, match="files"):
            servers.tools(name)  # type: ignore[arg-type]
    with pytest.raises(InvalidValue):
        McpTools("files")  # type: ignore[arg-type]


@pytest.mark.parametrize("command", ["true", [], [""], [1], None, ["a\0b"]])
def test_a_command_is_a_list_of_texts(command: Any) -> None:
    with pytest.raises(InvalidValue):
        StdioServer(command)


@pytest.mark.parametrize("name", ["", "a b", "../x", "é", 7])
def test_a_server_has_a_plain_name(name: Any) -> None:
    with pytest.raises(InvalidValue):
        McpServers({name: StdioServer(["true"])})


def test_what_a_server_is_given_in_confidence_is_not_shown() -> None:
    servers = [StdioServer(["true"], env={"KEY": "secret"}), HttpServer("https://a.example", {"X-Key": "secret"})]
    assert "secret" not in repr(servers)


# An honest server.


async def test_an_agent_uses_the_tools_of_a_server(written: Written) -> None:
    servers = McpServers({"math": written(source=HONEST)})
    async with servers.tools("math", prefix="math_") as tools:
        assert isinstance(tools, ToolChain)
        assert [spec.name for spec in tools.specs] == ["math_add", "math_fail"]
        spec = tools.specs[0]
        assert spec.description == "Add two numbers."
        assert set(spec.parameters["properties"]) == {"a", "b"}
        model = ScriptedModel([ToolCall("1", "math_add", {"a": 2, "b": 3}), "five"])
        result = await Agent(model, tools=tools).run("2 + 3?")
        assert result.output == "five"
        assert [message.text for message in result.messages if message.role == "tool"] == ["5"]

        failed = await run(tools, "math_fail")
        assert failed.is_error
        assert "fail" in failed.content
        wrong = await run(tools, "math_add", a="x", b=[])
        assert wrong.is_error
        assert "a" in wrong.content
        assert len([*tools]) == 2


async def test_a_call_is_one_contained_call_of_the_run(written: Written) -> None:
    async with McpTools(written()) as tools:
        with ExecutionContext(budget=Budget(max_steps=1)) as context:
            assert (await run(tools, context=context)).content == "done"
            with pytest.raises(Exception, match="step"):
                await run(tools, context=context)
        nodes = context.graph.snapshot()["nodes"].values()
        assert [(node["name"], node["status"]) for node in nodes if node["kind"] == "tool"] == [
            ("act", "success"),
            ("act", "halt"),
        ]


async def test_calls_run_side_by_side(written: Written) -> None:
    swapped = """
        waiting = []
        def act(arguments, id):
            waiting.append((id, arguments["n"]))
            if len(waiting) == 2:
                for id, n in reversed(waiting):
                    say(id=id, result=text(str(n)))
    """
    async with McpTools(written(swapped)) as tools:
        answers = await asyncio.gather(run(tools, n=1), run(tools, n=2))
        assert [answer.content for answer in answers] == ["1", "2"]


async def test_only_the_selected_tools_are_offered(written: Written) -> None:
    two = "def tools(params): return {'tools': [tool('act'), tool('other')]}"
    async with McpTools(written(two), only=["act"]) as tools:
        assert [spec.name for spec in tools.specs] == ["act"]
    with pytest.raises(McpError, match="no tool missing"):
        async with McpTools(written(two), only=["act", "missing"]):
            pass


async def test_tools_come_in_pages(written: Written) -> None:
    pages = """
        def tools(params):
            page = int(params.get("cursor") or 0)
            return {"tools": [tool(f"t{page}")], **({"nextCursor": str(page + 1)} if page < 2 else {})}
    """
    async with McpTools(written(pages)) as tools:
        assert [spec.name for spec in tools.specs] == ["t0", "t1", "t2"]


async def test_a_result_is_rendered_as_text_and_other_content_is_described(written: Written) -> None:
    several = """
        def act(arguments, id):
            image = {"type": "image", "data": "AAAA", "mimeType": "image/png"}
            resource = {"type": "resource", "resource": {"uri": "file:///a", "text": "inside"}}
            link = {"type": "resource_link", "name": "b", "uri": "file:///b"}
            return {"content": [{"type": "text", "text": "grüße \\U0001f600"}, image, resource, link]}
    """
    async with McpTools(written(several)) as tools:
        answer = await run(tools)
        assert answer.content == "grüße \U0001f600\n[image, image/png, 3 bytes]\ninside\n[b: file:///b]"


async def test_structured_content_is_used_if_there_is_no_text(written: Written) -> None:
    async with McpTools(written("def act(a, id): return {'content': [], 'structuredContent': {'a': 1}}")) as tools:
        assert (await run(tools)).content == '{"a": 1}'


async def test_the_environment_is_not_passed_on(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "secret")
    show = "def act(a, id): return text(repr(dict(os.environ)))"
    async with McpTools(written(show, env={"GIVEN": "1"})) as tools:
        shown = (await run(tools)).content
        assert "SECRET_KEY" not in shown
        assert "'GIVEN': '1'" in shown


async def test_tools_are_used_between_opening_and_closing_only(written: Written) -> None:
    tools = McpTools(written())
    with pytest.raises(McpError, match="not open"):
        _ = tools.specs
    async with tools:
        (offered,) = tools
        with pytest.raises(McpError, match="open already"):
            await tools.__aenter__()
    with pytest.raises(McpError, match="not open"):
        await run(tools)
    with ExecutionContext() as context:
        late = await offered.call(context, {})
    assert isinstance(late.error, McpError)
    async with tools:
        assert (await run(tools)).content == "done"


# Names.


@pytest.mark.parametrize("name", ["a.b", "naïve", "x" * 200, "", "a b", "\ud800", "😀"])
def test_a_name_no_provider_accepts_is_made_into_one(name: str) -> None:
    from penstock.agents.tools import TOOL_NAME

    assert TOOL_NAME.fullmatch(offered_name("pre_", name))
    assert offered_name("", name) != offered_name("", name + "?")


async def test_a_tool_of_an_odd_name_is_called_by_its_own(written: Written) -> None:
    odd = """
        def tools(params): return {"tools": [tool("süß/1"), tool("süß/2"), tool("x" * 128)]}
        def act(arguments, id): return text(params["name"])
    """
    async with McpTools(written(odd)) as tools:
        names = [spec.name for spec in tools.specs]
        assert len(set(names)) == 3
        assert [(await run(tools, name)).content for name in names] == ["süß/1", "süß/2", "x" * 128]


# Hostile servers: refused when they are opened.


@pytest.mark.parametrize(
    ("start", "problem"),
    [
        ("def tools(params): return {'tools': [tool('a'), tool('a')]}", "two tools of the name 'a'"),
        ("def tools(params): return {'tools': [tool(f't{n}') for n in range(129)]}", "more than 128 tools"),
        ("def tools(params): return {'tools': [], 'nextCursor': 'again'}", "does not end"),
        (
            "def tools(params): return {'tools': [tool('a', inputSchema={'type': 'array'})]}",
            "arguments by name|not of the form",
        ),
        (
            "def tools(params): return {'tools': [tool('a', inputSchema={'type': 'object', 'x': 'y' * 60_000})]}",
            "longer than",
        ),
        ("def tools(params): return {'tools': 7}", "not of the form"),
        ("def tools(params): return {}", "not of the form"),
        ("def tools(params): sys.exit(3)", "closed its output"),
        ("sys.stderr.write('no such database'); sys.exit(1)", "no such database"),
        ("for n in range(1000): print('garbage')", "no messages"),
        ("sys.stdout.write('x' * 20_000_000); sys.stdout.flush()", "larger than"),
        ("sys.stdout.buffer.write(bytes(range(256)) * 100); sys.stdout.flush(); sys.exit()", "closed its output"),
        ("sys.stdout.write('[' * 100_000 + '\\n'); sys.stdout.flush(); sys.exit()", "closed its output"),
    ],
)
async def test_a_server_that_cannot_be_used_is_refused_when_it_is_opened(
    written: Written, start: str, problem: str
) -> None:
    with pytest.raises(McpError, match=problem):
        async with McpTools(written(start)):
            pass


async def test_the_error_for_a_missing_program_names_it() -> None:
    with pytest.raises(McpError, match="FileNotFoundError"):
        async with McpTools(StdioServer(["/no/such/program"])):
            pass


async def test_a_server_that_never_answers_is_given_up(written: Written) -> None:
    with pytest.raises(McpError, match="did not start within"):
        async with McpTools(written("for line in sys.stdin: pass", start_timeout_s=0.5)):
            pass


async def test_a_long_description_is_cut(written: Written) -> None:
    long = "def tools(params): return {'tools': [tool('a', description='x' * 100_000)]}"
    async with McpTools(written(long)) as tools:
        assert len(tools.specs[0].description) == 4_000


async def test_some_lines_that_are_no_messages_do_no_harm(written: Written) -> None:
    async with McpTools(written("print('welcome!'); print(); print('{}'); print('[1]'); print('null')")) as tools:
        assert (await run(tools)).content == "done"


# Hostile servers: while a call is under way.


@pytest.mark.parametrize(
    ("act", "problem"),
    [
        ("sys.exit(1)", "closed its output"),
        ("os.kill(os.getpid(), 9)", "closed its output"),
        ("os.close(1); time.sleep(1000)", "closed its output"),
        ("return text('x' * 50_000_000)", "larger than 10,000,000 bytes"),
        ("sys.stdout.write('x' * 50_000_000); sys.stdout.flush(); time.sleep(1000)", "larger than"),
        ("return {'content': 7}", "not of the form"),
        ("return {'content': [{'type': 'unknown'}]}", "not of the form"),
        ("return {'resultType': 'input_required', 'inputRequests': {}}", ""),
        ("say(id=id, error={'code': -32000, 'message': 'out of order'})", "out of order"),
        ("return text('no water', isError=True)", "no water"),
    ],
)
async def test_a_failing_call_is_returned_to_the_model(written: Written, act: str, problem: str) -> None:
    async with McpTools(written(f"def act(arguments, id): {act}"), timeout_s=20) as tools:
        answer = await run(tools)
        assert answer.is_error
        assert problem in answer.content
        assert len(answer.content) < 3_000


async def test_an_answer_that_is_no_message_is_no_answer(written: Written) -> None:
    async with McpTools(written("def act(a, id): return 7"), timeout_s=0.2) as tools:
        answer = await run(tools)
        assert answer.is_error
        assert "stopped" in answer.content


async def test_a_server_that_broke_off_stays_broken_and_is_not_started_again(written: Written, tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with McpTools(written("def act(a, id): sys.exit(1)", env={"LOG": str(log)})) as tools:
        for _ in range(3):
            answer = await run(tools)
            assert answer.is_error
            assert "closed its output" in answer.content
    assert log.read_text().split().count("initialize") == 1


async def test_an_answer_to_an_unknown_request_is_dropped(written: Written) -> None:
    noisy = """
        def act(arguments, id):
            for n in range(1000):
                say(id=n + 10_000, result=text("not requested"))
                say(method="notifications/message", params={"level": "info", "data": "x"})
                say(method="notifications/tools/list_changed")
            say(id="evil", method="sampling/createMessage", params={"messages": [], "maxTokens": 1})
            return text("done")
        def tools(params, listed=[]):
            listed.append(1)
            return {"tools": [tool("act" if len(listed) == 1 else "changed")]}
    """
    async with McpTools(written(noisy)) as tools:
        assert (await run(tools)).content == "done"
        assert [spec.name for spec in tools.specs] == ["act"]


async def test_a_call_that_takes_too_long_is_a_tool_error_and_the_next_one_works(written: Written) -> None:
    once = """
        def act(arguments, id, seen=[]):
            seen.append(id)
            return None if len(seen) == 1 else text("done")
    """
    async with McpTools(written(once), timeout_s=0.3) as tools:
        slow = await run(tools)
        assert slow.is_error
        assert "stopped" in slow.content
        assert (await run(tools)).content == "done"


HANGS = """
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    def act(arguments, id):
        say(method="notifications/message", params={"level": "info", "data": "begun"})
        open(os.environ["BEGUN"], "w").close()
        time.sleep(1000)
"""


async def appeared(path: Path, text: str = "") -> None:
    """Another process has written the file, and this text into it; it has no other way to say so."""
    while not (path.exists() and text in path.read_text()):  # noqa: ASYNC110, ASYNC240
        await asyncio.sleep(0.01)


async def test_a_cancel_reaches_a_running_call_at_once_also_if_the_server_hangs(
    written: Written, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    server = written(HANGS, env={"BEGUN": str(begun)}, grace_s=0.1)
    async with McpTools(server) as tools:
        with ExecutionContext() as context:
            running = asyncio.ensure_future(run(tools, context=context))
            await appeared(begun)
            context.abort("enough")
            with pytest.raises(CancelledError):
                await running


async def test_a_cancel_is_sent_to_the_server(written: Written, tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with McpTools(written("def act(a, id): return None", env={"LOG": str(log)})) as tools:
        with ExecutionContext() as context:
            running = asyncio.ensure_future(run(tools, context=context))
            await appeared(log, "tools/call")
            context.abort("enough")
            with pytest.raises(CancelledError):
                await running
            await appeared(log, "notifications/cancelled")


@pytest.mark.parametrize("where", ["starting", "inside", "closing"])
async def test_a_task_that_is_cancelled_leaves_no_process(written: Written, tmp_path: Path, where: str) -> None:
    begun = tmp_path / "begun"
    stuck = "open(os.environ['BEGUN'], 'w').close(); time.sleep(1000)"
    server = written(stuck if where == "starting" else HANGS, env={"BEGUN": str(begun)}, grace_s=0.3)
    closing = asyncio.Event()

    async def use() -> None:
        async with McpTools(server) as tools:
            if where == "inside":
                await run(tools)
            begun.touch()
            hung = asyncio.ensure_future(run(tools))
            await asyncio.sleep(0)
            closing.set()
        with pytest.raises(asyncio.CancelledError):
            await hung

    using = asyncio.ensure_future(use())
    await (closing.wait() if where == "closing" else appeared(begun))
    using.cancel()
    with pytest.raises(asyncio.CancelledError):
        await using


def wait_for_the_end_of(pid: int) -> None:
    """It is not our child: there is nothing but looking, until the process that inherits it has noticed its death."""
    status = Path(f"/proc/{pid}/stat")
    with suppress(FileNotFoundError, ProcessLookupError):
        while status.read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)


async def test_what_a_server_has_started_ends_with_it(written: Written, tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    forks = f"""
        import subprocess
        child = subprocess.Popen(["sleep", "1000"])
        open({str(noted)!r}, "w").write(str(child.pid))
    """
    async with McpTools(written(forks)):
        pid = int(noted.read_text())
        os.kill(pid, 0)
    await asyncio.to_thread(wait_for_the_end_of, pid)


async def test_an_error_in_the_block_closes_the_server_and_is_raised(written: Written) -> None:
    with pytest.raises(RuntimeError, match="mine"):
        async with McpTools(written()):
            raise RuntimeError("mine")


async def test_many_servers_open_and_close_side_by_side(written: Written) -> None:
    server = written()

    async def once() -> str:
        async with McpTools(server) as tools:
            return (await run(tools)).content

    assert await asyncio.gather(*(once() for _ in range(4))) == ["done"] * 4


@pytest.mark.reliability
async def test_a_cancel_at_any_moment_leaves_nothing_behind(written: Written) -> None:
    server = written("def act(a, id): return None if a.get('hang') else text('done')", grace_s=0.2)

    async def use() -> None:
        async with McpTools(server) as tools:
            await run(tools)
            await asyncio.gather(*(run(tools, hang=number % 2) for number in range(4)))

    for moment in range(scaled(10, soak=100)):
        async with census():
            using = asyncio.ensure_future(use())
            await asyncio.sleep(moment % 20 * 0.007)
            using.cancel()
            await asyncio.sleep(0)
            using.cancel()  # an impatient caller cancels twice
            with pytest.raises(asyncio.CancelledError):
                await using
