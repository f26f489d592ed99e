"""Requests through the guard, to real servers on loopback: pinned, bounded, contained, and redirected with care."""

from __future__ import annotations

import asyncio
import gzip
import json
import ssl
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest

from penstock import Budget, CancelledError, Decision, ExecutionContext, InvalidValue, ShieldPipeline
from penstock.containment.limits import BudgetExceededError
from penstock.containment.safety import ToolCallContext
from penstock.providers.egress import EgressClient, EgressDenied, EgressFailed, EgressPolicy
from penstock.providers.egress.transport import resolve
from penstock.tracing.divergence import DivergenceDetector
from penstock.tracing.events import DivergenceTrace

Answer = Callable[["Received"], bytes | AsyncIterator[bytes]]


@dataclass
class Received:
    """A request as the server got it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Server:
    """A server that answers with bytes of the test's choice."""

    answer: Answer
    port: int = 0
    received: list[Received] = field(default_factory=list)
    connections: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            request = await self._read(reader)
            self.received.append(request)
            answer = self.answer(request)
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                async for piece in answer:
                    writer.write(piece)
                    await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            pass
        finally:
            writer.close()
            self.ended.set()

    @staticmethod
    async def _read(reader: asyncio.StreamReader) -> Received:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        return Received(method, path, headers, await reader.readexactly(int(headers.get("content-length", "0"))))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@asynccontextmanager
