"""`http-request`: one request to an address that is written in the graph, through the egress guard.

The host is written out; what comes in can fill places in the path, the query and the headers, and the body. A value in
the address is escaped, so that it stays the one piece it stands for. Who may be reached is the policy of the run's
`services["egress"]`; without one, any public host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from json import JSONDecodeError
from typing import Any, Literal
from urllib.parse import quote

from penstock.errors import PenstockError
from penstock.kernel.executor import ExecutionResult, ExecutorRegistry, Handle
from penstock.kernel.values import DataValue
from penstock.nodes.parts.nested import place_of
from penstock.nodes.parts.services import ServiceMissing, usual
from penstock.nodes.parts.settings import BudgetData, Checked, Data, Finding, Flag, Settings, Text
from penstock.nodes.parts.template import Template, TemplateFailed, TemplateInvalid
from penstock.nodes.parts.values import typed
from penstock.runtime.graphs.flow_context import FlowContext

WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
SCHEMES = ("https://", "http://")


class HttpFailed(PenstockError):
    """The answer has a status that is no success."""

    def __init__(self, method: str, host: str, status: int) -> None:
        self.status = status
        super().__init__(f"{method} {host} answered with status {status}")


@dataclass(frozen=True, slots=True)
class HttpRequestData(Data):
    """What is asked of whom."""

    url: Text
    """A template behind the host: `https://api.example.org/items/{{ input.id }}`."""
    method: Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"] = "GET"
    headers: dict[str, Text] = field(default_factory=dict)
    """Each a template."""
    any_status: Flag = False
    """Whether an answer that is no success is an answer all the same."""
    budget: BudgetData | None = None


class HttpRequest(Checked[HttpRequestData]):
    """Sends what comes in, as JSON, where the method has a body; gives the answer, JSON or text, and its status."""

    settings = Settings(HttpRequestData)
    inputs = (Handle("input"),)
    outputs = (Handle("output"), Handle("status", "number"))

    def look(self, data: HttpRequestData, executors: ExecutorRegistry) -> Iterator[Finding]:
        """Whether the address has a host, and the templates can be read."""
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
        """The answer."""
        read = self.settings.read(data)
        given = inputs["input"].value if "input" in inputs else None
        client = await _client(context)
        answer = await client.request(
            read.method,
            _address(read.url, given),
            headers={name: Template(text).render({"input": given}) for name, text in read.headers.items()},
            json=given if read.method in WITH_BODY else None,
            context=place_of(context, read.budget),
        )
        if not answer.is_success and not read.any_status:
            raise HttpFailed(read.method, _host(read.url), answer.status)
        return ExecutionResult({"output": _content(answer), "status": DataValue("number", answer.status)})


async def _client(context: FlowContext) -> Any:
    given = context.services.get("egress")
    if given is not None:
        return given
    try:
        made = await usual("penstock.providers.egress", "EgressClient")
    except ImportError as error:
        raise ServiceMissing("egress", f"node {context.node_id!r}", f"an EgressClient; {error}") from error
    return made()


def _host(url: str) -> str:
    behind = url.partition("://")[2]
    ends = [at for at in (behind.find(mark) for mark in "/?#") if at >= 0]
    return behind[: min(ends, default=len(behind))]


def _address(url: str, given: Any) -> str:
    return Template(url).render({"input": given}, escape=_escaped)


def _escaped(text: str) -> str:
    """One piece of an address."""
    if text in (".", ".."):  # a step of the path, however it is escaped
        raise TemplateFailed(f"{text!r} cannot be a piece of an address")
    return quote(text, safe="")


def _content(answer: Any) -> DataValue:
    if answer.content_type == "application/json" or answer.content_type.endswith("+json"):
        try:
            return typed(answer.json())
        except (JSONDecodeError, RecursionError, UnicodeDecodeError):
            return DataValue("text", answer.text)  # it says that it is JSON, and is not
    return DataValue("text", answer.text)
