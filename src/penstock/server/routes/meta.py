"""The server itself: health, metrics, the API's description and the start page."""

from __future__ import annotations

import asyncio
from html import escape
from typing import Any, get_args

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from penstock.hosting.ports import StoreUnavailable
from penstock.hosting.records import RunStatus
from penstock.runtime.graphs.document_schema import data_schema
from penstock.server.auth import format_time
from penstock.server.metrics import CONTENT_TYPE
from penstock.server.schemas import HandleShown, Health, Me, NodeTypes, NodeTypeShown, Readiness
from penstock.server.state import KNOWN_QUERY, CurrentUser, ServerState, Service

router = APIRouter(tags=["server"], dependencies=[KNOWN_QUERY])

SHOWN_GRAPHS = 50


@router.head("/health")
@router.get("/health")
async def health() -> Health:
    """Respond as long as the process is running."""
    return Health(status="ok")


@router.head("/ready")
@router.get("/ready")
async def ready(service: Service) -> Readiness:
    """Check that the stores can be read and written, so that the server can work; 503 if not."""
    await service.readiness.check()
    return Readiness(status="ready")


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(service: Service) -> Response:
    """Return the server's metrics in Prometheus text format."""
    figures = {**service.host.stats(), "runs": await _runs_by_status(service)}
    return Response(service.metrics.text(figures), headers={"Content-Type": CONTENT_TYPE})


@router.get("/api/me")
async def me(request: Request, user: CurrentUser) -> Me:
    """Return the authenticated user, their role, and when their token expires."""
    until_ns: int | None = request.state.until_ns
    return Me(name=user.name, role=user.role, until=None if until_ns is None else format_time(until_ns))


@router.get("/api/node-types")
async def node_types(service: Service) -> NodeTypes:
    """List every node type available to graphs on this server."""
    return NodeTypes(node_types=await asyncio.to_thread(_node_types, service))


@router.get("/api/openapi.json")
async def openapi(request: Request) -> dict[str, Any]:
    """Return the OpenAPI description of this API."""
    schema: dict[str, Any] = request.app.openapi()
    return schema


@router.get("/", response_class=HTMLResponse)
async def first_page(request: Request, service: Service) -> HTMLResponse:
    """Return the start page: how to use the server; graphs are listed only for authenticated users."""
    user = request.state.user
    graphs = [] if user is None else await service.stores.graphs.list(limit=SHOWN_GRAPHS)
    names = [(graph.id, graph.name) for graph in graphs]
    address = f"http://{request.headers['host']}"
    return HTMLResponse(page(address, names, needs_token=bool(service.settings.tokens)))


def page(address: str, graphs: list[tuple[str, str]], *, needs_token: bool) -> str:
    """Render the start page as self-contained HTML: no scripts, no external resources."""
    rows = "".join(
        f"<tr><td><code>{escape(id)}</code></td><td>{escape(name) if name != id else ''}</td></tr>"
        for id, name in graphs
    )
    listed = f"<table>{rows}</table>" if rows else "<p><code>GET /api/graphs</code> lists the graphs.</p>"
    return PAGE.format(
        graphs=listed,
        address=escape(address),
        token=" -H 'Authorization: Bearer $PENSTOCK_TOKEN'" if needs_token else "",
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
<h2>Talk to a graph</h2>
<p>In a terminal; the cost is printed after each answer:</p>
<pre>penstock chat {graph} --url {address}</pre>
<p>With curl; events are streamed as they happen:</p>
<pre>curl -N{token} -H 'Content-Type: application/json' \\
  -d '{{"content": "count to 10"}}' \\
  '{address}/api/agents/{graph}/chat?stream=true'</pre>
<p>With any OpenAI client; each graph is a model:</p>
<pre>client = OpenAI(base_url="{address}/v1", api_key={key})
client.chat.completions.create(
    model="{graph}", messages=[{{"role": "user", "content": "count to 10"}}])</pre>
<h2>Watch runs</h2>
<pre>penstock runs ls --url {address}
penstock runs tail RUN --url {address}</pre>
<h2>Graphs</h2>{graphs}
<h2>Endpoints</h2>
<table>
<tr><td><code>/api</code></td><td>graphs, runs, chats, approvals (<a href="/api/openapi.json">OpenAPI</a>)</td></tr>
<tr><td><code>/v1</code></td><td>OpenAI-compatible API: models, chat completions, responses</td></tr>
<tr><td><code>/mcp</code></td><td>MCP: each graph is a tool</td></tr>
<tr><td><code>/health</code></td><td>whether the process runs; <code>/ready</code>: whether its stores work</td></tr>
</table></body></html>
"""


async def _runs_by_status(service: ServerState) -> dict[str, int]:
    """Count runs by status; empty while the store is unavailable, when the other metrics are still needed."""
    try:
        return {status: await service.stores.runs.count(statuses=(status,)) for status in get_args(RunStatus)}
    except StoreUnavailable:
        return {}


def _node_types(service: ServerState) -> list[NodeTypeShown]:
    registry = service.executors()
    return [_shown(registry, node_type) for node_type in sorted(registry)]


def _shown(registry: Any, node_type: str) -> NodeTypeShown:
    return NodeTypeShown(
        type=node_type,
        inputs=_handles(registry.handles(node_type, "inputs")),
        outputs=_handles(registry.handles(node_type, "outputs")),
        data_schema=data_schema(registry[node_type]),
    )


def _handles(handles: Any) -> list[HandleShown] | None:
    return None if handles is None else [HandleShown.model_validate(handle) for handle in handles.values()]
