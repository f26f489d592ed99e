"""The server itself: health, metrics, the API's description, the web UI and the start page that stands in for it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from html import escape
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from penstock.kernel.executor import STANDARD_CONVERSIONS
from penstock.nodes.catalog import CATEGORIES, hinted_schema, node_info
from penstock.server.auth import User, format_time
from penstock.server.caching import REVALIDATED, revalidated
from penstock.server.errors import not_found
from penstock.server.guards import accepts_gzip
from penstock.server.metrics import CONTENT_TYPE
from penstock.server.openapi import DescribedApp
from penstock.server.schemas import (
    HandleShown,
    Health,
    McpServerList,
    Me,
    NodeTypes,
    NodeTypeShown,
    Readiness,
    ToolList,
    UnreadableRow,
)
from penstock.server.state import KNOWN_QUERY, CurrentUser, ServerState, Service
from penstock.server.ui_files import ASSET_CACHING, PAGE_CACHING, UiFile

router = APIRouter(tags=["server"], dependencies=[KNOWN_QUERY])

SHOWN_GRAPHS = 50
MAX_ROWS_SHOWN = 50


@router.head("/health")
@router.get("/health")
async def health() -> Health:
    """Respond as long as the process is running."""
    return Health(status="ok")


@router.head("/ready")
@router.get("/ready")
async def ready(request: Request, service: Service) -> Readiness:
    """Check that the stores can be read and written, so that the server can work; 503 if not.

    `degraded` means that the server works, but some stored rows cannot be read; admins are shown which.
    """
    await service.readiness.check()
    faults = service.stores.faults.rows
    if not faults:
        return Readiness(status="ready")
    user: User | None = request.state.user
    shown = [UnreadableRow(table=row.table, key=row.key, why=row.why) for row in faults[:MAX_ROWS_SHOWN]]
    is_admin = user is not None and user.is_admin
    return Readiness(
        status="degraded", unreadable=Counter(row.table for row in faults), rows=shown if is_admin else None
    )


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(service: Service) -> Response:
    """Return the server's metrics in Prometheus text format."""
    unreadable = Counter(row.table for row in service.stores.faults.rows)
    figures = {**service.host.stats(), "runs": await service.run_counts.read(), "unreadable_rows": unreadable}
    return Response(service.metrics.text(figures, service.host.figures), headers={"Content-Type": CONTENT_TYPE})


@router.get("/api/me")
async def me(request: Request, service: Service, user: CurrentUser) -> Me:
    """Return the authenticated user, their role, when their token expires, and the limits of their runs."""
    until_ns: int | None = request.state.until_ns
    limits = service.host.settings
    return Me(
        name=user.name,
        role=user.role,
        until=None if until_ns is None else format_time(until_ns),
        default_limits=limits.default_limits.to_dict(),
        ceilings=limits.ceilings.to_dict(),
    )


@router.get("/api/node-types", response_model=NodeTypes, responses=REVALIDATED)
async def node_types(request: Request, service: Service) -> Response:
    """List every node type available to graphs on this server, by category, with hints for forms of their data."""
    found = await asyncio.to_thread(_node_types, service)
    pairs = [list(pair) for pair in STANDARD_CONVERSIONS.pairs]
    return revalidated(request, NodeTypes(node_types=found, conversions=pairs))


@router.get("/api/tools")
async def tools(service: Service) -> ToolList:
    """List the tools that graphs on this server can name."""
    offered = service.host.services.get("tools")
    return ToolList(tools=sorted(map(str, offered)) if isinstance(offered, Mapping) else [])


@router.get("/api/mcp-servers")
async def mcp_servers(service: Service) -> McpServerList:
    """List the MCP servers that graphs on this server can name."""
    offered = service.host.services.get("mcp")
    return McpServerList(mcp_servers=sorted(map(str, offered)) if isinstance(offered, Mapping) else [])


@router.get("/api/openapi.json")
async def openapi(request: Request) -> dict[str, Any]:
    """Return the OpenAPI description of this API."""
    schema: dict[str, Any] = request.app.openapi()
    return schema


@router.get("/docs", response_class=HTMLResponse)
async def documentation(request: Request) -> Response:
    """Return the documentation of this API as a page."""
    app: DescribedApp = request.app
    plain, compressed = await asyncio.to_thread(app.document) if app.documentation is None else app.documentation
    if accepts_gzip(request.scope):
        return HTMLResponse(compressed, headers={"Content-Encoding": "gzip", "Vary": "Accept-Encoding"})
    return HTMLResponse(plain)


@router.get("/", response_class=HTMLResponse)
async def first_page(request: Request, service: Service) -> Response:
    """Return the web UI; if it is not built, a start page that lists graphs for authenticated users."""
    if service.ui.page is not None:
        return _ui_response(service.ui.page, request, PAGE_CACHING)
    user = request.state.user
    graphs = [] if user is None else await service.stores.graphs.list(limit=SHOWN_GRAPHS)
    names = [(graph.id, graph.name) for graph in graphs]
    root_path = service.settings.root_path
    address = f"{request.url.scheme}://{request.headers['host']}{root_path}"
    return HTMLResponse(page(address, names, needs_token=await service.needs_tokens(), root_path=root_path))


