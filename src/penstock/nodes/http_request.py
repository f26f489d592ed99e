"""`http-request`: one request to an address that is written in the graph, through the egress guard.

The host is literal; the input can fill placeholders in the path, the query and the headers, and is the body. A value in
the address is escaped, so that it stays a single segment. The policy of the run's `services["egress"]` decides which
hosts may be reached; without that service, any public host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from json import JSONDecodeError
from typing import Any, Literal
from urllib.parse import quote

from penstock.errors import PenstockError
from penstock.kernel.executor import DataValue, ExecutionResult, ExecutorRegistry, Handle, typed
from penstock.nodes.parts.services import ServiceMissing, import_default
from penstock.nodes.parts.template import Template, TemplateFailed, TemplateInvalid
from penstock.runtime.graphs.graph_runtime import FlowContext
from penstock.runtime.graphs.settings import Checked, Data, Finding, Flag, Settings, Text

WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
SCHEMES = ("https://", "http://")


class HttpFailed(PenstockError):
    """The response has a non-success status."""

    def __init__(self, method: str, host: str, status: int) -> None:
        self.status = status
        super().__init__(f"{method} {host} answered with status {status}")


@dataclass(frozen=True, slots=True)
class HttpRequestData(Data):
    """The request: its method, address and headers."""

    url: Text
    """A template after the host: `https://api.example.org/items/{{ input.id }}`."""
    method: Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"] = "GET"
    headers: dict[str, Text] = field(default_factory=dict)
    """Each a template."""
    any_status: Flag = False
    """Whether a response with a non-success status is output instead of failing the node."""


class HttpRequest(Checked[HttpRequestData]):
    """Sends a request, with the input as its JSON body if the method has one; outputs the response and its status."""

    settings = Settings(HttpRequestData)
    inputs = (Handle("input"),)
    outputs = (Handle("output"), Handle("status", "number"))

    def look(self, data: HttpRequestData, executors: ExecutorRegistry) -> Iterator[Finding]:
        """Check that the address has a literal host, and that the templates are valid."""
        if not data.url.startswith(SCHEMES):
            yield ".url", "an address begins with https:// or http://"
        elif not (host := _host(data.url)) or "{{" in host:
            yield ".url", "the host is written out: what comes in cannot choose it"
        for path, text in ((".url", data.url), *((f'.headers["{name}"]', text) for name, text in data.headers.items())):
            try:
                Template(text)
            except TemplateInvalid as invalid:
                yield path, str(invalid)

    async def execute(
        self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext
    ) -> ExecutionResult:
        """Send the request and return the response."""
        read = self.settings.read(data)
        given = inputs["input"].value if "input" in inputs else None
        client = await _client(context)
        answer = await client.request(
            read.method,
            _address(read.url, given),
            headers={name: Template(text).render({"input": given}) for name, text in read.headers.items()},
            json=given if read.method in WITH_BODY else None,
            context=context.execution,
        )
        if not answer.is_success and not read.any_status:
            raise HttpFailed(read.method, _host(read.url), answer.status)
        return ExecutionResult({"output": _content(answer), "status": DataValue("number", answer.status)})


async def _client(context: FlowContext) -> Any:
    given = context.services.get("egress")
    if given is not None:
        return given
    try:
        client = await import_default("penstock.providers.egress", "EgressClient")
    except ImportError as error:
        raise ServiceMissing("egress", f"node {context.node_id!r}", f"an EgressClient; {error}") from error
    return client()


def _host(url: str) -> str:
    behind = url.partition("://")[2]
    ends = [at for at in (behind.find(mark) for mark in "/?#") if at >= 0]
    return behind[: min(ends, default=len(behind))]


def _address(url: str, given: Any) -> str:
    return Template(url).render({"input": given}, escape=_escaped)


def _escaped(text: str) -> str:
    """Escape a value as one segment of an address."""
    if text in (".", ".."):  # a relative path segment, however it is escaped
        raise TemplateFailed(f"{text!r} cannot be a segment of an address")
    return quote(text, safe="")


def _content(answer: Any) -> DataValue:
    if answer.content_type == "application/json" or answer.content_type.endswith("+json"):
        try:
            return typed(answer.json())
        except (JSONDecodeError, RecursionError, UnicodeDecodeError):
            return DataValue("text", answer.text)  # declared as JSON, but is not
    return DataValue("text", answer.text)