async def serving(answer: Answer, tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    served = Server(answer)
    listening = await asyncio.start_server(served.serve, "127.0.0.1", 0, ssl=tls)
    served.port = listening.sockets[0].getsockname()[1]
    try:
        yield served
    finally:
        listening.close()
        await listening.wait_closed()


def response(body: bytes = b"hello", status: str = "200 OK", **headers: str) -> bytes:
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    head = "\r\n".join([f"HTTP/1.1 {status}", f"content-length: {len(body)}", "connection: close", *lines])
    return head.encode() + b"\r\n\r\n" + body


def sent_to(location: str, status: int = 302) -> bytes:
    return response(b"", f"{status} Moved", location=location)


def local(*servers: Server, **options: object) -> EgressPolicy:
    ports = [server.port for server in servers] or [80, 443]
    return EgressPolicy(allow_private=True, ports=ports, **options)  # type: ignore[arg-type]


def names(table: dict[str, Sequence[str]]) -> Callable[[str, int], Awaitable[Sequence[str]]]:
    async def look_up(host: str, port: int) -> Sequence[str]:
        return table[host]

    return look_up


async def test_an_answer_keeps_its_status_headers_type_and_body() -> None:
    async with serving(
        lambda _: response("grüße".encode("latin-1"), "404 Not Found", content_type="Text/Plain; charset=latin-1")
    ) as server:
        answer = await EgressClient(local(server)).get(f"{server.url}/a?b=c")
        assert (answer.status, answer.content_type, answer.text) == (404, "text/plain", "grüße")
        assert not answer.is_success
        assert answer.url == f"{server.url}/a?b=c"
        assert server.received[0].path == "/a?b=c"


async def test_a_request_carries_its_body_and_its_headers() -> None:
    async with serving(lambda _: response(b'{"ok": true}')) as server:
        client = EgressClient(local(server))
        answer = await client.post(server.url, json={"a": 1}, headers={"Authorization": "Bearer x"})
        assert answer.json() == {"ok": True}
        request = server.received[0]
        assert json.loads(request.body) == {"a": 1}
        assert request.headers["authorization"] == "Bearer x"
        assert request.headers["content-type"] == "application/json"
        assert request.headers["host"] == f"127.0.0.1:{server.port}"


@pytest.mark.parametrize("name", ["Host", "content-length", "Transfer-Encoding", "Connection", "Proxy-Authorization"])
async def test_headers_that_steer_the_connection_are_not_the_callers_to_set(name: str) -> None:
    with pytest.raises(InvalidValue):
        await EgressClient().get("http://example.org", headers={name: "x"})


@pytest.mark.parametrize("value", ["a\r\nx-evil: 1", "a\nb", "\x00", "a\x7f"])
async def test_a_header_cannot_smuggle_another_line(value: str) -> None:
    with pytest.raises(InvalidValue):
        await EgressClient().get("http://example.org", headers={"x": value})


# Addresses.


async def test_nothing_on_this_machine_is_reached_unless_the_policy_says_so() -> None:
    async with serving(lambda _: response()) as server:
        client = EgressClient(EgressPolicy(ports=[server.port]))
        for url in (server.url, f"http://localhost:{server.port}", f"http://[::ffff:127.0.0.1]:{server.port}"):
            with pytest.raises(EgressDenied, match="loopback"):
                await client.get(url)
        assert server.connections == 0


async def test_a_name_with_one_private_address_among_public_ones_is_refused() -> None:
    async with serving(lambda _: response()) as server:
        client = EgressClient(
            EgressPolicy(ports=[server.port]), resolve=names({"mixed.example": ["8.8.8.8", "127.0.0.1"]})
        )
        with pytest.raises(EgressDenied, match=r"127\.0\.0\.1, which is loopback"):
            await client.get(f"http://mixed.example:{server.port}/")
        assert server.connections == 0


async def test_a_name_is_resolved_once_and_what_it_changes_to_is_never_used() -> None:
    resolved: list[str] = []

    async def rebinding(host: str, port: int) -> Sequence[str]:
        resolved.append(host)
        return ["127.0.0.1"] if len(resolved) == 1 else ["169.254.169.254"]

    async with serving(lambda _: response()) as server:
        answer = await EgressClient(local(server), resolve=rebinding).get(f"http://rebind.example:{server.port}/")
        assert answer.is_success
        assert resolved == ["rebind.example"]
        assert server.received[0].headers["host"] == f"rebind.example:{server.port}"


async def test_each_request_checks_anew_where_its_host_is_now() -> None:
    table: dict[str, Sequence[str]] = {"moving.example": ["127.0.0.1"]}
    async with serving(lambda _: response()) as server:
        client = EgressClient(local(server), resolve=names(table))
        await client.get(f"http://moving.example:{server.port}/")
        table["moving.example"] = ["169.254.169.254"]
        with pytest.raises(EgressDenied, match="link-local"):
            await client.get(f"http://moving.example:{server.port}/")
        assert server.connections == 1


async def test_the_next_address_is_tried_if_one_does_not_answer() -> None:
    async with serving(lambda _: response()) as server:
        client = EgressClient(local(server), resolve=names({"two.example": ["127.0.0.99", "127.0.0.1"]}))
        assert (await client.get(f"http://two.example:{server.port}/")).is_success


async def test_a_name_that_does_not_exist_is_a_failure_not_a_denial() -> None:
    async def nowhere(host: str, port: int) -> Sequence[str]:
        raise OSError("no such name")

    for look_up in (nowhere, names({"gone.example": []})):
        with pytest.raises(EgressFailed):
            await EgressClient(resolve=look_up).get("http://gone.example/")


async def test_the_systems_resolver_knows_this_machine() -> None:
    assert {str(ip_address(each)) for each in await resolve("localhost", 80)} <= {"127.0.0.1", "::1"}


async def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(lambda _: response(b"proxy")) as proxy, serving(lambda _: response(b"server")) as server:
        for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        assert (await EgressClient(local(server)).get(server.url)).text == "server"
        assert proxy.connections == 0


# TLS.


@dataclass
class Authority:
    """A certificate for some names, and who trusts it."""

    server: ssl.SSLContext
    client: ssl.SSLContext


def authority(folder: Path, *hosts: str) -> Authority:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, hosts[0])])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    held = folder / "held.pem"
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    held.write_bytes(certificate.public_bytes(pem) + secret)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(held)
    client = ssl.create_default_context(cadata=certificate.public_bytes(pem).decode())
    return Authority(server, client)


@pytest.fixture
def trusted(tmp_path: Path) -> Authority:
    return authority(tmp_path, "secure.example")


