"""The tools of one MCP server, for an agent.

A server's tool list is not trusted: the number of tools, the length of descriptions and the size of schemas are
bounded, and the list is fixed when the server is opened. A server that disconnects stays disconnected: its calls fail
with an error, and the caller that opened it must reopen it.
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

Json = dict[str, Any]

MAX_TOOLS = 128
MAX_DESCRIPTION = 4_000
MAX_SCHEMA = 50_000
"""In characters; they are part of the model's input, and billed, in every turn."""
MAX_FAILURE = 2_000


class McpToolFailed(PenstockError):
    """A tool ran on its server and reported a failure."""

    def __init__(self, tool: str, reason: str) -> None:
        self.tool = tool
        self.reason = reason[:MAX_FAILURE]
        super().__init__(self.reason or "it failed without a reason")


class McpTools:
    """The tools of a server while it is open (`async with`); usable as a tool chain or as an iterable of tools."""

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
        """The offered tools, by the server's names; None offers all."""
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
        """The tool descriptions sent to models."""
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

    def _read(self, listed: Sequence[Json]) -> Iterator[Tool]:
        """Yield a tool for each listed tool that `only` allows; raise McpError for one that cannot be offered."""
        offered: dict[str, str] = {}
        for one in listed:
            name = one["name"]
            if self.only is not None and name not in self.only:
                continue
            called = offered_name(self.prefix, name)
            if called in offered:
                raise McpError(self.name, f"it has two tools of the name {name[:MAX_NAME]!r}")
            offered[called] = name
            yield self._tool(called, one)
        if self.only is not None and not self.only <= set(offered.values()):
            missing = ", ".join(sorted(self.only - set(offered.values())))
            raise McpError(self.name, f"it has no tool {missing}")

    def _tool(self, called: str, listed: Json) -> Tool:
        schema: Mapping[str, Any] = listed["inputSchema"]
        if schema.get("type") != "object":
            raise McpError(self.name, f"the tool {called!r} does not take arguments by name")
        if len(json.dumps(schema)) > MAX_SCHEMA:
            raise McpError(self.name, f"the schema of the tool {called!r} is longer than {MAX_SCHEMA:,} characters")
        description = (listed.get("description") or "")[:MAX_DESCRIPTION]
        run = self._runs(called, listed["name"])
        return Tool(run, name=called, description=description, parameters=schema, **self._options)

    def _runs(self, called: str, name: str) -> Any:
        link, server = self._link, self.server
        assert link is not None

        async def run(**arguments: Any) -> Any:
            if isinstance(server, HttpServer):
                _ask_hooks(server.url)
            return _value(called, await link.call(name, arguments))

        return run


class McpServers(Mapping[str, Server]):
    """The servers of a program, by the names under which graphs and models refer to them."""

    __slots__ = ("_by_name",)

    def __init__(self, servers: Mapping[str, Server]) -> None:
        given: Mapping[Any, Any] = servers
        for name, server in given.items():
            if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
                raise InvalidValue("name of a server", name, "1 to 64 letters, digits, _ or -")
            if not isinstance(server, StdioServer | HttpServer):
                raise InvalidValue(f"server {name!r}", server, "a StdioServer or an HttpServer")
        self._by_name = dict(servers)

    def tools(self, name: str, **options: Any) -> McpTools:
        """Return the named server's tools, to be opened with `async with`; takes the options of `McpTools`."""
        requested: Any = name  # a caller without types may pass anything
        found = self._by_name.get(requested) if isinstance(requested, str) else None
        if found is None:
            raise InvalidValue("server", name, f"a configured one ({', '.join(self._by_name) or 'there is none'})")
        return McpTools(found, **{"name": name, **options})

    def __getitem__(self, name: str) -> Server:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def __repr__(self) -> str:
        return f"McpServers({', '.join(self._by_name)})"


def offered_name(prefix: str, name: str) -> str:
    """Return the tool name for models: the server's own if every provider accepts it, else one derived from it."""
    wanted = f"{prefix}{name}"
    if TOOL_NAME.fullmatch(wanted):
        return wanted
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    plain = re.sub(r"[^A-Za-z0-9_-]+", "_", wanted)[: MAX_NAME - len(digest) - 1]
    return f"{plain}_{digest}"


def _ask_hooks(url: str) -> None:
    call = current_call()
    if call is None or not isinstance(call.context, ExecutionContext):
        return
    decision = call.context.egress(url, "POST")
    if decision not in (Decision.ALLOW, Decision.DEGRADE):
        raise EgressDenied(url, f"a hook of the run answered {decision}")


def _value(tool: str, result: Json) -> Any:
    """Return the text of a result, or its structured content if there is no text."""
    text = "\n".join(_shown(block) for block in result["content"])
    if result.get("isError"):
        raise McpToolFailed(tool, text)
    structured = result.get("structuredContent")
    return structured if not text and structured is not None else text


def _shown(block: Json) -> str:
    """Return a content block as text; a block without text is described in brackets."""
    kind = block["type"]
    if kind == "text":
        return str(block["text"])
    if kind == "resource":
        resource = block["resource"]
        text = resource.get("text")
        return text if isinstance(text, str) else f"[{resource.get('mimeType') or 'a file'}: {resource['uri']}]"
    if kind == "resource_link":
        return f"[{block['name']}: {block['uri']}]"
    return f"[{kind}, {block['mimeType']}, {len(block['data']) * 3 // 4:,} bytes]"


def _library() -> Any:
    """Import and return `Link`; called on a worker, because imports are slow."""
    from penstock.providers.mcp.installed import mcp_problem

    if (problem := mcp_problem()) is not None:
        raise ModuleNotFoundError(problem, name="mcp")
    try:
        from penstock.providers.mcp.link import Link
    except ModuleNotFoundError as error:  # of the other packages of the extra
        message = f"MCP servers need {error.name}: install penstock[mcp]"
        raise ModuleNotFoundError(message, name=error.name) from error
    return Link
