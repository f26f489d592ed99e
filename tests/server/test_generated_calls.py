"""Calls made from the server's own schema, by the rules and against them: none is a server error.

With PENSTOCK_SOAK set there are about 50,000 of them; otherwise as many as fit into a test.
"""

from __future__ import annotations

import asyncio
import json
import warnings
from contextlib import AsyncExitStack, suppress
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

from penstock.hosting.host import HostSettings
from penstock.server.settings import ServerSettings
from tests.server.served import Served, served
from tests.server.test_matrix import Things, prepared
from tests.soak import SOAK, scaled

EXAMPLES = scaled(4, soak=400)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import schemathesis
    from schemathesis import Case, GenerationMode
    from schemathesis.core import NOT_SET

LIMITED = settings(
    max_examples=EXAMPLES,
    database=None,
    derandomize=not SOAK,
    suppress_health_check=list(HealthCheck),
)


class Asking:
    """One server, on a loop that the generated calls take turns on."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self._stack = AsyncExitStack()
        self.calls = 0
        self.statuses: set[int] = set()

    def begin(self) -> tuple[Any, Things]:
        return self._runner.run(self._begin())

    async def _begin(self) -> tuple[Any, Things]:
        server: Served = await self._stack.enter_async_context(
            served(ServerSettings(max_streams_per_user=1_000), host_settings=HostSettings(tick_s=0.05, drain_s=0))
        )
        things = await prepared(server)
        self._client = await self._stack.enter_async_context(server.client())
        return server.app.openapi(), things["ann"]

    def end(self) -> None:
        self._runner.run(self._stack.aclose())

    def ask(self, case: Case) -> None:
        with suppress(UnicodeEncodeError, httpx2.InvalidURL, httpx2.LocalProtocolError):  # what no client could send
            self._runner.run(self._call(case))

    async def _call(self, case: Case) -> None:
        request = self._client.build_request(case.method, case.formatted_path, **state_of(case))
        try:
            async with asyncio.timeout(60 if SOAK else 15):
                answer = await self._client.send(request)
        except TimeoutError:
            pytest.exit(f"no answer to {case.method} {request.url} {request.content[:500]!r}")
        self.calls += 1
        self.statuses.add(answer.status_code)
        assert answer.status_code < 500, (case.method, str(request.url), request.content[:500], answer.text)
        if answer.status_code >= 400 and case.method != "HEAD":
            assert set(answer.json()) == {"error"}, answer.text


def state_of(case: Case) -> dict[str, Any]:
    query = {**(case.query or {}), "follow": "false"} if case.path == "/api/stream" else case.query  # it has no end
    parts: dict[str, Any] = {"headers": {**(case.headers or {})}, "params": query or None}
    if case.body is not NOT_SET:
        is_raw = isinstance(case.body, bytes)
        parts["content"] = case.body if is_raw else json.dumps(case.body).encode()
        parts["headers"].setdefault("Content-Type", case.media_type or "application/json")
    return parts


@pytest.mark.reliability
@pytest.mark.timeout(3_600 if SOAK else 300)
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("is_there", [True, False], ids=["of things that are there", "of anything"])
@pytest.mark.filterwarnings("ignore")
def test_no_generated_call_is_a_server_error(mode: GenerationMode, is_there: bool) -> None:
    with asyncio.Runner() as runner:
        asking = Asking(runner)
        description, things = asking.begin()
        try:
            for found in schemathesis.openapi.from_dict(description).get_all_operations():
                call_it(asking, found.ok(), mode, things if is_there else {})
        finally:
            asking.end()
    assert asking.calls > 40
    assert {200 if mode is GenerationMode.POSITIVE else 422} <= asking.statuses


def call_it(asking: Asking, operation: Any, mode: GenerationMode, things: Things) -> None:
    named = {one.name: things[one.name] for one in operation.path_parameters if one.name in things}
    if things and not named:
        return

    @LIMITED
    @given(operation.as_strategy(mode, path_parameters=named or None))
    def call(case: Case) -> None:
        asking.ask(case)

    with suppress(Unsatisfiable):  # nothing could be wrong with a call that has no parts
        call()