async def test_tls_asks_for_the_hosts_name_and_checks_its_certificate(trusted: Authority) -> None:
    server_names: list[str | None] = []
    trusted.server.sni_callback = lambda _socket, name, _context: server_names.append(name)
    async with serving(lambda _: response(b"safe"), trusted.server) as server:
        table = {"secure.example": ["127.0.0.1"], "other.example": ["127.0.0.1"]}
        client = EgressClient(local(server), resolve=names(table), ssl_context=trusted.client)
        assert (await client.get(f"https://secure.example:{server.port}/")).text == "safe"
        with pytest.raises(EgressFailed, match="ertificate"):
            await client.get(f"https://other.example:{server.port}/")
        assert server_names == ["secure.example", "other.example"]
        assert len(server.received) == 1


async def test_an_untrusted_certificate_is_refused(trusted: Authority) -> None:
    async with serving(lambda _: response(), trusted.server) as server:
        client = EgressClient(local(server), resolve=names({"secure.example": ["127.0.0.1"]}))
        with pytest.raises(EgressFailed):
            await client.get(f"https://secure.example:{server.port}/")
        assert server.received == []


# Redirects.


async def test_a_redirect_is_followed_and_listed() -> None:
    async with serving(
        lambda request: sent_to("/b?x=1") if request.path == "/a?key=secret" else response(b"there")
    ) as server:
        answer = await EgressClient(local(server)).get(f"{server.url}/a?key=secret")
        assert (answer.text, answer.url) == ("there", f"{server.url}/b?x=1")
        assert answer.redirects == (f"{server.url}/a?…",)


@pytest.mark.parametrize(
    "location",
    [
        "http://169.254.169.254/latest/meta-data",
        "http://[::ffff:169.254.169.254]/",
        "http://2852039166/",
        "//169.254.169.254/",
        "http://metadata.example/",
        "file:///etc/passwd",
        "ftp://127.0.0.1/",
        "http://127.0.0.1:1/",
        "http://user:secret@127.0.0.1/",
        "http:\\\\169.254.169.254",
        "http://[::1",
    ],
)
async def test_a_redirect_is_checked_like_any_address(location: str) -> None:
    async with serving(lambda _: sent_to(location)) as server:
        table = {"127.0.0.1": ["127.0.0.1"], "metadata.example": ["169.254.169.254"]}
        table |= {"169.254.169.254": ["169.254.169.254"], "::ffff:169.254.169.254": ["::ffff:169.254.169.254"]}
        policy = EgressPolicy(allow_private=True, ports=[server.port, 80])
        with pytest.raises(EgressDenied) as denied:
            await EgressClient(policy, resolve=names(table)).get(server.url)
        assert "secret" not in str(denied.value)
        assert server.connections == 1


async def test_redirects_end() -> None:
    async with serving(lambda request: sent_to(request.path + "x")) as server:
        with pytest.raises(EgressFailed, match="more than 3 times"):
            await EgressClient(local(server, max_redirects=3)).get(f"{server.url}/")
        assert server.connections == 4


async def test_what_goes_to_another_origin_carries_no_credentials() -> None:
    async with serving(lambda _: response(b"other")) as other, serving(lambda _: sent_to(other.url)) as server:
        headers = {"Authorization": "Bearer x", "Cookie": "a=b", "X-Api-Key": "k", "Accept": "text/html"}
        answer = await EgressClient(local(server, other)).get(server.url, headers=headers)
        assert answer.text == "other"
        got = other.received[0].headers
        assert got["accept"] == "text/html"
        assert not {"authorization", "cookie", "x-api-key"} & got.keys()


async def test_what_stays_at_its_origin_keeps_its_credentials() -> None:
    async with serving(lambda request: sent_to("/b") if request.path == "/a" else response()) as server:
        await EgressClient(local(server)).get(f"{server.url}/a", headers={"X-Api-Key": "k"})
        assert server.received[1].headers["x-api-key"] == "k"


