"""Answers what MCP clients ask: which tools there are, and what one of them gives."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any

import anyio
import mcp_types as types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError

from penstock.errors import PenstockError
from penstock.hosting.records import GraphRecord, RunRecord
from penstock.server.auth import User
from penstock.server.errors import api_error, told
from penstock.server.guards.envelope import fault
from penstock.server.mcp.tools import failed, input_of, progress_of, result_of, tool_name, tool_of
from penstock.server.openai.models import converses, listed, runnable
from penstock.server.runnable import Runnable
from penstock.server.schemas import limits_in

if TYPE_CHECKING:
    from penstock.chat.service import ChatService
    from penstock.hosting.host import RunHost
    from penstock.storage import Stores

LIMITS = "penstock/limits"
"""The key of a call's `_meta` under which a client may ask for limits."""
INSTRUCTIONS = "Each tool runs a graph of agents. It may take long and costs money; progress is told while it runs."
CANCELLED = "the call of the tool was cancelled"
FAILED = "the server failed to answer; its log says where"

LOG = logging.getLogger("penstock.server")

Context = ServerRequestContext[Any, Any]


class Calls:
    """The tools of one service."""

    def __init__(
        self, host: RunHost, chats: ChatService, stores: Stores, graphs: Runnable, user_of: Callable[[Any], User]
    ) -> None:
        self._host = host
        self._chats = chats
        self._stores = stores
        self._graphs = graphs
        self._user_of = user_of
        self.is_closing: Callable[[], bool] = lambda: False
        """Whether calls end because the server does: their runs are then parked, and not cancelled."""

    async def list_tools(self, context: Context, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        """Every graph that can run, in order of their ids."""
        with _told():
            found = await runnable(self._stores.graphs, self._graphs)
            return types.ListToolsResult(tools=[tool_of(graph) for graph in found])

    async def call_tool(self, context: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
        """Run the graph to its end."""
        with _told():
            graph = await self._graph(params.name)
            try:
                await self._graphs.must_run(graph, in_chat=converses(graph))
                given = input_of(graph, params.arguments or {})
                limits = (context.meta or {}).get(LIMITS)
                run_id = await self._begin(self._user_of(context.request), graph, given, limits)
            except PenstockError as error:
                return failed(told(error))
            return result_of(await self._followed(context, run_id))

    async def _graph(self, name: str) -> GraphRecord:
        found = await self._stores.graphs.get(name) if tool_name(name) == name else None
        if found is not None and not found.is_archived:
            return found
        for graph in await listed(self._stores.graphs):
            if tool_name(graph.id) == name:
                return graph
        raise MCPError(types.INVALID_PARAMS, f"there is no tool {name!r}; tools/list has those there are")

    async def _begin(self, user: User, graph: GraphRecord, given: Any, asked: Any) -> str:
        limits = limits_in(asked)
        if converses(graph):
            turn = await self._chats.stream_agent_chat(
                graph.id, str(given), owner=user.name, limits=limits, made_by="mcp"
            )
            return turn.run_id
        run = await self._host.submit(owner=user.name, graph_id=graph.id, input=given, limits=limits)
        return run.id

    async def _followed(self, context: Context, run_id: str) -> RunRecord:
        """The run once it is over, its progress told; a cancel of the call is one of the run."""
        try:
            await self._tell(context, run_id)
            return await self._host.wait(run_id)
        except asyncio.CancelledError:
            if not self.is_closing():
                with anyio.CancelScope(shield=True):
                    await self._host.cancel(run_id, reason=CANCELLED)
            raise

    async def _tell(self, context: Context, run_id: str) -> None:
        happened = 0
        async with aclosing(self._host.events(run_id)) as events:
            async for event in events:
                if message := progress_of(event):
                    happened += 1
                    await context.session.report_progress(happened, None, message)


@contextmanager
def _told() -> Iterator[None]:
    """What goes wrong is told as it is over HTTP: the protocol's own server would show the words of any error."""
    try:
        yield
    except MCPError:
        raise
    except Exception as error:
        said = api_error(error)
        if said.status == 500:
            LOG.error("a request over MCP failed: %s", fault(error))
        code = types.INTERNAL_ERROR if said.status >= 500 else types.INVALID_PARAMS
        raise MCPError(code, FAILED if said.status == 500 else str(said)) from None


def server_of(calls: Calls) -> Server[Any]:
    """The MCP server, without a way to reach it."""
    return Server(
        "penstock",
        version=str(sys.modules["penstock"].__version__),
        instructions=INSTRUCTIONS,
        on_list_tools=calls.list_tools,
        on_call_tool=calls.call_tool,
        get_tool_input_schema=lambda _: None,  # else every call would list all tools first
    )