@router.get("/assets/{name}", response_class=Response, include_in_schema=False)
async def asset(name: str, request: Request, service: Service) -> Response:
    """Return a file of the web UI; its name changes with its content, so that browsers may keep it."""
    found = service.ui.assets.get(name)
    if found is None:
        raise not_found("file")
    return _ui_response(found, request, ASSET_CACHING)


def _ui_response(file: UiFile, request: Request, caching: str) -> Response:
    content, headers = file.response(caching, is_compressed=accepts_gzip(request.scope))
    return Response(content, headers=headers)


def page(address: str, graphs: list[tuple[str, str]], *, needs_token: bool, root_path: str = "") -> str:
    """Render the start page as self-contained HTML: no scripts, no external resources."""
    rows = "".join(
        f"<tr><td><code>{escape(id)}</code></td><td>{escape(name) if name != id else ''}</td></tr>"
        for id, name in graphs
    )
    listed = f"<table>{rows}</table>" if rows else "<p><code>GET /api/graphs</code> lists the graphs.</p>"
    return PAGE.format(
        graphs=listed,
        address=escape(address),
        root_path=escape(root_path),
        token=' -H "Authorization: Bearer $PENSTOCK_TOKEN"' if needs_token else "",
        with_token="PENSTOCK_TOKEN=… " if needs_token else "",
        imports="import os\n\n" if needs_token else "",
        graph=escape(graphs[0][0]) if graphs else "GRAPH",
        key='os.environ["PENSTOCK_TOKEN"]' if needs_token else '"none"',
    )


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Penstock</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root{{color-scheme:light dark}}
body{{font:16px/1.55 system-ui,sans-serif;max-width:46rem;margin:3rem auto;padding:0 1rem}}
h1{{margin-bottom:.2rem}}h2{{margin-top:2rem;font-size:1.15rem}}p{{margin:.4rem 0}}
pre{{background:#8882;padding:.8rem 1rem;overflow:auto;border-radius:.4rem;font-size:.88rem}}
table{{border-collapse:collapse}}td{{padding:.2rem 1.2rem .2rem 0;vertical-align:top}}
</style></head>
<body><h1>Penstock is running</h1>
<p>An agent-graph runtime whose limits hold, at <code>{address}</code>.</p>
<p>The web UI is not part of this installation. In a clone of the repository, build it with <code>make ui</code>,
then restart the server.</p>
<h2>Talk to a graph</h2>
<p>In a terminal; the cost is printed after each answer:</p>
<pre>{with_token}penstock chat {graph} --url {address}</pre>
<p>With curl; events are streamed as they happen:</p>
<pre>curl -N{token} -H 'Content-Type: application/json' \\
  -d '{{"content": "count to 10"}}' \\
  '{address}/api/agents/{graph}/chat?stream=true'</pre>
<p>With any OpenAI client; each graph is a model:</p>
<pre>{imports}from openai import OpenAI

client = OpenAI(base_url="{address}/v1", api_key={key})
client.chat.completions.create(
    model="{graph}", messages=[{{"role": "user", "content": "count to 10"}}])</pre>
<h2>Watch runs</h2>
<pre>{with_token}penstock runs ls --url {address}
{with_token}penstock runs tail RUN --url {address}</pre>
<h2>Graphs</h2>{graphs}
<h2>Endpoints</h2>
<table>
<tr><td><code>/api</code></td><td>graphs, runs, chats, approvals: <a href="{root_path}/docs">documentation</a>,
<a href="{root_path}/api/openapi.json">OpenAPI</a></td></tr>
<tr><td><code>/v1</code></td><td>OpenAI-compatible API: models, chat completions, responses</td></tr>
<tr><td><code>/mcp</code></td><td>MCP: each graph is a tool</td></tr>
<tr><td><code>/health</code></td><td>whether the process runs; <code>/ready</code>: whether its stores work</td></tr>
</table></body></html>
"""


def _node_types(service: ServerState) -> list[NodeTypeShown]:
    registry = service.executors()
    shown = [_shown(registry, node_type) for node_type in sorted(registry)]
    order = {category: at for at, category in enumerate(CATEGORIES)}
    return sorted(shown, key=lambda one: (order.get(one.category, len(order)), one.category, one.title))


def _shown(registry: Any, node_type: str) -> NodeTypeShown:
    info = node_info(node_type, registry[node_type])
    return NodeTypeShown(
        type=node_type,
        title=info.title,
        description=info.description,
        category=info.category,
        runs=registry.can(node_type, "execute"),
        inputs=_handles(registry.handles(node_type, "inputs")),
        outputs=_handles(registry.handles(node_type, "outputs")),
        data_schema=hinted_schema(registry[node_type]),
    )


def _handles(handles: Any) -> list[HandleShown] | None:
    return None if handles is None else [HandleShown.model_validate(handle) for handle in handles.values()]
