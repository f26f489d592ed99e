"""The tools of one server, as an agent takes them.

What a server says of its tools is not trusted: there is a bound to how many they are, how long they are described and
how large their schemas are, and they stay what they were when the server was opened. A server that breaks off stays
broken: its calls fail and say so; opening it again is for whoever opened it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from penstock.agents.messages import ToolCall, ToolResult
from penstock.agents.tools import MAX_NAME, TOOL_NAME, Tool, Tools, ToolSpec
from penstock.containment.limits import seconds_to_ns
from penstock.containment.safety import Decision
from penstock.errors import InvalidValue, PenstockError
from penstock.money import Usd
from penstock.providers.egress.failures import EgressDenied
from penstock.providers.egress.workers import on_worker
from penstock.providers.mcp.servers import HttpServer, McpError, Server, StdioServer
from penstock.runtime.context import ExecutionContext, current_call

if TYPE_CHECKING:
    from penstock.providers.mcp.link import Link

MAX_TOOLS = 128
MAX_DESCRIPTION = 4_000
MAX_SCHEMA = 50_000
"""Characters; a model pays for each of them in every turn."""
MAX_FAILURE = 2_000


class McpToolFailed(PenstockError):
    """A tool ran on its server and says that it failed."""

    def __init__(self, tool: str, told: str) -> None:
        self.tool = tool
        self.told = told[:MAX_FAILURE]
        super().__init__(self.told or "it failed, and did not say why")


class McpTools:
    """The tools of a server, between `async with` and its end: a chain of tools, or a list to put others beside."""

    def __init__(
        self,
        server: Server,
        *,
        name: str = "mcp",
        prefix: str = "",
        only: Collection[str] | None = None,
        timeout_s: float | None = 60.0,
        max_tools: int = MAX_TOOLS,
        cost_usd: Usd | None = None,
        needs_approval: bool = False,
    ) -> None:
        if not isinstance(server, StdioServer | HttpServer):
            raise InvalidValue("server", server, "a StdioServer or an HttpServer; a name is looked up in McpServers")
        if prefix and not TOOL_NAME.fullmatch(prefix):
            raise InvalidValue("prefix", prefix, "letters, digits, _ or -")
        if isinstance(only, str):
            raise InvalidValue("only", only, "a list of the tools' names")
        if timeout_s is not None:
            seconds_to_ns(timeout_s, "timeout_s")
        self.server = server
        self.name = name
        self.prefix = prefix
        self.only = None if only is None else frozenset(only)
        """The tools that are offered, by the server's names; None is all of them."""
        self._options: dict[str, Any] = {"timeout_s": timeout_s, "cost_usd": cost_usd, "needs_approval": needs_approval}
        self._max_tools = max_tools
        self._link: Link | None = None
        self._chain: Tools | None = None
        self._tools: tuple[Tool, ...] = ()

    async def __aenter__(self) -> McpTools:
        if self._link is not None:
            raise McpError(self.name, "it is open already")
        make = await on_worker(_library)
        link: Link = make(self.name, self.server, self._max_tools)
        self._link = link
        try:
            self._tools = tuple(self._read(await link.open()))
            self._chain = Tools(self._tools)
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._close()

    @property
    def specs(self) -> Sequence[ToolSpec]:
        """What models are told."""
        return self._opened().specs

    def execute(self, context: ExecutionContext, call: ToolCall) -> Coroutine[Any, Any, ToolResult]:
        """Run one call on the server, as a contained call of the run."""
        return self._opened().execute(context, call)

    def __iter__(self) -> Iterator[Tool]:
        self._opened()
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)

    def __repr__(self) -> str:
        return f"<McpTools of {self.name!r}, {len(self._tools)} tools>"

    def _opened(self) -> Tools:
        if self._chain is None:
            raise McpError(self.name, "it is not open; use it inside of `async with`")
        return self._chain

    async def _close(self) -> None:
        link, self._link, self._chain, self._tools = self._link, None, None, ()
        if link is not None:
            await link.close()

    def _read(self, listed: Sequence[Any]) -> Iterator[Tool]:
        """A tool for each that is listed and wanted; McpError for one that cannot be offered."""
        offered: dict[str, str] = {}
        for one in listed:
            if self.only is not None and one.name not in self.only:
                continue
            called = offered_name(self.prefix, one.name)
            if called in offered:
                raise McpError(self.name, f"it has two tools of the name {one.name[:MAX_NAME]!r}")
            offered[called] = one.name
            yield self._tool(called, one)
        if self.only is not None and not self.only <= set(offered.values()):
            missing = ", ".join(sorted(self.only - set(offered.values())))
            raise McpError(self.name, f"it has no tool {missing}")

    def _tool(self, called: str, listed: Any) -> Tool:
        schema: Mapping[str, Any] = listed.input_schema
        if schema.get("type") != "object":
            raise McpError(self.name, f"the tool {called!r} does not take arguments by name")
        if len(json.dumps(schema)) > MAX_SCHEMA:
            raise McpError(self.name, f"the schema of the tool {called!r} is longer than {MAX_SCHEMA:,} characters")
        description = (listed.description or "")[:MAX_DESCRIPTION]
        run = self._runs(called, listed.name)
        return Tool(run, name=called, description=description, parameters=schema, **self._options)

    def _runs(self, called: str, name: str) -> Any:
        link, server = self._link, self.server
        assert link is not None

        async def run(**arguments: Any) -> Any:
            if isinstance(server, HttpServer):
                _ask_hooks(server.url)
            return _value(called, await link.call(name, arguments))

        return run


def offered_name(prefix: str, name: str) -> str:
    """The name a model calls a tool by: the server's own if every provider accepts it, or one made from it."""
    wanted = f"{prefix}{name}"
    if TOOL_NAME.fullmatch(wanted):
        return wanted
    told_apart = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    plain = re.sub(r"[^A-Za-z0-9_-]+", "_", wanted)[: MAX_NAME - len(told_apart) - 1]
    return f"{plain}_{told_apart}"


def _ask_hooks(url: str) -> None:
    call = current_call()
    if call is None or not isinstance(call.context, ExecutionContext):
        return
    decision = call.context.egress(url, "POST")
    if decision not in (Decision.ALLOW, Decision.DEGRADE):
        raise EgressDenied(url, f"a hook of the run answered {decision}")


def _value(tool: str, result: Any) -> Any:
    """The text of an answer; its data, if it has no text."""
    text = "\n".join(_shown(block) for block in result.content)
    if result.is_error:
        raise McpToolFailed(tool, text)
    return result.structured_content if not text and result.structured_content is not None else text


def _shown(block: Any) -> str:
    """A piece of an answer as text; what is none is named."""
    if block.type == "text":
        return str(block.text)
    if block.type == "resource":
        text = getattr(block.resource, "text", None)
        return text if isinstance(text, str) else f"[{block.resource.mime_type or 'a file'}: {block.resource.uri}]"
    if block.type == "resource_link":
        return f"[{block.name}: {block.uri}]"
    return f"[{block.type}, {block.mime_type}, {len(block.data) * 3 // 4:,} bytes]"


def _library() -> Any:
    """What opens connections; imported on a worker, for it takes a while."""
    try:
        from penstock.providers.mcp.link import Link
    except ModuleNotFoundError as error:
        told = f"MCP servers need {error.name}: install penstock[mcp]"
        raise ModuleNotFoundError(told, name=error.name) from error
    return Link
