"""Clients that send one request several times: each time it leaves is a call of the run, refused, or reported.

A provider of 25 cents a call, a ceiling of 50 cents, and one request that every client here sends five times by itself.
"""

from __future__ import annotations

import asyncio
import contextvars
import gzip
import http.client
from collections.abc import Awaitable, Callable, Generator
from typing import Any

import aiohttp
import httpcore2
import httpx2
import lm15.transports
import pytest
import requests
import urllib3

from penstock import BudgetExceededError, CancelledError, ExecutionContext, contain
from penstock.errors import RunEnded
from penstock.providers import UncontainedRequest, contained_client
from penstock.providers.current import already_held
from penstock.providers.http.forms import MAX_REDIRECTED, form_of, note_redirect
from penstock.testing.provider import FakeProviderServer, RefuseFree, Say
from tests.providers.sdk_calls import limits, outcome
from tests.providers.servers import redirecting_to
from tests.providers.stack_calls import CHAT, JSON, chat, encoded

pytestmark = pytest.mark.requirement("X-11")

TIMES = 5
CALL_USD = 0.25
CEILING_USD = 0.50


def assert_counted(server: FakeProviderServer, run: ExecutionContext) -> None:
    """Two calls were paid for, and no other left."""
    assert len(server.requests) == 2
    assert server.invoice.total_usd == run.balance.spent_usd == CEILING_USD
    assert (run.balance.held_nanos, run.uncontained_requests) == (0, 0)


# Sync.


class Auth(httpx2.Auth):
    """Sends the request several times, as schemes with a challenge do."""

    requires_response_body = True

    def auth_flow(self, request: httpx2.Request) -> Generator[httpx2.Request, httpx2.Response, None]:
        for _ in range(TIMES):
            yield request


class Retrying(httpx2.BaseTransport):
    """A transport around another one."""

    def __init__(self) -> None:
        self._inner = httpx2.HTTPTransport(verify=False)

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        for _ in range(TIMES - 1):
            self._inner.handle_request(request).read()
        return self._inner.handle_request(request)

    def close(self) -> None:
        self._inner.close()


class Derived(httpx2.HTTPTransport):
    """A transport of another class."""

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        for _ in range(TIMES - 1):
            super().handle_request(request).read()
        return super().handle_request(request)


def with_httpx2(url: str, **options: Any) -> bytes:
    with httpx2.Client(**{"verify": False, **options}) as client:
        return client.post(url, json=chat()).content


def with_an_auth_flow(url: str) -> bytes:
    return with_httpx2(url, auth=Auth())


def with_a_transport_around(url: str) -> bytes:
    return with_httpx2(url, transport=Retrying())


def with_a_derived_transport(url: str) -> bytes:
    return with_httpx2(url, transport=Derived(verify=False))


def with_an_event_hook(url: str) -> bytes:
    def again(response: httpx2.Response) -> None:
        response.read()
        sent.append(response)
        if len(sent) < TIMES:
            client.send(client.build_request("POST", url, json=chat()))

    sent: list[httpx2.Response] = []
    with httpx2.Client(verify=False, event_hooks={"response": [again]}) as client:
        return client.post(url, json=chat()).content


ON_SUCCESS: Any = urllib3.Retry(TIMES, status_forcelist=[200], allowed_methods=None, raise_on_status=False)


def with_retries_of_urllib3(url: str) -> bytes:
    with urllib3.PoolManager(retries=ON_SUCCESS) as pool:
        return pool.request("POST", url, body=encoded(chat()), headers=JSON).data


def with_retries_of_requests(url: str) -> bytes:
    with requests.Session() as session:
        session.mount("http://", requests.adapters.HTTPAdapter(max_retries=ON_SUCCESS))
        return session.post(url, json=chat()).content


def with_an_adapter_of_requests(url: str) -> bytes:
    class Adapter(requests.adapters.HTTPAdapter):
        def send(self, request: Any, *args: Any, **options: Any) -> Any:
            for _ in range(TIMES - 1):
                assert super().send(request, *args, **options).content
            return super().send(request, *args, **options)

    with requests.Session() as session:
        session.mount("http://", Adapter())
        return session.post(url, json=chat()).content


def with_a_response_hook_of_requests(url: str) -> bytes:
    def again(response: Any, **options: Any) -> None:
        sent.append(response.content)
        if len(sent) < TIMES:
            session.send(response.request)

    sent: list[bytes] = []
    with requests.Session() as session:
        return session.post(url, json=chat(), hooks={"response": again}).content


