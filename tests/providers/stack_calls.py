"""The ways in which programs send a model request without an SDK: a function per HTTP library that returns the body.

An error status is returned as a body too. Every call opens a client of its own and closes it; none loads certificates,
which takes longer than the call.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import httpx2
import lm15.transports
import requests
import urllib3

Body = dict[str, Any]
Send = Callable[[str, Body], bytes]
AsyncSend = Callable[[str, Body], Awaitable[bytes]]

MODEL = "fake-1"
PROMPT = [{"role": "user", "content": "hello"}]
SHAPES: dict[str, tuple[str, Body]] = {
    "chat": ("/v1/chat/completions", {"model": MODEL, "messages": PROMPT, "max_tokens": 100}),
    "responses": ("/v1/responses", {"model": MODEL, "input": "hello", "max_output_tokens": 100}),
    "messages": ("/v1/messages", {"model": MODEL, "messages": PROMPT, "max_tokens": 100}),
}
"""Path and body of one request in each format."""
CHAT = SHAPES["chat"][0]
JSON = {"content-type": "application/json"}


def chat(**more: Any) -> Body:
    """The body of a chat completion."""
    return {**SHAPES["chat"][1], **more}


def encoded(body: Body) -> bytes:
    return json.dumps(body).encode()


def over_httpx2(url: str, body: Body) -> bytes:
    with httpx2.Client(timeout=None, verify=False) as client, client.stream("POST", url, json=body) as response:
        return b"".join(response.iter_bytes())


async def over_httpx2_async(url: str, body: Body) -> bytes:
    async with (
        httpx2.AsyncClient(timeout=None, verify=False) as client,
        client.stream("POST", url, json=body) as response,
    ):
        return b"".join([chunk async for chunk in response.aiter_bytes()])


def over_httpx(url: str, body: Body) -> bytes:
    import httpx

    with httpx.Client(timeout=None, verify=False) as client, client.stream("POST", url, json=body) as response:
        return b"".join(response.iter_bytes())


async def over_httpx_async(url: str, body: Body) -> bytes:
    import httpx

    async with (
        httpx.AsyncClient(timeout=None, verify=False) as client,
        client.stream("POST", url, json=body) as response,
    ):
        return b"".join([chunk async for chunk in response.aiter_bytes()])


def over_urllib3(url: str, body: Body) -> bytes:
    with urllib3.PoolManager(retries=False) as pool:
        response = pool.request("POST", url, body=encoded(body), headers=JSON, preload_content=False)
        try:
            return b"".join(response.stream())
        finally:
            response.close()


def over_requests(url: str, body: Body) -> bytes:
    with requests.Session() as session, session.post(url, json=body, stream=True) as response:
        return b"".join(response.iter_content(None))


def over_http_client(url: str, body: Body) -> bytes:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.netloc)
    try:
        connection.request("POST", address.path, encoded(body), JSON)
        with connection.getresponse() as response:
            return b"".join(response)
    finally:
        connection.close()


def over_urllib(url: str, body: Body) -> bytes:
    request = urllib.request.Request(url, encoded(body), JSON, method="POST")
    try:
        with urllib.request.urlopen(request) as response:
            return bytes(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.read()


async def over_aiohttp(url: str, body: Body) -> bytes:
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        return b"".join([chunk async for chunk in response.content.iter_any()])


def over_lm15(url: str, body: Body) -> bytes:
    request = lm15.transports.TransportRequest("POST", url, list(JSON.items()), encoded(body))
    with lm15.transports.StdlibTransport(verify=False) as transport, transport.stream(request) as response:
        return bytes(response.read())


async def over_lm15_async(url: str, body: Body) -> bytes:
    request = lm15.transports.TransportRequest("POST", url, list(JSON.items()), encoded(body))
    async with (
        lm15.transports.StdlibAsyncTransport(verify=False) as transport,
        transport.stream(request) as response,
    ):
        return bytes(await response.read())


HAS_HTTPX = importlib.util.find_spec("httpx") is not None
SYNC: list[Send] = [
    over_httpx2,
    *([over_httpx] if HAS_HTTPX else []),
    over_urllib3,
    over_requests,
    over_http_client,
    over_urllib,
    over_lm15,
]
ASYNC: list[AsyncSend] = [over_httpx2_async, *([over_httpx_async] if HAS_HTTPX else []), over_aiohttp, over_lm15_async]
ON_HTTP_CLIENT: list[Send] = [over_urllib3, over_requests, over_http_client, over_urllib]
"""The libraries on top of http.client."""
