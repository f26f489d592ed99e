"""The http-request node, against a real server on this machine, through the egress guard."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock.containment.safety import Decision
from penstock.containment.shield import ShieldPipeline
from penstock.errors import CancelledError
from penstock.nodes.http_request import HttpFailed
from penstock.nodes.parts.services import ServiceMissing
from penstock.nodes.parts.template import TemplateFailed
from penstock.providers.egress import EgressClient, EgressDenied, EgressPolicy
from penstock.runtime.context import ExecutionContext
from tests.nodes.graphs import Json, graph, node, output_of, problems


class Site:
    """Answers every request the same way, and records the requests."""

    def __init__(self, status: int = 200, body: bytes = b'{"a": 1}', kind: str = "application/json") -> None:
        self.requests: list[bytes] = []
        self.came = asyncio.Event()
        self.answers = asyncio.Event()
        self.answers.set()
        self._answer = (
            f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        ).encode() + body
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = [int(one[15:]) for one in head.lower().split(b"\r\n") if one.startswith(b"content-length:")]
            self.requests.append(head + await reader.readexactly(sum(length)))
            self.came.set()
            await self.answers.wait()
            writer.write(self._answer)
            await writer.drain()
        finally:
            writer.close()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def services(self) -> Json:
        policy = EgressPolicy(allow_hosts=[f"127.0.0.1:{self.port}"], allow_private=True)
        return {"egress": EgressClient(policy)}


@asynccontextmanager
async def listening(**options: Any) -> AsyncIterator[Site]:
    site = Site(**options)
    server = await asyncio.start_server(site.serve, "127.0.0.1", 0)
    site.port = server.sockets[0].getsockname()[1]
    async with server:
        yield site
        site.answers.set()


def asks(url: str, **data: Any) -> Json:
    return graph([node("in", "input"), node("h", "http-request", url=url, **data)], ["in > h"])


async def test_an_answer_in_json_is_a_value_and_its_status_a_number() -> None:
    async with listening() as site:
        with ExecutionContext(input={"id": "7"}) as run:
            output = await output_of(asks(site.url("/items/{{ input.id }}")), run=run, services=site.services())
            assert output == {"output": {"a": 1}, "status": 200}
            assert run.stats.tool_call_count == 1
        assert site.requests[0].startswith(b"GET /items/7 HTTP/1.1\r\n")


async def test_any_other_answer_is_text() -> None:
    for kind, body in (("text/plain", b"hello"), ("application/json", b"{not json")):
        async with listening(kind=kind, body=body) as site:
            output = await output_of(asks(site.url("/")), 1, services=site.services())
            assert output["output"] == body.decode()


async def test_the_input_is_the_body() -> None:
    async with listening() as site:
        headers = {"x-dam": "{{ input.dam }}"}
        posts = asks(site.url("/"), method="POST", headers=headers)
        await output_of(posts, {"dam": "Hoover"}, services=site.services())
        assert site.requests[0].endswith(b'\r\n\r\n{"dam": "Hoover"}')
        assert b"x-dam: Hoover\r\n" in site.requests[0]


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ("a/b?c#d", b"/items/a%2Fb%3Fc%23d?q"),
        ("@evil.example", b"/items/%40evil.example?q"),
        ("x HTTP/1.1\r\nHost: evil", b"/items/x%20HTTP%2F1.1%0D%0AHost%3A%20evil?q"),
    ],
)
async def test_a_value_stays_one_piece_of_the_address(value: str, path: bytes) -> None:
    async with listening() as site:
        await output_of(asks(site.url("/items/{{ input }}?q")), value, services=site.services())
        assert site.requests[0].split(b" ")[1] == path


async def test_a_value_cannot_be_a_step_of_the_path() -> None:
    with pytest.raises(TemplateFailed, match="cannot be a segment of an address"):
        await output_of(asks("https://example.org/items/{{ input }}/secret"), "..")


async def test_a_status_that_is_no_success_is_an_error_unless_it_is_wanted() -> None:
    async with listening(status=404) as site:
        with pytest.raises(HttpFailed, match=f"GET 127.0.0.1:{site.port} answered with status 404"):
            await output_of(asks(site.url("/")), 1, services=site.services())
        output = await output_of(asks(site.url("/"), any_status=True), 1, services=site.services())
        assert output["status"] == 404


async def test_without_a_policy_of_its_own_nothing_private_is_reached() -> None:
    async with listening() as site:
        with pytest.raises(EgressDenied):
            await output_of(asks(site.url("/")), 1)
        assert site.requests == []


async def test_the_hooks_of_the_run_decide_on_requests() -> None:
    class Deny:
        def before_egress(self, ctx: Any, url: str, method: str) -> Decision:
            return Decision.HALT

    async with listening() as site:
        run = ExecutionContext(input=1, pipeline=ShieldPipeline(egress=Deny()))
        with run, pytest.raises(EgressDenied):
            await output_of(asks(site.url("/")), run=run, services=site.services())
        assert site.requests == []


async def test_a_cancel_reaches_a_request_that_is_not_answered() -> None:
    async with listening() as site:
        site.answers.clear()
        with ExecutionContext(input=1) as run:
            running = asyncio.ensure_future(output_of(asks(site.url("/")), run=run, services=site.services()))
            await site.came.wait()
            run.abort("enough")
            with pytest.raises(CancelledError):
                await running


async def test_without_an_egress_client_the_error_names_what_the_node_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "penstock.providers.egress", None)
    with pytest.raises(ServiceMissing, match=r"node 'h' needs services\['egress'\]"):
        await output_of(asks("https://example.org/"), 1)


@pytest.mark.parametrize(
    ("data", "path"),
    [
        ({"url": "ftp://example.org"}, ".url"),
        ({"url": "{{ input }}"}, ".url"),
        ({"url": "https://{{ input }}/"}, ".url"),
        ({"url": "https://api.{{ input }}"}, ".url"),
        ({"url": "https:///path"}, ".url"),
        ({"url": "https://example.org/{{ input() }}"}, ".url"),
        ({"url": "https://example.org/", "method": "TRACE"}, ".method"),
        ({"url": "https://example.org/", "headers": {"a": 1}}, ".headers.a"),
        ({"url": "https://example.org/", "headers": {"x-y": "{{"}}, '.headers["x-y"]'),
    ],
)
def test_wrong_data_is_found_before_the_run(data: Json, path: str) -> None:
    assert [one for one, _ in problems(graph([node("h", "http-request", **data)]))] == [f"$.nodes[0].data{path}"]