def with_a_connection_of_http_client(url: str) -> bytes:
    server, _, path = url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(server)
    try:
        for _ in range(TIMES):
            connection.request("POST", f"/{path}", encoded(chat()), JSON)
            answer = connection.getresponse().read()
        return answer
    finally:
        connection.close()


def with_a_transport_of_lm15(url: str) -> bytes:
    request = lm15.transports.TransportRequest("POST", url, list(JSON.items()), encoded(chat()))
    with lm15.transports.StdlibTransport(verify=False) as transport:
        for _ in range(TIMES):
            with transport.stream(request) as response:
                answer = bytes(response.read())
    return answer


SYNC = [
    with_an_auth_flow,
    with_a_transport_around,
    with_a_derived_transport,
    with_an_event_hook,
    with_retries_of_urllib3,
    with_retries_of_requests,
    with_an_adapter_of_requests,
    with_a_response_hook_of_requests,
    with_a_connection_of_http_client,
    with_a_transport_of_lm15,
]


@pytest.mark.parametrize("send", SYNC)
def test_each_time_a_sync_client_sends_the_request_is_a_call(send: Callable[[str], bytes]) -> None:
    with FakeProviderServer.flat(CALL_USD) as server, limits(server, max_cost_usd=CEILING_USD) as run:
        with pytest.raises(BudgetExceededError):
            send(server.url + CHAT)
        assert_counted(server, run)


# Async.


async def with_an_async_auth_flow(url: str) -> bytes:
    async with httpx2.AsyncClient(verify=False, auth=Auth()) as client:
        return (await client.post(url, json=chat())).content


