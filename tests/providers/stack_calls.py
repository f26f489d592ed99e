"""The ways in which programs send a model request without an SDK: a function per HTTP library that returns the body.

A request with a file is a multipart form, made by the library itself if it has forms. An error status is returned as a
body too. Every call opens a client of its own and closes it; none loads certificates, which takes longer than the call.
"""

from __future__ import annotations

import http.client
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import botocore.session
import httpx
import httpx2
import lm15.transports
import requests
import urllib3

from tests.providers.shapes import CHAT as CHAT_BODY
from tests.providers.shapes import OFFICIAL

Body = dict[str, Any]
File = tuple[str, bytes]
Send = Callable[..., bytes]
"""Takes the address, the body, and the name and content of a file, if there is one."""
AsyncSend = Callable[..., Awaitable[bytes]]

CHAT = OFFICIAL["chat"].path
JSON = {"content-type": "application/json"}
FILE_NAME = "a.bin"


def chat(**more: Any) -> Body:
    """The body of a chat completion."""
    return {**CHAT_BODY, **more}


def encoded(body: Body) -> bytes:
    return json.dumps(body).encode()


def _keywords(body: Body, file: File | None) -> dict[str, Any]:
    """Return the options of httpx, httpx2 and requests."""
    return {"json": body} if file is None else {"data": body, "files": {file[0]: (FILE_NAME, file[1])}}


def _fields(body: Body, file: File) -> dict[str, Any]:
    """Return the fields of a form as urllib3 takes them."""
    return {**body, file[0]: (FILE_NAME, file[1])}


def _written(body: Body, file: File | None) -> tuple[bytes, dict[str, str]]:
    """Return the body and the headers as a program writes them where the library has no forms."""
    if file is None:
        return encoded(body), JSON
    content, kind = urllib3.encode_multipart_formdata(_fields(body, file))
    return content, {"content-type": kind}


def over_httpx2(url: str, body: Body, file: File | None = None) -> bytes:
    with (
        httpx2.Client(timeout=None, verify=False) as client,
        client.stream("POST", url, **_keywords(body, file)) as response,
    ):
        return b"".join(response.iter_bytes())


async def over_httpx2_async(url: str, body: Body, file: File | None = None) -> bytes:
    async with (
        httpx2.AsyncClient(timeout=None, verify=False) as client,
        client.stream("POST", url, **_keywords(body, file)) as response,
    ):
        return b"".join([chunk async for chunk in response.aiter_bytes()])


def over_httpx(url: str, body: Body, file: File | None = None) -> bytes:
    with (
        httpx.Client(timeout=None, verify=False) as client,
        client.stream("POST", url, **_keywords(body, file)) as response,
    ):
        return b"".join(response.iter_bytes())


async def over_httpx_async(url: str, body: Body, file: File | None = None) -> bytes:
    async with (
        httpx.AsyncClient(timeout=None, verify=False) as client,
        client.stream("POST", url, **_keywords(body, file)) as response,
    ):
        return b"".join([chunk async for chunk in response.aiter_bytes()])


def over_urllib3(url: str, body: Body, file: File | None = None) -> bytes:
    options: dict[str, Any] = {"body": encoded(body), "headers": JSON}
    if file is not None:
        options = {"fields": _fields(body, file)}
    with urllib3.PoolManager(retries=False) as pool:
        response = pool.request("POST", url, preload_content=False, **options)
        try:
            return b"".join(response.stream())
        finally:
            response.close()


def over_requests(url: str, body: Body, file: File | None = None) -> bytes:
    with requests.Session() as session, session.post(url, stream=True, **_keywords(body, file)) as response:
        return b"".join(response.iter_content(None))


def over_http_client(url: str, body: Body, file: File | None = None) -> bytes:
    address, (content, headers) = urlsplit(url), _written(body, file)
    target = address.path + ("?" + address.query if address.query else "")
    connection = http.client.HTTPConnection(address.netloc)
    try:
        connection.request("POST", target, content, headers)
        with connection.getresponse() as response:
            return b"".join(response)
    finally:
        connection.close()


def over_urllib(url: str, body: Body, file: File | None = None) -> bytes:
    content, headers = _written(body, file)
    request = urllib.request.Request(url, content, headers, method="POST")
    try:
        with urllib.request.urlopen(request) as response:
            return bytes(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.read()


async def over_aiohttp(url: str, body: Body, file: File | None = None) -> bytes:
    options: dict[str, Any] = {"json": body}
    if file is not None:
        form = aiohttp.FormData(body)
        form.add_field(file[0], file[1], filename=FILE_NAME)
        options = {"data": form}
    async with aiohttp.ClientSession() as session, session.post(url, **options) as response:
        return b"".join([chunk async for chunk in response.content.iter_any()])


def _lm15_request(url: str, body: Body, file: File | None) -> Any:
    content, headers = _written(body, file)
    return lm15.transports.TransportRequest("POST", url, list(headers.items()), content)


def over_lm15(url: str, body: Body, file: File | None = None) -> bytes:
    with (
        lm15.transports.StdlibTransport(verify=False) as transport,
        transport.stream(_lm15_request(url, body, file)) as response,
    ):
        return bytes(response.read())


async def over_lm15_async(url: str, body: Body, file: File | None = None) -> bytes:
    async with (
        lm15.transports.StdlibAsyncTransport(verify=False) as transport,
        transport.stream(_lm15_request(url, body, file)) as response,
    ):
        return bytes(await response.read())


_aws = botocore.session.Session()
_aws.set_credentials("AKIA", "secret")  # of no account: everything is signed with them
_making_a_client = threading.Lock()  # a session is not made for several threads


def bedrock_client(url: str, **options: Any) -> Any:
    """A client of Amazon Bedrock for the server at that address."""
    with _making_a_client:
        return _aws.create_client("bedrock-runtime", region_name="us-east-1", endpoint_url=url, **options)


def over_botocore(url: str, body: Body, file: File | None = None) -> bytes:
    """Call the operation that the path names."""
    address = urlsplit(url)
    _, _, model, operation = address.path.split("/")
    client = bedrock_client(f"{address.scheme}://{address.netloc}")
    try:
        return read_bedrock(client, operation, model, body)
    finally:
        client.close()


def read_bedrock(client: Any, operation: str, model: str, body: Body) -> bytes:
    """Call one of the four operations, and return all of its answer."""
    match operation:
        case "converse":
            return encoded(client.converse(modelId=model, **body)["output"])
        case "converse-stream":
            return encoded({"events": list(client.converse_stream(modelId=model, **body)["stream"])})
        case "invoke":
            return bytes(client.invoke_model(modelId=model, body=encoded(body))["body"].read())
        case _:
            events = client.invoke_model_with_response_stream(modelId=model, body=encoded(body))["body"]
            return b"".join(event["chunk"]["bytes"] for event in events)


SYNC: list[Send] = [
    over_httpx2,
    over_httpx,
    over_urllib3,
    over_requests,
    over_http_client,
    over_urllib,
    over_lm15,
]
ASYNC: list[AsyncSend] = [over_httpx2_async, over_httpx_async, over_aiohttp, over_lm15_async]
ON_HTTP_CLIENT: list[Send] = [over_urllib3, over_requests, over_http_client, over_urllib]
"""The libraries on top of http.client that send any request."""