@pytest.mark.parametrize(("status", "method"), [(301, "GET"), (302, "GET"), (303, "GET"), (307, "POST"), (308, "POST")])
async def test_a_redirect_keeps_method_and_body_only_where_it_says_so(status: int, method: str) -> None:
    async with serving(lambda request: sent_to("/b", status) if request.path == "/a" else response()) as server:
        await EgressClient(local(server)).post(f"{server.url}/a", content=b"body")
        request = server.received[1]
        assert (request.method, request.body) == (method, b"body" if method == "POST" else b"")


async def test_a_body_is_never_sent_on_to_another_origin() -> None:
    async with serving(lambda _: response()) as other, serving(lambda _: sent_to(other.url, 307)) as server:
        with pytest.raises(EgressDenied, match="another origin"):
            await EgressClient(local(server, other)).post(server.url, content=b"secret")
        assert other.connections == 0


@pytest.mark.parametrize("allowed", [False, True])
async def test_a_redirect_leads_from_https_to_http_only_where_that_is_allowed(
    allowed: bool, trusted: Authority
) -> None:
    async with (
        serving(lambda _: response(b"plain")) as plain,
        serving(lambda _: sent_to(plain.url), trusted.server) as server,
    ):
        table = {"secure.example": ["127.0.0.1"], "127.0.0.1": ["127.0.0.1"]}
        policy = local(server, plain, allow_downgrade=allowed)
        client = EgressClient(policy, resolve=names(table), ssl_context=trusted.client)
        if allowed:
            assert (await client.get(f"https://secure.example:{server.port}")).text == "plain"
            return
        with pytest.raises(EgressDenied, match="https to http"):
            await client.get(f"https://secure.example:{server.port}")
        assert plain.connections == 0


async def test_cookies_are_not_kept() -> None:
    async with serving(lambda _: response(set_cookie="a=b")) as server:
        client = EgressClient(local(server))
        await client.get(server.url)
        await client.get(server.url)
        assert "cookie" not in server.received[1].headers


# Size and time.


async def endless() -> AsyncIterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"
    while True:
        yield b"x" * 65_536


async def test_an_answer_larger_than_allowed_is_cut_off() -> None:
    async with serving(lambda _: endless()) as server:
        with pytest.raises(EgressFailed, match="larger than 100,000 bytes"):
            await EgressClient(local(server, max_bytes=100_000)).get(server.url)
        await server.ended.wait()


async def test_an_answer_of_exactly_the_allowed_size_is_read() -> None:
    async with serving(lambda _: response(b"x" * 1000)) as server:
        assert len((await EgressClient(local(server, max_bytes=1000)).get(server.url)).body) == 1000
        with pytest.raises(EgressFailed):
            await EgressClient(local(server, max_bytes=999)).get(server.url)


@pytest.mark.parametrize("coding", ["gzip", "deflate", "x-gzip", "GZIP"])
async def test_a_packed_answer_is_unpacked(coding: str) -> None:
    body = bytes(range(256)) * 1000
    packed = zlib.compress(body) if coding == "deflate" else gzip.compress(body)
    async with serving(lambda _: response(packed, content_encoding=coding)) as server:
        answer = await EgressClient(local(server)).get(server.url)
        assert answer.body == body
        assert "content-encoding" not in answer.headers
        assert server.received[0].headers["accept-encoding"] == "gzip, deflate"


async def test_a_bomb_is_counted_as_it_unpacks_and_never_held_whole() -> None:
    bomb = gzip.compress(bytes(100_000_000))
    taken: list[int] = []
    async with serving(lambda _: response(bomb, content_encoding="gzip")) as server:
        client = EgressClient(local(server, max_bytes=1_000_000))
        with pytest.raises(EgressFailed, match="larger"):
            await client.download(server.url, lambda piece: taken.append(len(piece)))
    assert sum(taken) <= 1_000_000
    assert max(taken) <= 65_536


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, gzip", "gzip,deflate", "evil"])
async def test_a_coding_that_was_not_requested_is_refused(coding: str) -> None:
    async with serving(lambda _: response(content_encoding=coding)) as server:
        with pytest.raises(EgressFailed, match="coding"):
            await EgressClient(local(server)).get(server.url)