async def with_an_async_transport_around(url: str) -> bytes:
    class Around(httpx2.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            for _ in range(TIMES - 1):
                await (await inner.handle_async_request(request)).aread()
            return await inner.handle_async_request(request)

    async with httpx2.AsyncHTTPTransport(verify=False) as inner, httpx2.AsyncClient(transport=Around()) as client:
        return (await client.post(url, json=chat())).content


Handler = Callable[[aiohttp.ClientRequest], Awaitable[aiohttp.ClientResponse]]


async def again(request: aiohttp.ClientRequest, handler: Handler) -> aiohttp.ClientResponse:
    """A middleware that sends the request several times."""
    for _ in range(TIMES - 1):
        await (await handler(request)).read()
    return await handler(request)


async def at_once(request: aiohttp.ClientRequest, handler: Handler) -> aiohttp.ClientResponse:
    """A middleware that sends the request several times at once, and raises the first error."""

    async def one() -> aiohttp.ClientResponse:
        response = await handler(request)
        await response.read()
        return response

    found = await asyncio.gather(*(one() for _ in range(TIMES)), return_exceptions=True)
    for error in found:
        if isinstance(error, BaseException):
            raise error
    raise AssertionError


async def in_requests_of_its_own(request: aiohttp.ClientRequest, handler: Handler) -> aiohttp.ClientResponse:
    """A middleware that makes further requests with the same session."""
    for _ in range(TIMES - 1):
        async with request.session.post(request.url, json=chat(), middlewares=()) as response:
            await response.read()
    return await handler(request)


async def over_aiohttp(url: str, *middlewares: Any) -> bytes:
    async with aiohttp.ClientSession(middlewares=middlewares) as session, session.post(url, json=chat()) as response:
        return await response.read()


async def with_a_middleware(url: str) -> bytes:
    return await over_aiohttp(url, again)


async def with_two_middlewares(url: str) -> bytes:
    async def passing(request: aiohttp.ClientRequest, handler: Handler) -> aiohttp.ClientResponse:
        return await handler(request)

    return await over_aiohttp(url, passing, again)


async def with_a_middleware_that_hedges(url: str) -> bytes:
    return await over_aiohttp(url, at_once)


async def with_a_middleware_that_makes_requests(url: str) -> bytes:
    return await over_aiohttp(url, in_requests_of_its_own)


async def with_a_middleware_of_one_request(url: str) -> bytes:
    async with aiohttp.ClientSession() as session, session.post(url, json=chat(), middlewares=[again]) as response:
        return await response.read()


async def with_an_async_transport_of_lm15(url: str) -> bytes:
    request = lm15.transports.TransportRequest("POST", url, list(JSON.items()), encoded(chat()))
    async with lm15.transports.StdlibAsyncTransport(verify=False) as transport:
        for _ in range(TIMES):
            async with transport.stream(request) as response:
                answer = bytes(await response.read())
    return answer


ASYNC = [
    with_an_async_auth_flow,
    with_an_async_transport_around,
    with_a_middleware,
    with_two_middlewares,
    with_a_middleware_that_hedges,
    with_a_middleware_that_makes_requests,
    with_a_middleware_of_one_request,
    with_an_async_transport_of_lm15,
]


@pytest.mark.parametrize("send", ASYNC)
async def test_each_time_an_async_client_sends_the_request_is_a_call(send: Callable[[str], Awaitable[bytes]]) -> None:
    async with FakeProviderServer.flat(CALL_USD) as server:
        with limits(server, max_cost_usd=CEILING_USD) as run:
            with pytest.raises(BudgetExceededError):
                await send(server.url + CHAT)
            assert_counted(server, run)


# Redirects: clients follow them with the same body, also to paths that no model API has.


HIDDEN = "/behind/the/proxy"


def following_over_requests(url: str) -> Any:
    with requests.Session() as session:
        return session.post(url, json=chat())


def following_over_urllib3(url: str) -> Any:
    with urllib3.PoolManager() as pool:
        return pool.request("POST", url, body=encoded(chat()), headers=JSON)


def following_over_httpx2(url: str) -> Any:
    return with_httpx2(url, follow_redirects=True)


async def following_over_httpx2_async(url: str) -> Any:
    async with httpx2.AsyncClient(verify=False, follow_redirects=True) as client:
        return await client.post(url, json=chat())


FOLLOWING = [
    following_over_requests,
    following_over_urllib3,
    following_over_httpx2,
    following_over_httpx2_async,
    over_aiohttp,
]


@pytest.mark.parametrize("send", FOLLOWING)
def test_a_redirect_to_a_path_of_no_model_api_is_followed_as_a_call(send: Callable[[str], Any]) -> None:
    with FakeProviderServer() as server, redirecting_to(server.url, f"{HIDDEN}/{send.__name__}") as proxy:
        with limits(server) as run:
            found = send(proxy + CHAT)
            if asyncio.iscoroutine(found):
                asyncio.run(found)
        [request] = server.requests
    assert request.body == chat()
    assert (run.balance.attempts, run.balance.unresolved_nanos, run.balance.held_nanos) == (2, 0, 0)


def test_a_redirect_to_another_path_of_the_same_server_is_followed_as_calls() -> None:
    with (
        FakeProviderServer() as server,
        redirecting_to("", f"{HIDDEN}/again/") as proxy,
        limits(server) as run,
        requests.Session() as session,
    ):
        session.max_redirects = 3
        with pytest.raises(requests.TooManyRedirects):
            session.post(proxy + CHAT, json=chat())
    assert run.balance.attempts == 4


async def test_a_middleware_that_hedges_and_is_redirected_each_time_leaves_nothing_held() -> None:
    async def hedging(request: aiohttp.ClientRequest, handler: Handler) -> aiohttp.ClientResponse:
        first, *others = await asyncio.gather(*(handler(request) for _ in range(3)))
        for other in others:
            other.release()
        return first

    async with FakeProviderServer() as server:
        with redirecting_to(server.url) as proxy, limits(server, max_cost_usd=1) as run:
            async with (
                aiohttp.ClientSession(middlewares=[hedging]) as session,
                session.post(proxy + CHAT, json=chat(), allow_redirects=False),
            ):
                assert run.balance.attempts == 3
                assert run.balance.held_nanos == run.balance.unresolved_nanos == 0
    assert server.requests == ()


def test_only_so_many_redirects_are_remembered() -> None:
    form = form_of("POST", "127.0.0.1", CHAT)
    assert form is not None
    for number in range(MAX_REDIRECTED + 1):
        note_redirect(form, "a.example", CHAT, f"{HIDDEN}/{number}?key=1")
    assert form_of("POST", "a.example", f"{HIDDEN}/0") is None
    assert form_of("POST", "a.example", f"{HIDDEN}/{MAX_REDIRECTED}") is form
    assert form_of("POST", "b.example", f"{HIDDEN}/{MAX_REDIRECTED}") is None
    note_redirect(form, "a.example", CHAT, "http://[")  # no address, which no client follows


# What a middleware of aiohttp changes.


async def test_a_middleware_that_tries_again_after_an_error_gets_the_answer_and_pays_once() -> None:
    async def until_it_works(request: aiohttp.ClientRequest, handler: Handler) -> aiohttp.ClientResponse:
        while (response := await handler(request)).status != 200:
            assert await response.read()
        return response

    async with FakeProviderServer(script=[RefuseFree(429), RefuseFree(500), "hello"]) as server:
        with limits(server, max_cost_usd=1) as run:
            assert b"hello" in await over_aiohttp(server.url + CHAT, until_it_works)
    assert run.balance.spent_nanos == server.invoice.total_nanos > 0
    assert (run.balance.attempts, run.balance.unresolved_nanos) == (3, 0)


async def test_what_a_middleware_asks_for_is_what_is_held_and_cut_down() -> None:
    async def greedy(request: aiohttp.ClientRequest, handler: Handler) -> aiohttp.ClientResponse:
        await request.update_body(encoded(chat(max_tokens=1_000_000)))
        return await handler(request)

    async with FakeProviderServer(script=lambda _: Say(output_tokens=1_000_000)) as server:
        with limits(server, max_cost_usd=0.01) as run:
            assert await over_aiohttp(server.url + CHAT, greedy)
    assert server.requests[0].body["max_tokens"] < 700  # a cent buys 666 tokens of output
    assert run.balance.spent_nanos == server.invoice.total_nanos <= 10_000_000


async def test_a_middleware_sees_the_request_of_the_program_each_time() -> None:
    seen: list[bytes] = []

    async def twice(request: aiohttp.ClientRequest, handler: Handler) -> aiohttp.ClientResponse:
        for _ in range(2):
            response = await handler(request)
            answers.append(await response.read())
            body = request.body
            assert isinstance(body, aiohttp.BytesPayload)
            seen.append(body._value)
        return response

    answers: list[bytes] = []
    async with FakeProviderServer() as server:
        with limits(server, max_cost_usd=1) as run:
            async with aiohttp.ClientSession(middlewares=[twice]) as session:
                await session.post(server.url + CHAT, json=chat(stream=True))
    assert seen == [encoded(chat(stream=True))] * 2
    assert all(request.body["stream_options"] == {"include_usage": True} for request in server.requests)
    assert not any(b'"prompt_tokens"' in answer for answer in answers)  # the usage was requested by us alone
    assert run.balance.spent_nanos == server.invoice.total_nanos


async def test_a_middleware_that_sends_a_request_elsewhere_sends_it_to_a_model() -> None:
    async def to_the_model(request: aiohttp.ClientRequest, handler: Handler) -> aiohttp.ClientResponse:
        request.url = request.url.with_path(CHAT)
        return await handler(request)

    async with FakeProviderServer() as server:
        with limits(server, max_cost_usd=0), pytest.raises(BudgetExceededError):
            await over_aiohttp(f"{server.url}/health", to_the_model)
    assert server.requests == ()


async def compressed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer a request with a compressed greeting."""
    packed = gzip.compress(b"hello")
    await reader.readuntil(b"\r\n\r\n")
    head = f"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: {len(packed)}\r\n\r\n"
    writer.write(head.encode() + packed)
    await writer.drain()
    writer.close()


async def test_a_compressed_answer_to_a_request_that_is_no_models_is_decompressed_by_aiohttp() -> None:
    async with FakeProviderServer() as provider, await asyncio.start_server(compressed, "127.0.0.1") as plain:
        port = plain.sockets[0].getsockname()[1]
        with limits(provider, max_cost_usd=0):
            assert await over_aiohttp(f"http://127.0.0.1:{port}/search") == b"hello"


async def test_a_compressed_answer_that_a_resolver_needs_for_a_model_request_is_decompressed_by_aiohttp() -> None:
    class OverHttp(aiohttp.abc.AbstractResolver):
        """Looks names up with requests of its own."""

        async def resolve(self, host: str, port: int = 0, family: Any = 0) -> list[Any]:
            async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{plain_port}/") as found:
                answers.append(await found.read())
            return [{"hostname": host, "host": "127.0.0.1", "port": port, "family": family, "proto": 0, "flags": 0}]

        async def close(self) -> None:
            pass

    answers: list[bytes] = []
    async with FakeProviderServer() as provider, await asyncio.start_server(compressed, "127.0.0.1") as plain:
        plain_port = plain.sockets[0].getsockname()[1]
        with limits(provider, max_cost_usd=1) as run:
            async with (
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(resolver=OverHttp())) as session,
                session.post(provider.url.replace("127.0.0.1", "model.example") + CHAT, json=chat()) as response,
            ):
                assert b"hello" in await response.read()
    assert answers == [b"hello"]
    assert run.balance.attempts == 1


# Around the transports of httpx.


class OwnPool(httpx2.BaseTransport):
    """A transport with a pool of its own, as those for SOCKS proxies and caches have."""

    def __init__(self) -> None:
        self._pool = httpcore2.ConnectionPool()

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        found = self._pool.request(
            request.method, str(request.url), headers=request.headers.raw, content=request.read()
        )
        return httpx2.Response(found.status, headers=found.headers, content=found.content)

    def close(self) -> None:
        self._pool.close()


def with_a_pool_of_its_own(url: str) -> Any:
    return with_httpx2(url, transport=OwnPool())


def with_httpcore2(url: str) -> Any:
    with httpcore2.ConnectionPool() as pool:
        return pool.request("POST", url, headers=JSON, content=encoded(chat())).content


AROUND = [with_a_pool_of_its_own, with_httpcore2]


@pytest.mark.parametrize("send", AROUND)
def test_a_request_around_the_transport_is_reported(send: Callable[[str], Any]) -> None:
    warned = pytest.warns(RuntimeWarning, match=r"to 127\.0\.0\.1 is sent around the libraries that are contained")
    with FakeProviderServer() as server, limits(server, max_cost_usd=1) as run, warned:
        assert send(server.url + CHAT)
    assert run.uncontained_requests == len(server.requests) == 1


@pytest.mark.parametrize("send", AROUND)
def test_a_strict_run_refuses_a_request_around_the_transport(send: Callable[[str], Any]) -> None:
    with FakeProviderServer() as server, limits(server, strict=True) as run:
        refused = outcome(lambda: send(server.url + CHAT))
    assert isinstance(refused, UncontainedRequest)
    assert refused.run_id == run.run_id
    assert server.requests == ()


@pytest.mark.parametrize("send", AROUND)
def test_a_request_around_the_transport_is_refused_once_its_run_has_ended(send: Callable[[str], Any]) -> None:
    with FakeProviderServer() as server:
        with limits(server, max_cost_usd=1) as run:
            context = contextvars.copy_context()
        assert isinstance(context.run(outcome, lambda: send(server.url + CHAT)), RunEnded)
        with limits(server, max_cost_usd=1) as run:
            run.abort("enough")
            assert isinstance(outcome(lambda: send(server.url + CHAT)), CancelledError)
    assert server.requests == ()
    assert run.uncontained_requests == 0


async def test_an_async_request_around_the_transport_is_reported() -> None:
    async with FakeProviderServer() as server, httpcore2.AsyncConnectionPool() as pool:
        with limits(server, max_cost_usd=1) as run, pytest.warns(RuntimeWarning, match="sent around"):
            assert await pool.request("POST", server.url + CHAT, headers=JSON, content=encoded(chat()))
    assert run.uncontained_requests == 1


async def on_a_connection_of_its_own(request: aiohttp.ClientRequest, handler: Handler) -> aiohttp.ClientResponse:
    """A middleware that sends the request on a connection of its own."""
    connector = request.session.connector
    assert connector is not None
    connection = await connector.connect(request, [], aiohttp.ClientTimeout())
    assert connection.protocol is not None
    connection.protocol.set_response_params()
    try:
        response = await request.send(connection)
    except BaseException:
        connection.close()
        raise
    await response.start(connection)
    return response


async def test_a_request_around_the_middlewares_of_aiohttp_is_reported() -> None:
    async with FakeProviderServer() as server:
        with limits(server, max_cost_usd=1) as run, pytest.warns(RuntimeWarning, match="sent around"):
            assert await over_aiohttp(server.url + CHAT, on_a_connection_of_its_own)
    assert run.uncontained_requests == len(server.requests) == 1


async def test_a_strict_run_refuses_a_request_around_the_middlewares_of_aiohttp() -> None:
    async with FakeProviderServer() as server:
        with limits(server, strict=True), pytest.raises(UncontainedRequest):
            await over_aiohttp(server.url + CHAT, on_a_connection_of_its_own)
    assert server.requests == ()


def test_the_run_of_a_client_reports_what_its_transport_sends_around() -> None:
    with (
        FakeProviderServer() as server,
        contain(prices=server.provider.prices) as run,
        contained_client(run, transport=OwnPool()) as client,
        pytest.warns(RuntimeWarning, match="sent around"),
    ):
        assert client.post(server.url + CHAT, json=chat()).content
    assert run.uncontained_requests == 1


@pytest.mark.filterwarnings("error")
def test_other_requests_around_the_transport_are_not_reported() -> None:
    with FakeProviderServer() as server, limits(server, max_cost_usd=1) as run, httpcore2.ConnectionPool() as pool:
        assert pool.request("GET", f"{server.url}/v1/models").status == 200
        assert pool.request("POST", f"{server.url}/search", headers=JSON, content=b"{}").status == 404
        assert with_httpx2(server.url + CHAT)
        with already_held():
            assert with_httpcore2(server.url + CHAT)
    assert run.uncontained_requests == 0
