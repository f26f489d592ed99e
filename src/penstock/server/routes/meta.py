"""The server itself: whether it is there, what it counts, what it offers."""

from __future__ import annotations

import asyncio
from html import escape
from typing import Any, get_args

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from penstock.hosting.ports import StoreUnavailable
from penstock.hosting.records import RunStatus
from penstock.server.auth import written
from penstock.server.metrics import CONTENT_TYPE
from penstock.server.parts import KNOWN_QUERY, Asker, Parts, Service
from penstock.server.schemas import HandleShown, Health, Me, NodeTypes, NodeTypeShown, Readiness

router = APIRouter(tags=["server"], dependencies=[KNOWN_QUERY])

SHOWN_GRAPHS = 50


@router.head("/health")
@router.get("/health")
async def health() -> Health:
    """That the process answers."""
    return Health(status="ok")


@router.head("/ready")
@router.get("/ready")
async def ready(service: Service) -> Readiness:
    """Whether the stores can be read and written to, and so the server can do its work; 503 if not."""
    await service.readiness.check()
    return Readiness(status="ready")


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(service: Service) -> Response:
    """What the server counts, in the text that Prometheus reads."""
    figures = {**service.host.stats(), "runs": await _runs_by_status(service)}
    return Response(service.metrics.text(figures), headers={"Content-Type": CONTENT_TYPE})


@router.get("/api/me")
async def me(request: Request, user: Asker) -> Me:
    """Who asks, what they may do, and until when."""
    until_ns: int | None = request.state.until_ns
    return Me(name=user.name, role=user.role, until=None if until_ns is None else written(until_ns))


@router.get("/api/node-types")
async def node_types(service: Service) -> NodeTypes:
    """Every node type that graphs here may use."""
    return NodeTypes(node_types=await asyncio.to_thread(_node_types, service))


@router.get("/api/openapi.json")
async def openapi(request: Request) -> dict[str, Any]:
    """This API, as OpenAPI describes it."""
    schema: dict[str, Any] = request.app.openapi()
    return schema


@router.get("/", response_class=HTMLResponse)
async def first_page(request: Request, service: Service) -> HTMLResponse:
    """What is running, and how to talk to it; graphs are shown to whom they may be shown."""
    user = request.state.user
    graphs = [] if user is None else await service.stores.graphs.list(limit=SHOWN_GRAPHS)
    names = [(graph.id, graph.name) for graph in graphs]
    address = f"http://{request.headers['host']}"
    return HTMLResponse(page(address, names, needs_token=bool(service.settings.tokens)))


def page(address: str, graphs: list[tuple[str, str]], *, needs_token: bool) -> str:
    """A page that stands for itself: no script, nothing from elsewhere."""
    rows = "".join(
        f"<tr><td><code>{escape(id)}</code></td><td>{escape(name) if name != id else ''}</td></tr>"
        for id, name in graphs
    )
    listed = f"<table>{rows}</table>" if rows else "<p>None is shown here; <code>GET /api/graphs</code> lists them.</p>"
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
<p>In a terminal; what each answer cost stands behind it:</p>
<pre>penstock chat {graph} --url {address}</pre>
<p>With curl; the events come as they happen:</p>
<pre>curl -N{token} -H 'Content-Type: application/json' \\
  -d '{{"content": "count to 10"}}' \\
  '{address}/api/agents/{graph}/chat?stream=true'</pre>
<p>With any client of OpenAI's API; a graph is a model:</p>
<pre>client = OpenAI(base_url="{address}/v1", api_key={key})
client.chat.completions.create(
    model="{graph}", messages=[{{"role": "user", "content": "count to 10"}}])</pre>
<h2>Watch what runs</h2>
<pre>penstock runs ls --url {address}
penstock runs tail RUN --url {address}</pre>
<h2>Graphs</h2>{graphs}
<h2>Addresses</h2>
<table>
<tr><td><code>/api</code></td><td>graphs, runs, chats, approvals: <a href="/api/openapi.json">every route</a></td></tr>
<tr><td><code>/v1</code></td><td>OpenAI's API: models, chat completions, responses</td></tr>
<tr><td><code>/mcp</code></td><td>MCP: each graph is a tool</td></tr>
<tr><td><code>/health</code></td><td>whether it is there; <code>/ready</code>, whether it can work</td></tr>
</table></body></html>
"""


async def _runs_by_status(service: Parts) -> dict[str, int]:
    """How many runs there are; nothing while their store is away, which is when the other figures are looked at."""
    try:
        return {status: await service.stores.runs.count(statuses=(status,)) for status in get_args(RunStatus)}
    except StoreUnavailable:
        return {}


def _node_types(service: Parts) -> list[NodeTypeShown]:
    registry = service.executors()
    return [_shown(registry, node_type) for node_type in sorted(registry)]


def _shown(registry: Any, node_type: str) -> NodeTypeShown:
    schema = getattr(registry[node_type], "schema", None)
    return NodeTypeShown(
        type=node_type,
        inputs=_handles(registry.handles(node_type, "inputs")),
        outputs=_handles(registry.handles(node_type, "outputs")),
        data_schema=schema() if callable(schema) else None,
    )


def _handles(handles: Any) -> list[HandleShown] | None:
    return None if handles is None else [HandleShown.model_validate(one) for one in handles.values()]