@pytest.mark.parametrize("body", [b"no gzip at all", gzip.compress(b"x" * 1000)[:-9]], ids=["plain", "cut short"])
async def test_an_answer_that_cannot_be_unpacked_is_a_failure(body: bytes) -> None:
    async with serving(lambda _: response(body, content_encoding="gzip")) as server:
        with pytest.raises(EgressFailed):
            await EgressClient(local(server)).get(server.url)


NO_HTTP = {
    "nothing": b"",
    "garbage": b"\x00\x01garbage\r\n\r\n",
    "cut short": b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nshort",
    "endless head": b"HTTP/1.1 200 OK\r\n" + b"x: " + b"y" * 1_000_000,
    "no chunk": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
}


@pytest.mark.parametrize("answer", NO_HTTP.values(), ids=NO_HTTP)
async def test_an_answer_that_is_no_http_is_a_failure(answer: bytes) -> None:
    async with serving(lambda _: answer) as server:
        with pytest.raises(EgressFailed):
            await EgressClient(local(server)).get(server.url)


async def dripping() -> AsyncIterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"
    while True:
        yield b"x"
        await asyncio.sleep(0.001)


async def test_a_server_that_never_finishes_is_left_in_time_however_often_it_says_something() -> None:
    async with serving(lambda _: dripping()) as server:
        with pytest.raises(EgressFailed, match="longer than 2 s"):  # long enough to connect on a busy machine
            await EgressClient(local(server, timeout_s=2)).get(server.url)
        await server.ended.wait()


async def test_a_name_that_is_never_resolved_is_given_up_in_time() -> None:
    async def never(host: str, port: int) -> Sequence[str]:
        await asyncio.Event().wait()
        return []

    with pytest.raises(EgressFailed, match="longer than"):
        await EgressClient(EgressPolicy(timeout_s=0.05), resolve=never).get("http://slow.example/")


def test_a_client_may_be_used_on_one_loop_after_another() -> None:
    client = EgressClient(EgressPolicy(allow_private=True, ports=range(1, 65_536)))

    async def once() -> None:
        async with serving(lambda _: response()) as server:
            assert (await client.get(server.url)).is_success

    for _ in range(3):
        asyncio.run(once())


