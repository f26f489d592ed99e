"""Handlers of MCP requests: list the tools, and call one of them."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any

import anyio
from mcp import types

from penstock.errors import PenstockError
from penstock.hosting.ports import GraphRecord, RunRecord
from penstock.server.auth import User
from penstock.server.errors import api_error, fault_location, public_text
from penstock.server.graph_check import GraphChecker, all_graphs, is_conversational
from penstock.server.mcp.library import Context, MCPError, create_server
from penstock.server.mcp.tools import failed, input_of, progress_of, result_of, tool_name, tool_of
from penstock.server.schemas import parse_limits

if TYPE_CHECKING:
    from penstock.chat.service import ChatService
    from penstock.hosting.host import RunHost
    from penstock.storage import Stores

LIMITS = "penstock/limits"
"""Key of a call's `_meta` in which a client may request limits."""
INSTRUCTIONS = (
    "Each tool runs a graph of agents. A call may take long and costs money; progress is reported while it runs."
)
CANCELLED = "the tool call was cancelled"
FAILED = "the server failed to answer; its log has the location"

LOG = logging.getLogger("penstock.server")


class Calls:
    """The request handlers of one MCP server."""

    def __init__(
        self, host: RunHost, chats: ChatService, stores: Stores, graphs: GraphChecker, user_of: Callable[[Any], User]
    ) -> None:
        self._host = host
        self._chats = chats
        self._stores = stores
        self._graphs = graphs
        self._user_of = user_of
        self.is_closing: Callable[[], bool] = lambda: False
        """Whether the server is closing: runs of interrupted calls are then parked, not cancelled."""

    async def list_tools(self, context: Context, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        """List every graph that can run, by id."""
        with _converting_errors():
            found = await self._graphs.runnable(self._stores.graphs)
            return types.ListToolsResult(tools=[tool_of(graph) for graph in found])

    async def call_tool(self, context: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
        """Run the graph to its end and return its result."""
        with _converting_errors():
            graph = await self._graph(params.name)
            try:
                await self._graphs.must_run(graph, in_chat=is_conversational(graph))
                given = input_of(graph, params.arguments or {})
                limits = (context.meta or {}).get(LIMITS)
                run_id = await self._start(self._user_of(context.request), graph, given, limits)
            except PenstockError as error:
                return failed(public_text(error))
            return result_of(await self._result(context, run_id))

    async def _graph(self, name: str) -> GraphRecord:
        found = await self._stores.graphs.get(name) if tool_name(name) == name else None
        if found is not None and not found.is_archived:
            return found
        for graph in await all_graphs(self._stores.graphs):
            if tool_name(graph.id) == name:
                return graph
        raise MCPError(types.INVALID_PARAMS, f"there is no tool {name!r}; tools/list returns the available tools")

    async def _start(self, user: User, graph: GraphRecord, given: Any, requested_limits: Any) -> str:
        limits = None if requested_limits is None else parse_limits(requested_limits)
        if is_conversational(graph):
            turn = await self._chats.stream_agent_chat(
                graph.id, str(given), owner=user.name, limits=limits, made_by="mcp"
            )
            return turn.run_id
        run = await self._host.submit(owner=user.name, graph_id=graph.id, input=given, limits=limits)
        return run.id

    async def _result(self, context: Context, run_id: str) -> RunRecord:
        """Report progress until the run is over, and return it; cancelling the call cancels the run."""
        try:
            await self._report_progress(context, run_id)
            return await self._host.wait(run_id)
        except asyncio.CancelledError:
            if not self.is_closing():
                with anyio.CancelScope(shield=True):
                    await self._host.cancel(run_id, reason=CANCELLED)
            raise

    async def _report_progress(self, context: Context, run_id: str) -> None:
        reported = 0
        async with aclosing(self._host.events(run_id)) as events:
            async for event in events:
                if message := progress_of(event):
                    reported += 1
                    await context.session.report_progress(reported, None, message)


@contextmanager
def _converting_errors() -> Iterator[None]:
    """Convert errors to MCPError as over HTTP; the MCP library would send the message of any error to the client."""
    try:
        yield
    except MCPError:
        raise
    except Exception as error:
        known = api_error(error)
        if known.status == 500:
            LOG.error("an MCP request failed: %s", fault_location(error))
        code = types.INTERNAL_ERROR if known.status >= 500 else types.INVALID_PARAMS
        raise MCPError(code, FAILED if known.status == 500 else str(known)) from None


def server_of(calls: Calls) -> Any:
    """Create the MCP server, without a transport."""
    version = str(sys.modules["penstock"].__version__)
    return create_server(version, INSTRUCTIONS, calls.list_tools, calls.call_tool)