async def test_an_answer_without_a_body_is_read() -> None:
    async with serving(lambda request: b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\n") as server:
        answer = await EgressClient(local(server)).request("HEAD", server.url)
        assert (answer.status, answer.body, answer.headers["content-length"]) == (200, b"", "5")


async def test_what_a_sink_raises_ends_the_download() -> None:
    def full(piece: bytes) -> None:
        raise OSError("no space left")

    async with serving(lambda _: response(b"x" * 300_000)) as server:
        with pytest.raises(OSError, match="no space"):
            await EgressClient(local(server)).download(server.url, full)
        await server.ended.wait()


async def test_a_download_gives_its_pieces_as_they_come() -> None:
    taken = bytearray()

    async def keep(piece: bytes) -> None:
        taken.extend(piece)

    async with serving(lambda _: response(b"x" * 300_000, content_type="image/png")) as server:
        answer = await EgressClient(local(server)).download(server.url, keep)
        assert (len(taken), answer.body, answer.content_type) == (300_000, b"", "image/png")


# In a run.


def tool_calls(context: ExecutionContext) -> list[tuple[str, str]]:
    """The name and the status of each tool call of the run."""
    nodes = context.graph.snapshot()["nodes"].values()
    return [(node["name"], node["status"]) for node in nodes if node["kind"] == "tool"]


class Refusing:
    """A hook that knows one path it does not like."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.received: list[tuple[str, str]] = []

    def before_egress(self, ctx: ToolCallContext, url: str, method: str) -> Decision | None:
        self.received.append((method, url))
        return Decision.HALT if url.endswith(self.path) else None


async def test_a_request_is_one_tool_call_of_the_run() -> None:
    async with serving(lambda _: response()) as server:
        with ExecutionContext() as context:
            await EgressClient(local(server)).get(f"{server.url}/?key=secret", context=context)
        assert tool_calls(context) == [(f"GET 127.0.0.1:{server.port}", "success")]
        assert "secret" not in context.explain()
        assert "secret" not in repr(context.partial_results)


async def test_a_request_that_is_repeated_again_and_again_is_seen_and_its_secrets_are_not() -> None:
    async with serving(lambda _: response()) as server:
        client = EgressClient(local(server))
        with ExecutionContext(divergence=DivergenceDetector()) as context:
            for _ in range(20):
                await client.get(f"{server.url}/?key=secret", context=context)
            for number in range(20):
                await client.post(f"{server.url}/?key=secret", content=str(number), context=context)
        divergences = [event for event in context.events if isinstance(event, DivergenceTrace)]
        assert len(divergences) == 1
        assert "GET" in repr(divergences[0])
        assert "secret" not in repr([*context.events])


async def test_the_run_is_found_where_the_request_is_made() -> None:
    async with serving(lambda _: response()) as server:
        client = EgressClient(local(server))

        async def fetch() -> str:
            return (await client.get(server.url)).text

        with ExecutionContext() as context:
            await client.get(server.url)
        assert await ExecutionContext().atool(fetch) == "hello"
        assert len(tool_calls(context)) == 1


async def test_a_limit_of_the_run_stops_a_request_before_anything_is_sent() -> None:
    async with serving(lambda _: response()) as server:
        with ExecutionContext(budget=Budget(max_steps=1)) as context:
            client = EgressClient(local(server))
            await client.get(server.url, context=context)
            with pytest.raises(BudgetExceededError):
                await client.get(server.url, context=context)
        assert server.connections == 1


async def test_hooks_decide_before_the_name_is_resolved_and_for_each_redirect() -> None:
    looked_up: list[str] = []

    async def look_up(host: str, port: int) -> Sequence[str]:
        looked_up.append(host)
        return ["127.0.0.1"]

    async with serving(lambda _: sent_to("/secret")) as server:
        hook = Refusing("/secret")
        with ExecutionContext(pipeline=ShieldPipeline(egress=hook)) as context:
            client = EgressClient(local(server), resolve=look_up)
            base = f"http://a.example:{server.port}"
            with pytest.raises(EgressDenied, match="hook"):
                await client.get(f"{base}/secret", context=context)
            assert looked_up == []
            with pytest.raises(EgressDenied, match="hook"):
                await client.get(f"{base}/", context=context)
            assert hook.received == [("GET", f"{base}/secret"), ("GET", f"{base}/"), ("GET", f"{base}/secret")]
            assert server.connections == 1
        assert [status for _, status in tool_calls(context)] == ["fail", "fail"]


async def test_a_cancel_of_the_run_closes_the_connection() -> None:
    begun = asyncio.Event()

    async def waiting() -> AsyncIterator[bytes]:
        begun.set()
        yield b"HTTP/1.1 200 OK\r\n"
        while True:
            yield b"x-more: 1\r\n"
            await asyncio.sleep(0.001)

    async with serving(lambda _: waiting()) as server:
        with ExecutionContext() as context:
            client = EgressClient(local(server, max_bytes=10**9))
            asking = asyncio.ensure_future(client.get(server.url, context=context))
            await begun.wait()
            context.abort("enough")
            with pytest.raises(CancelledError):
                await asking
        await server.ended.wait()


LAZY = """
import sys
import penstock.providers.egress, penstock.providers.mcp
loaded = {"httpx2", "httpcore2", "mcp", "mcp_types", "anyio", "pydantic"} & set(sys.modules)
assert not loaded, loaded
sys.modules["httpcore2"] = sys.modules["mcp_types"] = None  # as if they were not installed
import asyncio
from penstock.providers.egress import EgressClient
from penstock.providers.mcp import McpTools, StdioServer
opened = McpTools(StdioServer(["true"])).__aenter__()
for operation, extra in ((EgressClient().get("http://example.org"), "http"), (opened, "mcp")):
    try:
        asyncio.run(operation)
    except ModuleNotFoundError as error:
        assert f"install penstock[{extra}]" in str(error), error
    else:
        raise AssertionError(extra)
"""


def test_the_libraries_are_imported_when_they_are_needed_and_missed_by_name() -> None:
    ended = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
